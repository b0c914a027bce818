//! What applications call: operations of devcomm's kernels, with all that can be wrong with a launch
//! checked before.

mod gemm_allreduce;

pub use gemm_allreduce::{GemmAllReduce, GemmOutput};
