//! A matrix product fused with the all-reduce behind it, written in Rust, beside cuBLASLt and `ncclAllReduce`.
//!
//! ```text
//! cargo xtask run gemm_allreduce                                    # every GPU of this machine, or the simulator where there is none
//! cargo xtask run gemm_allreduce --m 1,7,4096 --n 64,8192 --k 1000  # every combination
//! cargo xtask run gemm_allreduce --sim 3                            # three simulated GPUs, small matrices
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/gemm_allreduce
//! ```
//!
//! `C = sum over the ranks of A x B^T`: each rank has `m x k` elements of A and `n x k` of B, so k is the number of terms of *one rank*. The
//! kernels are in `kernels/src/gemm_allreduce`. Inputs are random numbers of which every sum is exact (`problem.rs`), so an
//! element is right when it is the nearest bf16, bit for bit. Some are compared with a reference computed on the host, and all with
//! cuBLASLt and `ncclAllReduce` in f32, where cuBLASLt can be loaded. The output ends with `PASS` when all are right.

mod cublaslt;
mod gpu;
mod options;
mod problem;
mod simulated;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use devcomm::World;
use devcomm::kernels::GemmForm;
use devcomm::sim::Simulator;

use options::{Form, Options};

/// Simulated GPUs where there is none, and blocks of each.
const SIMULATED: usize = 4;
const SIMULATED_BLOCKS: u32 = 3;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    if let Some(ranks) = options.sim {
        return simulate(options, ranks);
    }
    if World::is_launched() {
        // torchrun, or the parent below, started this process as one rank.
        if options.one_process {
            bail!("--one-process is not for a rank that a launcher started (RANK, WORLD_SIZE)");
        }
        let world = World::from_env()?;
        if let Some(gpus) = options.gpus
            && gpus != world.n_ranks()
        {
            bail!("--gpus {gpus}, but the launcher started {} ranks", world.n_ranks());
        }
        return on_gpus(options, &world);
    }
    let visible = match (devcomm::visible_gpus(), options.gpus) {
        (Ok(visible), _) => visible,
        (Err(reason), Some(_)) => return Err(reason.into()),
        (Err(reason), None) => {
            println!("no GPU: {reason}\nsimulating {SIMULATED} GPUs instead");
            return simulate(options, SIMULATED);
        }
    };
    let ranks = options.gpus.unwrap_or(visible);
    if options.one_process {
        on_gpus(options, &World::threads(ranks)?)
    } else {
        Ok(World::spawn_local(ranks)?)
    }
}

/// Runs this process's ranks.
fn on_gpus(options: &Options, world: &World) -> Result<()> {
    let problems = options.problems(&[4096], &[4096], &[4096], world.n_ranks())?;
    let roots = world.run(|rank| {
        gpu::run(rank, options, &problems)?;
        Ok::<_, anyhow::Error>(rank.is_root())
    })?;
    // After all ranks of this process, and on one of them.
    if roots.contains(&true) {
        println!("PASS");
    }
    Ok(())
}

/// Every element of every rank, of each form.
fn simulate(options: &Options, ranks: usize) -> Result<()> {
    let sim = Simulator::new(ranks)?;
    let forms: &[GemmForm] = match options.form {
        Form::Auto => &[GemmForm::Wgmma, GemmForm::Mma],
        Form::Wgmma => &[GemmForm::Wgmma],
        Form::Mma => &[GemmForm::Mma],
    };
    for problem in options.problems(&[1, 64, 130], &[7, 264], &[8, 72], ranks)? {
        for &form in forms {
            simulated::check(&sim, form, problem, SIMULATED_BLOCKS)?;
        }
        println!("{} x {}, {} terms a rank: all right", problem.m, problem.n, problem.k);
    }
    println!("PASS, SIMULATED");
    Ok(())
}
