//! The 16 barriers of a block (PTX `bar.sync`). Barrier 0 is `sync_threads`. After them come
//! internal ones, at which the threads of a warpgroup wait for each other.

use std::cell::Cell;

use nccl_device::raw::host::CoopCall;

use crate::base::error::{Error, Site, thread_ids};
use crate::gpu::thread::{Block, Thread, Wait};
use crate::gpu::warp::WARP;

/// State of one barrier.
#[derive(Default)]
pub(crate) struct BlockBarrier {
    arrived: Cell<u32>,
    /// The number of expected threads; 0 means all threads of the block that have not exited.
    count: Cell<u32>,
    /// The missing lanes of the block's last warp, if a thread of that warp has arrived: a barrier
    /// for a number of threads counts whole warps.
    missing: Cell<u32>,
    first: Cell<Option<Arrival>>,
}

/// The first arrival at a barrier.
#[derive(Clone, Copy)]
struct Arrival {
    tid: u32,
    at: Site,
    coop_call: Option<CoopCall>,
}

/// The number of barriers that kernels can name.
const NAMED: u32 = 16;
/// The number of all barriers: a block has at most eight warpgroups.
pub(crate) const BARRIERS: usize = NAMED as usize + 8;
/// The number of threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;

/// Waits for the other threads of the warpgroup.
pub(crate) fn meet_warpgroup(thread: &Thread, at: Site) {
    let number = thread.tid.get() / WARPGROUP;
    let threads = thread.block().size - number * WARPGROUP;
    if threads < WARPGROUP {
        let what = format!(
            "wgmma is for {WARPGROUP} threads, but the block's last warpgroup has {threads}"
        );
        thread.misuse(at, what);
    }
    arrive_at(thread, NAMED + number, WARPGROUP, Some(CoopCall::new("wgmma")), at);
}

/// Makes the thread arrive at barrier `id` for `count` threads and wait for the others, as part of
/// the NCCL call `coop_call`, if any. Returns false if a mutation removes the barrier.
pub(crate) fn arrive(
    thread: &Thread,
    id: u32,
    count: u32,
    coop_call: Option<CoopCall>,
    at: Site,
) -> bool {
    let block = thread.block();
    if thread.gpus().removes(at) {
        return false;
    }
    if id >= NAMED {
        thread.misuse(at, format!("barrier {id} does not exist: a block has barriers 0 to 15"));
    }
    if !count.is_multiple_of(32) {
        thread.misuse(
            at,
            format!("barrier {id} for {count} threads, which is not a multiple of the warp size"),
        );
    }
    if count > block.size.next_multiple_of(32) {
        let threads = block.size;
        thread.misuse(at, format!("barrier {id} for {count} threads of a block of {threads}"));
    }
    arrive_at(thread, id, count, coop_call, at);
    true
}

fn arrive_at(thread: &Thread, id: u32, count: u32, coop_call: Option<CoopCall>, at: Site) {
    let block = thread.block();
    let barrier = &block.barriers[id as usize];
    let coop_call = coop_call.or(thread.coop_call.get());
    match barrier.first.get() {
        None => {
            barrier.first.set(Some(Arrival { tid: thread.tid.get(), at, coop_call }));
            barrier.count.set(count);
        }
        Some(first) => check_equal(thread, barrier, (id, count), first, coop_call, at),
    }
    barrier.arrived.set(barrier.arrived.get() + 1);
    if thread.tid.get() / WARP == block.size / WARP {
        barrier.missing.set(block.missing_lanes());
    }
    if let Some(what) = block.lacks_threads(id) {
        thread.misuse(at, what);
    }
    match release_if_complete(block, id, Some(thread)) {
        true => thread.arrived_last(),
        false => thread.suspend(Wait::Barrier { id, at, coop_call }),
    }
}

/// Fails the kernel if the thread's arrival differs from the first one.
fn check_equal(
    thread: &Thread,
    barrier: &BlockBarrier,
    (id, count): (u32, u32),
    first: Arrival,
    call: Option<CoopCall>,
    at: Site,
) {
    if barrier.count.get() != count {
        let others = barrier.count.get();
        let what =
            format!("barrier {id} for {count} threads, but other threads pass {others} (0 is all)");
        thread.misuse(at, what);
    }
    check_arguments(thread, call, (first.coop_call, first.tid, first.at), at);
    // Optimised builds may merge calls from different call sites.
    if cfg!(debug_assertions) && id == 0 && first.at != at {
        let what = call.map_or_else(|| "sync_threads".to_owned(), |call| call.to_string());
        let (kernel, thread_id) = (thread.kernel(), thread.id());
        thread.fail(Error::Divergent { kernel, thread: thread_id, what, at, other: first.at });
    }
}

