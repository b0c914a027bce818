//! Indices, barriers, warp operations, printing.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Shuffle, current, shared_static};
use crate::io::{Arguments, Pieces};
use crate::thread::index_in_block;

macro_rules! indices {
    ($($name:ident)*) => { $(
        #[track_caller]
        pub(crate) fn $name(axis: usize) -> u32 {
            current().1.$name[axis]
        }
    )* };
}

indices!(thread_idx block_idx block_dim grid_dim);

#[track_caller]
pub(crate) fn lane_id() -> u32 {
    index_in_block() % crate::warp::WARP_SIZE
}

hooks! {
    /// Executes a barrier. Returns false if a planted bug removes it.
    meet(id: u32, count: u32) -> bool = barrier(id, count);
    sync_warp(mask: u32) = sync_warp(mask);
    shuffle(mask: u32, mode: Shuffle, value: u32, lane: u32, width: u32) -> (u32, bool) =
        shuffle(mask, mode, value, lane, width);
    ballot(mask: u32, predicate: bool) -> u32 = ballot(mask, predicate);
}

#[inline]
#[track_caller]
pub(crate) fn barrier(id: u32, count: u32) {
    meet(id, count);
}

#[inline]
#[track_caller]
pub(crate) fn barrier_all() {
    meet(0, 0);
}

/// Executes a block barrier that counts predicates, in a word of shared memory and by three
/// barriers: the first follows the reads of the previous count, the second separates the reset from
/// the additions, and the third the additions from the reads. If a planted bug removes it, a thread
/// counts its own predicate only.
#[track_caller]
pub(crate) fn barrier_count(predicate: bool) -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // SAFETY: the simulator returns at least four bytes, aligned to 16, alive while the block runs;
    // all accesses to them are in this function, and atomic.
    let count = unsafe { AtomicU32::from_ptr(shared_static(COUNT.as_ptr())) };
    if !meet(0, 0) {
        return predicate.into();
    }
    // Each thread resets it, since any other one may have left the block.
    count.store(0, Ordering::Relaxed);
    barrier_all();
    count.fetch_add(predicate.into(), Ordering::Relaxed);
    barrier_all();
    count.load(Ordering::Relaxed)
}

#[track_caller]
pub(crate) fn barrier_and(predicate: bool) -> bool {
    barrier_count(!predicate) == 0
}

#[track_caller]
pub(crate) fn barrier_or(predicate: bool) -> bool {
    barrier_count(predicate) != 0
}

/// Does the same as [`barrier_or`], for a named barrier of `threads` threads; it executes three
/// barriers as [`barrier_count`] does.
#[track_caller]
pub(crate) fn named_barrier_or(id: u32, threads: u32, predicate: bool) -> bool {
    /// A word for each barrier. `meet` reports an id above 15.
    static ANY: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];
    // SAFETY: the word is a static of the block's, which threads access only as an atomic.
    let any = unsafe { AtomicU32::from_ptr(shared_static(ANY[id as usize % 16].as_ptr())) };
    if !meet(id, threads) {
        return predicate;
    }
    any.store(0, Ordering::Relaxed);
    barrier(id, threads);
    any.fetch_or(predicate.into(), Ordering::Relaxed);
    barrier(id, threads);
    any.load(Ordering::Relaxed) != 0
}

#[track_caller]
pub(crate) fn exit() -> ! {
    let (thread, context) = current();
    (context.ops.exit)(thread)
}

/// Returns the existing lanes of the warp, as if none had diverged or exited.
#[track_caller]
pub(crate) fn active_mask() -> u32 {
    use crate::thread::block_dim;
    use crate::warp::WARP_SIZE;
    let first = index_in_block() / WARP_SIZE * WARP_SIZE;
    let lanes = (block_dim().element_product() - first).min(WARP_SIZE);
    u32::MAX >> (WARP_SIZE - lanes)
}

#[track_caller]
pub(crate) fn warp_min(value: u32) -> u32 {
    let exchanged =
        |least: u32, distance| least.min(shuffle(u32::MAX, Shuffle::Xor, least, distance, 32).0);
    [16, 8, 4, 2, 1].into_iter().fold(value, exchanged)
}

#[track_caller]
pub(crate) fn match_any(value: u32) -> u32 {
    let has = |lane| shuffle(u32::MAX, Shuffle::Index, value, lane, 32).0 == value;
    (0..32).fold(0, |lanes, lane| lanes | u32::from(has(lane)) << lane)
}

#[inline]
#[track_caller]
pub(crate) fn vote_all(mask: u32, predicate: bool) -> bool {
    ballot(mask, predicate) == mask
}

#[inline]
#[track_caller]
pub(crate) fn vote_any(mask: u32, predicate: bool) -> bool {
    ballot(mask, predicate) != 0
}

#[track_caller]
pub(crate) fn clock64() -> u64 {
    let (thread, context) = current();
    (context.ops.clock)(thread)
}

#[track_caller]
pub(crate) fn globaltimer() -> u64 {
    clock64()
}

#[track_caller]
pub(crate) fn print<P: Pieces, A: Arguments>(arguments: A) {
    let (thread, context) = current();
    let mut text = String::new();
    if arguments.write(P::PIECES, &mut text).is_ok() {
        (context.ops.print)(thread, &text);
    }
}

pub(crate) fn opaque(value: u32) -> u32 {
    value
}

pub(crate) fn opaque_usize(value: usize) -> usize {
    value
}
