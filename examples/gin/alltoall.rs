//! All-to-all by a kernel, with random sizes, grids and blocks, every element checked: on GPUs, and simulated.

use anyhow::{Result, ensure};
use devcomm::sim::{self, DevCommConfig};
use devcomm::{DevCommResource, HostKernel, KERNELS, Kernel, LaunchConfig, Rank, device};

use super::{Datum, Options, Random, datum, finish, simulator};

/// Blocks at most: as many barriers and signals are needed.
pub const BLOCKS: u32 = 8;

/// Elements for each peer at most, and where they are simulated.
const LARGEST: usize = 1 << 18;
const LARGEST_SIMULATED: usize = 1 << 9;
const THREADS: usize = 512;
const THREADS_SIMULATED: usize = 72;

/// Launches with one device communicator in the simulator: signals and barriers go on from one to the next.
const LAUNCHES: usize = 3;

/// What an all-to-all takes.
pub type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// A random launch.
#[derive(Debug)]
struct Shape {
    count: usize,
    blocks: u32,
    threads: u32,
    salt: u64,
}

impl Shape {
    fn random(options: &Options, i: usize, largest: usize, threads: usize) -> Self {
        let mut random = Random::new(options.seed, i);
        Self {
            count: random.size(largest),
            blocks: random.up_to(BLOCKS as usize) as u32,
            threads: random.up_to(threads) as u32,
            salt: random.number(),
        }
    }

    /// What `rank` sends: for each peer its elements, one peer behind the other.
    fn sent<T: Datum>(&self, rank: usize, n_ranks: usize) -> Vec<T> {
        (0..self.count * n_ranks).map(|i| datum(self.salt, rank, i)).collect()
    }

    /// Fails unless `rank` has received what the others sent it, and nothing else was written.
    fn check<T: Datum>(&self, rank: usize, n_ranks: usize, got: &[T]) -> Result<()> {
        let wanted = |at: usize| match at / self.count {
            from if from < n_ranks => {
                datum::<T>(self.salt, from, rank * self.count + at % self.count).bits()
            }
            _ => T::UNTOUCHED,
        };
        let is_wrong = |at: &usize| got[*at].bits() != wanted(*at);
        let wrong: Vec<usize> = (0..got.len()).filter(is_wrong).collect();
        let first = wrong.first().copied().unwrap_or_default();
        ensure!(
            wrong.is_empty(),
            "rank {rank}, {}, {self:?}: {} elements are wrong; the first, {first}, has bits {:#x} instead of {:#x}",
            T::NAME,
            wrong.len(),
            got[first].bits(),
            wanted(first)
        );
        Ok(())
    }
}

/// Runs `kernel` on this rank's GPU, again and again with one device communicator.
pub fn on_gpu<T: Datum, K: Kernel<Args = Args<T>>>(
    kernel: K,
    rank: &Rank,
    dev_comm: &DevCommResource,
    options: &Options,
) -> Result<()> {
    let (comm, n_ranks) = (rank.communicator()?, rank.n_ranks());
    let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let len = LARGEST * n_ranks;
    let (send, recv) = (comm.window::<T>(len)?, comm.window::<T>(len)?);
    let mut got = vec![T::of(0); len];
    for i in 0..options.iterations {
        let shape = Shape::random(options, i, LARGEST, THREADS);
        send.copy_from_host(&shape.sent(rank.rank(), n_ranks))?;
        recv.fill(0xff)?;
        let args = (dev_comm, &send, &recv, shape.count);
        let config = LaunchConfig::new(shape.blocks, shape.threads);
        // SAFETY: the windows have room for `LARGEST` elements a rank and live until the ranks have met below; only this rank
        // touches its own, and waits for the kernel before it does.
        unsafe { compiled.launch(&stream, kernel, config, args)? };
        finish(&stream)?;
        recv.copy_to_host(&mut got)?;
        shape.check(rank.rank(), n_ranks, &got)?;
    }
    rank.barrier()?;
    if rank.is_root() {
        println!("{n_ranks} ranks, {:4} x {} shapes: 0 wrong", T::NAME, options.iterations);
    }
    Ok(())
}

/// Runs `kernel` on simulated GPUs, in another order of threads and deliveries each time.
pub fn simulated<T: Datum, K: HostKernel<Args = Args<T>>>(
    kernel: K,
    (ranks, team): (usize, usize),
    config: &DevCommConfig,
    options: &Options,
) -> Result<()> {
    for first in (0..options.iterations).step_by(LAUNCHES) {
        let sim = simulator(options, ranks, team, first)?;
        let len = LARGEST_SIMULATED * ranks;
        let (send, recv) = (sim.window::<T>(len)?, sim.window::<T>(len)?);
        let comm = sim.dev_comm(config.clone())?;
        for i in first..options.iterations.min(first + LAUNCHES) {
            let shape = Shape::random(options, i, LARGEST_SIMULATED, THREADS_SIMULATED);
            let untouched = vec![untouched::<T>(); len];
            for rank in 0..ranks {
                send.write(rank, &shape.sent(rank, ranks))?;
                recv.write(rank, &untouched)?;
            }
            let config = sim::LaunchConfig::new(shape.blocks, shape.threads);
            // SAFETY: the windows have room for as many elements, and nothing else uses them.
            unsafe {
                sim.launch(kernel, config, |rank| {
                    (comm.rank(rank), send.rank(rank), recv.rank(rank), shape.count)
                })
            }?;
            for rank in 0..ranks {
                shape.check(rank, ranks, &recv.read(rank))?;
            }
        }
    }
    println!(
        "{ranks} ranks in teams of {team}, {:4} x {} shapes: 0 wrong",
        T::NAME,
        options.iterations
    );
    Ok(())
}

/// An element of a window that was filled with 0xff.
fn untouched<T: Datum>() -> T {
    // SAFETY: every bit pattern is an element.
    unsafe { std::mem::transmute_copy(&u64::MAX) }
}
