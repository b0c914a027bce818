//! RMSNorm fused with the all-reduce before it, written in Rust, beside `ncclAllReduce` alone.
//!
//! ```text
//! cargo xtask run rmsnorm_allreduce              # every GPU of this machine, or the simulator where there is none
//! cargo xtask run rmsnorm_allreduce --sim 3      # three simulated GPUs, by load and store and by multicast
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/rmsnorm_allreduce
//! ```
//!
//! The kernel is `kernels/src/rmsnorm_allreduce.rs`. What a layer of a model split over GPUs does between its halves, in one launch
//! and one pass: sum the partial results of all ranks, normalise each row, give it to all. Every element is compared with a
//! reference computed in f64; the output ends with `PASS` when all are right.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use devcomm::sim::{self, DevCommConfig, Simulator};
use devcomm::{
    Buffer, DevCommRequirements, Event, KERNELS, LaunchConfig, Rank, ReduceOp, Stream, World,
    kernels,
};
use half::bf16;

const BLOCKS: u32 = 128;
const EPS: f32 = 1e-5;
/// Simulated GPUs where there is none.
const SIMULATED: usize = 4;
/// Tokens, and elements of each.
const SHAPES: [(usize, usize); 7] =
    [(1, 1024), (8, 4096), (64, 4096), (7, 7168), (256, 8192), (1024, 8192), (4096, 8192)];
/// Shapes that a simulator takes its time for are left out there.
const SIMULATED_ELEMENTS: usize = 1 << 16;
/// Kernel and NCCL are timed in turns, and the median turn counts.
const TURNS: usize = 11;
const BATCH: usize = 20;

/// RMSNorm fused with an all-reduce over NVLink, beside ncclAllReduce alone.
#[derive(Parser)]
struct Options {
    /// Simulate N GPUs on the CPU instead
    #[arg(long, value_name = "N")]
    sim: Option<usize>,
}

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
        return simulate(ranks);
    }
    if let Err(reason) = devcomm::visible_gpus() {
        println!("no GPU: {reason}\nsimulating {SIMULATED} GPUs instead");
        return simulate(SIMULATED);
    }
    let roots = World::from_env()?.run(|rank| {
        run_rank(rank)?;
        Ok::<_, anyhow::Error>(rank.is_root())
    })?;
    // After all ranks, and on one of them.
    if roots.contains(&true) {
        println!("PASS");
    }
    Ok(())
}

/// A number between -1 and 1 for each place, the same everywhere.
fn random(seed: usize, at: usize) -> f32 {
    let mut x = (seed as u64) << 40 ^ at as u64;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32 / (1 << 23) as f32) - 1.0
}

/// What `rank` has of element `at` of the sum.
fn part(rank: usize, at: usize) -> bf16 {
    bf16::from_f32(random(rank + 1, at))
}

fn parts(rank: usize, len: usize) -> Vec<bf16> {
    (0..len).map(|at| part(rank, at)).collect()
}

fn weights(hidden: usize) -> Vec<bf16> {
    (0..hidden).map(|at| bf16::from_f32(1.0 + random(0, at) / 2.0)).collect()
}

/// How many elements of row `row` are off by more than one rounding of the result (and, for `rounded_sums`, of the sum).
fn wrong_in(row: usize, n_ranks: usize, rounded_sums: bool, got: &[bf16]) -> usize {
    let hidden = got.len();
    let sum = |at: usize| (0..n_ranks).map(|rank| f64::from(part(rank, at))).sum::<f64>();
    let sums: Vec<f64> = (row * hidden..(row + 1) * hidden).map(sum).collect();
    let mean = sums.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    let half_step = f64::from(bf16::EPSILON) / 2.0;
    // The hardware's square root is good to some units of f32. A rounded sum changes the mean as well.
    let roundings = if rounded_sums { 3.01 } else { 1.01 };
    let is_right = |((got, sum), weight): &((&bf16, &f64), &bf16)| {
        let right = **sum * scale * f64::from(**weight);
        (f64::from(**got) - right).abs() <= right.abs() * half_step * roundings + 1e-6
    };
    let all = got.iter().zip(&sums);
    // A NaN is wrong too.
    hidden - all.zip(&weights(hidden)).filter(is_right).count()
}

