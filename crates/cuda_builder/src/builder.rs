//! [`CudaBuilder`]: compiles a kernel package to PTX.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use devcomm_locate::{NCCL_VERSION, NcclPart, find_nccl};

use crate::arch::NvvmArch;
use crate::artifact::{self, Artifacts, ModuleArtifact, NcclCode, Sidecar};
use crate::cache::{Cache, Entry, copy_if_changed, write_if_changed};
use crate::compile::{Compile, Panics};
use crate::error::Error;
use crate::link::{self, PrepareNccl};
use crate::metadata;
use crate::modules::{Modules, Nccl};
use crate::package::{self, KernelPackage};
use crate::ptxas::Ptxas;
use crate::script;
use crate::split::{self, KernelFile, Split};
use crate::sysroot::sysroot;
use crate::toolchain::Toolchain;
use crate::worker::{Job, Workers, link_worker};

/// Builds a kernel package. See the [crate](crate) for an example.
#[derive(Clone, Debug)]
#[must_use = "nothing is built before `build` is called"]
pub struct CudaBuilder {
    package: String,
    arch: Option<NvvmArch>,
    copy_to: Option<PathBuf>,
    debug: bool,
    panic_messages: bool,
    line_tables: bool,
    assemble: bool,
    check_all: bool,
    only: Option<String>,
    out_dir: Option<PathBuf>,
    manifest_dir: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    rustc: Option<PathBuf>,
    nccl_home: Option<PathBuf>,
}

impl CudaBuilder {
    /// Returns a builder for the kernel package with this name, in the calling package's workspace,
    /// among its path dependencies, or among its own dependencies from a registry.
    ///
    /// The kernels are built with the features that the calling package's manifest enables in its
    /// dependency on them, of whatever kind and target, and with those that its own features enable
    /// (`fast = ["kernels/fast"]`); for kernels from a registry only its default features count.
    /// Features that only other packages enable are not on. With
    /// [`manifest_dir`](Self::manifest_dir) it is the manifest there that counts.
    pub fn new(package: impl Into<String>) -> Self {
        Self {
            package: package.into(),
            arch: None,
            copy_to: None,
            debug: false,
            panic_messages: false,
            line_tables: true,
            assemble: true,
            check_all: false,
            only: None,
            out_dir: None,
            manifest_dir: None,
            target_dir: None,
            rustc: None,
            nccl_home: None,
        }
    }

    /// Sets the architecture; default [`NvvmArch::Compute90`]. In a build script
    /// `DEVCOMM_CUDA_ARCH` overrides it. `arch` in a kernel's `#[kernel]` attribute has priority.
    pub fn arch(mut self, arch: NvvmArch) -> Self {
        self.arch = Some(arch);
        self
    }

    /// Sets a folder into which the build also copies the PTX, sidecars and cubins.
    pub fn copy_to(mut self, folder: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(folder.into());
        self
    }

    /// Enables debug assertions, overflow checks and panic messages in kernels. Device code is
    /// still optimised.
    pub fn debug(mut self, debug: bool) -> Self {
        self.debug = debug;
        self
    }

    /// Sets whether a kernel that panics prints the message, the file and line, rank, block and
    /// thread before it traps, in kernels that are otherwise the same. This takes registers, stack
    /// and a call of the driver's `vprintf` at each panic. Default: no; in a build script
    /// `DEVCOMM_PANIC_MESSAGES=1` asks for it.
    ///
    /// A message is printed if it is a plain string, without arguments to format.
    pub fn panic_messages(mut self, messages: bool) -> Self {
        self.panic_messages = messages;
        self
    }

    /// Sets whether PTX and cubins have line tables, for profilers. Without them the PTX has the
    /// same instructions and no comments, the files have half the size, and equal sources give
    /// equal files on every machine, since no paths are in them. `ptxas` may arrange a kernel's
    /// machine code in another way then. Default: yes.
    pub fn line_tables(mut self, line_tables: bool) -> Self {
        self.line_tables = line_tables;
        self
    }

    /// Sets whether `ptxas`, if found, assembles the PTX, which gives each kernel's resources
    /// and the cubins that programs include. Default: yes.
    pub fn assemble(mut self, assemble: bool) -> Self {
        self.assemble = assemble;
        self
    }

    /// Sets whether the build warns of every kernel that spills registers or uses the stack, or
    /// whose `wgmma` instructions `ptxas` serialises. Default: only of those that set
    /// `max_threads`. Without `ptxas` there are no such warnings.
    pub fn check_all(mut self, all: bool) -> Self {
        self.check_all = all;
        self
    }

    /// Builds only one module: of the file with this kernel, or else of the file with this name.
    pub fn only(mut self, kernel: impl Into<String>) -> Self {
        self.only = Some(kernel.into());
        self
    }

