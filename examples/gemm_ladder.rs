//! Runs and checks the matrix products of `docs/gemm.md`, from a loop to the shipped kernel.
//!
//! ```text
//! cargo xtask run gemm_ladder  # 1024 x 1024 x 1024, or small matrices on a simulated GPU
//! cargo xtask run gemm_ladder --m 4096 --n 2048 --k 512
//! ```
//!
//! `C = A x B^T` in bf16 on one GPU, of the Hopper family. Inputs are random numbers whose f32 sums
//! are exact, so a correct element is the sum rounded to bf16. `devcomm-bench gemm-ladder` measures
//! times, and compares with cuBLASLt.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use devcomm::{Buffer, Communicator, Rank, World};
use devcomm_gemm_ladder::{Ladder, Step};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::run;
use half::bf16;

/// Matrix products, from a loop to cuBLASLt's speed, each a step faster than the one before.
#[derive(Parser)]
struct Options {
    /// Rows of C, a multiple of 256 [default: 1024; simulated 256]
    #[arg(long)]
    m: Option<usize>,
    /// Columns of C, a multiple of 256 [default: 1024; simulated 256]
    #[arg(long)]
    n: Option<usize>,
    /// Terms, a multiple of 64 [default: 1024; simulated 64]
    #[arg(long)]
    k: Option<usize>,
    /// Random elements of a large result that are compared, in addition to the corners
    #[arg(long, default_value_t = 4096)]
    samples: usize,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        // All ranks make the communicator, which allocates the matrices; one multiplies.
        let comm = rank.communicator()?;
        if rank.is_root() {
            check_steps(rank, comm, &options)?;
        }
        Ok(rank.barrier()?)
    })
}

fn check_steps(rank: &Rank, comm: &Communicator, options: &Options) -> Result<()> {
    let stream = rank.stream()?;
    let [m, n, k] = match rank.is_simulated() {
        true => [256, 256, 64],
        false => [1024; 3],
    };
    let [m, n, k] = [options.m.unwrap_or(m), options.n.unwrap_or(n), options.k.unwrap_or(k)];
    let problems = Problem::combinations([&[m], &[n], &[k]], 1, options.seed)?; // Of one rank.
    let ladder = Ladder::new(&stream)?;
    for problem in problems {
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        let c = comm.mem_alloc::<bf16>(m * n)?;
        a.copy_from_host(&problem.factor(Factor::A, 0))?;
        b.copy_from_host(&problem.factor(Factor::B, 0))?;
        let matrices = [a.device_slice(), b.device_slice(), c.device_slice()];
        for (number, step) in (1..).zip(Step::ALL) {
            // An element that no thread writes stays NaN.
            c.fill_bytes(0xff)?;
            // SAFETY: only this stream uses the matrices.
            unsafe { ladder.launch(step, matrices.each_ref(), problem.shape())? };
            let mut got = vec![bf16::NAN; m * n];
            stream.copy_to_host(&c, &mut got)?;
            let wrong = match m * n <= options.samples {
                true => problem.count_wrong(0..1, &got, problem.all()),
                false => problem.count_wrong(0..1, &got, problem.samples(options.samples)),
            };
            ensure!(wrong == 0, "step {number}, {step:?}, {problem:?}: {wrong} elements are wrong");
            println!("step {number}, {}: 0 wrong", step.what());
        }
    }
    Ok(())
}
