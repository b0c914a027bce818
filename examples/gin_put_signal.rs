//! Ping-pong over the network, from kernel to kernel, beside NCCL's one-sided operations of the host.
//!
//! ```text
//! cargo xtask run gin_put_signal                     # every GPU of this machine, or the simulator where there is none
//! cargo xtask run gin_put_signal --sim 2             # two simulated GPUs
//! cargo xtask run gin_put_signal --iterations 100    # more random shapes
//! torchrun --no-python --nproc-per-node 2 -- ./target/release/gin_put_signal
//! ```
//!
//! The kernel is `kernels/src/gin_put_signal.rs`. First random sizes, grids and rounds, on many contexts, with messages that may begin
//! at any byte; then the time of a round trip for some sizes: of the kernel's puts with a signal, and of `put_signal` and
//! `wait_signal` that the host enqueues. Every byte of every round is checked; the output ends with `PASS` when all are right.

pub mod gin;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use comfy_table::{CellAlignment, Table, presets};
use devcomm::sim::{self, DevCommConfig};
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, GinConnectionType, KERNELS, Kernels,
    LaunchConfig, Rank, Signal, Stream, SymmetricBuffer, WaitSignalDesc, Window, kernels,
};
use gin::{Datum, Options, Random, datum, finish, simulator};

/// Blocks at most, each with a signal of its own.
const BLOCKS: u32 = 8;
/// Each with signals of its own; fewer than blocks, so that some share one.
const CONTEXTS: u32 = 5;
/// Rounds of a launch at most, and bytes thrown in each, where shapes are random.
const ROUNDS: usize = 6;
const LARGEST: usize = 1 << 16;
const LARGEST_SIMULATED: usize = 1 << 9;
/// Bytes, and rounds, of which the median counts.
const SIZES: [usize; 5] = [1, 8, 1 << 10, 64 << 10, 1 << 20];
const TIMED_ROUNDS: u32 = 101;
/// Bytes that a rank throws in one launch at most.
const ROOM: usize = TIMED_ROUNDS as usize * (1 << 20);
/// One warp is enough to throw.
const WARP: u32 = 32;

fn main() -> ExitCode {
    gin::run("Ping-pong over the network, from kernel to kernel", run_rank, simulate)
}

/// A launch.
#[derive(Debug)]
struct Shape {
    count: usize,
    rounds: u32,
    blocks: u32,
    threads: u32,
    salt: u64,
}

impl Shape {
    fn random(options: &Options, i: usize, largest: usize) -> Self {
        let mut random = Random::new(options.seed, i);
        Self {
            count: random.size(largest),
            rounds: random.up_to(ROUNDS) as u32,
            blocks: random.up_to(BLOCKS as usize) as u32,
            threads: random.up_to(70) as u32,
            salt: random.number(),
        }
    }

    /// One block that throws `count` bytes each time.
    fn timed(count: usize) -> Self {
        Self { count, rounds: TIMED_ROUNDS, blocks: 1, threads: WARP, salt: count as u64 }
    }

    /// Round trips of all blocks.
    fn throws(&self) -> usize {
        (self.blocks * self.rounds) as usize
    }

    /// What `rank` throws first: everything, if it serves.
    fn thrown(&self, rank: usize) -> Vec<u8> {
        (0..self.throws() * self.count).map(|i| datum(self.salt, rank, i)).collect()
    }

    /// Fails unless `rank` holds what the even rank of its pair has thrown, and nothing behind it.
    fn check(&self, rank: usize, n_ranks: usize, got: &[u8]) -> Result<()> {
        let thrown = if rank ^ 1 < n_ranks { self.thrown(rank & !1) } else { Vec::new() };
        let wanted = |at: usize| thrown.get(at).copied().unwrap_or(u8::UNTOUCHED as u8);
        let wrong: Vec<usize> = (0..got.len()).filter(|&at| got[at] != wanted(at)).collect();
        ensure!(
            wrong.is_empty(),
            "rank {rank}, {self:?}: {} bytes are wrong, the first at {}",
            wrong.len(),
            wrong[0]
        );
        Ok(())
    }
}

