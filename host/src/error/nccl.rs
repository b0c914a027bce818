//! Errors of NCCL: of its library, its version and its calls.

use std::path::{Path, PathBuf};

use devcomm_locate::{NcclVersion, NotFound, PipNccl};
use devcomm_sys::nccl::ABI_VERSION;

/// Why NCCL's library cannot be used, or a call into it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No usable NCCL library was found.
    #[error(transparent)]
    NotFound(NotFound),
    /// A file is not a usable NCCL library.
    #[error("{} is not a usable NCCL library: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be used.
        reason: String,
    },
    /// The loaded NCCL is older than the program needs.
    #[error(
        "NCCL {has} ({}) is too old: {needs} or newer is needed; {}",
        path.display(), renewal(path, *needs).unwrap_or_else(|| NAME_ANOTHER.to_owned())
    )]
    TooOld {
        /// The version needed.
        needs: NcclVersion,
        /// The version found.
        has: NcclVersion,
        /// The library.
        path: PathBuf,
    },
    /// Another part of the program has loaded another NCCL than the one that was named.
    #[error(
        "this process has loaded {}, but {} was named: two NCCL libraries in one process do not \
         know of each other's communicators; name the one that is loaded (or unset \
         DEVCOMM_NCCL_HOME), or load the other before it (in Python: devcomm.load_nccl() before \
         import torch)",
        loaded.display(), named.display()
    )]
    TwoLibraries {
        /// The library that is loaded.
        loaded: PathBuf,
        /// The one that the caller or DEVCOMM_NCCL_HOME names.
        named: PathBuf,
    },
    /// Two ranks loaded different NCCL libraries.
    #[error(
        "rank {} loaded NCCL {} but rank {} loaded NCCL {}; point DEVCOMM_NCCL_HOME at one \
         version on all hosts",
        first.0, first.1, second.0, second.1
    )]
    VersionsDiffer {
        /// A rank and its version.
        first: (usize, NcclVersion),
        /// Another rank and its version.
        second: (usize, NcclVersion),
    },
    /// The loaded NCCL lacks a function or feature.
    #[error(
        "{what} needs NCCL {needs} or newer; the loaded one is {has} ({}){}",
        path.display(), renewal(path, *needs).map(|text| format!("; {text}")).unwrap_or_default()
    )]
    Unsupported {
        /// A function or feature.
        what: &'static str,
        /// The first version that has it.
        needs: NcclVersion,
        /// The loaded version.
        has: NcclVersion,
        /// The loaded library.
        path: PathBuf,
    },
    /// A call into NCCL failed.
    #[error(
        "{operation} failed{}: {text} (code {code}){}; {hint}",
        on_rank(*rank), quoted(last_error)
    )]
    Failed {
        /// The NCCL function.
        operation: &'static str,
        /// NCCL's `ncclResult_t`.
        code: i32,
        /// `ncclGetErrorString`.
        text: String,
        /// `ncclGetLastError`, or empty.
        last_error: String,
        /// The rank on which it failed, if the communicator has one already.
        rank: Option<usize>,
        /// What to do next.
        hint: &'static str,
    },
}

impl NcclError {
    /// Returns what the call returned, if a call has failed.
    #[must_use]
    pub fn result(&self) -> Option<NcclResult> {
        match self {
            Self::Failed { code, .. } => Some(NcclResult::from_raw(*code)),
            _ => None,
        }
    }
}

/// The result of a call of NCCL. NCCL: `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclResult_t")]
#[non_exhaustive]
pub enum NcclResult {
    /// NCCL: `ncclSuccess`.
    Success,
    /// A call of CUDA failed. NCCL: `ncclUnhandledCudaError`.
    UnhandledCudaError,
    /// A call of the operating system failed. NCCL: `ncclSystemError`.
    SystemError,
    /// NCCL: `ncclInternalError`.
    InternalError,
    /// NCCL: `ncclInvalidArgument`.
    InvalidArgument,
    /// NCCL: `ncclInvalidUsage`.
    InvalidUsage,
    /// Another rank failed, or the network. NCCL: `ncclRemoteError`.
    RemoteError,
    /// NCCL: `ncclInProgress`.
    InProgress,
    /// NCCL: `ncclTimeout`.
    Timeout,
    /// A result unknown to this crate, by NCCL's number.
    Other(i32),
}

impl NcclResult {
    /// The codes that are known; the index is the number.
    const ALL: [Self; 9] = [
        Self::Success,
        Self::UnhandledCudaError,
        Self::SystemError,
        Self::InternalError,
        Self::InvalidArgument,
        Self::InvalidUsage,
        Self::RemoteError,
        Self::InProgress,
        Self::Timeout,
    ];

    /// Returns the result with NCCL's number.
    #[must_use]
    pub fn from_raw(code: i32) -> Self {
        let known = usize::try_from(code).ok().and_then(|code| Self::ALL.get(code));
        known.copied().unwrap_or(Self::Other(code))
    }

    /// Returns NCCL's number.
    #[must_use]
    pub fn raw(self) -> i32 {
        match self {
            Self::Other(code) => code,
            // All other variants are in `ALL`.
            known => Self::ALL.iter().position(|result| *result == known).unwrap_or(0) as i32,
        }
    }
}

/// What to do about a library that is too old and is in no Python environment.
const NAME_ANOTHER: &str = "run `devcomm setup`, or name a newer one in DEVCOMM_NCCL_HOME";

/// Returns what to do about a library that is too old, if it is in a Python environment: PyTorch
/// loads the library there, so a newer one must take its place. No version older than the kernels
/// need is advised.
pub(crate) fn renewal(library: &Path, needs: NcclVersion) -> Option<String> {
    let pip = PipNccl::of_library(library)?;
    let command = pip.install(needs.max(NcclVersion::from_code(ABI_VERSION)));
    Some(format!("run {command} and start the program again"))
}

fn on_rank(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!(" on rank {rank}"))
}

fn quoted(last_error: &str) -> String {
    let text = last_error.trim();
    if text.is_empty() { String::new() } else { format!(", NCCL says: {text}") }
}
