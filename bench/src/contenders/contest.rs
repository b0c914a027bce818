//! Who competes in a benchmark, and what is measured beside: the one place that decides what a
//! ratio is.

use crate::contenders::contender::Variant;
use Variant::{
    CopyEngine, Cpp, CublasLt, CublasLtRust, Nccl, NcclAllToAll, NcclSym, NcclTestsLsa,
    NcclTestsLsaVector, Read, Rust, RustAllGather, RustGemm, RustLsa, RustOps, RustOpsPlain,
    RustThroughput, RustUnfused, Step1Loop, Step2Shared, Step3Registers, Step4Mma, Step5Wgmma,
    Step6Pipeline, Step7Cluster, Step8Persistent, Tma, TorchFused, TorchOneShot, TorchTwoShot,
    Write,
};

/// The roles of a benchmark's variants.
#[derive(Debug)]
pub struct Contest {
    pub benchmark: &'static str,
    /// What a program gets that chooses nothing; `None` for a benchmark without a ratio.
    pub default: Option<Variant>,
    /// What others offer for the same work. A ratio is the default's time over that of the fastest.
    pub competitors: &'static [Variant],
    /// In no ratio: other forms of devcomm, mixes of theirs and devcomm's, and what does less, such
    /// as a product without its communication or bare stores.
    pub columns: &'static [Variant],
}

/// The collectives of one buffer by NCCL.
const HOST_CALLS: &[Variant] = &[Nccl, NcclSym];

const CONTESTS: &[Contest] = &[
    Contest {
        benchmark: "all-reduce",
        default: Some(RustOps),
        competitors: &[Nccl, NcclSym, TorchOneShot, TorchTwoShot, NcclTestsLsa, NcclTestsLsaVector],
        columns: &[Rust, RustOpsPlain, Cpp],
    },
    collective("reduce-scatter"),
    collective("all-gather"),
    collective("all-to-all"),
    collective("broadcast"),
    Contest { columns: &[], ..collective("rmsnorm-allreduce") },
    Contest { columns: &[Rust], ..collective("launch") },
    Contest { benchmark: "barrier", default: Some(Rust), competitors: HOST_CALLS, columns: &[Cpp] },
    Contest {
        benchmark: "put",
        default: Some(Rust),
        competitors: HOST_CALLS,
        columns: &[RustLsa, Cpp],
    },
    Contest {
        benchmark: "signal",
        default: Some(Rust),
        competitors: HOST_CALLS,
        columns: &[RustLsa],
    },
    Contest {
        benchmark: "p2p",
        default: None,
        competitors: HOST_CALLS,
        columns: &[Read, Write, Tma, CopyEngine],
    },
    product("gemm"),
    Contest { columns: &[RustGemm], ..product("grouped-gemm") },
    Contest {
        benchmark: "gemm-allreduce",
        default: Some(Rust),
        competitors: &[Nccl, NcclSym, TorchOneShot, TorchTwoShot],
        columns: &[RustUnfused, CublasLtRust],
    },
    Contest {
        benchmark: "gemm-reduce-scatter",
        default: Some(Rust),
        competitors: &[Nccl, NcclSym, TorchFused],
        columns: &[CublasLtRust],
    },
    Contest {
        benchmark: "allgather-gemm",
        default: Some(Rust),
        competitors: &[Nccl, NcclSym, TorchFused],
        columns: &[RustGemm, CublasLtRust],
    },
    Contest {
        columns: &[
            Step1Loop,
            Step2Shared,
            Step3Registers,
            Step4Mma,
            Step5Wgmma,
            Step6Pipeline,
            Step7Cluster,
            Step8Persistent,
        ],
        ..product("gemm-ladder")
    },
    Contest {
        benchmark: "ep",
        default: Some(Rust),
        competitors: &[Nccl, NcclSym, NcclAllToAll],
        columns: &[RustThroughput, RustAllGather, Write],
    },
];

const fn collective(benchmark: &'static str) -> Contest {
    let (default, columns) = (Some(RustOps), &[RustOpsPlain]);
    Contest { benchmark, default, competitors: HOST_CALLS, columns }
}

const fn product(benchmark: &'static str) -> Contest {
    Contest { benchmark, default: Some(Rust), competitors: &[CublasLt], columns: &[] }
}

impl Contest {
    /// That of a benchmark, by its name on the command line.
    pub fn of(benchmark: &str) -> Option<&'static Self> {
        CONTESTS.iter().find(|contest| contest.benchmark == benchmark)
    }
}