/// The kernel on this rank's GPU.
pub fn run_rank(rank: &Rank, options: &Options) -> Result<()> {
    ensure!(rank.n_ranks() >= 2, "there is one GPU, but ping-pong takes two");
    let court = Court::new(rank)?;
    for i in 0..options.iterations {
        court.play(&Shape::random(options, i, LARGEST))?;
    }
    if rank.is_root() {
        println!("{} ranks, {} shapes: 0 wrong\n", rank.n_ranks(), options.iterations);
    }
    let host = rank.communicator()?.properties()?.host_rma;
    if host {
        // NCCL connects the ranks at the first of them.
        court.play_by_host(&Shape::timed(1))?;
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "bytes",
        "kernel us",
        "#wrong",
        "host us",
        "#wrong",
    ]);
    for count in SIZES {
        let shape = Shape::timed(count);
        let kernel_us = court.play(&shape)?;
        let [host_us, host_wrong] = if host {
            [format!("{:.2}", court.play_by_host(&shape)?), "0".to_owned()]
        } else {
            ["-".to_owned(), "-".to_owned()]
        };
        let kernel_us = format!("{kernel_us:.2}");
        table.add_row([count.to_string(), kernel_us, "0".to_owned(), host_us, host_wrong]);
    }
    if rank.is_root() {
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let device = rank.context().device_name()?;
        println!(
            "Round trips between two of {} x {device}: the kernel's, median of {TIMED_ROUNDS};",
            rank.n_ranks()
        );
        println!(
            "put_signal and wait_signal of the host, mean of as many in a stream\n\n{table}\n"
        );
    }
    Ok(())
}

/// What two ranks need to play.
struct Court<'a> {
    rank: &'a Rank,
    dev_comm: DevCommResource,
    send: Window<u8>,
    recv: Window<u8>,
    nanos: SymmetricBuffer<u64>,
    compiled: Kernels,
    stream: Stream,
}

impl<'a> Court<'a> {
    fn new(rank: &'a Rank) -> Result<Self> {
        let comm = rank.communicator()?;
        let requirements = DevCommRequirements::new()
            .gin_connection(GinConnectionType::Full)
            .gin_contexts(CONTEXTS)
            .gin_signals(BLOCKS);
        Ok(Self {
            rank,
            dev_comm: comm.create_dev_comm(requirements)?,
            send: comm.window(ROOM)?,
            recv: comm.window(ROOM)?,
            nanos: comm.mem_alloc(TIMED_ROUNDS as usize)?,
            compiled: rank.load(&KERNELS)?,
            stream: rank.stream()?,
        })
    }

    /// Bytes of the windows that a launch may touch, and one behind them.
    fn bytes(shape: &Shape) -> usize {
        ROOM.min(shape.throws() * shape.count + 1)
    }

    /// Fills the windows, and waits until all ranks have.
    fn prepare(&self, shape: &Shape) -> Result<()> {
        self.send.copy_from_host(&shape.thrown(self.rank.rank()))?;
        self.recv.slice(..Self::bytes(shape))?.fill(0xff)?;
        Ok(self.rank.barrier()?)
    }

    /// Waits for all ranks, and checks what this one has.
    fn check(&self, shape: &Shape) -> Result<()> {
        finish(&self.stream)?;
        self.rank.barrier()?;
        let mut got = vec![0; Self::bytes(shape)];
        self.recv.copy_to_host(&mut got)?;
        shape.check(self.rank.rank(), self.rank.n_ranks(), &got)
    }