/// Fails the kernel if a thread's cooperative call has other arguments than the call of the same
/// function by another thread of the coop. Calls of different functions may meet at a barrier, as
/// on a GPU.
pub(crate) fn check_arguments(
    thread: &Thread,
    call: Option<CoopCall>,
    (other, tid, there): (Option<CoopCall>, u32, Site),
    at: Site,
) {
    if let (Some(call), Some(other)) = (call, other)
        && call.name == other.name
        && call != other
    {
        let what = format!(
            "{call}, but thread {tid} of the same coop calls {other}, at {there}: all threads of a \
            coop pass equal arguments"
        );
        thread.misuse(at, what);
    }
}

/// Returns the report of a cooperative call that lacks threads which have returned.
pub(crate) fn lacks_threads(call: &str, count: u32, returned: &[u32]) -> String {
    let have = if returned.len() == 1 { "has" } else { "have" };
    let returned = thread_ids(returned);
    format!(
        "{call} is for {count} threads, but {returned} of the block {have} returned from the \
        kernel without it"
    )
}

impl Block {
    /// Returns the number of lanes by which the last warp is smaller than a whole one.
    fn missing_lanes(&self) -> u32 {
        self.size.next_multiple_of(WARP) - self.size
    }

    /// Returns a report if barrier `id`, at which threads wait, lacks threads that have returned
    /// from the kernel. `sync_threads` by the kernel itself is for the remaining threads, as on a
    /// GPU; but a cooperative call gives each thread of its coop a share. Threads that exit because
    /// the host aborts do not count as returned.
    fn lacks_threads(&self, id: u32) -> Option<String> {
        let barrier = &self.barriers[id as usize];
        let call = barrier.first.get()?.coop_call;
        let count = barrier.count.get();
        let lacks = match count {
            0 => call.is_some() && self.live.get() < self.size,
            count => self.live.get() + self.missing_lanes() < count,
        };
        if !lacks {
            return None;
        }
        let returned = self.threads().filter(|thread| thread.returned.get());
        let returned: Vec<u32> = returned.map(|thread| thread.tid.get()).collect();
        if returned.is_empty() {
            return None;
        }
        let count = if count == 0 { self.size } else { count };
        let call = call.map_or_else(|| format!("barrier {id}"), |call| call.to_string());
        Some(lacks_threads(&call, count, &returned))
    }
}

/// Wakes the threads at barrier `id`, except `except`, if all have arrived; returns whether they
/// have.
fn release_if_complete(block: &Block, id: u32, except: Option<&Thread>) -> bool {
    let barrier = &block.barriers[id as usize];
    let lacks = match barrier.count.get() {
        0 => barrier.arrived.get() < block.live.get(),
        count => barrier.arrived.get() + barrier.missing.get() < count,
    };
    if lacks {
        return false;
    }
    barrier.arrived.set(0);
    barrier.missing.set(0);
    barrier.first.set(None);
    let is_last = |other: &Thread| except.is_some_and(|thread| std::ptr::eq(thread, other));
    let waits =
        |other: &Thread| matches!(other.wait.get(), Wait::Barrier { id: at, .. } if at == id);
    // The internal barriers order no accesses.
    if let Some(gpus) = block.threads().next().map(Thread::gpus).filter(|_| id < NAMED) {
        let threads = || {
            let all = block.threads().filter(|other| is_last(other) || waits(other));
            all.map(|thread| &thread.race)
        };
        // A thread that has exited has not arrived, and is ordered before none.
        let whole = barrier.count.get() == 0 && block.live.get() == block.size;
        gpus.memory.races.barrier(threads, whole);
    }
    block.threads().filter(|other| !is_last(other) && waits(other)).for_each(Thread::wake);
    true
}

/// Completes barriers for all threads that waited only for `thread`, which has ended; fails the
/// kernel if they need it.
pub(crate) fn thread_ended(block: &Block, thread: &Thread) {
    for (id, barrier) in (0..).zip(&block.barriers) {
        if barrier.arrived.get() == 0 {
            continue;
        }
        if let (Some(what), Some(first)) = (block.lacks_threads(id), barrier.first.get()) {
            let (kernel, waits) = (block.grid.launch.kernel, block.thread(first.tid).id());
            thread.gpus().fail(Error::Misuse { kernel, thread: waits, what, at: first.at });
        } else if barrier.count.get() == 0 {
            release_if_complete(block, id, None);
        }
    }
}