/// A block for each row of a rank's share, with threads for the vectors of a row.
fn config(n_ranks: usize, tokens: usize, hidden: usize) -> LaunchConfig {
    const LANES: usize = 8;
    let rows = tokens.div_ceil(n_ranks) as u32;
    let threads = (hidden / LANES).next_multiple_of(32).clamp(32, 512) as u32;
    LaunchConfig::new(rows.min(BLOCKS), threads)
}

fn run_rank(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    let (me, n_ranks) = (rank.rank(), rank.n_ranks());
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let events = (rank.context().event()?, rank.context().event()?);

    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "tokens",
        "hidden",
        "MiB",
        "us",
        "#wrong",
        "ncclAllReduce us",
        "kernel/nccl",
    ]);
    for (tokens, hidden) in SHAPES {
        let len = tokens * hidden;
        let (input, output) = (comm.window::<bf16>(len)?, comm.window::<bf16>(len)?);
        let (nccl_input, nccl_output) =
            (comm.mem_alloc::<bf16>(len)?, comm.mem_alloc::<bf16>(len)?);
        let weight = comm.mem_alloc::<bf16>(hidden)?;
        input.copy_from_host(&parts(me, len))?;
        nccl_input.copy_from_host(&parts(me, len))?;
        weight.copy_from_host(&weights(hidden))?;
        // An element that nobody writes stays a NaN.
        output.fill(0xff)?;

        let config = config(n_ranks, tokens, hidden);
        let kernel = || {
            let weight = weight.device_slice().device_address();
            let args = (&dev_comm, &input, weight, &output, tokens, hidden, EPS);
            // SAFETY: windows and weights have the elements and live until the stream is idle below; a block has a thread for
            // every few vectors of a row.
            unsafe { compiled.launch(&stream, kernels::rmsnorm_allreduce::<bf16>, config, args) }
        };
        let nccl = || comm.all_reduce(&nccl_input, &nccl_output, ReduceOp::Sum, &stream);
        kernel()?;
        stream.synchronize()?;
        let mut got = vec![bf16::NAN; len];
        output.copy_to_host(&mut got)?;
        // All ranks have the same bits, and each compares some rows.
        let mut sum = DefaultHasher::new();
        got.iter().for_each(|x| x.to_bits().hash(&mut sum));
        let sums = rank.all_gather(&sum.finish().to_le_bytes())?;
        ensure!(sums.iter().all(|other| *other == sums[0]), "the ranks' results differ");
        let rows = got.chunks(hidden).enumerate().skip(me).step_by(n_ranks);
        let mine: usize = rows.map(|(row, got)| wrong_in(row, n_ranks, false, got)).sum();
        let [wrong, _] = over_ranks(rank, [mine as f64, 0.0], |a, b| a + b)?;

        let mut turns = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            turns[0].push(time(rank, &stream, &events, kernel)?);
            turns[1].push(time(rank, &stream, &events, nccl)?);
        }
        let median = |mut turns: Vec<f64>| {
            turns.sort_by(f64::total_cmp);
            turns[turns.len() / 2]
        };
        let [kernel_us, nccl_us] = over_ranks(rank, turns.map(median), f64::max)?;
        table.add_row([
            tokens.to_string(),
            hidden.to_string(),
            format!("{:.2}", (len * size_of::<bf16>()) as f64 / f64::from(1 << 20)),
            format!("{kernel_us:.2}"),
            format!("{wrong}"),
            format!("{nccl_us:.2}"),
            format!("{:.3}", kernel_us / nccl_us),
        ]);
        ensure!(wrong == 0.0, "{wrong} elements are wrong\n{table}");
    }
    if rank.is_root() {
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let device = rank.context().device_name()?;
        println!("{n_ranks} x {device}, bf16; median of {TURNS} turns, slowest rank\n\n{table}\n");
    }
    Ok(())
}

