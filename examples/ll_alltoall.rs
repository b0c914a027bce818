//! All-to-all of short messages by NCCL's low-latency protocol, written in Rust, beside `ncclAlltoAll`.
//!
//! ```text
//! cargo xtask run ll_alltoall                    # every GPU of this machine, or the simulator where there is none
//! cargo xtask run ll_alltoall --sim 3            # three simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./target/release/ll_alltoall
//! ```
//!
//! The kernel is `kernels/src/ll_alltoall.rs`. A message carries the news of its own arrival in its data, so that there is neither a
//! barrier nor a fence. Every element is checked; the output ends with `PASS` when all are right.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use devcomm::sim::{self, DevCommConfig, Simulator};
use devcomm::{
    DevCommRequirements, Event, KERNELS, LaunchConfig, LlA2a, Rank, Stream, World, kernels,
};

/// Blocks at most, threads of a block, and words of 8 bytes that a block sends to each peer before it waits.
const BLOCKS: u32 = 16;
const THREADS: u32 = 256;
const CHUNK: u32 = 256;
/// Simulated GPUs where there is none.
const SIMULATED: usize = 4;
/// Elements for each peer: powers of four, and some that fill no word.
const COUNTS: [usize; 10] = [1, 2, 3, 8, 31, 128, 512, 1023, 2048, 8192];
/// Kernel and NCCL are timed in turns, and the median turn counts.
const TURNS: usize = 11;
const BATCH: usize = 40;

/// All-to-all of short messages over NVLink, beside ncclAlltoAll.
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

/// What rank `from` has for rank `to`: different for every pair and place.
fn element(from: usize, to: usize, i: usize) -> f32 {
    (from * 1009 + to * 31 + i) as f32
}

/// What `rank` sends: for each peer its elements, one peer behind the other.
fn sent(rank: usize, n_ranks: usize, count: usize) -> Vec<f32> {
    (0..n_ranks).flat_map(|to| (0..count).map(move |i| element(rank, to, i))).collect()
}

/// How many of the elements that `rank` got are wrong.
fn wrong(rank: usize, count: usize, got: &[f32]) -> usize {
    let right = |at: usize| element(at / count, rank, at % count);
    got.iter().enumerate().filter(|(at, got)| **got != right(*at)).count()
}

/// The same for every rank: enough that each thread has a word.
fn config(n_ranks: usize, count: usize) -> LaunchConfig {
    let words = (count.div_ceil(2) * n_ranks) as u32;
    LaunchConfig::new(words.div_ceil(THREADS).clamp(1, BLOCKS), THREADS)
}

fn run_rank(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    let (me, n_ranks) = (rank.rank(), rank.n_ranks());
    let mut requirements = DevCommRequirements::new();
    let key = requirements.add(LlA2a {
        blocks: BLOCKS,
        max_elements: CHUNK * n_ranks as u32,
        element_size: 8,
    });
    let dev_comm = comm.create_dev_comm(requirements)?;
    let exchange = dev_comm.resource(key)?;
    let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let events = (rank.context().event()?, rank.context().event()?);

    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["B a pair", "blocks", "us", "#wrong", "nccl us", "#wrong", "kernel/nccl"]);
    for count in COUNTS {
        let len = count * n_ranks;
        let (send, recv) = (comm.window::<f32>(len)?, comm.window::<f32>(len)?);
        let (nccl_send, nccl_recv) = (comm.mem_alloc::<f32>(len)?, comm.mem_alloc::<f32>(len)?);
        send.copy_from_host(&sent(me, n_ranks, count))?;
        nccl_send.copy_from_host(&sent(me, n_ranks, count))?;
        // An element that nobody writes stays a NaN.
        recv.fill(0xff)?;
        nccl_recv.fill(0xff)?;

        let config = config(n_ranks, count);
        let kernel = || {
            let args = (&dev_comm, exchange, &send, &recv, count);
            // SAFETY: the windows have `count` elements for every rank and live until the stream is idle below; the exchange
            // is of this device communicator, and every rank passes the same.
            unsafe { compiled.launch(&stream, kernels::ll_alltoall::<f32>, config, args) }
        };
        let nccl = || comm.all_to_all(&nccl_send, &nccl_recv, &stream);
        kernel()?;
        nccl()?;
        stream.synchronize()?;
        let check = |result: &dyn Fn(&mut [f32]) -> devcomm::Result<()>| -> Result<usize> {
            let mut got = vec![0.0; len];
            result(&mut got)?;
            Ok(wrong(me, count, &got))
        };
        let ours = check(&|got| recv.copy_to_host(got))?;
        let nccls = check(&|got| nccl_recv.copy_to_host(got))?;
        let [ours, nccls] = over_ranks(rank, [ours as f64, nccls as f64], |a, b| a + b)?;

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
            (count * size_of::<f32>()).to_string(),
            config.grid.x.to_string(),
            format!("{kernel_us:.2}"),
            format!("{ours}"),
            format!("{nccl_us:.2}"),
            format!("{nccls}"),
            format!("{:.3}", kernel_us / nccl_us),
        ]);
        ensure!(
            ours + nccls == 0.0,
            "{ours} elements of the kernel's and {nccls} of NCCL's are wrong\n{table}"
        );
    }
    if rank.is_root() {
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!(
            "{n_ranks} x {}; median of {TURNS} turns, slowest rank\n",
            rank.context().device_name()?
        );
        println!("{table}\n");
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

/// The same kernel on simulated GPUs.
fn simulate(ranks: usize) -> Result<()> {
    for count in COUNTS {
        let sim = Simulator::new(ranks)?;
        let (send, recv) = (sim.window::<f32>(count * ranks)?, sim.window::<f32>(count * ranks)?);
        let mut requirements = DevCommConfig::default();
        let key = requirements.add(sim::LlA2a {
            blocks: BLOCKS,
            max_elements: CHUNK * ranks as u32,
            element_size: 8,
        });
        let comm = sim.dev_comm(requirements)?;
        for rank in 0..ranks {
            send.write(rank, &sent(rank, ranks, count))?;
        }
        let blocks = config(ranks, count).grid.x;
        // SAFETY: the windows have `count` elements for every rank, and nothing else uses them.
        unsafe {
            sim.launch(
                kernels::ll_alltoall::<f32>,
                sim::LaunchConfig::new(blocks, THREADS),
                |rank| {
                    (
                        comm.rank(rank),
                        comm.rank(rank).resource(key),
                        send.rank(rank),
                        recv.rank(rank),
                        count,
                    )
                },
            )
        }?;
        let wrong: usize = (0..ranks).map(|rank| wrong(rank, count, &recv.read(rank))).sum();
        println!("{:6} bytes a pair, {blocks:2} blocks: {wrong} wrong", count * size_of::<f32>());
        ensure!(wrong == 0, "{wrong} elements are wrong");
    }
    println!("PASS, SIMULATED");
    Ok(())
}
