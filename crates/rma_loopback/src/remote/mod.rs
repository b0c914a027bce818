//! Ranks of other processes of this host.
//!
//! Two ranks share a piece of memory, with a ring of entries and slots for each direction, pinned
//! on both sides. The sender copies data from its device into a slot and publishes an entry. The
//! *owner* of the target memory, whose device alone can reach its signals, puts it on its own lane
//! from its progress calls, in order with all else that goes into it, and acknowledges in that
//! order. A get is an entry too: the owner fills the slot, and the rank that asked empties it. Each
//! pair also holds a socket: over it the memory's descriptor goes at first, then word of a failure,
//! or of leaving; its end without a word is the other's death.

mod incoming;
mod link;
mod meet;
mod outgoing;
mod segment;

pub(crate) use link::Link;
pub(crate) use meet::meet;
pub(crate) use outgoing::{Asked, Job};
pub(crate) use segment::RemoteSignal;
