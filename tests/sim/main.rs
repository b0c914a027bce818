//! Tests that run on simulated GPUs only: the guarantees of the simulator, NCCL's C functions on
//! it, and the typed API of `nccl_device`.
//!
//! Tests that also run on real GPUs are in `tests/gpu_*` and `tests/device`.

mod allreduce;
mod asynchronous;
mod block;
mod bounds;
mod checks;
mod clusters;
mod common;
mod coop_misuse;
mod dependent;
mod endless;
mod expert_traffic;
mod failures;
mod freed;
mod gin;
mod gin_barriers;
mod gin_completion_races;
mod gin_hints;
mod gin_misuse;
mod gin_races;
mod gin_release_races;
mod hints;
mod host_nccl;
mod host_nccl_faults;
mod host_nccl_windows;
mod host_order;
mod host_polls;
mod large_accesses;
mod leaks;
mod lsa_barriers;
mod machine;
mod main_loop;
mod messages;
mod multimem;
mod nccl_threads;
mod pointers;
mod races;
mod reduce_copy;
mod schedules;
mod scope_races;
mod stream_races;
mod teams;
mod tensor;
mod tensor_maps;
mod thread_races;
mod timeline;
mod typed_multimem;
mod typed_numbers;
mod typed_reduce_copy;
mod typed_together;
mod unwritten;
mod waits;
mod weak_copies;
