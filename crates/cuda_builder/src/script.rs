//! Talks to cargo from a build script.

use std::env;
use std::path::{Path, PathBuf};

/// Variables that change what is built. `DEVCOMM_REQUIRE_KERNELS` changes only how a build ends
/// that lacks something, and that one runs again in any case.
const VARIABLES: [&str; 9] = [
    "DEVCOMM_CUDA_ARCH",
    "DEVCOMM_BUILD_SKIP",
    "DEVCOMM_DUMP_IR",
    "DEVCOMM_NCCL_HOME",
    "DEVCOMM_CACHE",
    "DEVCOMM_PTXAS",
    "NCCL_HOME",
    "CUDA_HOME",
    "DOCS_RS",
];

/// Asks cargo to run the build script again when one of the builder's variables changes.
pub(crate) fn watch_variables() {
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// Asks cargo to run the build script again when one of these changes.
pub(crate) fn watch(paths: &[PathBuf]) {
    for path in paths {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

/// Asks cargo to run the build script each time, until what is missing is there: a file that does
/// not exist counts as changed.
pub(crate) fn try_again_next_time(folder: &Path) {
    println!("cargo::rerun-if-changed={}", folder.join("kernels-were-built").display());
}

/// Shows a warning; each line is one for cargo.
pub(crate) fn warn(message: &str) {
    for line in message.lines() {
        println!("cargo::warning={line}");
    }
}

/// Whether a variable is set, and not to nothing or 0.
pub(crate) fn is_on(variable: &str) -> bool {
    env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

/// The target folder of the build that runs this build script: cargo tags it as a cache.
pub(crate) fn target_folder(out_dir: &Path) -> Option<PathBuf> {
    let tagged = |folder: &&Path| folder.join("CACHEDIR.TAG").is_file();
    out_dir.ancestors().find(tagged).map(Path::to_owned)
}
