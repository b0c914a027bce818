//! Puts and gets that their kernel did not flush.

use std::fmt;

use crate::base::error::{Site, ThreadId};

/// A put or get that its kernel did not flush.
///
/// This is no misuse if nothing writes a put's source before its signal has arrived at the peer, or
/// until the device communicator's next flush; but a get's data may come after its kernel's end.
#[derive(Clone, Debug)]
pub struct Unflushed {
    /// The thread that posted it.
    pub thread: ThreadId,
    /// The local memory that it reads, if it is a put, or writes.
    pub memory: String,
    /// Whether the operation is a get.
    pub is_get: bool,
    /// Where it was posted.
    pub at: Site,
}

impl Unflushed {
    /// Returns the text that follows "the kernel ends, and".
    pub(crate) fn what(&self) -> String {
        let memory = &self.memory;
        match self.is_get {
            true => format!("its get into {memory} is not flushed: its data may come later"),
            false => format!("its put from {memory} is not flushed: it may read its source later"),
        }
    }
}

impl fmt::Display for Unflushed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}: the kernel ends, and {}", self.thread, self.at, self.what())
    }
}