/// Microseconds that one call of `work` takes on the GPU, over a batch.
fn time(
    rank: &Rank,
    stream: &Stream,
    events: &(Event, Event),
    work: impl Fn() -> devcomm::Result<()>,
) -> Result<f64> {
    rank.barrier()?;
    work()?;
    stream.record(&events.0)?;
    for _ in 0..BATCH {
        work()?;
    }
    stream.record(&events.1)?;
    stream.synchronize()?;
    Ok(f64::from(events.1.elapsed_ms(&events.0)?) * 1e3 / BATCH as f64)
}

/// Two numbers of each rank, put together over all.
fn over_ranks(rank: &Rank, mine: [f64; 2], both: fn(f64, f64) -> f64) -> Result<[f64; 2]> {
    let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
    let all = rank.all_gather(&bytes)?;
    let column = |i: usize| -> Result<f64> {
        let numbers = all.iter().map(|row| {
            let bytes = row.get(8 * i..8 * i + 8).context("a rank sent something else")?;
            Ok(f64::from_le_bytes(bytes.try_into()?))
        });
        let numbers = numbers.collect::<Result<Vec<f64>>>()?;
        Ok(numbers.into_iter().reduce(both).unwrap_or_default())
    };
    Ok([column(0)?, column(1)?])
}

/// Both forms of the kernel on simulated GPUs, which have multicast.
fn simulate(ranks: usize) -> Result<()> {
    for (tokens, hidden) in SHAPES.into_iter().filter(|(t, h)| t * h <= SIMULATED_ELEMENTS) {
        let sim = Simulator::new(ranks)?;
        let len = tokens * hidden;
        let input = sim.window::<bf16>(len)?;
        let weight = (0..ranks)
            .map(|rank| sim.buffer::<bf16>(rank, hidden))
            .collect::<sim::Result<Vec<_>>>()?;
        let outputs = [sim.window::<bf16>(len)?, sim.window::<bf16>(len)?];
        for (rank, weight) in weight.iter().enumerate() {
            input.write(rank, &parts(rank, len))?;
            weight.write(&weights(hidden))?;
        }
        let comm = sim.dev_comm(DevCommConfig {
            lsa_barriers: BLOCKS,
            lsa_multimem: true,
            ..DevCommConfig::default()
        })?;
        let config = config(ranks, tokens, hidden);
        let config = sim::LaunchConfig::new(config.grid.x, config.block.x);
        // SAFETY: windows and weights have the elements, and nothing else uses them.
        unsafe {
            sim.launch(kernels::rmsnorm_allreduce::<bf16>, config, |rank| {
                (
                    comm.rank(rank),
                    input.rank(rank),
                    &weight[rank],
                    outputs[0].rank(rank),
                    tokens,
                    hidden,
                    EPS,
                )
            })?;
            sim.launch(kernels::rmsnorm_allreduce_multimem::<bf16>, config, |rank| {
                (
                    comm.rank(rank),
                    input.rank(rank),
                    &weight[rank],
                    outputs[1].rank(rank),
                    tokens,
                    hidden,
                    EPS,
                )
            })?;
        }
        for (form, output) in ["load and store", "multicast"].into_iter().zip(&outputs) {
            let rounded_sums = form == "multicast";
            let mut wrong = 0;
            for rank in 0..ranks {
                let rows = output.read(rank);
                let rows = rows.chunks(hidden).enumerate();
                wrong +=
                    rows.map(|(row, got)| wrong_in(row, ranks, rounded_sums, got)).sum::<usize>();
            }
            println!("{tokens:3} tokens of {hidden}, by {form}: {wrong} wrong");
            ensure!(wrong == 0, "{wrong} elements are wrong");
        }
    }
    println!("PASS, SIMULATED");
    Ok(())
}
