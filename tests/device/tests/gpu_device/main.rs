//! The device API on GPUs. One program, since each carries all kernels.

mod gin;
mod lsa;
mod stuck;
