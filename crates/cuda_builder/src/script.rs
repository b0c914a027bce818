//! Communicates with cargo in a build script.

use std::env;
use std::path::{Path, PathBuf};

/// Variables that change the build's result. `DEVCOMM_REQUIRE_KERNELS` only turns a warning into an
/// error, and a build with that warning runs again in any case.
const VARIABLES: [&str; 12] = [
    "DEVCOMM_CUDA_ARCH",
    "DEVCOMM_BUILD_SKIP",
    KERNEL_FILES,
    "DEVCOMM_DUMP_IR",
    "DEVCOMM_PANIC_MESSAGES",
    crate::toolchain::VARIABLE,
    "DEVCOMM_NCCL_HOME",
    "DEVCOMM_CACHE",
    "DEVCOMM_PTXAS",
    "NCCL_HOME",
    "CUDA_HOME",
    "DOCS_RS",
];

/// The variable with the names of the kernel files to build, separated by commas; default: all.
const KERNEL_FILES: &str = "DEVCOMM_KERNEL_FILES";

/// Returns whether the kernel file `name` is to be built.
pub(crate) fn wants(name: &str) -> bool {
    let files = env::var(KERNEL_FILES).unwrap_or_default();
    files.is_empty() || files.split(',').any(|file| file.trim() == name)
}

/// Makes cargo rerun the build script when one of the builder's variables changes.
pub(crate) fn watch_variables() {
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// Makes cargo rerun the build script when one of these paths changes.
pub(crate) fn watch<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) {
    for path in paths {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

/// Makes cargo rerun the build script every time until the missing component exists: a nonexistent
/// file counts as changed.
pub(crate) fn rerun_always(folder: &Path) {
    println!("cargo::rerun-if-changed={}", folder.join("kernels-were-built").display());
}

/// Prints a warning, one cargo message per line.
pub(crate) fn warn(message: &str) {
    for line in message.lines() {
        println!("cargo::warning={line}");
    }
}

/// Returns whether a variable is set, and is neither empty nor 0.
pub(crate) fn is_on(variable: &str) -> bool {
    env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Returns the target folder of the current build, recognised by cargo's cache tag.
pub(crate) fn target_folder(out_dir: &Path) -> Option<PathBuf> {
    let tagged = |folder: &&Path| folder.join("CACHEDIR.TAG").is_file();
    out_dir.ancestors().find(tagged).map(Path::to_owned)
}