    /// By the kernel; the median time of a round trip in microseconds, on even ranks.
    fn play(&self, shape: &Shape) -> Result<f64> {
        self.prepare(shape)?;
        let nanos = self.nanos.device_address();
        let args = (&self.dev_comm, &self.send, &self.recv, shape.count, shape.rounds, nanos);
        let config = LaunchConfig::new(shape.blocks, shape.threads);
        // SAFETY: windows and times have room for every round of every block, the same in every rank, and live until all ranks
        // have met in `check`.
        unsafe { self.compiled.launch(&self.stream, kernels::gin_put_signal, config, args)? };
        self.check(shape)?;
        let mut times = vec![0; shape.throws()];
        self.nanos.copy_to_host(&mut times)?;
        times.sort_unstable();
        Ok(times[times.len() / 2] as f64 / 1e3)
    }

    /// By the host's operations, all rounds in one stream; the mean time of a round trip in microseconds.
    fn play_by_host(&self, shape: &Shape) -> Result<f64> {
        let (comm, me) = (self.rank.communicator()?, self.rank.rank());
        self.prepare(shape)?;
        let events = (self.rank.context().event()?, self.rank.context().event()?);
        let partner = me ^ 1;
        self.stream.record(&events.0)?;
        for round in 0..if partner < self.rank.n_ranks() { shape.rounds as usize } else { 0 } {
            let (at, ball) = (round * shape.count, round * shape.count..(round + 1) * shape.count);
            if me % 2 == 0 {
                let ball = self.send.slice(ball.clone())?;
                comm.put_signal(&ball, &self.recv, at, Signal::to(partner), &self.stream)?;
            }
            comm.wait_signal(&[WaitSignalDesc::from(partner)], &self.stream)?;
            if me % 2 == 1 {
                let ball = self.recv.slice(ball)?;
                comm.put_signal(&ball, &self.recv, at, Signal::to(partner), &self.stream)?;
            }
        }
        self.stream.record(&events.1)?;
        self.check(shape)?;
        Ok(f64::from(events.1.elapsed_ms(&events.0)?) * 1e3 / f64::from(shape.rounds))
    }
}

/// The kernel on simulated GPUs, in another order of threads and deliveries each time.
pub fn simulate(ranks: usize, team: usize, options: &Options) -> Result<()> {
    /// Launches with one device communicator: signals go on from one to the next.
    const LAUNCHES: usize = 3;
    let room = BLOCKS as usize * ROUNDS * LARGEST_SIMULATED;
    for first in (0..options.iterations).step_by(LAUNCHES) {
        let sim = simulator(options, ranks, team, first)?;
        let (send, recv) = (sim.window::<u8>(room)?, sim.window::<u8>(room)?);
        let nanos = |rank| sim.buffer::<u64>(rank, BLOCKS as usize * ROUNDS);
        let nanos = (0..ranks).map(nanos).collect::<sim::Result<Vec<_>>>()?;
        let comm = sim.dev_comm(DevCommConfig {
            gin_connection: GinConnectionType::Full,
            gin_contexts: CONTEXTS,
            gin_signals: BLOCKS,
            ..DevCommConfig::default()
        })?;
        for i in first..options.iterations.min(first + LAUNCHES) {
            let shape = Shape::random(options, i, LARGEST_SIMULATED);
            for rank in 0..ranks {
                send.write(rank, &shape.thrown(rank))?;
                recv.write(rank, &vec![0xff; room])?;
            }
            let config = sim::LaunchConfig::new(shape.blocks, shape.threads);
            // SAFETY: windows and times have room for every round of every block, and nothing else uses them.
            unsafe {
                sim.launch(kernels::gin_put_signal, config, |rank| {
                    let (send, recv) = (send.rank(rank), recv.rank(rank));
                    (comm.rank(rank), send, recv, shape.count, shape.rounds, &nanos[rank])
                })
            }?;
            for rank in 0..ranks {
                shape.check(rank, ranks, &recv.read(rank))?;
            }
        }
    }
    println!("{ranks} ranks, {} shapes: 0 wrong", options.iterations);
    Ok(())
}
