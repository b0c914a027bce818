//! Store buffering: each of two threads stores to its word and then reads the other's. Only
//! sequentially consistent fences forbid that both read what was there before.

use cuda_std::atomic::{AtomicU32, Order, Scope, fence};
use cuda_std::prelude::*;

use crate::{all, all_but, outcomes};

/// Blocks 0 and 1 store and read; the outcome is what each has read. The forms, from 0: relaxed;
/// release and acquire; an `AcqRel` fence between the accesses; a `SeqCst` fence; a `SeqCst` fence
/// in block 0 only; one with the scope of the block; `SeqCst` accesses.
#[kernel]
unsafe fn store_and_read(words: *mut u32, results: *mut u32, form: u32) {
    let me = thread::block_idx_x() as usize;
    let (store, load) = match form {
        1 => (Order::Release, Order::Acquire),
        6 => (Order::SeqCst, Order::SeqCst),
        _ => (Order::Relaxed, Order::Relaxed),
    };
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        AtomicU32::from_ptr(words.add(4 * me)).store(1, store, Scope::Gpu);
        match form {
            2 => fence(Order::AcqRel, Scope::Gpu),
            3 => fence(Order::SeqCst, Scope::Gpu),
            4 if me == 0 => fence(Order::SeqCst, Scope::Gpu),
            5 => fence(Order::SeqCst, Scope::Cta),
            _ => {}
        }
        let other = AtomicU32::from_ptr(words.add(4 - 4 * me));
        mem::store(results.add(me), other.load(load, Scope::Gpu));
    }
}

#[test]
fn both_threads_miss_the_others_store_unless_both_have_a_sequentially_consistent_fence() {
    for form in [0, 1, 2, 4, 5] {
        assert_eq!(outcomes::<store_and_read, 2>(2, form), all(2), "form {form}");
    }
    for form in [3, 6] {
        let right = all_but(2, &[[0, 0]]);
        assert_eq!(outcomes::<store_and_read, 2>(2, form), right, "form {form}");
    }
}
