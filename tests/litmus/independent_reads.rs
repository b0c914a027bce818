//! Causality: independent reads of independent writes, and a write that is passed on.

use cuda_std::atomic::{AtomicU32, Order, Scope, fence};
use cuda_std::prelude::*;

use crate::{all, all_but, outcomes};

/// Blocks 0 and 1 write a word each; blocks 2 and 3 read both, in opposite orders. The loads of
/// form 0 are relaxed, those of form 1 acquire; form 2 has fences (`SeqCst`) between them.
#[kernel]
unsafe fn independent_reads(words: *mut u32, results: *mut u32, form: u32) {
    let block = thread::block_idx_x() as usize;
    let order = if form == 1 { Order::Acquire } else { Order::Relaxed };
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let word = |i| AtomicU32::from_ptr(words.add(4 * i));
        if block < 2 {
            word(block).store(1, Order::Relaxed, Scope::Gpu);
            return;
        }
        let first = word(block - 2).load(order, Scope::Gpu);
        if form == 2 {
            fence(Order::SeqCst, Scope::Gpu);
        }
        let second = word(3 - block).load(order, Scope::Gpu);
        mem::store(results.add(2 * block - 4), first);
        mem::store(results.add(2 * block - 3), second);
    }
}

#[test]
fn readers_disagree_on_the_order_of_independent_writes_unless_fences_order_them() {
    for form in [0, 1] {
        assert_eq!(outcomes::<independent_reads, 4>(4, form), all(2), "form {form}");
    }
    assert_eq!(outcomes::<independent_reads, 4>(4, 2), all_but(2, &[[1, 0, 1, 0]]));
}

/// Block 0 writes a word; block 1 reads it and writes another one; block 2 reads that one and then
/// the first. The outcome is what they have read. In form 0 block 1 releases and block 2 acquires;
/// in form 1 block 1 is relaxed, in form 2 block 2.
#[kernel]
unsafe fn pass_on(words: *mut u32, results: *mut u32, form: u32) {
    let release = if form == 1 { Order::Relaxed } else { Order::Release };
    let acquire = if form == 2 { Order::Relaxed } else { Order::Acquire };
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let (first, second) = (AtomicU32::from_ptr(words), AtomicU32::from_ptr(words.add(4)));
        match thread::block_idx_x() {
            0 => first.store(1, Order::Relaxed, Scope::Gpu),
            1 => {
                mem::store(results, first.load(Order::Relaxed, Scope::Gpu));
                second.store(1, release, Scope::Gpu);
            }
            _ => {
                mem::store(results.add(1), second.load(acquire, Scope::Gpu));
                mem::store(results.add(2), first.load(Order::Relaxed, Scope::Gpu));
            }
        }
    }
}

#[test]
fn what_a_thread_has_seen_is_visible_to_those_that_it_releases_to() {
    assert_eq!(outcomes::<pass_on, 3>(3, 0), all_but(2, &[[1, 1, 0]]));
    for form in [1, 2] {
        assert_eq!(outcomes::<pass_on, 3>(3, form), all(2), "form {form}");
    }
}
