//! RMSNorm fused with the all-reduce that precedes it.
//!
//! ```text
//! cargo xtask run rmsnorm_allreduce                     # every GPU, or four simulated ones
//! DEVCOMM_SIMULATE=3 cargo xtask run rmsnorm_allreduce  # three simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./rmsnorm_allreduce
//! ```
//!
//! The kernel is `examples/kernels/src/rmsnorm_allreduce.rs`. In one pass it sums the partial
//! results of all ranks, normalises each row, and stores the row to all ranks. On simulated GPUs
//! its multicast form runs too. Every element is compared with a reference computed in f64.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, Rank, World};
use devcomm_examples::{KERNELS, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::numbers::{checksum, input, inputs};
use half::bf16;

const BLOCKS: u32 = 128;
const EPS: f32 = 1e-5;
/// Tokens, and elements per token. Simulated GPUs skip shapes of more than `SIMULATED_ELEMENTS`.
const SHAPES: [(usize, usize); 7] =
    [(1, 1024), (8, 4096), (7, 7168), (64, 4096), (256, 8192), (1024, 8192), (4096, 8192)];
const SIMULATED_ELEMENTS: usize = 1 << 16;
/// Seeds of the summed inputs, and of the weights.
const INPUTS: u64 = 1;
const WEIGHTS: u64 = 2;

fn main() -> ExitCode {
    run(World::from_env(), |rank| {
        rank.communicator()?.require_single_lsa_team()?;
        let is_for = |(tokens, hidden): &(usize, usize)| {
            !rank.is_simulated() || tokens * hidden <= SIMULATED_ELEMENTS
        };
        SHAPES.into_iter().filter(is_for).try_for_each(|shape| normalise(rank, shape))
    })
}

fn normalise(rank: &Rank, (tokens, hidden): (usize, usize)) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    // Multicast runs on simulated GPUs only, since it is not verified on a real GPU.
    let multimem = rank.is_simulated() && comm.properties()?.multimem;
    let requirements = DevCommRequirements::new().lsa_barriers(BLOCKS).lsa_multimem(multimem);
    let dev_comm = comm.create_dev_comm(requirements)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let len = tokens * hidden;
    let (input, output) = (comm.window::<bf16>(len)?, comm.window::<bf16>(len)?);
    let weight = comm.mem_alloc::<bf16>(hidden)?;
    input.copy_from_host(&inputs::<bf16>(INPUTS, me, len))?;
    weight.copy_from_host(&weights(hidden))?;
    // One block per row of a rank's share, with one thread per vector of a row, within limits.
    let threads = (hidden / 8).next_multiple_of(32).clamp(32, 512) as u32;
    let blocks = (tokens.div_ceil(n_ranks) as u32).min(BLOCKS);

    for by_multicast in [false, true].into_iter().take(1 + usize::from(multimem)) {
        // An element that no rank writes stays NaN.
        output.fill_bytes(0xff)?;
        rank.barrier()?;
        // SAFETY: the windows and `weight` have enough elements and live until the stream is idle
        // below; a block has enough threads for a row.
        unsafe {
            if by_multicast {
                let norm = kernels::rmsnorm_allreduce_multimem::args(
                    &dev_comm, &input, &weight, &output, tokens, hidden, EPS,
                );
                norm.grid(blocks).block(threads).launch(&stream)?;
            } else {
                let norm = kernels::rmsnorm_allreduce::args(
                    &dev_comm, &input, &weight, &output, tokens, hidden, EPS,
                );
                norm.grid(blocks).block(threads).launch(&stream)?;
            }
        }
        let mut got = vec![bf16::NAN; len];
        stream.copy_to_host(&output, &mut got)?;
        // All ranks must have the same bits, and each checks some rows.
        let sums = rank.all_gather(&[checksum(&got)])?;
        ensure!(sums.iter().all(|sum| *sum == sums[0]), "the ranks' results differ");
        let rows = got.chunks(hidden).enumerate().skip(me).step_by(n_ranks);
        let wrong: usize =
            rows.map(|(row, got)| count_wrong(row, n_ranks, by_multicast, got)).sum();
        ensure!(wrong == 0, "rank {me}, {tokens} x {hidden}: {wrong} elements are wrong");
        if rank.is_root() {
            let form = if by_multicast { "multicast" } else { "load and store" };
            println!("{tokens:4} tokens of {hidden}, by {form}: 0 wrong");
        }
    }
    rank.barrier()?;
    Ok(())
}

fn weights(hidden: usize) -> Vec<bf16> {
    let weight = |at| bf16::from_f32(1.0 + input::<f32>(WEIGHTS, 0, at) / 2.0);
    (0..hidden).map(weight).collect()
}

/// Returns how many elements of row `row` differ from the reference by more than one rounding of
/// the result (and, for `rounded_sums`, of the sum).
fn count_wrong(row: usize, n_ranks: usize, rounded_sums: bool, got: &[bf16]) -> usize {
    let hidden = got.len();
    let part = |rank, at| f64::from(input::<bf16>(INPUTS, rank, at));
    let sum = |at: usize| (0..n_ranks).map(|rank| part(rank, at)).sum::<f64>();
    let sums: Vec<f64> = (row * hidden..(row + 1) * hidden).map(sum).collect();
    let mean = sums.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    let half_step = f64::from(bf16::EPSILON) / 2.0;
    // A rounded sum is a further rounding, and changes the mean. `rsqrt` is wrong by some f32 ulps.
    let roundings = if rounded_sums { 3.01 } else { 1.01 };
    let is_right = |((got, sum), weight): &((&bf16, &f64), &bf16)| {
        let right = **sum * scale * f64::from(**weight);
        (f64::from(**got) - right).abs() <= right.abs() * half_step * roundings + 1e-6
    };
    // A NaN is wrong too.
    hidden - got.iter().zip(&sums).zip(&weights(hidden)).filter(is_right).count()
}
