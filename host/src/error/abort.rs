//! Why kernels were aborted.

use std::fmt;
use std::time::Duration;

/// Why the kernels of a device communicator were aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AbortCause {
    /// The program called [`DevCommResource::abort`](crate::DevCommResource::abort), or
    /// [`KernelAbortHandle::abort`](crate::KernelAbortHandle::abort) on another thread.
    Request,
    /// The limit of [`Stream::synchronize_within`](crate::Stream::synchronize_within) has passed.
    Deadline {
        /// The time waited.
        waited: Duration,
    },
    /// The communicator was aborted, by [`Communicator::abort`](crate::Communicator::abort) or
    /// because NCCL reported an error.
    CommunicatorAborted,
    /// Another rank was lost.
    RankLost {
        /// The rank.
        rank: usize,
    },
}

impl fmt::Display for AbortCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request => f.write_str("the program asked for it"),
            Self::Deadline { waited } => {
                write!(f, "they had not ended after {:.1} s", waited.as_secs_f64())
            }
            Self::CommunicatorAborted => f.write_str("their communicator was aborted"),
            Self::RankLost { rank } => write!(f, "rank {rank} is lost"),
        }
    }
}
