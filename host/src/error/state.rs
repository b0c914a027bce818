//! Errors of calls that the state of an object, a group, a capture or a wait does not allow.

use std::time::Duration;

/// Why the current state does not allow a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The communicator has ended or is suspended, and does not allow this call.
    #[error("rank {rank}: the communicator is {how}, which does not allow this")]
    CommunicatorEnded {
        /// The rank.
        rank: usize,
        /// The state: suspended, revoked, finalized, destroyed or aborted.
        how: &'static str,
    },
    /// An object of a communicator was used after it was closed.
    #[error("rank {rank}: {what} is closed")]
    Closed {
        /// The object.
        what: &'static str,
        /// The rank.
        rank: usize,
    },
    /// A non-blocking communicator has not completed its previous operation yet.
    #[error(
        "{operation} on rank {rank}: the communicator is still busy with its previous operation; \
         wait until it is ready"
    )]
    InProgress {
        /// The operation that was refused.
        operation: &'static str,
        /// The rank.
        rank: usize,
    },
    /// The call cannot be deferred to the end of a group.
    #[error("{what} is not possible inside a group")]
    InGroup {
        /// The call.
        what: &'static str,
    },
    /// The work would run before operations that the open group has deferred.
    #[error(
        "{what} would run before the operations that the open group has deferred on its stream; \
         enqueue it after the group"
    )]
    BeforeDeferred {
        /// The work.
        what: &'static str,
    },
    /// The call is not allowed while a stream is captured to a graph.
    #[error("{what} while a stream is captured to a graph; do it before the capture")]
    Capturing {
        /// The call.
        what: &'static str,
    },
    /// The GPU did not finish in time.
    #[error(
        "the GPU has not finished{}; its work may still run, and its memory is kept",
        after(waited)
    )]
    DeadlinePassed {
        /// The time waited.
        waited: Duration,
    },
    /// A copy of pinned memory was enqueued, but the driver told neither its end nor the stream's:
    /// the copy may still run, so the memory is neither accessed nor freed any more.
    #[error("it is not known when a copy of the pinned memory ends, because the driver failed")]
    UnknownCopy,
    /// The process was forked after the object was made, and this is the child, which has none of
    /// the threads and connections.
    #[error(
        "this process is a fork of the one that joined the world, and cannot use what was made \
         there; call devcomm in the parent, or start the process anew (spawn, exec)"
    )]
    Forked,
    /// A call of NCCL that waits for the other ranks has not returned in time; its communicator is
    /// aborted.
    #[error(
        "{operation} had not returned after {:.1} s: another rank does not call it, or is stuck in \
         it; DEVCOMM_OPERATION_TIMEOUT, WorldBuilder::deadline or Context::with_deadline sets the \
         time",
        waited.as_secs_f64()
    )]
    NotReturned {
        /// NCCL's function.
        operation: &'static str,
        /// The time waited.
        waited: Duration,
    },
    /// A wait was ended by the check of [`interruptible`](crate::interruptible).
    #[error("the wait was interrupted")]
    Interrupted,
    /// A deadlock of a simulated machine: every thread and kernel waits for something that cannot
    /// happen. On GPUs the program would hang.
    #[error("{report}")]
    Deadlock {
        /// The word `deadlock`, and a line for each wait, which says what it waits for.
        report: String,
    },
}

/// Returns ` after 1.5 s`; an empty text for less than 1 ms, when nothing was waited for.
fn after(waited: &Duration) -> String {
    match waited.as_millis() {
        0 => String::new(),
        millis @ 1..1000 => format!(" after {millis} ms"),
        _ => format!(" after {:.1} s", waited.as_secs_f64()),
    }
}
