//! Operations between processes of one host.
//!
//! Two ranks share memory with a ring of entries and slots for each direction, pinned on both
//! sides. The sender copies data from its device into a slot and publishes an entry. The *owner* of
//! the target memory, whose device alone can access its signals, enqueues it on its own lane from
//! its progress calls, in order with all other operations into it, and acknowledges in that order.
//! A get is an entry too: the owner fills the slot, and the requester empties it. Each pair also
//! has a socket: it passes the memory's descriptor, then the notice of a failure or of leaving; if
//! it closes without a message, the other process has died.

mod connect;
mod incoming;
mod link;
mod outgoing;
mod segment;

pub(crate) use connect::connect_links;
pub(crate) use link::Link;
pub(crate) use outgoing::{Job, RemoteKind};
pub(crate) use segment::RemoteSignal;
