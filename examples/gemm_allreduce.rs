//! A matrix product fused with the all-reduce that follows it.
//!
//! ```text
//! cargo xtask run gemm_allreduce  # every GPU, or four simulated ones
//! cargo xtask run gemm_allreduce --m 1,7,4096 --n 64,8192 --k 1000  # every combination
//! DEVCOMM_SIMULATE=3 cargo xtask run gemm_allreduce  # three simulated GPUs, small matrices
//! torchrun --no-python --nproc-per-node 4 -- ./gemm_allreduce
//! ```
//!
//! `C = sum over the ranks of A x B^T`: each rank has `m x k` elements of A and `n x k` of B, so k
//! is the number of terms of *one rank*. The kernels are in `kernels/src/gemm_allreduce`. Inputs
//! are random numbers whose f32 sums are exact, so a correct element is the sum rounded to bf16.
//! `devcomm-bench gemm-allreduce` measures times, and compares with cuBLASLt and NCCL.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use devcomm::kernels::GemmForm;
use devcomm::{GemmAllReduce, Rank, World};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::run;
use half::bf16;

/// A matrix product fused with the all-reduce that follows it.
#[derive(Parser)]
struct Options {
    /// Rows of C [default: 4096; simulated 1,64,130]
    #[arg(long, value_delimiter = ',')]
    m: Vec<usize>,
    /// Columns of C [default: 4096; simulated 7,264]
    #[arg(long, value_delimiter = ',')]
    n: Vec<usize>,
    /// Terms of each rank's product, multiples of 8 [default: 4096; simulated 8,72]
    #[arg(long, value_delimiter = ',')]
    k: Vec<usize>,
    /// Form of the kernel [default: the fastest that the GPUs support]
    #[arg(long, value_enum)]
    form: Option<Form>,
    /// Random elements of a large result that are compared, besides the corners
    #[arg(long, default_value_t = 2048)]
    samples: usize,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    Wgmma,
    Mma,
}

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        let defaults: [&[usize]; 3] = match rank.is_simulated() {
            true => [&[1, 64, 130], &[7, 264], &[8, 72]],
            false => [&[4096]; 3],
        };
        let given = [&options.m, &options.n, &options.k];
        let lists = std::array::from_fn(|i| match given[i].is_empty() {
            true => defaults[i],
            false => given[i],
        });
        let problems = Problem::combinations(lists, rank.n_ranks(), options.seed)?;
        problems.into_iter().try_for_each(|problem| multiply(rank, &options, problem))
    })
}

fn multiply(rank: &Rank, options: &Options, problem: Problem) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    let stream = rank.stream()?;
    let Problem { m, n, k, .. } = problem;
    let gemm = match options.form {
        None => GemmAllReduce::options(),
        Some(Form::Wgmma) => GemmAllReduce::options().form(GemmForm::Wgmma),
        Some(Form::Mma) => GemmAllReduce::options().form(GemmForm::Mma),
    };
    let gemm = gemm.build(comm, &stream, m, n)?;
    let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
    let c = comm.window::<bf16>(m * n)?;
    a.copy_from_host(&problem.factor(Factor::A, me))?;
    b.copy_from_host(&problem.factor(Factor::B, me))?;
    // An element that no rank writes stays NaN.
    c.fill_bytes(0xff)?;
    rank.barrier()?;
    gemm.launch(&a, &b, &c, [m, n, k])?;
    let mut got = vec![bf16::NAN; m * n];
    stream.copy_to_host(&c, &mut got)?;
    let wrong = match m * n <= options.samples {
        true => problem.count_wrong(0..n_ranks, &got, problem.all()),
        false => problem.count_wrong(0..n_ranks, &got, problem.samples(options.samples)),
    };
    ensure!(wrong == 0, "rank {me}, {problem:?}: {wrong} elements are wrong");
    rank.barrier()?;
    if rank.is_root() {
        println!("{m} x {n}, {k} terms per rank, {:?}: 0 wrong", gemm.form());
    }
    Ok(())
}
