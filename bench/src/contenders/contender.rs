//! Contenders: the implementations of one operation that a benchmark compares.

use std::fmt;
use std::rc::Rc;

use anyhow::Result;
use clap::ValueEnum;
use devcomm::{CollectivePlan, FunctionInfo, LaunchConfig};
use serde::{Deserialize, Serialize};

/// Declares [`Variant`]: names in code and on the command line.
macro_rules! variants {
    ($($(#[$doc:meta])* $variant:ident $name:literal;)*) => {
        /// How a contender implements the operation.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
        pub enum Variant {
            $($(#[$doc])* #[serde(rename = $name)] #[value(name = $name)] $variant,)*
        }

        impl Variant {
            /// Returns its name on the command line.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

variants! {
    /// A kernel in Rust
    #[default]
    Rust "rust";
    /// A kernel in Rust that puts by stores over NVLink
    RustLsa "rust-lsa";
    /// A kernel in Rust that loads from the peer
    Read "read";
    /// A kernel in Rust that stores to the peer
    Write "write";
    /// A kernel in Rust that copies to the peer by TMA
    Tma "tma";
    /// cuMemcpyAsync to the peer
    CopyEngine "copy-engine";
    /// The operation of `devcomm`, which chooses among kernels and NCCL
    RustOps "rust-ops";
    /// The operation of `rust-ops` on memory that is not registered
    RustOpsPlain "rust-ops-plain";
    /// The operation in several launches of `devcomm`
    RustUnfused "rust-unfused";
    /// The operation of `devcomm` in its form for high throughput
    RustThroughput "rust-throughput";
    /// The operation by `devcomm`'s all-gather and reduce-scatter
    RustAllGather "rust-allgather";
    /// `devcomm`'s matrix product, without the operation's communication
    RustGemm "rust-gemm";
    /// cuBLASLt's matrix product and then `devcomm`'s collective
    CublasLtRust "cublaslt-rust";
    /// The kernel of `rust` in CUDA C++, compiled by `cargo xtask twins`
    Cpp "cpp";
    /// The kernel of `cpp` loaded a second time
    CppAgain "cpp-again";
    /// cuBLASLt's matrix product
    CublasLt "cublaslt";
    /// The product of `cublaslt` with parts of a sum added in the type of C
    CublasLtRoundedParts "cublaslt-rounded-parts";
    /// cuBLAS's products of groups, in one call
    CublasGrouped "cublas-grouped";
    /// NCCL's call on the host, on memory that is not registered
    Nccl "nccl";
    /// NCCL's call on the host, on registered symmetric windows
    NcclSym "nccl-sym";
    /// The operation by `ncclAlltoAll`, on registered symmetric windows
    NcclAllToAll "nccl-alltoall";
    /// PyTorch's one-shot all-reduce on symmetric memory
    TorchOneShot "torch-one-shot";
    /// PyTorch's two-shot all-reduce on symmetric memory, in place
    TorchTwoShot "torch-two-shot";
    /// PyTorch's product in one operation with its collective, on symmetric memory
    TorchFused "torch-fused";
    /// FlashInfer's all-reduce by its Lamport kernels
    FlashInfer "flashinfer";
    /// vLLM's custom all-reduce, FlashInfer's copy
    Vllm "vllm";
    /// nccl-tests' kernel that loads and stores over NVLink (`-D 1`)
    NcclTestsLsa "nccl-tests-lsa";
    /// The kernel of `nccl-tests-lsa` by vectors of 16 bytes (`-D 2`)
    NcclTestsLsaVector "nccl-tests-lsa-vector";
    /// NCCL EP's algorithm for low latency
    NcclEpLl "nccl-ep-ll";
    /// NCCL EP's algorithm for high throughput
    NcclEpHt "nccl-ep-ht";
    /// The matrix product of step 1 of `gemm-ladder`; the variants after it are the next steps
    Step1Loop "step1-loop";
    Step2Shared "step2-shared";
    Step3Registers "step3-registers";
    Step4Mma "step4-mma";
    Step5Wgmma "step5-wgmma";
    Step6Pipeline "step6-pipeline";
    Step7Cluster "step7-cluster";
    Step8Persistent "step8-persistent";
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
    /// The launch of its kernel: `None` unless [`by_kernel`](Self::by_kernel), or
    /// [`by_plan`](Self::by_plan) with a plan by a kernel, has recorded one.
    pub launch: Option<Launch>,
    /// How the operation is done: by which algorithm of a library or of `devcomm::Collectives`, by
    /// which plan of a product in Rust. Some benchmarks record other facts here, such as a kernel's
    /// registers; `None` if nothing was recorded.
    pub algorithm: Option<String>,
    /// The configuration of NCCL ([`NcclSetting`](crate::base::options::NcclSetting)); `None` for
    /// NCCL's default, and without NCCL.
    pub configuration: Option<String>,
    /// The plan, or the configuration of NCCL, that the command line names for it. The rows of one
    /// variant in a case differ in it.
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

/// A result in this rank's memory; `()` is a result that cannot be wrong.
pub trait Outcome {
    /// Fills it with wrong values, so that elements that a contender does not write count as wrong.
    fn poison(&self) -> Result<()> {
        Ok(())
    }

    /// Counts its wrong elements. *Collective*.
    fn count_wrong(&self) -> Result<usize> {
        Ok(0)
    }
}

impl Outcome for () {}

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
    /// Returns a contender with one operation, both timed and checked.
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
            configuration: None,
            asked: None,
            operations: 1,
            most_calls: usize::MAX,
            timed,
            checked: work,
            outcome,
        }
    }

    /// Returns a contender that launches `checked` rounds to check them, and `timed` rounds, each
    /// of `operations` operations, to time them.
    pub fn in_rounds(
        variant: Variant,
        launch: impl Fn(u32) -> devcomm::Result<()> + 'a,
        [checked, timed]: [u32; 2],
        operations: u32,
        outcome: impl Outcome + 'a,
    ) -> Self {
        let launch = Rc::new(launch);
        let launch_checked = Rc::clone(&launch);
        let contender = Self::new(variant, move || launch_checked(checked), outcome);
        contender.timed(operations * timed, move || launch(timed))
    }

    /// Times `work`, which does `operations` operations, instead of the checked work.
    pub fn timed(self, operations: u32, work: impl Fn() -> devcomm::Result<()> + 'a) -> Self {
        Self { operations, timed: Rc::new(work), ..self }
    }

    /// Records the algorithm.
    pub fn by_algorithm(self, algorithm: String) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }

    /// Records the configuration of NCCL; `None` for its default.
    pub fn configured(self, name: Option<&String>) -> Self {
        Self { asked: name.cloned(), configuration: name.cloned(), ..self }
    }

    /// Returns the text of a row's column `algorithm`: the algorithm, and the configuration of NCCL
    /// that was recorded.
    pub fn description(&self) -> Option<String> {
        match (&self.configuration, &self.algorithm) {
            (Some(name), Some(algorithm)) => Some(format!("{algorithm}; NCCL {name}")),
            (name, algorithm) => name.as_ref().or(algorithm.as_ref()).cloned(),
        }
    }

    /// Records the plan by which `devcomm::Collectives` does the operation: its algorithm and, if
    /// it is a kernel's, its launch.
    pub fn by_plan(self, CollectivePlan { algorithm, blocks, threads }: CollectivePlan) -> Self {
        let launch = Launch { blocks, threads, ..Launch::default() };
        // A plan by NCCL has no blocks.
        let launch = (blocks > 0).then_some(launch);
        Self { launch, ..self }.by_algorithm(format!("{algorithm:?}"))
    }

    /// Records the grid and registers of the kernel that does the work.
    pub fn by_kernel(self, config: LaunchConfig, info: FunctionInfo) -> Self {
        let (blocks, threads) = (config.grid.x, config.block.x);
        Self { launch: Some(Launch { blocks, threads, registers: info.registers }), ..self }
    }
}
