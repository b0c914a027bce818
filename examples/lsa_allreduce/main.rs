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

use anyhow::bail;
use clap::Parser;
use devcomm::{Error, World};

use options::Options;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(message) => {
            // A reader that is gone needs no message.
            let _ = message.print();
            // The help that was asked for is no error.
            return if message.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(&options).map_err(advise) {
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
        if options.one_process {
            bail!("--one-process is not for a rank that a launcher started (RANK, WORLD_SIZE)");
        }
        let world = World::from_env()?;
        let ranks = world.n_ranks();
        if let Some(gpus) = options.gpus
            && gpus != ranks
        {
            bail!("--gpus {gpus}, but the launcher started {ranks} ranks (WORLD_SIZE)");
        }
        return gpu::run(&world, options);
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

/// Names the way out when it is the machine that does not do.
fn advise(error: anyhow::Error) -> anyhow::Error {
    if let Some(Error::SeveralLsaTeams { .. }) = error.downcast_ref() {
        return error.context(
            "this kernel reduces by load and store alone; `hybrid_allreduce` also goes over the network between the domains",
        );
    }
    if error.downcast_ref().is_some_and(Error::is_of_the_machine) {
        return error.context("this machine cannot run it; `--sim N` simulates N GPUs");
    }
    error
}
