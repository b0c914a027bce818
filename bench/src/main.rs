//! `devcomm-bench`: measures kernels that communicate. bench/README.md is its manual.
//!
//! Results are checked first, on random data. Flags and columns are named as in nccl-tests.

mod base;
mod cases;
mod contenders;
mod harness;
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures kernels that communicate: kernel-initiated against host-initiated, and Rust against
/// C++.
///
/// Flags mean what they mean in nccl-tests, except that: -g counts all ranks; -G captures -n
/// launches as one graph; times are GPU times of the slowest rank, medians over the rounds. Flags
/// of nccl-tests that have no meaning here are refused, with the reason. --nccl-tests prints its
/// table, with the in-place columns.
#[derive(Parser)]
#[command(name = "devcomm-bench", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// All-reduce: a kernel that loads and stores peer memory (LSA) against ncclAllReduce
    AllReduce(cases::Command<cases::AllReduce>),
    /// All-gather: devcomm::Collectives against ncclAllGather
    AllGather(cases::Command<cases::AllGather>),
    /// Reduce-scatter (sum): devcomm::Collectives against ncclReduceScatter
    ReduceScatter(cases::Command<cases::ReduceScatter>),
    /// Broadcast from rank 0: devcomm::Collectives against ncclBroadcast
    Broadcast(cases::Command<cases::Broadcast>),
    /// All-to-all: devcomm::Collectives against ncclAlltoAll
    AllToAll(cases::Command<cases::AllToAll>),
    /// All-to-all of uneven parts: devcomm::Collectives against ncclSend and ncclRecv
    #[command(name = "all-to-all-v")]
    AllToAllV(cases::Command<cases::AllToAllV>),
    /// All-reduce, residual add and RMSNorm: one kernel against ncclAllReduce and then a kernel
    #[command(name = "rmsnorm-allreduce")]
    RmsNormAllReduce(cases::Command<cases::RmsNormAllReduce>),
    /// Expert parallelism: devcomm::ExpertParallel against all-gather and reduce-scatter
    Ep(cases::Command<cases::Experts>),
    /// Launches of one small all-to-all, with and without attributes; with --host, what the host's
    /// calls take
    Launch(cases::Command<cases::Launch>),
    /// Barrier: LSA barriers within a kernel against ncclAllReduce of one element
    Barrier(cases::Command<cases::Barrier>),
    /// Ping-pong of messages between neighbouring ranks: puts by a kernel against ncclSend and
    /// ncclPutSignal
    Put(cases::Command<cases::Put>),
    /// Ping-pong of signals without data between neighbouring ranks: by a kernel against ncclSend
    /// and ncclSignal
    Signal(cases::Command<cases::Signal>),
    /// Copies between neighbouring ranks: by loads, stores and TMA of a kernel, and by the copy
    /// engine, against ncclSend
    P2p(cases::Command<cases::P2p>),
    /// Matrix product on one GPU, C = A x B^T with A of m x k and B of n x k: a kernel against
    /// cuBLASLt
    Gemm(cases::Command<cases::Gemm>),
    /// Products of groups of rows, each with a B of its own, such as experts', on one GPU: one
    /// kernel against a product of cuBLASLt for each
    #[command(name = "grouped-gemm")]
    GroupedGemm(cases::Command<cases::GroupedGemm>),
    /// Matrix product followed by an all-reduce: one kernel against cuBLASLt and then ncclAllReduce
    #[command(name = "gemm-allreduce")]
    GemmAllReduce(cases::Command<cases::GemmAllReduce>),
    /// Matrix product followed by the reduce-scatter of its rows: one kernel, or two, against
    /// cuBLASLt and then ncclReduceScatter
    #[command(name = "gemm-reduce-scatter")]
    GemmReduceScatter(cases::Command<cases::GemmReduceScatter>),
    /// All-gather of A's rows followed by a matrix product: one kernel, or two, against
    /// ncclAllGather and then cuBLASLt
    #[command(name = "allgather-gemm")]
    AllGatherGemm(cases::Command<cases::AllGatherGemm>),
    /// The matrix products of docs/gemm.md, from a loop to the shipped kernel, against cuBLASLt
    #[command(name = "gemm-ladder")]
    GemmLadder(cases::Command<cases::GemmLadder>),
    /// Finds the fastest plans of devcomm's operations on these GPUs
    Tune {
        #[command(subcommand)]
        what: Tunable,
    },
    /// The time of collectives from a few costs, fitted to measured rows and printed next to them,
    /// and extrapolated to more GPUs
    Model(report::model::Options),
    /// Compares two JSON files of the same benchmark: exit status 1 if a row became slower
    Compare(report::compare::Options),
    /// A page of ratios and plots from files of rows (--json), such as docs/measurements.md
    Report(report::Options),
    /// Prints the rows of files (--json) as tables
    Rows(report::RowsOptions),
    /// Kernels written in Rust against the same kernels in CUDA C++, compiled by `cargo xtask
    /// twins`
    Twins(cases::Command<cases::Twins>),
}

#[derive(Subcommand)]
enum Tunable {
    /// Plans of matrix products, for the tables that devcomm::Gemm reads
    ///
    /// The plans that the model puts first (--plans) are timed in a third of --rounds, and then the
    /// fastest three in twice --rounds, if they are within 5 %. Among plans within 0.3 % the
    /// model's choice is kept. Each shape is written to the table as soon as it is done.
    Gemm(cases::Tune),
    /// Plans of all-reduces (sum), for the tables that devcomm::Collectives reads
    AllReduce(cases::TuneCollective),
    /// Plans of all-gathers
    AllGather(cases::TuneCollective),
    /// Plans of reduce-scatters (sum)
    ReduceScatter(cases::TuneCollective),
    /// Plans of broadcasts
    Broadcast(cases::TuneCollective),
    /// Plans of all-to-alls
    AllToAll(cases::TuneCollective),
}

impl Tunable {
    fn run(&self) -> anyhow::Result<()> {
        use cases::Operation;
        match self {
            Self::Gemm(tune) => tune.run(),
            Self::AllReduce(tune) => tune.run(Operation::AllReduce),
            Self::AllGather(tune) => tune.run(Operation::AllGather),
            Self::ReduceScatter(tune) => tune.run(Operation::ReduceScatter),
            Self::Broadcast(tune) => tune.run(Operation::Broadcast),
            Self::AllToAll(tune) => tune.run(Operation::AllToAll),
        }
    }
}

/// Implements `Bench::run`: all subcommands with these names go to [`cases::run`].
macro_rules! comparisons {
    ($($name:ident)*) => {
        impl Bench {
            fn run(&self) -> anyhow::Result<()> {
                match self {
                    $(Self::$name(command) => cases::run(command),)*
                    Self::Tune { what } => what.run(),
                    Self::Model(options) => report::model::run(options),
                    Self::Compare(options) => report::compare::run(options),
                    Self::Report(options) => report::run(options),
                    Self::Rows(options) => report::rows(options),
                }
            }
        }
    };
}

comparisons! {
    AllReduce AllGather ReduceScatter Broadcast AllToAll AllToAllV RmsNormAllReduce Ep Launch
    Barrier Put Signal P2p Gemm GroupedGemm GemmAllReduce GemmReduceScatter AllGatherGemm GemmLadder
    Twins
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // Printing fails if the pipe is closed, and then nobody reads the message.
            let _ = message.print();
            // Requested help is not an error.
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    if let Err(error) = cli.bench.run() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
