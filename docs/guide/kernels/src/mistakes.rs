//! Kernels with a planted mistake each; the chapters show the simulator's reports.

// ANCHOR: uses
use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};
// ANCHOR_END: uses

// ANCHOR: no_barrier
/// Stores a number to each rank, and adds up the numbers of all ranks. Block: one thread.
#[kernel]
pub unsafe fn no_barrier(comm: DevComm, mine: f32, sums: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    for peer in team.all_from_self() {
        // SAFETY: the window has an element for each rank.
        unsafe { sums.lsa(peer).store(team.rank as usize, mine) };
    }
    let mut total = 0.0;
    for rank in 0..team.n_ranks as usize {
        // SAFETY: the window has this element. But has the rank stored it yet?
        total += unsafe { sums.local().load(rank) };
    }
    // SAFETY: the window has an element.
    unsafe { out.local().store(0, total) };
}
// ANCHOR_END: no_barrier

// ANCHOR: relaxed
/// Waits for the ranks at a barrier that orders nothing. Block: one thread.
#[kernel]
pub unsafe fn relaxed(comm: DevComm, inbox: Window<f32>, out: Window<f32>) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // SAFETY: both windows have an element.
    unsafe {
        inbox.lsa(team.next()).store(0, team.rank as f32);
        barrier.sync(MemoryOrder::Relaxed);
        out.local().store(0, inbox.local().load(0));
    }
}
// ANCHOR_END: relaxed

// ANCHOR: narrow
/// Sends a flag between two ranks at the scope of one GPU. Block: one thread.
#[kernel]
pub unsafe fn narrow(comm: DevComm, data: Window<f32>, flag: Window<u32>) {
    let team = comm.lsa_team();
    // SAFETY: both windows have an element.
    unsafe {
        if team.rank == 0 {
            data.lsa(1).store(0, 1.5);
            AtomicU32::from_ptr(flag.lsa(1).as_ptr()).store(1, Order::Release, Scope::Gpu);
        } else {
            let flag = AtomicU32::from_ptr(flag.local().as_ptr());
            while flag.load(Order::Acquire, Scope::Gpu) == 0 {}
            data.local().store(0, 2.0 * data.local().load(0));
        }
    }
}
// ANCHOR_END: narrow

// ANCHOR: block
/// Exchanges values in a block through shared memory, without `sync_threads`.
#[kernel]
pub unsafe fn block(out: *mut f32) {
    let i = thread::thread_idx_x() as usize;
    let tile = shared_array![f32; 64];
    // SAFETY: the block has 64 threads, and `out` has 64 elements.
    unsafe {
        mem::store(tile.add(i), i as f32);
        mem::store(out.add(i), mem::load(tile.add(63 - i)));
    }
}
// ANCHOR_END: block

// ANCHOR: gin_early
/// Reads the element that the previous rank puts, without a wait for its signal.
#[kernel(B = gin)]
pub unsafe fn gin_early<B: GinBackend>(
    comm: DevComm,
    source: Window<f32>,
    target: Window<f32>,
    out: Window<f32>,
) {
    let (world, coop) = (comm.world_team(), Coop::cta());
    let gin = comm.gin::<B>(0);
    // SAFETY: the windows have an element.
    unsafe {
        let put = gin.put(world, world.next(), target.at(0), source.at(0), 1);
        put.signal(comm.signal(0).inc()).post(coop);
        if coop.thread_rank() == 0 {
            out.local().store(0, target.local().load(0));
        }
    }
    gin.wait_signal(coop, comm.signal(0), 1, MemoryOrder::Acquire);
    gin.flush(coop, MemoryOrder::Relaxed);
}
// ANCHOR_END: gin_early

// ANCHOR: no_flush
/// Writes the source of a put again before the put has read it.
#[kernel(B = gin)]
pub unsafe fn no_flush<B: GinBackend>(comm: DevComm, source: Window<f32>, target: Window<f32>) {
    let (world, coop) = (comm.world_team(), Coop::cta());
    let gin = comm.gin::<B>(0);
    // SAFETY: the windows have an element.
    unsafe {
        let put = gin.put(world, world.next(), target.at(0), source.at(0), 1);
        put.signal(comm.signal(0).inc()).post(coop);
        if coop.thread_rank() == 0 {
            source.local().store(0, 0.0);
        }
    }
    gin.wait_signal(coop, comm.signal(0), 1, MemoryOrder::Acquire);
    gin.flush(coop, MemoryOrder::Relaxed);
}
// ANCHOR_END: no_flush

// ANCHOR: deadlock
/// Returns before the second barrier in the last rank.
#[kernel]
pub fn deadlock(comm: DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if comm.rank() + 1 == comm.n_ranks() {
        return;
    }
    barrier.sync(MemoryOrder::Release);
}
// ANCHOR_END: deadlock

// ANCHOR: panic
/// Fails a check in one thread.
#[kernel]
pub unsafe fn panic(x: &[f32], out: *mut f32) {
    let i = thread::index_1d() as usize;
    assert!(i < 40, "the table has 40 entries");
    // SAFETY: one thread writes each element.
    unsafe { mem::store(out.add(i), x[i]) };
}
// ANCHOR_END: panic
