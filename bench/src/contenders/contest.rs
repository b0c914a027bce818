//! The variants of each benchmark: what they are, and whether they compete. Only these tables
//! decide what a ratio is.

use devcomm_gemm_ladder::Step;

use crate::contenders::contender::Variant;

/// The variants of a benchmark.
#[derive(Debug)]
pub struct Contest {
    pub benchmark: &'static str,
    pub variants: &'static [VariantInfo],
}

/// A variant in a benchmark.
#[derive(Clone, Copy, Debug)]
pub struct VariantInfo {
    pub variant: Variant,
    pub role: Role,
    /// The description.
    pub what: &'static str,
}

impl VariantInfo {
    /// Returns a variant that is in no ratio, for tests.
    #[cfg(test)]
    pub const fn column(variant: Variant, what: &'static str) -> Self {
        Self { variant, role: Role::Column, what }
    }
}

/// The role of a variant in the ratios of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// devcomm's default; absent from a benchmark without a ratio.
    Ours,
    /// A competitor with the same work. A ratio is the time of `Ours` over that of the fastest.
    Theirs,
    /// A variant in no ratio: another form of devcomm, a mix of theirs and devcomm's, or one that
    /// does less, such as a product without its communication or bare stores.
    Column,
}

/// Returns a benchmark's variants, from their roles, names and descriptions.
macro_rules! contest {
    ($benchmark:literal: $($role:ident $variant:ident $what:expr,)*) => {{
        let variants =
            &[$(VariantInfo { variant: Variant::$variant, role: Role::$role, what: $what }),*];
        Contest { benchmark: $benchmark, variants }
    }};
}

/// Returns the variants of a collective, from its name, its method and NCCL's function.
macro_rules! collective {
    ($benchmark:literal, $method:literal, $nccl:literal) => {
        contest!($benchmark:
            Ours RustOps concat!("devcomm::Collectives::", $method, " on symmetric windows"),
            Column RustOpsPlain PLAIN,
            Theirs Nccl concat!($nccl, " on memory of ncclMemAlloc that is not registered"),
            Theirs NcclSym concat!($nccl, " on the windows"),
            Column RustGemm BESIDE,
        )
    };
}

const PLAIN: &str = "the same on memory of ncclMemAlloc that is not registered";
const BESIDE: &str = "the product of --beside alone";

