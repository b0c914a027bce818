//! All-reduce by load and store over NVLink.
//!
//! ```text
//! cargo xtask run lsa_allreduce                     # every GPU, or four simulated ones
//! cargo xtask run lsa_allreduce --dtype bf16 --max 64M
//! DEVCOMM_SIMULATE=3 cargo xtask run lsa_allreduce  # three simulated GPUs
//! torchrun --no-python --nproc-per-node 8 -- ./lsa_allreduce
//! ```
//!
//! The kernel is `kernels/src/lsa_allreduce.rs`. Every element of every rank is compared with a
//! reference computed on the host, and all ranks must have the same bits. `devcomm-bench
//! all-reduce` measures times.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use devcomm::{DevCommRequirements, KERNELS, Kernel, Rank, Safe, World, device, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::numbers::{Number, checksum, count_wrong, inputs};
use half::{bf16, f16};

/// All-reduce by load and store over NVLink.
#[derive(Parser)]
struct Options {
    /// Smallest message in bytes (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", default_value = "4", value_parser = bytes)]
    min: usize,
    /// Largest message in bytes (suffixes K, M, G) [default: 256M, simulated 256K]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    max: Option<usize>,
    /// Element type
    #[arg(long, value_enum, default_value = "all")]
    dtype: Dtype,
    /// Blocks of the kernel [default: by size]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    blocks: Option<u32>,
    /// Threads per block
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
    All,
}

/// Element counts that are mostly not multiples of the number of ranks or of a vector's elements.
const UNEVEN_COUNTS: [usize; 12] = [1, 2, 3, 5, 7, 9, 15, 17, 1023, 1025, 4099, 65537];
/// Maximum number of blocks; a small message takes only the blocks for one vector per thread.
const MAX_BLOCKS: u32 = 128;

fn main() -> ExitCode {
    let options = Options::parse();
    run(World::from_env(), |rank| {
        if let Some(max) = options.max {
            ensure!(options.min <= max, "--min {} is above --max {max}", options.min);
        }
        rank.communicator()?.require_single_lsa_team()?;
        let is_wanted = |dtype| [dtype, Dtype::All].contains(&options.dtype);
        if rank.is_root() {
            let device = rank.context().device_name()?;
            println!("{} x {device}, {} threads per block\n", rank.n_ranks(), options.threads);
            println!("{:>10}  {:>10}  type  redop  blocks  #wrong", "size", "count");
            println!("{:>10}  {:>10}", "bytes", "elements");
        }
        if is_wanted(Dtype::F32) {
            all_reduces::<f32>(rank, &options)?;
        }
        if is_wanted(Dtype::F16) {
            all_reduces::<f16>(rank, &options)?;
        }
        if is_wanted(Dtype::Bf16) {
            all_reduces::<bf16>(rank, &options)?;
        }
        Ok(())
    })
}

/// The kernel's parameters.
type Params<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// Runs and checks all-reduces of all sizes, with one element type.
fn all_reduces<T: Number>(rank: &Rank, options: &Options) -> Result<()>
where
    kernels::lsa_allreduce<T>: Kernel<Args = Params<T>, Safety = Safe>,
{
    let (comm, n_ranks, seed) = (rank.communicator()?, rank.n_ranks(), options.seed);
    let max = options.max.unwrap_or(if rank.is_simulated() { 256 << 10 } else { 256 << 20 });
    let sizes = std::iter::successors(Some(options.min.max(1)), |size| size.checked_mul(4));
    let even = sizes.take_while(|size| *size <= max).map(|size| size / size_of::<T>());
    let uneven = UNEVEN_COUNTS.into_iter().filter(|count| count * size_of::<T>() <= max);
    let counts: Vec<usize> = even.filter(|count| *count > 0).chain(uneven).collect();
    let Some(max_count) = counts.iter().copied().max() else {
        anyhow::bail!("no message of at most {max} bytes holds an element of {}", T::NAME);
    };

    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let max_blocks = options.blocks.unwrap_or(MAX_BLOCKS);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(max_blocks))?;
    let (send, recv) = (comm.window::<T>(max_count)?, comm.window::<T>(max_count)?);
    for count in counts {
        let vectors = (count * size_of::<T>()).div_ceil(n_ranks).div_ceil(16);
        let blocks = (vectors as u32).div_ceil(options.threads).clamp(1, max_blocks);
        let blocks = options.blocks.unwrap_or(blocks);
        send.copy_from_host(&inputs::<T>(seed, rank.rank(), count))?;
        // An element that no rank writes stays NaN.
        recv.fill_bytes(0xff)?;
        rank.barrier()?;
        let sum = kernels::lsa_allreduce::<T>::args(&dev_comm, &send, &recv, count);
        sum.grid(blocks).block(options.threads).launch(&stream)?;
        stream.synchronize()?;

        let mut sums = vec![T::nearest(0.0); count];
        recv.copy_to_host(&mut sums)?;
        let roundings = 1; // Of the sum, to `T`.
        let mine = [checksum(&sums), count_wrong(seed, n_ranks, roundings, &sums) as u64];
        let all = rank.all_gather(&mine)?;
        ensure!(all.iter().all(|of_rank| of_rank[0] == mine[0]), "the ranks' results differ");
        let wrong: u64 = all.iter().map(|of_rank| of_rank[1]).sum();
        if rank.is_root() {
            let (size, name) = (count * size_of::<T>(), T::NAME);
            println!("{size:10}  {count:10}  {name:4}  {:5}  {blocks:6}  {wrong:6}", "sum");
        }
        ensure!(wrong == 0, "{wrong} elements are wrong, over all ranks");
    }
    Ok(())
}

/// Parses a size such as `64K`.
fn bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        _ => (text, 0),
    };
    let number: usize =
        digits.parse().map_err(|_| format!("`{text}` is not a size: try 4, 64K, 256M or 1G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is too large"))
}
