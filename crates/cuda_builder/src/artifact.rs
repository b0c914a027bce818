//! Artifacts of a build: one PTX module per kernel file, its sidecar, and an index to `include!`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::lines::Lines;
use crate::metadata::Declared;
use crate::packed;
use crate::ptx::{self, Ptx};
use crate::ptxas::Resources;

/// The sidecar of a PTX module: how it was built, and its kernels. JSON next to the PTX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    /// The kernels' package; `None` for kernels without `#[kernel]`.
    #[serde(default)]
    pub package: Option<String>,
    /// The architecture, `sm_90`.
    pub arch: String,
    /// The PTX version, `8.6`: the oldest that the driver must know.
    pub ptx_isa: String,
    /// The compiler: the output of `rustc -V`, or another compiler's name.
    pub rustc: String,
    /// The version of rustc's LLVM; empty for another compiler.
    pub llvm: String,
    /// NCCL's device code in the module; `None` when it uses none.
    pub nccl: Option<NcclCode>,
    /// SHA-256 of the cubin that programs include, in hexadecimal; `None` without `ptxas`, and for
    /// kernels whose panics print: the host writes the rank into their PTX.
    #[serde(default)]
    pub cubin_sha256: Option<String>,
    /// The kernels, by name.
    pub kernels: Vec<Kernel>,
}

/// The NCCL device code of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclCode {
    /// NCCL's version, `2.32.3`.
    pub version: String,
    /// SHA-256 of `libnccl_device.bc`, in hexadecimal; empty for code compiled from NCCL's headers.
    pub bitcode_sha256: String,
}

/// A kernel of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The name of the entry.
    pub name: String,
    /// Stem of the source file, and of the PTX.
    pub file: String,
    /// The parameters, in order.
    pub params: Vec<Param>,
    /// Whether the kernel opens sessions on the LSA barriers of the device communicator: a launch
    /// then needs one barrier per block.
    #[serde(default)]
    pub lsa_barriers: bool,
    /// The resources that `ptxas` reports; `None` without `ptxas`.
    pub resources: Option<Resources>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Param {
    /// The name in the source; `param_0` and so on for a kernel without `#[kernel]`.
    pub name: String,
    /// The Rust type; PTX's for a kernel without `#[kernel]`.
    #[serde(rename = "type")]
    pub ty: String,
    /// The size in bytes.
    pub size: usize,
    /// The alignment in bytes.
    pub align: usize,
}

/// The result of a build.
#[derive(Clone, Debug)]
pub struct Artifacts {
    /// The output folder.
    pub folder: PathBuf,
    /// A Rust file with one expression, of type
    /// `(&[(&str, &[u8], &str, Option<&[u8]>)], Option<&str>)`, to `include!`: name, PTX (zlib),
    /// sidecar and cubin (zlib) of each module, and the reason if kernels could not be built.
    pub index: PathBuf,
    /// The modules, by name. Empty when kernels were skipped or could not be built.
    pub modules: Vec<ModuleArtifact>,
    /// Why there are no modules, and what to do.
    pub missing: Option<String>,
}

/// One PTX module.
#[derive(Clone, Debug)]
pub struct ModuleArtifact {
    /// Stem of the kernel file.
    pub file: String,
    /// The PTX.
    pub ptx: PathBuf,
    /// The sidecar, as JSON.
    pub sidecar: PathBuf,
    /// The assembled module; `None` without `ptxas`.
    pub cubin: Option<PathBuf>,
    /// The sidecar's content.
    pub info: Sidecar,
    /// Whether this build linked it; otherwise it is from the cache.
    pub linked: bool,
}

impl ModuleArtifact {
    /// Returns whether it has architecture-specific code (`sm_90a`), which runs on no other
    /// architecture.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.info.arch.ends_with('a')
    }

    /// Returns the cubin, if programs include it.
    fn included_cubin(&self) -> Option<&Path> {
        self.cubin.as_deref().filter(|_| self.info.cubin_sha256.is_some())
    }

    /// Returns the compressed files that programs include: the PTX, and the cubin.
    pub(crate) fn packed(&self) -> impl Iterator<Item = PathBuf> {
        [Some(self.ptx.as_path()), self.included_cubin()].into_iter().flatten().map(packed::path)
    }
}

