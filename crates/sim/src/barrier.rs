//! The 16 barriers of a block (PTX `bar.sync`). Barrier 0 is `sync_threads`.

use std::cell::Cell;

use crate::error::{Error, Site};
use crate::thread::{Block, CoopCall, Thread, Wait};

/// State of one barrier.
#[derive(Default)]
pub(crate) struct BlockBarrier {
    arrived: Cell<u32>,
    /// Expected threads; 0: all threads of the block that have not exited.
    count: Cell<u32>,
    /// Call site of the first arrival.
    at: Cell<Option<Site>>,
}

/// Makes the thread arrive at barrier `id` for `count` threads and wait for the others, as part of
/// the NCCL call `coop_call`, if any.
pub(crate) fn arrive(thread: &Thread, id: u32, count: u32, coop_call: Option<CoopCall>, at: Site) {
    let block = thread.block();
    let Some(barrier) = block.barriers.get(id as usize) else {
        thread.misuse(at, format!("barrier {id} does not exist: a block has barriers 0 to 15"))
    };
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
    match barrier.at.get() {
        None => {
            barrier.at.set(Some(at));
            barrier.count.set(count);
        }
        Some(other) => {
            if barrier.count.get() != count {
                let others = barrier.count.get();
                thread.misuse(
                    at,
                    format!(
                        "barrier {id} for {count} threads, but other threads pass {others} (0 is \
                        all)"
                    ),
                );
            }
            // Optimised builds may merge calls from different call sites.
            if cfg!(debug_assertions) && id == 0 && other != at {
                let what = "sync_threads".to_owned();
                let (kernel, thread_id) = (thread.kernel(), thread.id());
                thread.fail(Error::Divergent { kernel, thread: thread_id, what, at, other });
            }
        }
    }
    barrier.arrived.set(barrier.arrived.get() + 1);
    if !release_if_complete(block, id, Some(thread)) {
        thread.suspend(Wait::Barrier { id, at, coop_call });
    } else if thread.gpus().random() {
        thread.suspend(Wait::Ready);
    }
}

/// Wakes the threads at barrier `id` except `except`, if all have arrived.
fn release_if_complete(block: &Block, id: u32, except: Option<&Thread>) -> bool {
    let barrier = &block.barriers[id as usize];
    let needed = match barrier.count.get() {
        0 => block.live.get(),
        // A partial last warp's missing lanes count as arrived.
        count => count.min(block.size),
    };
    if barrier.arrived.get() < needed.max(1) {
        return false;
    }
    barrier.arrived.set(0);
    barrier.at.set(None);
    for other in block.threads() {
        if !except.is_some_and(|thread| std::ptr::eq(thread, other))
            && matches!(other.wait.get(), Wait::Barrier { id: at, .. } if at == id)
        {
            other.wake();
        }
    }
    true
}

/// Completes barriers for all threads that waited only for a thread that has exited.
pub(crate) fn thread_ended(block: &Block) {
    for id in 0..block.barriers.len() {
        let barrier = &block.barriers[id];
        if barrier.arrived.get() > 0 && barrier.count.get() == 0 {
            release_if_complete(block, id as u32, None);
        }
    }
}
