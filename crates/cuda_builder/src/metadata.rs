//! Reads the metadata that `#[kernel]` emits into the bitcode.
//!
//! The attribute emits one static per kernel in the section `.devcomm.kernel`, whose bytes are
//! JSON: `{"name":"saxpy_f32","package":"my-kernels","file":"saxpy","arch":"sm_90a",
//! "max_threads":256,"min_blocks":1,"cluster":2,"params":[{"name":"x","type":"*const f32"}]}`,
//! where `arch`, `max_threads`, `min_blocks` and `cluster` are optional. Nothing refers to these
//! statics, so linking drops them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::arch::NvvmArch;
use crate::llvm::{Failure, Module, Result};

const SECTION: &str = ".devcomm.kernel";

/// One kernel, as its source declares it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Declared {
    pub(crate) name: String,
    /// The package that defines it.
    #[serde(default)]
    pub(crate) package: Option<String>,
    pub(crate) file: String,
    /// `None` for a plain `extern "ptx-kernel"` function, which has only PTX parameters.
    pub(crate) params: Option<Vec<DeclaredParam>>,
    /// The architecture that this kernel requires, overriding the build's.
    #[serde(default)]
    pub(crate) arch: Option<String>,
    /// The maximum block size.
    #[serde(default)]
    pub(crate) max_threads: Option<u32>,
    /// The blocks of that size that a multiprocessor has room for, at least.
    #[serde(default)]
    pub(crate) min_blocks: Option<u32>,
    /// The number of blocks per cluster.
    #[serde(default)]
    pub(crate) cluster: Option<u32>,
}

impl Declared {
    /// Returns a kernel without metadata.
    pub(crate) fn unknown(name: String, file: String) -> Self {
        Self {
            name,
            package: None,
            file,
            params: None,
            arch: None,
            max_threads: None,
            min_blocks: None,
            cluster: None,
        }
    }
}

/// One parameter of a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DeclaredParam {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) ty: String,
}

/// Reads the kernels of a package's module, grouped by source file. Kernels without metadata are in
/// the group `default_file`.
pub(crate) fn kernels(
    module: &Module<'_>,
    default_file: &str,
) -> Result<BTreeMap<String, Vec<Declared>>> {
    let mut declared: Vec<Declared> = Vec::new();
    for global in module.globals().into_iter().filter(|global| global.section() == SECTION) {
        let bytes = global.initializer().and_then(|value| value.as_bytes());
        let kernel = bytes.as_deref().map(serde_json::from_slice);
        match kernel {
            Some(Ok(kernel)) => declared.push(kernel),
            Some(Err(e)) => return unreadable(&global.name(), &e.to_string()),
            None => return unreadable(&global.name(), "its value is not a constant byte array"),
        }
    }
    let functions = module.functions();
    let mut entries: Vec<String> = functions
        .iter()
        .filter(|function| function.is_kernel() && !function.is_declaration())
        .map(|function| function.name())
        .collect();
    let mut files: BTreeMap<String, Vec<Declared>> = BTreeMap::new();
    for kernel in declared {
        check_file_name(&kernel)?;
        let Some(entry) = entries.iter().position(|name| *name == kernel.name) else {
            return Err(Failure(format!(
                "the metadata of kernel `{}` ({}.rs) names an entry that the package does not \
                 define",
                kernel.name, kernel.file
            )));
        };
        entries.swap_remove(entry);
        files.entry(kernel.file.clone()).or_default().push(kernel);
    }
    for name in entries {
        let kernel = Declared::unknown(name, default_file.to_owned());
        files.entry(default_file.to_owned()).or_default().push(kernel);
    }
    for kernels in files.values_mut() {
        kernels.sort_by(|a, b| a.name.cmp(&b.name));
    }
    Ok(files)
}

fn unreadable<T>(symbol: &str, reason: &str) -> Result<T> {
    Err(Failure(format!(
        "the static `{symbol}` in section {SECTION} is not a kernel's metadata: {reason}; do \
         cuda_std and cuda_builder have the same version?"
    )))
}

/// Checks the file's name, which becomes part of file names on disk.
fn check_file_name(kernel: &Declared) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !kernel.file.is_empty() && kernel.file.chars().all(plain) {
        return Ok(());
    }
    Err(Failure(format!(
        "kernel `{}` is in a file named {:?}: use letters, digits, `_` and `-` only",
        kernel.name, kernel.file
    )))
}

/// Returns the architecture of a file: the one that its kernels require, else the build's.
pub(crate) fn arch_of(
    file: &str,
    kernels: &[Declared],
    build: NvvmArch,
) -> std::result::Result<NvvmArch, crate::Error> {
    let mut required = kernels.iter().filter_map(|k| Some((&k.name, k.arch.as_deref()?)));
    let Some((first, arch)) = required.next() else {
        return Ok(build);
    };
    if let Some((other, differs)) = required.find(|(_, other)| *other != arch) {
        return Err(crate::Error::TwoArchitectures {
            file: file.to_owned(),
            first: format!("{first} ({arch})"),
            second: format!("{other} ({differs})"),
        });
    }
    arch.parse()
}
