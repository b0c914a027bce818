//! All-reduce (sum): `kernels/src/lsa_allreduce.rs` against `ncclAllReduce`.

mod gpus;
mod host;
mod simulated;

use super::Benchmark;
use super::row::Case;
use super::variant::Variant;
use crate::number::Number;

pub use host::ByHost;

/// What the command line calls `all-reduce`.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "all-reduce",
    variants: &[
        (Variant::Rust, "kernels::lsa_allreduce on symmetric windows"),
        (Variant::Cpp, "its twin in C++ on the same windows"),
        (
            Variant::Nccl,
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, as in nccl-tests",
        ),
        (Variant::NcclSym, "ncclAllReduce on the windows"),
    ],
    on_gpus: gpus::run,
    simulated: simulated::run,
};

/// Threads of a block, and blocks at most.
const THREADS: u32 = 128;
const MAX_BLOCKS: u32 = 128;

fn case<T: Number>(count: usize, ranks: usize) -> Case {
    Case {
        size: count * size_of::<T>(),
        count,
        dtype: T::NAME,
        redop: "sum",
        // What each rank has to send and to receive, in messages.
        bus: 2.0 * (ranks - 1) as f64 / ranks as f64,
    }
}
