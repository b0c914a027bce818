//! Errors of device communicators and windows.

/// Why a device communicator or a window could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevCommError {
    /// `ncclDevCommCreate` was not called, because a rank's check found that it would fail.
    #[error("no device communicator: rank {rank}{} refuses: {why}", and_others(*others))]
    Refused {
        /// The first rank that refuses.
        rank: usize,
        /// How many other ranks refuse too.
        others: usize,
        /// That rank's [`RequirementsRefusal`](crate::RequirementsRefusal).
        why: String,
    },
    /// Ranks gave different requirements for a device communicator.
    #[error(
        "no device communicator: {field} is {} on rank {} but {} on rank {}; requirements must be \
         the same on all ranks",
        first.1, first.0, second.1, second.0
    )]
    RequirementsDiffer {
        /// The requirement that differs.
        field: String,
        /// A rank and its value.
        first: (usize, String),
        /// Another rank and its value.
        second: (usize, String),
    },
    /// NCCL registered the memory but returned no window.
    #[error(
        "rank {rank}: NCCL registered no window over {bytes} bytes: symmetric memory is not \
         supported between these ranks"
    )]
    NoWindow {
        /// The rank that reports the error.
        rank: usize,
        /// Size in bytes.
        bytes: usize,
    },
    /// The ranks are in more than one LSA team (load/store domain).
    #[error(
        "not every rank reaches every other by load and store; the domains are: {}",
        teams.join("; ")
    )]
    SeveralLsaTeams {
        /// Each domain: its ranks and their hosts.
        teams: Vec<String>,
    },
}

fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (and 1 other)".to_owned(),
        others => format!(" (and {others} others)"),
    }
}
