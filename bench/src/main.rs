//! `devcomm-bench`: measures kernels that communicate.
//!
//! ```text
//! cargo xtask twins && cargo run --release -p devcomm-bench -- twins     # Rust against CUDA C++, one process a GPU
//! devcomm-bench twins --one-process -b 1M -e 64M -d bf16 --json rows.json
//! torchrun --no-python --nproc-per-node 8 -- ./devcomm-bench twins
//! ```
//!
//! What is measured is checked first, on random data; flags and columns are those of nccl-tests where it has them.

mod header;
mod number;
mod options;
mod ranks;
mod stats;
mod table;
mod twins;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures kernels that communicate.
#[derive(Parser)]
#[command(name = "devcomm-bench", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Kernels written in Rust against the same kernels in CUDA C++, compiled by `cargo xtask twins`
    Twins(twins::Options),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // A reader that is gone needs no message.
            let _ = message.print();
            // The help that was asked for is no error.
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let done = match &cli.bench {
        Bench::Twins(options) => twins::run(options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