    /// Writes into this folder without output for cargo: for use outside a build script, where a
    /// missing component is an error. Modules that an earlier build has left there, and that this
    /// one does not make, are removed.
    pub fn out_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out_dir = Some(folder.into());
        self
    }

    /// Sets the folder of the manifest whose workspace has the kernel package; default: the
    /// calling package's.
    pub fn manifest_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.manifest_dir = Some(folder.into());
        self
    }

    /// Sets the folder for intermediate results, shared between builds; default:
    /// `devcomm-kernels` in the target folder, one per workspace.
    pub fn target_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(folder.into());
        self
    }

    /// Sets the compiler; default: [`kernel_compiler`](crate::kernel_compiler)'s.
    pub fn rustc(mut self, rustc: impl Into<PathBuf>) -> Self {
        self.rustc = Some(rustc.into());
        self
    }

    /// Sets a folder with NCCL's `lib/` and `include/`, tried first.
    pub fn nccl_home(mut self, folder: impl Into<PathBuf>) -> Self {
        self.nccl_home = Some(folder.into());
        self
    }

    /// Builds the kernels.
    ///
    /// In a build script, a missing component (NCCL, rust-src) is a warning and an empty
    /// [index](Artifacts::index) with the reason, unless `DEVCOMM_REQUIRE_KERNELS=1`;
    /// `DEVCOMM_BUILD_SKIP=1` and docs.rs give an empty index too. LLVM runs in child processes:
    /// this program starts itself again, and the child exits in [`link_worker`].
    ///
    /// # Errors
    ///
    /// [`Error`] for each failed step. rustc prints errors of kernel sources itself before
    /// [`Error::Compile`] is returned.
    pub fn build(self) -> Result<Artifacts, Error> {
        link_worker();
        let in_script = self.out_dir.is_none();
        let folder = match &self.out_dir {
            Some(folder) => folder.clone(),
            None => script_variable("OUT_DIR", "out_dir")?.join("kernels"),
        };
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        if in_script {
            script::watch_variables();
        }
        for variable in ["DEVCOMM_BUILD_SKIP", "DOCS_RS"] {
            if in_script && script::is_on(variable) {
                return without_kernels(
                    folder,
                    format!("kernels were not built: {variable} is set"),
                );
            }
        }
        let result = self.build_into(&folder);
        match result {
            Err(error) if in_script && error.is_missing_part() => {
                if script::is_on("DEVCOMM_REQUIRE_KERNELS") {
                    return Err(error);
                }
                let reason = format!("kernels were not built: {error}");
                script::warn(&reason);
                script::rerun_always(&folder);
                without_kernels(folder, reason)
            }
            other => other,
        }
    }

    /// Returns what a panic does, by the options and, in a build script, the environment.
    fn panics(&self, in_script: bool) -> Panics {
        let wanted = in_script && script::is_on("DEVCOMM_PANIC_MESSAGES");
        match (self.debug, self.panic_messages || wanted) {
            (true, _) => Panics::Checked,
            (false, true) => Panics::Reported,
            (false, false) => Panics::Silent,
        }
    }

    fn build_into(&self, folder: &Path) -> Result<Artifacts, Error> {
        let in_script = self.out_dir.is_none();
        let panics = self.panics(in_script);
        let manifest_dir = match &self.manifest_dir {
            Some(folder) => folder.clone(),
            None => script_variable("CARGO_MANIFEST_DIR", "manifest_dir")?,
        };
        let package = package::find(&self.package, &manifest_dir)?;
        let toolchain = Toolchain::find(self.rustc.as_deref(), package.needs.as_ref())?;
        let tell = |text: &str| match in_script {
            true => script::warn(text),
            false => eprintln!("warning: {text}"),
        };
        if let Some(notice) = toolchain.notice() {
            tell(&notice);
        }
        let arch = self.chosen_arch()?;
        let target = self.target_folder(&package);
        fs::create_dir_all(&target).map_err(Error::io("create", &target))?;
        let compile = Compile {
            toolchain: &toolchain,
            package: &package,
            arch,
            panics,
            target_dir: &target,
            quiet: in_script,
        };
        let compiled = compile.run(sysroot(&compile)?)?;
        if in_script {
            script::watch(package.sources.iter().chain(&compiled.sources));
        }

        let scratch = tempfile::Builder::new().prefix("link-").tempdir_in(&target);
        let scratch = scratch.map_err(Error::io("create a folder in", &target))?;
        let workers = Workers { toolchain: &toolchain, folder: scratch.path().to_owned() };
        let split = Job::Split(Split {
            kernels: compiled.kernels,
            libraries: compiled.libraries,
            default_file: package.name.replace('-', "_"),
            folder: scratch.path().to_owned(),
        });
        let what = format!("cannot split the bitcode of `{}`", package.name);
        let mut sources: Vec<KernelFile> = workers.run("split", &what, split)?;
        if let Some(name) = &self.only {
            sources = split::only(sources, name)?;
        }
        sources.retain(|source| !in_script || script::wants(&source.file));
        let uses_nccl = sources.iter().any(KernelFile::uses_nccl);
        let nccl = uses_nccl.then(|| self.prepare_nccl(&workers, &target)).transpose()?;
        if let (true, Some(nccl)) = (in_script, &nccl) {
            script::watch([&nccl.source]);
        }
        let modules = Modules {
            toolchain: &toolchain,
            workers: &workers,
            nccl,
            ptxas: if self.assemble { Ptxas::find(architectures(&sources, arch)?)? } else { None },
            line_tables: self.line_tables,
            cache: Cache { folder: target.join("modules"), hashes: true },
            arch,
            panics,
            dump: dump_folder()?,
        };
        let made = modules.build(&sources, folder)?;
        modules.cache.remove_unused();
        let artifacts = self.finish(folder, made)?;
        self.costs(&artifacts, &sources, &toolchain, panics)?.iter().for_each(|cost| tell(cost));
        Ok(artifacts)
    }

    /// Returns the warnings of [`check_all`](Self::check_all).
    fn costs(
        &self,
        artifacts: &Artifacts,
        sources: &[KernelFile],
        toolchain: &Toolchain,
        panics: Panics,
    ) -> Result<Vec<String>, Error> {
        // Assertions and messages take registers and stack.
        if panics != Panics::Silent {
            return Ok(Vec::new());
        }
        let declared = sources.iter().flat_map(|source| &source.kernels);
        let declared: HashMap<&str, Option<u32>> =
            declared.map(|kernel| (&*kernel.name, kernel.max_threads)).collect();
        let mut costs = Vec::new();
        for report in artifacts.costly()? {
            let threads = declared.get(&*report.name).copied().flatten();
            if self.check_all || threads.is_some() {
                // Without `max_threads` a block of any size will do.
                let kernel_costs = report.costs(threads.unwrap_or(0));
                costs.extend(kernel_costs.iter().map(|cost| format!("{}: {cost}", report.name)));
            }
        }
        if !costs.is_empty() {
            let (rustc, llvm) = (&toolchain.version, &toolchain.llvm_version);
            costs.push(format!(
                "these kernels are slower than they could be; {rustc}, LLVM {llvm} compiled them"
            ));
        }
        Ok(costs)
    }

    fn chosen_arch(&self) -> Result<NvvmArch, Error> {
        let wanted = env::var("DEVCOMM_CUDA_ARCH").ok().filter(|text| !text.is_empty());
        match (wanted, self.arch) {
            // Outside a build script the caller's choice has priority.
            (Some(_), Some(arch)) if self.out_dir.is_some() => Ok(arch),
            (Some(text), _) => text.parse(),
            (None, arch) => Ok(arch.unwrap_or(NvvmArch::Compute90)),
        }
    }

    /// Returns the folder for intermediate device code, shared by the builds of one workspace.
    ///
    /// Workspaces with a common target folder (`CARGO_TARGET_DIR`) do not share it: cargo gives a
    /// package's bitcode the same name in each, so one workspace would link another's code.
    fn target_folder(&self, package: &KernelPackage) -> PathBuf {
        if let Some(folder) = &self.target_dir {
            return folder.clone();
        }
        let workspace = artifact::sha256(package.workspace.as_os_str().as_encoded_bytes());
        let script_target = match &self.out_dir {
            Some(_) => None,
            None => env::var_os("OUT_DIR").and_then(|out| script::target_folder(Path::new(&out))),
        };
        let target = script_target.unwrap_or_else(|| package.target.clone());
        target.join("devcomm-kernels").join(&workspace[..16])
    }

    /// Finds NCCL's bitcode and prepares it, once per bitcode and LLVM.
    fn prepare_nccl(&self, workers: &Workers<'_>, target: &Path) -> Result<Nccl, Error> {
        let tree = find_nccl(self.nccl_home.as_deref(), NcclPart::Bitcode, |tree| {
            tree.has_version(NCCL_VERSION)
        })?;
        // `find_nccl` takes only trees that have both.
        let (Some(source), Some(version)) = (tree.bitcode, tree.version) else {
            return Err(Error::Llvm {
                what: format!("cannot use the NCCL in {}", tree.root.display()),
                message: "it has no device bitcode".to_owned(),
            });
        };
        let bitcode_sha256 = artifact::sha256_of(&source)?;
        let llvm = &workers.toolchain.llvm_version;
        let key = format!("{bitcode_sha256}-{llvm}-{}", link::REVISION);
        let key = artifact::sha256(key.as_bytes())[..16].to_owned();
        let cache = Cache { folder: target.join("nccl"), hashes: true };
        let file = |entry: &Entry| entry.folder.join("prepared.bc");
        let (entry, _marked) = cache.find_or_make::<usize>(&key, |entry| {
            let job = PrepareNccl { bitcode: source.clone(), prepared: file(entry) };
            let what = format!("cannot use NCCL's device bitcode {}", source.display());
            workers.run("nccl", &what, Job::PrepareNccl(job))
        })?;
        cache.remove_unused();
        let prepared = file(&entry);
        let code = NcclCode { version: version.to_string(), bitcode_sha256 };
        Ok(Nccl { source, prepared, code })
    }

    fn finish(&self, folder: &Path, modules: Vec<ModuleArtifact>) -> Result<Artifacts, Error> {
        let files = |module: &ModuleArtifact| {
            [Some(module.ptx.clone()), Some(module.sidecar.clone()), module.cubin.clone()]
        };
        let current: Vec<PathBuf> = modules.iter().flat_map(files).flatten().collect();
        let packed = modules.iter().flat_map(ModuleArtifact::packed);
        remove_stale(folder, &current.iter().cloned().chain(packed).collect::<Vec<_>>())?;
        if let Some(copy) = &self.copy_to {
            fs::create_dir_all(copy).map_err(Error::io("create", copy))?;
            for file in &current {
                copy_if_changed(file, &copy.join(file.file_name().unwrap_or_default()))?;
            }
        }
        let index = folder.join("kernels.rs");
        write_if_changed(&index, artifact::index(&modules, None).as_bytes())?;
        Ok(Artifacts { folder: folder.to_owned(), index, modules, missing: None })
    }
}

