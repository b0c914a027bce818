//! Counters of the rows of experts, and what says which rows a token has.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;

use super::ep_layout::NONE;
use super::shape::Shape;

/// Experts that a thread loads together.
pub(super) const UNROLL: usize = 8;

/// The most warps of a block.
pub(super) const WARPS: usize = 16;

/// Adds 1 to a word of shared memory.
///
/// # Safety
///
/// Other threads access the word atomically, or on the other side of a barrier.
#[track_caller]
pub(super) unsafe fn add_one(word: *mut u32) {
    // SAFETY: other accesses are atomic, or separated by a barrier, as the caller guarantees.
    unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Order::Relaxed, Scope::Cta);
}

/// Returns the sum of `mine` over the threads before this one.
///
/// # Safety
///
/// All threads of the block call this together, once between two barriers, and `sums` has
/// [`WARPS`] words of shared memory.
#[track_caller]
pub(super) unsafe fn sum_before(mine: u32, sums: *mut u32) -> u32 {
    let (lane, own_warp) = (warp::lane_id(), warp::warp_id());
    // SAFETY: all threads of the block are here, and `sums` has a word for each warp.
    unsafe {
        let (mut sum, mut distance) = (mine, 1);
        while distance < warp::WARP_SIZE {
            let lower = warp::shuffle_up(sum, distance);
            sum += if lane >= distance { lower } else { 0 };
            distance *= 2;
        }
        if lane == warp::WARP_SIZE - 1 {
            mem::store(sums.wrapping_add(own_warp as usize), sum);
        }
        thread::sync_threads();
        let mut before = sum - mine;
        for warp in 0..own_warp {
            before += mem::load(sums.wrapping_add(warp as usize));
        }
        before
    }
}

/// Returns the number of a token's row among those of an expert, given how many come before the
/// token's; the token may have the expert several times. Lane `k` has the `k`-th expert. Counts the
/// token's rows.
///
/// # Safety
///
/// All lanes of a warp call this together; `next` has a word of shared memory for each expert,
/// which no other warp accesses.
pub(super) unsafe fn take_next(next: *mut u32, expert: Option<u32>) -> u32 {
    let own = expert.unwrap_or(NONE);
    let of_expert = next.wrapping_add(expert.unwrap_or(0) as usize);
    let mut number = 0;
    // SAFETY: all lanes of the warp are here, and no other warp uses `next`, as the caller
    // guarantees.
    unsafe {
        for k in 0..Shape::TOP_K as u32 {
            let other = warp::shuffle_idx(own, k);
            number += u32::from(k < warp::lane_id() && other == own);
        }
        if expert.is_some() {
            number += mem::load(of_expert);
        }
        warp::sync();
        if expert.is_some() {
            add_one(of_expert);
        }
        warp::sync();
    }
    number
}

/// Stores the positions and weights of a token's rows: those of the lanes that have one, in their
/// order, and [`NONE`] after them. Returns the number of this lane's row among them.
///
/// # Safety
///
/// All lanes of a warp call this together; `returns` has the words of the token.
#[track_caller]
pub(super) unsafe fn store_returns(
    returns: *mut u32,
    is_here: bool,
    position: u32,
    weight: f32,
) -> usize {
    let lane = warp::lane_id();
    // SAFETY: all lanes of the warp are here, and `returns` has the token's words.
    unsafe {
        let here = warp::ballot(is_here);
        let at = (here & ((1 << lane) - 1)).count_ones() as usize;
        if is_here {
            mem::store(returns.wrapping_add(2 * at), position);
            mem::store(returns.wrapping_add(2 * at + 1), weight.to_bits());
        }
        if lane >= here.count_ones() && lane < Shape::TOP_K as u32 {
            mem::store(returns.wrapping_add(2 * lane as usize), NONE);
            mem::store(returns.wrapping_add(2 * lane as usize + 1), 0);
        }
        at
    }
}
