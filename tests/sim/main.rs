//! Programs on simulated GPUs alone: what the simulated machine promises, and NCCL's device
//! functions and the typed layer on it.
//!
//! Tests that also run on real GPUs are in `gpu_*` and `device`.

mod allreduce;
mod block;
mod common;
mod failures;
mod gin;
mod gin_barriers;
mod gin_misuse;
mod host_nccl;
mod host_nccl_faults;
mod host_nccl_windows;
mod lsa_barriers;
mod machine;
mod multimem;
mod nccl_threads;
mod pointers;
mod reduce_copy;
mod teams;
mod tensor;
/// The typed layer of `nccl_device`.
mod typed {
    mod multimem;
    mod reduce_copy;
    mod together;
}
mod waits;
