//! What can go wrong, in words for the person who runs the build.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::arch::NvvmArch;

/// Why kernels could not be built.
///
/// `Debug` prints the same sentence as `Display`, so that a build script may end in
/// `fn main() -> Result<(), cuda_builder::Error>`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An architecture that the builder does not know.
    #[error("unknown GPU architecture `{0}`; known are {all}", all = known_architectures())]
    UnknownArch(String),
    /// Kernels of one file ask for two architectures, and a file is one PTX module.
    #[error(
        "the kernels of {file}.rs ask for two architectures, {first} and {second}; a file is one \
         PTX module: move one of them to another file"
    )]
    TwoArchitectures {
        /// The file's stem.
        file: String,
        /// A kernel and its architecture.
        first: String,
        /// Another.
        second: String,
    },
    /// A variable that cargo sets for build scripts is missing.
    #[error("{variable} is not set: call this from a build script, or give CudaBuilder::{instead}")]
    NotInBuildScript {
        /// The variable.
        variable: &'static str,
        /// The method that takes its place.
        instead: &'static str,
    },
    /// `cargo metadata` failed.
    #[error("cannot read the workspace of {manifest}: {source}", manifest = manifest.display())]
    Workspace {
        /// The manifest that was asked about.
        manifest: PathBuf,
        /// What cargo said.
        source: cargo_metadata::Error,
    },
    /// There is no kernel package of this name.
    #[error(
        "there is no package `{package}` in the workspace of {manifest} or among its path \
         dependencies; there are: {known}",
        manifest = manifest.display()
    )]
    NoPackage {
        /// The name that was asked for.
        package: String,
        /// The manifest whose workspace was searched.
        manifest: PathBuf,
        /// The packages that were found.
        known: String,
    },
    /// The kernel package has no library.
    #[error("the kernel package `{0}` has no library target (src/lib.rs)")]
    NoLibrary(String),
    /// The kernel package has no kernel, and no kernel file, of this name.
    #[error("there is no kernel `{kernel}`; the kernels are: {known}")]
    NoKernel {
        /// The name that was asked for.
        kernel: String,
        /// The kernels that there are.
        known: String,
    },
    /// A program could not be run, or said something unexpected.
    #[error("cannot use `{program}`: {reason}")]
    Program {
        /// The program.
        program: String,
        /// What happened.
        reason: String,
    },
    /// The sources of `core` are not installed, so it cannot be compiled for the GPU.
    #[error(
        "rust-src is missing: {folder} does not exist, so `core` cannot be compiled for the GPU; \
         run `{fix}`",
        folder = folder.display()
    )]
    NoRustSource {
        /// The folder that holds the sources when they are installed.
        folder: PathBuf,
        /// The command that installs them.
        fix: String,
    },
    /// The toolchain's LLVM was not found.
    #[error("no libLLVM of rustc's own was found; tried {tried}; use a toolchain from rustup")]
    NoLlvm {
        /// Where it was looked for.
        tried: String,
    },
    /// The toolchain's LLVM cannot read NCCL's bitcode.
    #[error(
        "this rustc has LLVM {has}, and NCCL's device bitcode needs LLVM {needs} or newer; use a \
         newer Rust toolchain"
    )]
    LlvmTooOld {
        /// The LLVM of this rustc.
        has: String,
        /// The oldest that will do.
        needs: u32,
    },
    /// Kernels call NCCL, and its device bitcode was not found.
    #[error(transparent)]
    NoNccl(#[from] devcomm_locate::NotFound),
    /// The kernel package does not compile.
    #[error(
        "the kernel package `{package}` does not compile for the GPU; the compiler's messages are \
         above"
    )]
    Compile {
        /// The package.
        package: String,
    },
    /// Cargo could not begin: `core` has dependencies of its own, which it downloads once.
    #[error(
        "cargo cannot begin to build the kernel package `{package}`; the first build needs the \
         network, as `core` has dependencies of its own\n{messages}"
    )]
    NotBegun {
        /// The package.
        package: String,
        /// What cargo printed; empty when it has been shown already.
        messages: String,
    },
    /// LLVM could not do a step.
    #[error("{what}: {message}")]
    Llvm {
        /// The step, with the module and its kernels.
        what: String,
        /// What LLVM, or the check that failed, said.
        message: String,
    },
    /// The PTX is not what it must be.
    #[error("the PTX of {file}.rs: {message}")]
    Ptx {
        /// The kernel file.
        file: String,
        /// What is wrong.
        message: String,
    },
    /// `ptxas` refused the PTX.
    #[error("ptxas does not take the PTX of {file}.rs ({ptx}):\n{message}", ptx = ptx.display())]
    Ptxas {
        /// The kernel file.
        file: String,
        /// The PTX.
        ptx: PathBuf,
        /// What ptxas printed.
        message: String,
    },
    /// A file could not be read or written.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// Whether something has to be installed or downloaded: no reason to fail a `cargo check`.
    pub fn is_missing_part(&self) -> bool {
        use Error::{LlvmTooOld, NoLlvm, NoNccl, NoRustSource, NotBegun};
        matches!(
            self,
            NoRustSource { .. } | NoNccl(_) | NoLlvm { .. } | LlvmTooOld { .. } | NotBegun { .. }
        )
    }

    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, path: path.to_owned(), source }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn known_architectures() -> String {
    NvvmArch::ALL.iter().map(|arch| arch.name()).collect::<Vec<_>>().join(", ")
}
