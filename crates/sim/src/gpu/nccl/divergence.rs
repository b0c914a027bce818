//! Cooperative calls in which the threads of a coop do not wait for each other: the simulator
//! compares the arguments of the threads' first calls, of their second ones, and so on.

use litemap::LiteMap;
use nccl_device::raw::host::CoopCall;

use super::coop::Coop;
use crate::base::error::Site;
use crate::gpu::barrier::check_arguments;
use crate::gpu::thread::{Block, Thread};

/// A coop of a block: its kind (1 is lanes, 2 a span of warps, 3 the block), its first warp, and
/// the mask of its lanes, or the number of its warps and its id.
type Key = (u8, u32, u32);

/// The calls of a block's coops.
#[derive(Default)]
pub(crate) struct CallDivergence {
    /// The number of calls that each thread has made with a coop.
    made: LiteMap<(Key, u32), u32>,
    /// The calls that not all threads of the coop have made yet, by number.
    open: LiteMap<(Key, u32), Open>,
}

/// A call that a part of the coop has made.
struct Open {
    /// The first thread's call.
    call: CoopCall,
    tid: u32,
    at: Site,
    /// The number of threads that have made the call.
    made: u32,
    /// The number of threads of the coop.
    size: u32,
}

impl Coop {
    fn key(self, thread: &Thread) -> Option<Key> {
        match self {
            Self::Thread => None,
            Self::Lanes { mask } => Some((1, thread.tid.get() / crate::gpu::warp::WARP, mask)),
            Self::Span { first, warps, id } => Some((2, first, warps << 8 | id)),
            Self::Cta => Some((3, 0, 0)),
        }
    }
}

/// Records that the thread makes a call with its coop.
pub(super) fn call(thread: &Thread, coop: Coop, call: CoopCall, at: Site) {
    let Some(key) = coop.key(thread) else { return };
    let tid = thread.tid.get();
    let mut calls = thread.block().calls.borrow_mut();
    let made = calls.made.entry((key, tid)).or_insert(0);
    *made += 1;
    let number = *made;
    let size = coop.size(thread);
    let first = || Open { call, tid, at, made: 0, size };
    let open = calls.open.entry((key, number)).or_insert_with(first);
    open.made += 1;
    let first = (Some(open.call), open.tid, open.at);
    if open.made == size {
        calls.open.remove(&(key, number));
    }
    drop(calls);
    check_arguments(thread, Some(call), first, at);
}

impl Block {
    /// Returns the location and the report of a call that a part of its coop has not made, at the
    /// end of the block; none if threads have exited because the host aborts.
    pub(crate) fn incomplete_call(&self) -> Option<(Site, String)> {
        if !self.threads().all(|thread| thread.returned.get()) {
            return None;
        }
        let calls = self.calls.borrow();
        let (_, Open { call, at, made, size, .. }) = calls.open.iter().next()?;
        let what = format!(
            "{call}: only {made} of the {size} threads of the coop have made this call, so a part \
             of the elements is left out"
        );
        Some((at, what))
    }
}
