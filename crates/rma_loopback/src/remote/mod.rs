//! Operations between processes of one host.
//!
//! Two ranks share memory, pinned in both processes: for each direction a ring of entries
//! (requests) and data slots. The sender copies data from its device into a slot and publishes an
//! entry. The *owner* of the target memory, whose device alone can access its signals, enqueues the
//! entry on its own inbound stream in `rmaProgress`, in order with all other operations into the
//! rank, and acknowledges in that order. For a get, the owner fills the slot, and the requester
//! copies the data out. Each pair also has a socket, which passes the memory's file descriptor, and
//! a last message: the rank has closed or failed. A socket closed without one means a dead process.

mod connect;
mod incoming;
mod link;
mod outgoing;
mod segment;

pub(crate) use connect::connect_links;
pub(crate) use link::Link;
pub(crate) use outgoing::{RemoteKind, RemoteOp};
pub(crate) use segment::RemoteSignal;
