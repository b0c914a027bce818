//! Builds the modules of a package, one for each kernel file, or takes them from the cache.

use std::fs;
use std::path::{Path, PathBuf};

use crate::arch::NvvmArch;
use crate::artifact::{self, ModuleArtifact, NcclCode, Sidecar};
use crate::cache::{Cache, Entry, copy_if_changed, write_if_changed};
use crate::compile::Panics;
use crate::error::Error;
use crate::link::{self, Link, Linked};
use crate::metadata;
use crate::packed;
use crate::parallel;
use crate::ptx::{self, Ptx};
use crate::ptxas::{Ptxas, Resources};
use crate::split::KernelFile;
use crate::toolchain::Toolchain;
use crate::worker::{Job, Workers};

/// NCCL's device code, ready to link.
#[derive(Debug)]
pub(crate) struct Nccl {
    /// NCCL's bitcode.
    pub(crate) source: PathBuf,
    /// The same in the form that is linked.
    pub(crate) prepared: PathBuf,
    pub(crate) code: NcclCode,
}

/// Builds the modules of one build.
pub(crate) struct Modules<'a> {
    pub(crate) toolchain: &'a Toolchain,
    pub(crate) workers: &'a Workers<'a>,
    pub(crate) nccl: Option<Nccl>,
    pub(crate) ptxas: Option<Ptxas>,
    pub(crate) line_tables: bool,
    pub(crate) cache: Cache,
    pub(crate) arch: NvvmArch,
    pub(crate) panics: Panics,
    pub(crate) dump: Option<PathBuf>,
}

