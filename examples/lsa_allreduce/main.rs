//! All-reduce by load and store over NVLink, written in Rust, beside `ncclAllReduce`.
//!
//! ```text
//! cargo xtask run lsa_allreduce                  # every GPU of this machine, or the simulator where there is none
//! cargo xtask run lsa_allreduce --gpus 2 --dtype bf16 --max 64M
//! cargo xtask run lsa_allreduce --sim 3          # three simulated GPUs
//! torchrun --no-python --nproc-per-node 8 -- ./lsa_allreduce --max 64M
//! ```
//!
//! The kernel is `kernels/src/lsa_allreduce.rs`. Every element of every result is compared with a reference computed on the
//! host from random inputs; the output ends with `PASS` when all are right.

mod check;
mod gpu;
mod options;
mod simulated;

use std::process::ExitCode;

use clap::Parser;
use devcomm::World;

use options::Options;

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    options.validate()?;
    if let Some(ranks) = options.sim {
        return simulated::run(options, ranks);
    }
    if World::is_launched() {
        // torchrun, or the parent below, started this process as one rank.
        return gpu::run(&World::from_env()?, options);
    }
    let visible = match (devcomm::visible_gpus(), options.gpus) {
        (Ok(visible), _) => visible,
        (Err(reason), None) => {
            println!("no GPU: {reason}");
            println!("simulating {} GPUs instead\n", simulated::DEFAULT_RANKS);
            return simulated::run(options, simulated::DEFAULT_RANKS);
        }
        (Err(reason), Some(_)) => return Err(reason.into()),
    };
    let ranks = options.gpus.unwrap_or(visible);
    if options.one_process {
        gpu::run(&World::threads(ranks)?, options)
    } else {
        Ok(World::spawn_local(ranks)?)
    }
}
