//! The builder's errors.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An error of a kernel build.
///
/// `Debug` prints the same text as `Display`, so that a build script can return it from
/// `fn main() -> Result<(), cuda_builder::Error>`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An architecture that the builder does not know.
    #[error("unknown GPU architecture `{name}`; known are {known}")]
    UnknownArch {
        /// The name.
        name: String,
        /// The architectures that the builder knows.
        known: String,
    },
    /// Kernels of one file require two architectures; a file is one PTX module.
    #[error(
        "the kernels of {file}.rs ask for two architectures, {first} and {second}; a file is one \
         PTX module: move one of them to another file"
    )]
    TwoArchitectures {
        /// The file's stem.
        file: String,
        /// A kernel and its architecture.
        first: String,
        /// Another kernel and its architecture.
        second: String,
    },
    /// A variable that cargo sets for build scripts is missing.
    #[error("{variable} is not set: call this from a build script, or give CudaBuilder::{instead}")]
    NotInBuildScript {
        /// The variable.
        variable: &'static str,
        /// The builder method that replaces it.
        instead: &'static str,
    },
    /// `cargo metadata` failed.
    #[error("cannot read the workspace of {manifest}: {source}", manifest = manifest.display())]
    Workspace {
        /// The manifest.
        manifest: PathBuf,
        /// Cargo's error.
        source: cargo_metadata::Error,
    },
    /// There is no kernel package of this name.
    #[error(
        "no package `{package}` in the workspace of {manifest} or among its dependencies; there \
         are: {known}",
        manifest = manifest.display()
    )]
    NoPackage {
        /// The requested name.
        package: String,
        /// The manifest whose workspace was searched.
        manifest: PathBuf,
        /// The packages that were found.
        known: String,
    },
    /// The kernel package has no library.
    #[error("the kernel package `{0}` has no library target (src/lib.rs)")]
    NoLibrary(String),
    /// The kernel package has no kernel or kernel file with this name.
    #[error("no kernel `{kernel}`; the kernels are: {known}")]
    NoKernel {
        /// The requested name.
        kernel: String,
        /// The existing kernels.
        known: String,
    },
    /// A program could not be run, or had unexpected output.
    #[error("cannot use `{program}`: {reason}")]
    Program {
        /// The program.
        program: String,
        /// The reason.
        reason: String,
    },
    /// The sources of `core` are not installed, so it cannot be compiled for the GPU.
    #[error(
        "rust-src is missing: {folder} does not exist, so `core` cannot be compiled for the GPU; \
         run `{fix}`",
        folder = folder.display()
    )]
    NoRustSource {
        /// The expected folder of the sources.
        folder: PathBuf,
        /// The command that installs them.
        fix: String,
    },
    /// `DEVCOMM_KERNEL_TOOLCHAIN` names a toolchain that is not installed.
    #[error(
        "DEVCOMM_KERNEL_TOOLCHAIN is `{0}`, but there is no such toolchain; run `rustup toolchain \
         install {0} --profile minimal --component rust-src`, or set it to `user` for the \
         toolchain that cargo runs"
    )]
    NoKernelToolchain(String),
    /// The toolchain's LLVM was not found.
    #[error("rustc's libLLVM was not found; tried {tried}; use a toolchain from rustup")]
    NoLlvm {
        /// The searched locations.
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
        /// The minimum version.
        needs: u32,
    },
    /// Kernels call NCCL, and its device bitcode was not found.
    #[error(transparent)]
    NoNccl(#[from] devcomm_locate::NotFound),
    /// `DEVCOMM_CACHE` cannot be the cache.
    #[error(transparent)]
    NoCache(#[from] devcomm_locate::NoCache),
    /// The kernel package does not compile.
    #[error(
        "the kernel package `{package}` does not compile for the GPU; the compiler's messages are \
         above{}",
        lines_of(advice)
    )]
    Compile {
        /// The package.
        package: String,
        /// What to do about mistakes that the compiler's messages do not explain.
        advice: Vec<&'static str>,
    },
    /// A dependency of the kernel package needs the standard library.
    #[error(
        "`{dependency}`, which the kernel package `{package}` depends on, needs `std` or `alloc`, \
         which GPUs do not have; leave out its default features in the manifest: \
         `{dependency} = {{ version = \"{version}\", default-features = false }}`, or find a crate \
         that is `no_std` (`cargo tree -p {package} -i {dependency}` shows what needs it)"
    )]
    NeedsStd {
        /// The kernel package.
        package: String,
        /// The dependency.
        dependency: String,
        /// The version.
        version: String,
    },
    /// Cargo could not start the build: a package needs a newer Rust, or `core` has dependencies,
    /// which it downloads once.
    #[error(
        "cargo cannot start to build the kernel package `{package}`{}\n{messages}",
        why_not_begun(messages)
    )]
    NotBegun {
        /// The package.
        package: String,
        /// Cargo's output; empty if already shown.
        messages: String,
    },
    /// A step of LLVM failed.
    #[error("{what}: {message}")]
    Llvm {
        /// The step, with the module and its kernels.
        what: String,
        /// LLVM's message, or that of the failed check.
        message: String,
    },
    /// The PTX is invalid.
    #[error("the PTX of {file}.rs: {message}")]
    Ptx {
        /// The kernel file.
        file: String,
        /// A description of the fault.
        message: String,
    },
    /// `ptxas` rejects the PTX.
    #[error("{file}.rs: {reason}\nptxas says of {ptx}:\n{message}", ptx = ptx.display())]
    Ptxas {
        /// The kernel file.
        file: String,
        /// A description of the fault, its place, and the remedy.
        reason: String,
        /// The PTX.
        ptx: PathBuf,
        /// ptxas' output.
        message: String,
    },
    /// A file could not be read or written.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// Returns whether kernels for GPUs cannot be built here, because a component must be installed
    /// or a dependency be changed: a `cargo check` and simulated runs should not fail for that.
    pub fn is_missing_part(&self) -> bool {
        use Error::{
            LlvmTooOld, NeedsStd, NoKernelToolchain, NoLlvm, NoNccl, NoRustSource, NotBegun,
        };
        matches!(
            self,
            NoRustSource { .. }
                | NoKernelToolchain(_)
                | NoNccl(_)
                | NoLlvm { .. }
                | LlvmTooOld { .. }
                | NotBegun { .. }
                | NeedsStd { .. }
        )
    }

    /// Copies the PTX that `ptxas` rejected to this folder, for readers of its message.
    pub(crate) fn with_ptx_in(mut self, folder: &Path) -> Self {
        if let Self::Ptxas { file, ptx, .. } = &mut self {
            let kept = folder.join(format!("{file}.ptx"));
            if std::fs::copy(&*ptx, &kept).is_ok() {
                *ptx = kept;
            }
        }
        self
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

/// Returns each advice on a line of its own.
fn lines_of(advice: &[&str]) -> String {
    advice.iter().map(|advice| format!("\n  note: {advice}")).collect()
}

/// Returns what to do if cargo did not start, by its messages.
fn why_not_begun(messages: &str) -> &'static str {
    if messages.is_empty() {
        "; its messages are above"
    } else if messages.contains("is not supported by the following package") {
        "; set DEVCOMM_KERNEL_TOOLCHAIN to a toolchain that is new enough, or to `user` for the \
         one that cargo runs"
    } else {
        "; the first build needs the network, as `core` has dependencies of its own"
    }
}
