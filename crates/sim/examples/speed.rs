//! How fast the simulator is: element accesses and switches a second, for an all-reduce over LSA. In processor time, the
//! best of five.
//!
//! `cargo run -p devcomm-sim --example speed -- [RANKS [BLOCKS [THREADS [ELEMENTS]]]]`

use cuda_std::prelude::*;
use devcomm_sim::{Builder, DevCommConfig, LaunchConfig, Result, Simulator};
use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Window};

#[kernel]
unsafe fn allreduce(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {
    let team = comm.lsa_team();
    LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::this_block(), |barrier| {
        barrier.sync(MemoryOrder::Acquire);
        let each = count / team.n_ranks as usize;
        let begin = each * team.rank as usize;
        let mut i = begin + thread::index_1d() as usize;
        while i < begin + each {
            let mut sum = 0.0;
            for peer in 0..team.n_ranks {
                // SAFETY: below `count`; the barriers order it.
                sum += unsafe { send.lsa(peer).load(i) };
            }
            for peer in 0..team.n_ranks {
                // SAFETY: as above.
                unsafe { recv.lsa(peer).store(i, sum) };
            }
            i += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        }
        barrier.sync(MemoryOrder::Release);
    });
}

#[kernel]
unsafe fn barriers(count: u32) {
    for _ in 0..count {
        thread::sync_threads();
    }
}

/// Processor time of this thread in seconds: other work on the machine does not count.
fn processor_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock writes to the struct.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn main() -> Result<()> {
    let number = |at: usize, or: usize| {
        std::env::args().nth(at).and_then(|text| text.parse().ok()).unwrap_or(or)
    };
    let (ranks, grid, block) = (number(1, 8), number(2, 8) as u32, number(3, 256) as u32);
    let count = number(4, 1 << 18);
    println!("{ranks} ranks, {grid} blocks of {block} threads, {count} elements a rank");
    let all = Simulator::builder().ranks(ranks);
    show("unwatched", all.watch(false), grid, block, count)?;
    show("watched (default)", all, grid, block, count)?;
    show("random order", all.seed(7), grid, block, count)?;
    show("preempted", all.preempt(true), grid, block, count)?;
    show("preempted, random", all.preempt(true).seed(7), grid, block, count)?;

    let sim = all.build()?;
    let begun = processor_time();
    // SAFETY: the kernel touches no memory.
    let report = unsafe { sim.launch(barriers, LaunchConfig::new(grid, block), |_| (100_u32,)) }?;
    let switch = (processor_time() - begun) * 1e9 / report.switches as f64;
    println!("sync_threads: {switch:.0} ns a thread and barrier");
    Ok(())
}

fn show(what: &str, builder: Builder, grid: u32, block: u32, count: usize) -> Result<()> {
    let sim = builder.build()?;
    let (send, recv) = (sim.window::<f32>(count)?, sim.window::<f32>(count)?);
    for rank in 0..sim.ranks() {
        send.write(rank, &vec![1.0; count])?;
    }
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: grid, ..Default::default() })?;
    let config = LaunchConfig::new(grid, block);
    let args = |rank: usize| (comm.rank(rank), send.rank(rank), recv.rank(rank), count);
    let mut seconds = f64::MAX;
    let mut report = None;
    for _ in 0..5 {
        let begun = processor_time();
        // SAFETY: both windows have `count` elements.
        report = Some(unsafe { sim.launch(allreduce, config, args) }?);
        seconds = seconds.min(processor_time() - begun);
    }
    let switches = report.map_or(0, |report| report.switches);
    let accesses = (2 * count * sim.ranks()) as f64;
    println!(
        "{what:20} {:6.1} M accesses/s, {switches:8} switches ({:5.0} ns each, work included)",
        accesses / seconds / 1e6,
        seconds * 1e9 / switches as f64,
    );
    Ok(())
}