/// The contests of all benchmarks.
pub const CONTESTS: &[Contest] = &[
    contest!("all-reduce":
        Column Rust "kernels::lsa_allreduce on symmetric windows",
        Ours RustOps "devcomm::Collectives::all_reduce on the windows",
        Column RustOpsPlain PLAIN,
        Column Cpp "the same kernel in C++ on the same windows",
        Theirs Nccl
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, as in nccl-tests",
        Theirs NcclSym "ncclAllReduce on the windows",
        Theirs TorchOneShot
            "torch.ops.symm_mem.one_shot_all_reduce, timed in a run of its own before the others",
        Theirs TorchTwoShot "torch.ops.symm_mem.two_shot_all_reduce_, the same, in place",
        Theirs FlashInfer "FlashInfer's allreduce_fusion without a norm, in a run before too",
        Theirs Vllm "vLLM's custom all-reduce, FlashInfer's copy, the same",
        Theirs NcclTestsLsa
            "all_reduce_perf -D 1 of nccl-tests, with its default of 16 blocks (-V), by the host's \
             clock, in a run before the others",
        Theirs NcclTestsLsaVector "all_reduce_perf -D 2, the same",
        Column RustGemm BESIDE,
    ),
    collective!("reduce-scatter", "reduce_scatter", "ncclReduceScatter"),
    collective!("all-gather", "all_gather", "ncclAllGather"),
    collective!("all-to-all", "all_to_all", "ncclAlltoAll"),
    collective!("all-to-all-v", "all_to_all_v", "ncclSend and ncclRecv in a group"),
    collective!("broadcast", "broadcast", "ncclBroadcast"),
    contest!("rmsnorm-allreduce":
        Ours RustOps "devcomm::Collectives::all_reduce_rmsnorm, from window to window",
        Theirs Nccl
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, and then \
             kernels::rmsnorm",
        Theirs NcclSym "ncclAllReduce on the windows, and then kernels::rmsnorm",
        Theirs FlashInfer "FlashInfer's allreduce_fusion, in a run before the others",
    ),
    contest!("launch":
        Column Rust "kernels::push_exchange, one block, with each set of launch attributes",
        Ours RustOps "devcomm::Collectives::all_to_all, which chooses a kernel",
        Theirs Nccl "ncclAlltoAll on memory of ncclMemAlloc that is not registered",
        Theirs NcclSym "ncclAlltoAll on the windows",
    ),
    contest!("barrier":
        Ours Rust "an LSA barrier for each block, synchronised 1000 times per launch",
        Column Cpp "the same kernel in C++",
        Theirs Nccl "ncclAllReduce of one element on memory that is not registered, one per launch",
        Theirs NcclSym "ncclAllReduce of one element on symmetric windows, one per launch",
    ),
    contest!("put":
        Ours Rust "puts with a signal over GIN (PROXY) by one warp",
        Column RustLsa
            "stores over NVLink and then a flag; each block runs its own ping-pong, so with many \
             blocks both directions are busy at once",
        Column Cpp "the kernel of `rust` in C++",
        Theirs Nccl
            "ncclSend and ncclRecv on memory that is not registered, two launches per round trip",
        Theirs NcclSym "ncclPutSignal and ncclWaitSignal on symmetric windows",
    ),
    contest!("signal":
        Ours Rust "signals over GIN (PROXY) by one warp, 1000 round trips per launch",
        Column RustLsa "flags over NVLink by one warp, 1000 round trips per launch",
        Theirs Nccl
            "ncclSend and ncclRecv of a byte that is not registered, two launches per round trip",
        Theirs NcclSym "ncclSignal and ncclWaitSignal",
    ),
    contest!("twins":
        Ours Rust "a kernel in Rust, named in the column of reductions",
        Theirs Cpp "the same kernel in C++",
        Column CppAgain "the kernel in C++ loaded a second time",
    ),
    contest!("p2p":
        Column Read
            "a kernel of the even rank loads from the odd one, 2 to 200 times per launch, so that \
             the time of a copy has little of the launch",
        Column Write "a kernel of the even rank stores to the odd one, as often",
        Column Tma "the same by TMA, for multiples of 128 bytes",
        Column CopyEngine "cuMemcpyAsync of the even rank to the odd one, a call for each copy",
        Theirs Nccl
            "ncclSend of the even rank, on memory that is not registered, a call for each copy",
        Theirs NcclSym "the same on the windows",
    ),
    contest!("gemm":
        Ours Rust
            "a kernel in Rust, launched by devcomm::Gemm, told that no kernel writes B; its tiles \
             are rows x columns of C",
        Theirs CublasLt
            "cuBLASLt, the fastest of the first algorithms of its heuristics; its tiles are \
             columns x rows of C",
        Column CublasLtRoundedParts "the same with parts of a sum added in the type of C",
    ),
    contest!("grouped-gemm":
        Ours Rust "devcomm::GroupedGemm, which reads on the GPU where the groups are",
        Theirs CublasLt
            "cuBLASLt, a product for each group that has rows, which the host knows; each by the \
             fastest algorithm of its heuristics",
        Theirs CublasGrouped "cublasGemmGroupedBatchedEx, of the groups that have rows",
        Column RustGemm "devcomm::Gemm, one product of all rows and one B",
    ),
    contest!("gemm-allreduce":
        Ours Rust "one kernel, launched by devcomm::GemmAllReduce, C in a symmetric window",
        Column RustUnfused
            "devcomm::Gemm, then devcomm::Collectives::all_reduce in place, on a symmetric window",
        Column CublasLtRust
            "cuBLASLt, then devcomm::Collectives::all_reduce in place, on a symmetric window",
        Theirs Nccl "cuBLASLt, then ncclAllReduce in place, on memory that is not registered",
        Theirs NcclSym "cuBLASLt, then ncclAllReduce in place, on a symmetric window",
        Theirs TorchOneShot
            "torch.mm, then torch.ops.symm_mem.one_shot_all_reduce, in a run before the others",
        Theirs TorchTwoShot "the same by torch.ops.symm_mem.two_shot_all_reduce_, in place",
    ),
    contest!("gemm-reduce-scatter":
        Ours Rust "devcomm::GemmReduceScatter, by its default or by the plans of --plan",
        Column CublasLtRust
            "cuBLASLt, then devcomm::Collectives::reduce_scatter, on a symmetric window",
        Theirs Nccl "cuBLASLt, then ncclReduceScatter, on memory that is not registered",
        Theirs NcclSym "cuBLASLt, then ncclReduceScatter, on symmetric windows",
        Theirs TorchFused
            "torch.ops.symm_mem.fused_matmul_reduce_scatter, in a run before the others",
    ),
    contest!("allgather-gemm":
        Ours Rust "devcomm::AllGatherGemm, by its default or by the plans of --plan",
        Column RustGemm "devcomm::Gemm alone, where all ranks have all rows",
        Column CublasLtRust "devcomm::Collectives::all_gather on symmetric windows, then cuBLASLt",
        Theirs Nccl "ncclAllGather on memory that is not registered, then cuBLASLt",
        Theirs NcclSym "ncclAllGather on symmetric windows, then cuBLASLt",
        Theirs TorchFused "torch.ops.symm_mem.fused_all_gather_matmul, in a run before the others",
    ),
    contest!("gemm-ladder":
        Column Step1Loop Step::Loop.what(),
        Column Step2Shared Step::Shared.what(),
        Column Step3Registers Step::Registers.what(),
        Column Step4Mma Step::Mma.what(),
        Column Step5Wgmma Step::Wgmma.what(),
        Column Step6Pipeline Step::Pipeline.what(),
        Column Step7Cluster Step::Cluster.what(),
        Column Step8Persistent Step::Persistent.what(),
        Ours Rust Step::Shipped.what(),
        Theirs CublasLt "cuBLASLt, the fastest of the first algorithms of its heuristics",
    ),
    contest!("ep":
        Ours Rust "devcomm::ExpertParallel",
        Column RustThroughput
            "the same in its form for high throughput; `group` copies rows to the other experts of \
             their tokens, in place",
        Column RustAllGather
            "devcomm::Collectives on the windows: all_gather of rows and routing; a kernel that \
             sums what experts return, and reduce_scatter",
        Column Write "plain stores of as many bytes between two ranks, in both directions",
        Theirs Nccl
            "ncclAllGather of rows and routing in a group; a kernel that sums what experts return, \
             and ncclReduceScatter; on memory of ncclMemAlloc that is not registered",
        Theirs NcclSym "the same on the windows",
        Theirs NcclAllToAll
            "ncclAlltoAll on windows, all chunks as long as the longest; dispatch: rows and \
             routing in a group, put in the order of the ranks before the measurement; combine: a \
             kernel sums what experts return, and another one what arrives",
        Theirs NcclEpLl "NCCL EP for low latency; in a layer its dispatch orders rows by expert",
        Theirs NcclEpHt "NCCL EP for high throughput; its combine applies no weights",
    ),
];

impl Contest {
    /// Returns the contest of a benchmark, by its name on the command line.
    pub fn of(benchmark: &str) -> Option<&'static Self> {
        CONTESTS.iter().find(|contest| contest.benchmark == benchmark)
    }

    /// Returns whether a variant is in ratios.
    pub fn competes(&self, variant: Variant) -> bool {
        let is_it = |info: &VariantInfo| info.variant == variant && info.role != Role::Column;
        self.variants.iter().any(is_it)
    }

    /// Returns the variants with a role.
    pub fn with(&self, role: Role) -> Vec<Variant> {
        let variants = self.variants.iter().filter(|info| info.role == role);
        variants.map(|info| info.variant).collect()
    }
}
