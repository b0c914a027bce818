//! What all layers of the simulator use: errors, settings, and what names a place in a kernel or in
//! memory.

pub(crate) mod arguments;
pub(crate) mod error;
pub(crate) mod ids;
pub(crate) mod layout;
pub(crate) mod mapping;
pub(crate) mod mutation;
pub(crate) mod owner;
pub(crate) mod ranges;
pub(crate) mod schedule;
pub(crate) mod simulation;
pub(crate) mod timeline;
