//! Contenders: the implementations of one operation that a benchmark compares.

use std::fmt;
use std::rc::Rc;

use anyhow::Result;
use clap::ValueEnum;
use devcomm::{CollectivePlan, FunctionInfo, LaunchConfig};
use serde::{Deserialize, Serialize};

/// How a contender implements the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// A kernel in Rust
    Rust,
    /// A kernel in Rust that puts by stores over NVLink
    RustLsa,
    /// A kernel in Rust that loads from the peer
    Read,
    /// A kernel in Rust that stores to the peer
    Write,
    /// A kernel in Rust that copies to the peer by TMA
    Tma,
    /// cuMemcpyAsync to the peer
    CopyEngine,
    /// The operation of `devcomm`, which chooses among kernels and NCCL
    RustOps,
    /// The same on memory that is not registered
    RustOpsPlain,
    /// The operation in several launches of `devcomm`
    RustUnfused,
    /// The operation of `devcomm` in its form for high throughput
    RustThroughput,
    /// The operation by `devcomm`'s all-gather and reduce-scatter
    #[serde(rename = "rust-allgather")]
    #[value(name = "rust-allgather")]
    RustAllGather,
    /// `devcomm`'s matrix product, without the operation's communication
    RustGemm,
    /// cuBLASLt's matrix product and then `devcomm`'s collective
    #[serde(rename = "cublaslt-rust")]
    #[value(name = "cublaslt-rust")]
    CublasLtRust,
    /// The kernel of `rust` in CUDA C++, compiled by `cargo xtask twins`
    Cpp,
    /// cuBLASLt's matrix product
    #[serde(rename = "cublaslt")]
    #[value(name = "cublaslt")]
    CublasLt,
    /// The same with parts of a sum added in the type of C
    #[serde(rename = "cublaslt-rounded-parts")]
    #[value(name = "cublaslt-rounded-parts")]
    CublasLtRoundedParts,
    /// NCCL's call on the host, on memory that is not registered
    Nccl,
    /// NCCL's call on the host, on registered symmetric windows
    NcclSym,
    /// The operation by `ncclAlltoAll`, on registered symmetric windows
    #[serde(rename = "nccl-alltoall")]
    #[value(name = "nccl-alltoall")]
    NcclAllToAll,
    /// PyTorch's one-shot all-reduce on symmetric memory
    TorchOneShot,
    /// PyTorch's two-shot all-reduce on symmetric memory, in place
    TorchTwoShot,
    /// PyTorch's product in one operation with its collective, on symmetric memory
    TorchFused,
    /// FlashInfer's all-reduce by its Lamport kernels
    #[serde(rename = "flashinfer")]
    #[value(name = "flashinfer")]
    FlashInfer,
    /// vLLM's custom all-reduce, FlashInfer's copy
    Vllm,
    /// nccl-tests' kernel that loads and stores over NVLink (`-D 1`)
    NcclTestsLsa,
    /// The same by vectors of 16 bytes (`-D 2`)
    NcclTestsLsaVector,
    /// A step of the ladder of matrix products, as are the following
    Step1Loop,
    Step2Shared,
    Step3Registers,
    Step4Mma,
    Step5Wgmma,
    Step6Pipeline,
    Step7Cluster,
    Step8Persistent,
}

impl Variant {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rust => "rust",
            Self::RustLsa => "rust-lsa",
            Self::Read => "read",
            Self::Write => "write",
            Self::Tma => "tma",
            Self::CopyEngine => "copy-engine",
            Self::RustOps => "rust-ops",
            Self::RustOpsPlain => "rust-ops-plain",
            Self::RustUnfused => "rust-unfused",
            Self::RustThroughput => "rust-throughput",
            Self::RustAllGather => "rust-allgather",
            Self::RustGemm => "rust-gemm",
            Self::CublasLtRust => "cublaslt-rust",
            Self::Cpp => "cpp",
            Self::CublasLt => "cublaslt",
            Self::CublasLtRoundedParts => "cublaslt-rounded-parts",
            Self::Nccl => "nccl",
            Self::NcclSym => "nccl-sym",
            Self::NcclAllToAll => "nccl-alltoall",
            Self::TorchOneShot => "torch-one-shot",
            Self::TorchTwoShot => "torch-two-shot",
            Self::TorchFused => "torch-fused",
            Self::FlashInfer => "flashinfer",
            Self::Vllm => "vllm",
            Self::NcclTestsLsa => "nccl-tests-lsa",
            Self::NcclTestsLsaVector => "nccl-tests-lsa-vector",
            Self::Step1Loop => "step1-loop",
            Self::Step2Shared => "step2-shared",
            Self::Step3Registers => "step3-registers",
            Self::Step4Mma => "step4-mma",
            Self::Step5Wgmma => "step5-wgmma",
            Self::Step6Pipeline => "step6-pipeline",
            Self::Step7Cluster => "step7-cluster",
            Self::Step8Persistent => "step8-persistent",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One contender. It enqueues the same work on every rank.
pub struct Contender<'a> {
    pub variant: Variant,
    /// Whether it sends and receives in one buffer.
    pub in_place: bool,
    /// The launch of its kernel; `None` for NCCL's calls.
    pub launch: Option<Launch>,
    /// The algorithm of a library, or the plan of a product in Rust.
    pub algorithm: Option<String>,
    /// The plan that the command line names for it.
    pub asked: Option<String>,
    /// Operations per timed call: a row reports the time of one operation.
    pub operations: u32,
    /// The most calls that are timed together.
    pub most_calls: usize,
    /// Enqueues the timed work.
    pub timed: Work<'a>,
    /// Enqueues the checked work.
    pub checked: Work<'a>,
    /// The result to check.
    pub outcome: Box<dyn Outcome + 'a>,
}