impl Modules<'_> {
    /// Builds all modules.
    pub(crate) fn build(
        &self,
        sources: &[KernelFile],
        folder: &Path,
    ) -> Result<Vec<ModuleArtifact>, Error> {
        let made = parallel::map(sources, |source| self.module(source, folder));
        let mut modules = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        modules.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(modules)
    }

    fn module(&self, source: &KernelFile, folder: &Path) -> Result<ModuleArtifact, Error> {
        let arch = metadata::arch_of(&source.file, &source.kernels, self.arch)?;
        let nccl = self.nccl.as_ref().filter(|_| source.uses_nccl());
        let key = self.key(source, arch, nccl)?;
        // `DEVCOMM_DUMP_IR` dumps every module, so bypass the cache.
        let cached = if self.dump.is_none() { self.cache.find::<Sidecar>(&key) } else { None };
        let linked = cached.is_none();
        let (entry, info) = match cached {
            Some(cached) => cached,
            None => self
                .cache
                .make(&key, |entry| self.link(&Module { source, arch, nccl, entry, folder }))?,
        };
        let output = |extension: &str| folder.join(format!("{}.{extension}", source.file));
        let (ptx, sidecar, cubin) = (output("ptx"), output("json"), output("cubin"));
        copy_if_changed(&entry.ptx(), &ptx)?;
        let text = serde_json::to_string_pretty(&info).unwrap_or_default();
        write_if_changed(&sidecar, text.as_bytes())?;
        let assembled = entry.cubin().is_file();
        if assembled {
            copy_if_changed(&entry.cubin(), &cubin)?;
        }
        let cubin = assembled.then_some(cubin);
        let module =
            ModuleArtifact { file: source.file.clone(), ptx, sidecar, cubin, info, linked };
        // The compressed copies, which the program includes.
        let packed = [entry.ptx(), entry.cubin()].map(|path| packed::path(&path));
        for (from, to) in packed.into_iter().zip(module.packed()) {
            copy_if_changed(&from, &to)?;
        }
        Ok(module)
    }

    /// Returns the hash of all inputs of a module.
    fn key(
        &self,
        source: &KernelFile,
        arch: NvvmArch,
        nccl: Option<&Nccl>,
    ) -> Result<String, Error> {
        let inputs = serde_json::json!([
            link::REVISION,
            env!("CARGO_PKG_VERSION"),
            artifact::sha256_of(&source.bitcode)?,
            source.kernels,
            nccl.map(|nccl| &nccl.code),
            self.toolchain.version,
            self.toolchain.llvm_version,
            arch.name(),
            self.panics as u8,
            self.ptxas.as_ref().map(|ptxas| &ptxas.version),
            self.line_tables,
        ]);
        Ok(artifact::sha256(inputs.to_string().as_bytes()))
    }

    fn link(&self, module: &Module<'_>) -> Result<Sidecar, Error> {
        let Module { source, nccl, entry, .. } = module;
        let (ptx_path, cubin) = (&entry.ptx(), &entry.cubin());
        let mut best = self.attempt(0, module)?;
        for back_end in 1..link::BACK_ENDS.len() {
            if best.spills() == 0 {
                break;
            }
            let other = self.attempt(back_end, module)?;
            if other.spills() < best.spills() {
                best = other;
            }
        }
        let Attempt { text, ptx, lsa_barriers, resources, code } = best;
        fs::write(ptx_path, &text).map_err(Error::io("write", ptx_path))?;
        if let Some(code) = code {
            fs::write(cubin, code).map_err(Error::io("write", cubin))?;
        }
        packed::write(ptx_path)?;
        let cubin_sha256 = match self.panics {
            Panics::Silent if self.ptxas.is_some() => {
                packed::write(cubin)?;
                Some(artifact::sha256_of(cubin)?)
            }
            // Without `ptxas` there is no cubin. With messages, the host writes the rank into the
            // PTX, which the driver then compiles.
            _ => None,
        };
        Ok(Sidecar {
            package: source.kernels.iter().find_map(|kernel| kernel.package.clone()),
            arch: ptx.target.clone(),
            ptx_isa: ptx.version.clone(),
            rustc: self.toolchain.version.clone(),
            llvm: self.toolchain.llvm_version.clone(),
            nccl: nccl.map(|nccl| nccl.code.clone()),
            cubin_sha256,
            kernels: artifact::kernels(
                &source.file,
                &source.kernels,
                &ptx,
                resources.as_deref(),
                &lsa_barriers,
            )?,
        })
    }

    /// Links and assembles a file with one of the sets of options of LLVM's back end.
    fn attempt(&self, back_end: usize, module: &Module<'_>) -> Result<Attempt, Error> {
        let Module { source, arch, nccl, entry, folder } = module;
        let (ptx_path, cubin) = (&entry.ptx(), &entry.cubin());
        let names: Vec<String> = source.kernels.iter().map(|kernel| kernel.name.clone()).collect();
        let job = Job::Link(Link {
            file: source.file.clone(),
            kernels: names.clone(),
            max_threads: source.kernels.iter().map(|kernel| kernel.max_threads).collect(),
            min_blocks: source.kernels.iter().map(|kernel| kernel.min_blocks).collect(),
            clusters: source.kernels.iter().map(|kernel| kernel.cluster).collect(),
            bitcode: source.bitcode.clone(),
            nccl: nccl.map(|nccl| nccl.prepared.clone()),
            cpu: arch.name().to_owned(),
            features: arch.ptx_feature(),
            back_end,
            dump: self.dump.clone(),
        });
        let what = format!("cannot link {}.rs (kernels: {})", source.file, names.join(", "));
        let Linked { ptx: mut text, lsa_barriers } = self.workers.run(&source.file, &what, job)?;
        fs::write(ptx_path, &text).map_err(Error::io("write", ptx_path))?;
        let ptx = artifact::read_ptx(&source.file, &text)?;
        // `core::fmt`, which formats the messages of panics, has indirect calls; none of them runs.
        if ptx.call_prototypes > 0 && self.panics == Panics::Silent {
            return Err(artifact::indirect_calls(&source.file, &names, &text));
        }
        if !self.line_tables {
            text = ptx::without_line_tables(&text);
            fs::write(ptx_path, &text).map_err(Error::io("write", ptx_path))?;
        }
        let (mut resources, mut code) = (None, None);
        if let Some(ptxas) = &self.ptxas {
            let lines = self.line_tables;
            let made = ptxas.assemble(&source.file, arch.name(), ptx_path, cubin, lines);
            resources = Some(made.map_err(|error| error.with_ptx_in(folder))?);
            code = Some(fs::read(cubin).map_err(Error::io("read", cubin))?);
        }
        if !self.line_tables {
            text = ptx::compact(&text);
        }
        Ok(Attempt { text, ptx, lsa_barriers, resources, code })
    }
}

/// A module to build.
struct Module<'a> {
    source: &'a KernelFile,
    arch: NvvmArch,
    nccl: Option<&'a Nccl>,
    /// The cache entry in which it is made.
    entry: &'a Entry,
    /// The build's output folder, which keeps PTX that `ptxas` rejects.
    folder: &'a Path,
}

/// A module as the back end makes it with one set of options.
struct Attempt {
    text: String,
    ptx: Ptx,
    /// The kernels that open sessions on the device communicator's LSA barriers.
    lsa_barriers: Vec<String>,
    resources: Option<Vec<(String, Resources)>>,
    /// The cubin.
    code: Option<Vec<u8>>,
}

impl Attempt {
    /// Returns the bytes that its kernels spill, as far as is known.
    fn spills(&self) -> u32 {
        let all = self.resources.iter().flatten();
        all.map(|(_, kernel)| kernel.spill_stores + kernel.spill_loads).sum()
    }
}
