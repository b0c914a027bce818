//! Coops: the thread groups that make NCCL's cooperative calls.
//!
//! # Safety
//!
//! As in the parent module. A coop is recognised by its tag, which only the functions here write.

use std::mem::MaybeUninit;

use devcomm_types::nccl::CoopAny;
use nccl_device::raw::host::{CALL_SITE, CoopCall};

use crate::base::error::Site;
use crate::gpu::barrier;
use crate::gpu::thread::Thread;
use crate::gpu::warp::{self, Lane, Op, WARP};

/// The kind of a coop, in `CoopAny::storage[0]`; `storage[1]` has the lane mask or the warp span.
#[derive(Clone, Copy)]
#[repr(u64)]
enum Kind {
    Thread = 1,
    Lanes = 2,
    Span = 3,
    Cta = 4,
}

/// The tag of coops: `CoopAny::vtable` has its address.
static COOP: u8 = 0;

/// A decoded coop.
#[derive(Clone, Copy)]
pub(super) enum Coop {
    Thread,
    Lanes {
        mask: u32,
    },
    /// `warps` warps from warp `first` on, which synchronise at barrier `1 + id` of the block: a
    /// block has 16 barriers, and barrier 0 is that of `sync_threads`.
    Span {
        first: u32,
        warps: u32,
        id: u32,
    },
    Cta,
}

impl Coop {
    /// Decodes a coop; fails the kernel if no init function wrote it.
    pub(super) fn of(coop: &CoopAny, thread: &Thread, at: Site) -> Self {
        if !std::ptr::eq(coop.vtable.cast(), &raw const COOP) {
            thread.misuse(at, "the coop was not made by one of the init functions");
        }
        // SAFETY: only `init` writes this tag, and it initializes `storage`.
        let [kind, data] = coop.storage.map(|word| unsafe { word.assume_init() });
        if kind == Kind::Thread as u64 {
            Self::Thread
        } else if kind == Kind::Lanes as u64 {
            Self::Lanes { mask: data as u32 }
        } else if kind == Kind::Span as u64 {
            // As `warp_span` packs them: 16 bits, 16 bits, and the rest.
            let (first, warps) = (data as u16, (data >> 16) as u16);
            Self::Span { first: first.into(), warps: warps.into(), id: (data >> 32) as u32 }
        } else {
            Self::Cta
        }
    }

    /// Returns the thread's rank in the coop; `None` if it is not in the coop.
    pub(super) fn rank(self, thread: &Thread) -> Option<u32> {
        let lane = thread.lane();
        match self {
            Self::Thread => Some(0),
            Self::Lanes { mask } => {
                (mask >> lane & 1 == 1).then(|| (mask & !(u32::MAX << lane)).count_ones())
            }
            Self::Span { first, warps, .. } => {
                thread.tid.get().checked_sub(first * WARP).filter(|rank| *rank < warps * WARP)
            }
            Self::Cta => Some(thread.tid.get()),
        }
    }

    pub(super) fn size(self, thread: &Thread) -> u32 {
        match self {
            Self::Thread => 1,
            Self::Lanes { mask } => mask.count_ones(),
            Self::Span { warps, .. } => warps * WARP,
            Self::Cta => thread.block().size,
        }
    }

    /// Synchronises the coop, as part of the NCCL call `coop_call`, if any.
    pub(super) fn sync(self, thread: &Thread, coop_call: Option<CoopCall>, at: Site) {
        match self {
            Self::Thread => {}
            Self::Lanes { mask } => {
                warp::converge(thread, mask, Op::Sync, Lane::default(), coop_call, at);
            }
            Self::Span { warps, id, .. } => {
                barrier::arrive(thread, 1 + id, warps * WARP, coop_call, at);
            }
            Self::Cta => {
                barrier::arrive(thread, 0, 0, coop_call, at);
            }
        }
    }
}

/// Encodes a coop.
///
/// # Safety
///
/// `coop` is valid for writes.
unsafe fn init(coop: *mut CoopAny, kind: Kind, data: u64) {
    let storage = [kind as u64, data].map(MaybeUninit::new);
    let value = CoopAny { storage, vtable: (&raw const COOP).cast() };
    // SAFETY: the kernel passes memory for a coop.
    unsafe { coop.write(value) };
}

pub(super) unsafe extern "C-unwind" fn thread(coop: *mut CoopAny) {
    // SAFETY: the kernel passes memory for a coop.
    unsafe { init(coop, Kind::Thread, 0) };
}

pub(super) unsafe extern "C-unwind" fn warp(coop: *mut CoopAny) {
    // SAFETY: the kernel passes memory for a coop.
    unsafe { init(coop, Kind::Lanes, u32::MAX.into()) };
}

pub(super) unsafe extern "C-unwind" fn lanes(coop: *mut CoopAny, mask: u32) {
    // SAFETY: the kernel passes memory for a coop.
    unsafe { init(coop, Kind::Lanes, mask.into()) };
}

pub(super) unsafe extern "C-unwind" fn warp_span(
    coop: *mut CoopAny,
    first: i32,
    warps: i32,
    id: i32,
) {
    let thread = Thread::current();
    let all = thread.block().size.div_ceil(WARP) as i32;
    if first < 0 || warps < 1 || first > all || warps > all - first || !(0..15).contains(&id) {
        let what = format!(
            "warp span of {warps} warps from {first} with id {id}: the block has {all} warps, ids \
            are 0 to 14"
        );
        thread.misuse(CALL_SITE.get(), what);
    }
    let data = first as u64 | (warps as u64) << 16 | (id as u64) << 32;
    // SAFETY: the kernel passes memory for a coop.
    unsafe { init(coop, Kind::Span, data) };
}

pub(super) unsafe extern "C-unwind" fn cta(coop: *mut CoopAny) {
    // SAFETY: the kernel passes memory for a coop.
    unsafe { init(coop, Kind::Cta, 0) };
}

pub(super) unsafe extern "C-unwind" fn thread_rank(coop: *const CoopAny) -> i32 {
    let (thread, at) = (Thread::current(), CALL_SITE.get());
    // SAFETY: the kernel passes a coop.
    let coop = Coop::of(unsafe { &*coop }, thread, at);
    coop_rank(coop, thread, at) as i32
}

pub(super) unsafe extern "C-unwind" fn size(coop: *const CoopAny) -> i32 {
    let (thread, at) = (Thread::current(), CALL_SITE.get());
    // SAFETY: the kernel passes a coop.
    Coop::of(unsafe { &*coop }, thread, at).size(thread) as i32
}

pub(super) unsafe extern "C-unwind" fn sync(coop: *const CoopAny) {
    let (thread, at) = (Thread::current(), CALL_SITE.get());
    // SAFETY: the kernel passes a coop.
    let coop = Coop::of(unsafe { &*coop }, thread, at);
    coop_rank(coop, thread, at);
    coop.sync(thread, Some(CoopCall::new("ncclCoopSync")), at);
}

/// Returns the thread's rank in the coop; fails the kernel if it is not in the coop.
pub(super) fn coop_rank(coop: Coop, thread: &Thread, at: Site) -> u32 {
    coop.rank(thread)
        .unwrap_or_else(|| thread.misuse(at, "the thread is not in the coop that it passes"))
}
