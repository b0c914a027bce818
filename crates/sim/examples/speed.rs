//! Measures the simulator's speed: first against its targets, then element accesses per second and
//! time per thread switch for an all-reduce over LSA in each kind of schedule. Times are processor
//! time of the best of five launches.
//!
//! `cargo run --release -p devcomm-sim --example speed -- [RANKS [BLOCKS [THREADS [ELEMENTS]]]]`

use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::{DevCommRequirements, Lag, Result, Simulation, kernels};
use devcomm_testing::simulated::{Gpu, run, world};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

#[kernel]
unsafe fn allreduce(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let share = count / team.n_ranks as usize;
    let begin = share * team.rank as usize;
    let mut i = begin + thread::index_1d() as usize;
    while i < begin + share {
        let mut sum = 0.0;
        for peer in 0..team.n_ranks {
            // SAFETY: `i` is below `count`; the barriers order the accesses.
            sum += unsafe { send.lsa(peer).load(i) };
        }
        for peer in 0..team.n_ranks {
            // SAFETY: the windows have `count` elements, and each thread stores its own ones.
            unsafe { recv.lsa(peer).store(i, sum) };
        }
        i += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    }
    barrier.sync(MemoryOrder::Release);
}

/// Each thread adds to its own elements.
#[kernel]
unsafe fn adds(elements: *mut f32, count: usize) {
    for i in thread::grid_strided(count) {
        // SAFETY: `i` is below `count`, the buffer's length.
        unsafe { mem::store(elements.add(i), mem::load(elements.add(i)) + 1.0) };
    }
}

#[kernel]
unsafe fn barriers(count: u32) {
    for _ in 0..count {
        thread::sync_threads();
    }
}

/// Returns the processor time of this process in seconds, which excludes other processes' work.
fn processor_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a `timespec`, which the call writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the loads and stores per second, in millions, of a grid in which each thread adds to
/// elements of its own, `adds` times.
fn adds_per_second(races: bool, (grid, block): (u32, u32), adds: usize) -> Result<f64> {
    let count = adds * (grid * block) as usize;
    let (seconds, _) = best(Simulation::new(1).races(races), |gpu| {
        let elements = gpu.buffer(&vec![0_f32; count])?;
        Ok(move |gpu: &Gpu<'_>| gpu.launch(adds::args(&elements, count).grid(grid).block(block)))
    })?;
    Ok(2.0 * count as f64 / seconds / 1e6)
}

/// Prints a measurement, and whether it meets its target.
fn print_verdict(what: &str, measured: f64, unit: &str, meets: bool, target: &str) {
    let verdict = if meets { "met" } else { "MISSED" };
    println!("{what:60} {measured:8.2} {unit:9} target {target:10} {verdict}");
}

/// Measures what the simulator must achieve on one core.
fn targets() -> Result<()> {
    for (races, target) in [(false, 20.0), (true, 8.0)] {
        let speed = adds_per_second(races, (8, 256), 512)?;
        let what = if races { "with" } else { "without" };
        let what = format!("loads and stores, {what} race detection");
        print_verdict(&what, speed, "M/s", speed >= target, &format!(">= {target}"));
    }
    let count = (1 << 20) / size_of::<f32>();
    let (seconds, _) = best(Simulation::new(8), |gpu| {
        let (send, recv) = (gpu.window(&vec![1_f32; count])?, gpu.window(&vec![0_f32; count])?);
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
        Ok(move |gpu: &Gpu<'_>| {
            let args = kernels::lsa_allreduce::<f32>::args(&comm, &send, &recv, count);
            gpu.launch(args.grid(8).block(256))
        })
    })?;
    let what = "lsa_allreduce of 1 MiB, 8 ranks x 8 blocks x 256 threads, races";
    print_verdict(what, seconds, "s", seconds < 10.0, "< 10 s");
    // Each thread has the same work in all grids.
    let costs = [1, 4, 16, 64].map(|grid| {
        let speed = adds_per_second(true, (grid, 256), 64)?;
        println!("  {:5} threads: {:.1} ns per access", grid * 256, 1e3 / speed);
        Ok(1.0 / speed)
    });
    let costs = costs.into_iter().collect::<Result<Vec<f64>>>()?;
    let ratio = costs[3] / costs[0];
    print_verdict("cost of an access, 16384 threads to 256", ratio, "times", ratio < 1.5, "< 1.5");
    Ok(())
}

fn main() -> Result<()> {
    targets()?;
    let number = |at: usize, or: usize| {
        std::env::args().nth(at).and_then(|text| text.parse().ok()).unwrap_or(or)
    };
    let (ranks, grid, block) = (number(1, 8), number(2, 8) as u32, number(3, 256) as u32);
    let count = number(4, 1 << 18);
    println!("{ranks} ranks, {grid} blocks of {block} threads, {count} elements per rank");
    let all = || Simulation::new(ranks);
    let accesses = (2 * count * ranks) as f64;
    for (what, simulation) in [
        ("unchecked", all().watch(false)),
        ("checked, no races", all().races(false)),
        ("checked (default)", all()),
        ("random order", all().seed(7)),
        ("preempted", all().preempt(true)),
        ("preempted, random", all().preempt(true).seed(7)),
        ("PCT", all().pct(3).seed(7)),
        ("PCT, no preemption", all().pct(3).preempt(false).seed(7)),
        ("a rank lags", all().lag(Lag::Rank).seed(7)),
    ] {
        let (seconds, switches) = best(simulation, |gpu| {
            let (send, recv) = (gpu.window(&vec![1_f32; count])?, gpu.window(&vec![0_f32; count])?);
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(grid))?;
            Ok(move |gpu: &Gpu<'_>| {
                gpu.launch(allreduce::args(&comm, &send, &recv, count).grid(grid).block(block))
            })
        })?;
        println!(
            "{what:20} {:6.1} M accesses/s, {switches:8} switches ({:5.0} ns each, work included)",
            accesses / seconds / 1e6,
            seconds * 1e9 / switches as f64,
        );
    }
    let (seconds, switches) = best(all(), |_| {
        Ok(|gpu: &Gpu<'_>| gpu.launch(barriers::args(100_u32).grid(grid).block(block)))
    })?;
    println!("sync_threads: {:.0} ns per thread and barrier", seconds * 1e9 / switches as f64);
    Ok(())
}

/// The launches of a measurement.
const LAUNCHES: u64 = 5;

/// Returns the processor time of the fastest launch in seconds, and the number of thread switches
/// per launch.
fn best<L: Fn(&Gpu<'_>) -> Result<()>>(
    simulation: Simulation,
    prepare: impl Fn(&Gpu<'_>) -> Result<L> + Sync,
) -> Result<(f64, u64)> {
    let world = world(simulation);
    let of_ranks = run(&world, |gpu| {
        let (launch, mut best) = (prepare(gpu)?, f64::MAX);
        for _ in 0..LAUNCHES {
            gpu.barrier()?;
            let begun = processor_time();
            launch(gpu)?;
            best = best.min(processor_time() - begun);
        }
        Ok(best)
    })?;
    let switches = world.simulated_machine().map_or(0, |machine| machine.activity().switches);
    Ok((of_ranks[0], switches / LAUNCHES))
}