pub(crate) fn read_ptx(file: &str, text: &str) -> Result<Ptx, Error> {
    ptx::read(text).map_err(|message| Error::Ptx { file: file.to_owned(), message })
}

/// Returns the error of a module in which indirect calls are left.
pub(crate) fn indirect_calls(file: &str, kernels: &[String], text: &str) -> Error {
    let lines = Lines::of(text);
    let calls = lines.lines().iter().enumerate();
    let calls = calls.filter(|(_, line)| line.contains(".callprototype"));
    let indices: Vec<usize> = calls.map(|(index, _)| index).collect();
    let places: BTreeSet<_> = indices.iter().filter_map(|index| lines.place(*index)).collect();
    let message = format!(
        "{} indirect calls are left (.callprototype) in the code of {}, at {}: a `dyn` or \
         function-pointer call that LLVM cannot resolve, for which a generic function may stand, \
         or a function declared with other types than NCCL's",
        indices.len(),
        kernels.join(", "),
        Vec::from_iter(places).join(", ")
    );
    Error::Ptx { file: file.to_owned(), message }
}

/// Returns the sidecar's kernels: declarations from the source, with sizes from the PTX.
pub(crate) fn kernels(
    file: &str,
    declared: &[Declared],
    ptx: &Ptx,
    resources: Option<&[(String, Resources)]>,
    lsa_barriers: &[String],
) -> Result<Vec<Kernel>, Error> {
    let wrong = |message: String| Error::Ptx { file: file.to_owned(), message };
    let mut kernels = Vec::new();
    for kernel in declared {
        let entry = ptx.entries.iter().find(|entry| entry.name == kernel.name);
        let entry = entry.ok_or_else(|| wrong(format!("it has no entry `{}`", kernel.name)))?;
        let names: Vec<(String, String)> = match &kernel.params {
            Some(params) => params.iter().map(|p| (p.name.clone(), p.ty.clone())).collect(),
            None => (entry.params.iter().enumerate())
                .map(|(index, param)| (format!("param_{index}"), param.ty.clone()))
                .collect(),
        };
        if names.len() != entry.params.len() {
            return Err(wrong(format!(
                "kernel `{}` declares {} parameters and its PTX has {}: PTX omits a zero-sized \
                 parameter, remove it",
                kernel.name,
                names.len(),
                entry.params.len()
            )));
        }
        let params = names.into_iter().zip(&entry.params);
        let found = resources.and_then(|all| all.iter().find(|(name, _)| *name == kernel.name));
        kernels.push(Kernel {
            name: kernel.name.clone(),
            file: kernel.file.clone(),
            params: params
                .map(|((name, ty), param)| Param { name, ty, size: param.size, align: param.align })
                .collect(),
            lsa_barriers: lsa_barriers.contains(&kernel.name),
            resources: found.map(|(_, resources)| *resources),
        });
    }
    Ok(kernels)
}

/// Returns the content of the index, which names the files of its own folder.
pub(crate) fn index(modules: &[ModuleArtifact], missing: Option<&str>) -> String {
    let mut text = "(&[\n".to_owned();
    for module in modules {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_owned();
        let bytes = |path| format!("include_bytes!({:?}) as &[u8]", name(&packed::path(path)));
        let cubin = module.included_cubin().map(bytes);
        text += &format!(
            "    ({:?}, {},\n        include_str!({:?}),\n        {}),\n",
            module.file,
            bytes(&module.ptx),
            name(&module.sidecar),
            cubin.map_or("None".to_owned(), |cubin| format!("Some({cubin})"))
        );
    }
    text + &format!("] as &[(&str, &[u8], &str, Option<&[u8]>)], {missing:?} as Option<&str>)\n")
}

/// Returns SHA-256 of some bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns SHA-256 of a file's contents, in hexadecimal.
pub(crate) fn sha256_of(path: &Path) -> Result<String, Error> {
    Ok(sha256(&fs::read(path).map_err(Error::io("read", path))?))
}

#[cfg(test)]
mod tests {
    use super::index;

    #[test]
    fn an_index_of_nothing_gives_the_reason() {
        let text = index(&[], Some("run \"setup\""));
        assert_eq!(
            text,
            "(&[\n] as &[(&str, &[u8], &str, Option<&[u8]>)], Some(\"run \\\"setup\\\"\") as \
             Option<&str>)\n"
        );
    }
}
