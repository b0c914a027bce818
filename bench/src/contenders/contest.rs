//! The competitors in a benchmark, and what else is measured: the one place that decides what a
//! ratio is.

use crate::contenders::contender::Variant;
use Variant::*;

/// The roles of a benchmark's variants.
#[derive(Debug)]
pub struct Contest {
    pub benchmark: &'static str,
    /// What a program gets that chooses nothing; `None` for a benchmark without a ratio.
    pub default: Option<Variant>,
    /// What others offer for the same work. A ratio is the default's time over that of the fastest.
    pub competitors: &'static [Variant],
    /// The columns that are in no ratio: other forms of devcomm, mixes of theirs and devcomm's, and
    /// what does less, such as a product without its communication or bare stores.
    pub columns: &'static [Variant],
}

const NCCL: &[Variant] = &[Nccl, NcclSym];
const NCCL_AND_TORCH: &[Variant] = &[Nccl, NcclSym, TorchFused];
const OPS: Option<Variant> = Some(RustOps);
const KERNEL: Option<Variant> = Some(Rust);

const CONTESTS: &[Contest] = &[
    contest(
        "all-reduce",
        OPS,
        &[
            Nccl,
            NcclSym,
            TorchOneShot,
            TorchTwoShot,
            FlashInfer,
            Vllm,
            NcclTestsLsa,
            NcclTestsLsaVector,
        ],
        &[Rust, RustOpsPlain, Cpp, RustGemm],
    ),
    contest("reduce-scatter", OPS, NCCL, &[RustOpsPlain, RustGemm]),
    contest("all-gather", OPS, NCCL, &[RustOpsPlain, RustGemm]),
    contest("all-to-all", OPS, NCCL, &[RustOpsPlain, RustGemm]),
    contest("all-to-all-v", OPS, NCCL, &[RustOpsPlain, RustGemm]),
    contest("broadcast", OPS, NCCL, &[RustOpsPlain, RustGemm]),
    contest("rmsnorm-allreduce", OPS, &[Nccl, NcclSym, FlashInfer], &[]),
    contest("launch", OPS, NCCL, &[Rust]),
    contest("barrier", KERNEL, NCCL, &[Cpp]),
    contest("put", KERNEL, NCCL, &[RustLsa, Cpp]),
    contest("signal", KERNEL, NCCL, &[RustLsa]),
    contest("twins", KERNEL, &[Cpp], &[CppAgain]),
    contest("p2p", None, NCCL, &[Read, Write, Tma, CopyEngine]),
    contest("gemm", KERNEL, &[CublasLt], &[CublasLtRoundedParts]),
    contest("grouped-gemm", KERNEL, &[CublasLt, CublasGrouped], &[RustGemm]),
    contest(
        "gemm-allreduce",
        KERNEL,
        &[Nccl, NcclSym, TorchOneShot, TorchTwoShot],
        &[RustUnfused, CublasLtRust],
    ),
    contest("gemm-reduce-scatter", KERNEL, NCCL_AND_TORCH, &[CublasLtRust]),
    contest("allgather-gemm", KERNEL, NCCL_AND_TORCH, &[RustGemm, CublasLtRust]),
    contest(
        "gemm-ladder",
        KERNEL,
        &[CublasLt],
        &[
            Step1Loop,
            Step2Shared,
            Step3Registers,
            Step4Mma,
            Step5Wgmma,
            Step6Pipeline,
            Step7Cluster,
            Step8Persistent,
        ],
    ),
    contest(
        "ep",
        KERNEL,
        &[Nccl, NcclSym, NcclAllToAll, NcclEpLl, NcclEpHt],
        &[RustThroughput, RustAllGather, Write],
    ),
];

const fn contest(
    benchmark: &'static str,
    default: Option<Variant>,
    competitors: &'static [Variant],
    columns: &'static [Variant],
) -> Contest {
    Contest { benchmark, default, competitors, columns }
}

impl Contest {
    /// Returns the contest of a benchmark, by its name on the command line.
    pub fn of(benchmark: &str) -> Option<&'static Self> {
        CONTESTS.iter().find(|contest| contest.benchmark == benchmark)
    }
}