/// A function that enqueues work.
pub type Work<'a> = Rc<dyn Fn() -> devcomm::Result<()> + 'a>;

/// A result in this rank's memory.
pub trait Outcome {
    /// Fills it with wrong values, so that elements that a contender does not write count as wrong.
    fn poison(&self) -> Result<()>;

    /// Counts its wrong elements. *Collective*.
    fn count_wrong(&self) -> Result<usize>;
}

/// Nothing that could be wrong.
impl Outcome for () {
    fn poison(&self) -> Result<()> {
        Ok(())
    }

    fn count_wrong(&self) -> Result<usize> {
        Ok(0)
    }
}

impl<O: Outcome> Outcome for &O {
    fn poison(&self) -> Result<()> {
        (**self).poison()
    }

    fn count_wrong(&self) -> Result<usize> {
        (**self).count_wrong()
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launch {
    pub blocks: u32,
    pub threads: u32,
    /// Registers per thread.
    pub registers: u32,
}

impl<'a> Contender<'a> {
    /// A contender with one operation, both timed and checked.
    pub fn new(
        variant: Variant,
        work: impl Fn() -> devcomm::Result<()> + 'a,
        outcome: impl Outcome + 'a,
    ) -> Self {
        let work: Work<'a> = Rc::new(work);
        let (timed, outcome) = (Rc::clone(&work), Box::new(outcome));
        Self {
            variant,
            in_place: false,
            launch: None,
            algorithm: None,
            asked: None,
            operations: 1,
            most_calls: usize::MAX,
            timed,
            checked: work,
            outcome,
        }
    }

    /// Times `work`, with this many operations, instead of the checked work.
    pub fn timed(self, operations: u32, work: impl Fn() -> devcomm::Result<()> + 'a) -> Self {
        Self { operations, timed: Rc::new(work), ..self }
    }

    /// Times at most this many calls together: for operations that take long.
    pub fn at_most(self, calls: usize) -> Self {
        Self { most_calls: calls, ..self }
    }

    /// Records whether it sends and receives in one buffer.
    pub fn in_place(self, in_place: bool) -> Self {
        Self { in_place, ..self }
    }

    /// Records the algorithm.
    pub fn by_algorithm(self, algorithm: String) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }

    /// Records the configuration of NCCL; `None` for its default.
    pub fn configured(self, name: Option<&String>) -> Self {
        let algorithm = match (name, self.algorithm) {
            (Some(name), Some(algorithm)) => Some(format!("{algorithm}; NCCL {name}")),
            (Some(name), None) => Some(name.clone()),
            (None, algorithm) => algorithm,
        };
        Self { asked: name.cloned(), algorithm, ..self }
    }

    /// Records how `devcomm::Collectives` does it.
    pub fn by_plan(self, CollectivePlan { algorithm, blocks, threads }: CollectivePlan) -> Self {
        let launch = Launch { blocks, threads, ..Launch::default() };
        let launch = (blocks > 0).then_some(launch);
        Self { launch, ..self }.by_algorithm(format!("{algorithm:?}"))
    }

    /// Records the grid and registers of the kernel that does the work.
    pub fn by_kernel(self, config: LaunchConfig, info: FunctionInfo) -> Self {
        let (blocks, threads) = (config.grid.x, config.block.x);
        Self { launch: Some(Launch { blocks, threads, registers: info.registers }), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_command_line() {
        for variant in Variant::value_variants() {
            assert_eq!(variant.to_possible_value().unwrap().get_name(), variant.name());
        }
    }
}