/// Returns the architecture of each file.
fn architectures(sources: &[KernelFile], build: NvvmArch) -> Result<Vec<NvvmArch>, Error> {
    let arch = |source: &KernelFile| metadata::arch_of(&source.file, &source.kernels, build);
    sources.iter().map(arch).collect()
}

/// Creates the folder in `DEVCOMM_DUMP_IR`, if it is set.
fn dump_folder() -> Result<Option<PathBuf>, Error> {
    let folder = env::var_os("DEVCOMM_DUMP_IR").filter(|value| !value.is_empty());
    let folder = folder.map(PathBuf::from);
    if let Some(folder) = &folder {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    Ok(folder)
}

fn script_variable(variable: &'static str, instead: &'static str) -> Result<PathBuf, Error> {
    let value = env::var_os(variable).map(PathBuf::from);
    value.ok_or(Error::NotInBuildScript { variable, instead })
}

fn without_kernels(folder: PathBuf, reason: String) -> Result<Artifacts, Error> {
    remove_stale(&folder, &[])?;
    let index = folder.join("kernels.rs");
    write_if_changed(&index, artifact::index(&[], Some(&reason)).as_bytes())?;
    Ok(Artifacts { folder, index, modules: Vec::new(), missing: Some(reason) })
}

/// Removes the files of modules that are not current, such as those of kernel files that no longer
/// exist. A sidecar tells that the files with its name are a module's.
fn remove_stale(folder: &Path, current: &[PathBuf]) -> Result<(), Error> {
    let entries = fs::read_dir(folder).map_err(Error::io("read", folder))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_sidecar = |path: &PathBuf| {
        let text = || fs::read(path).unwrap_or_default();
        path.extension() == Some("json".as_ref())
            && serde_json::from_slice::<Sidecar>(&text()).is_ok()
    };
    for sidecar in paths.filter(is_sidecar).collect::<Vec<_>>() {
        // The sidecar is the last, so that a build that ends early leaves it to the next.
        for extension in ["ptx", "ptx.z", "cubin", "cubin.z", "json"] {
            let path = sidecar.with_extension(extension);
            if path.exists() && !current.contains(&path) {
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_removes_stale_modules_and_no_files_of_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let sidecar =
            r#"{"arch":"sm_90","ptx_isa":"8.6","rustc":"","llvm":"","nccl":null,"kernels":[]}"#;
        for module in ["old", "sum"] {
            fs::write(path(module).with_extension("json"), sidecar).unwrap();
        }
        for name in ["settings.json", "x.z", "other.ptx", "sum.ptx"] {
            fs::write(path(name), "{}").unwrap();
        }
        for name in ["old.ptx", "old.ptx.z", "old.cubin", "old.cubin.z", "sum.cubin"] {
            fs::write(path(name), "").unwrap();
        }
        remove_stale(folder.path(), &[path("sum.json"), path("sum.ptx")]).unwrap();
        let entries = fs::read_dir(folder.path()).unwrap();
        let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["other.ptx", "settings.json", "sum.json", "sum.ptx", "x.z"]);
    }
}
