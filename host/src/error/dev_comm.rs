//! Errors of device communicators and windows.

/// Why a device communicator or a window could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevCommError {
    /// `ncclDevCommCreate` was not called: this rank found that it would fail. The other ranks get
    /// [`WorldError::CallFailed`](crate::WorldError::CallFailed) with this text.
    #[error("no device communicator: rank {rank} refuses: {why}")]
    Refused {
        /// The rank.
        rank: usize,
        /// The [`RequirementsRefusal`](crate::RequirementsRefusal).
        why: String,
        /// Whether another machine may meet the requirements.
        is_hardware: bool,
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
