//! The device API. One program, since each carries all kernels.

mod gin;
mod ll_a2a;
mod lsa;
mod stuck;
mod wrong;
