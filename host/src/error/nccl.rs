//! Errors of NCCL: of its library, its version and its calls.

use std::path::PathBuf;

use devcomm_locate::{NcclVersion, NotFound};

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
        /// What is wrong with it.
        reason: String,
    },
    /// The loaded NCCL is older than the program needs.
    #[error(
        "NCCL {has} ({}) is too old: {needs} or newer is needed; run `cargo xtask setup`, or name \
         a newer one in DEVCOMM_NCCL_HOME",
        path.display()
    )]
    TooOld {
        /// The version needed.
        needs: NcclVersion,
        /// The version found.
        has: NcclVersion,
        /// The library.
        path: PathBuf,
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
    #[error("{what} needs NCCL {needs} or newer; the loaded one is {has}")]
    Unsupported {
        /// A function or feature.
        what: &'static str,
        /// The first version that has it.
        needs: NcclVersion,
        /// The loaded version.
        has: NcclVersion,
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

fn on_rank(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!(" on rank {rank}"))
}

fn quoted(last_error: &str) -> String {
    let text = last_error.trim();
    if text.is_empty() { String::new() } else { format!(", NCCL says: {text}") }
}
