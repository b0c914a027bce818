//! Calls that the state of an object, a group, a capture or a wait does not allow.

use std::time::Duration;

/// Why something cannot be done now, or any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The communicator is no longer of use for this.
    #[error("rank {rank}: the communicator is {how}, which does not allow this")]
    CommunicatorEnded {
        /// The rank.
        rank: usize,
        /// Its state: suspended, revoked, finalized, destroyed or aborted.
        how: &'static str,
    },
    /// What belongs to a communicator was used after it was closed.
    #[error("rank {rank}: {what} is closed")]
    Closed {
        /// What it was.
        what: &'static str,
        /// The rank.
        rank: usize,
    },
    /// A non-blocking communicator has not done yet what was asked of it last.
    #[error(
        "{operation} on rank {rank}: the communicator is still busy with the operation before; \
         wait until it is ready"
    )]
    InProgress {
        /// What was asked of it.
        operation: &'static str,
        /// The rank.
        rank: usize,
    },
    /// This cannot be deferred to the end of a group.
    #[error("{what} is not possible inside a group")]
    InGroup {
        /// What was asked for.
        what: &'static str,
    },
    /// This cannot be part of a graph.
    #[error("{what} while a stream is captured to a graph; do it before the capture")]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },
    /// The GPU did not finish in time.
    #[error(
        "the GPU had not finished after {:.1} s; its work is still running and its memory is kept",
        waited.as_secs_f64()
    )]
    DeadlinePassed {
        /// The time waited.
        waited: Duration,
    },
    /// On a simulated machine: everybody waits, and nothing that they wait for can happen. On GPUs
    /// this would hang.
    #[error("deadlock: {report}")]
    Deadlock {
        /// Who waits for what.
        report: String,
    },
}
