//! Coherence: all threads see the stores to one word in one order, in which a thread's own loads
//! and stores never go back.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;

use crate::{all, all_but, outcomes};

/// Loads a word twice, relaxed.
///
/// # Safety
///
/// As for kernels with [`Args`](crate::Args).
unsafe fn load_twice(word: &AtomicU32, results: *mut u32) {
    // SAFETY: the test passes two results for this thread.
    unsafe {
        mem::store(results, word.load(Order::Relaxed, Scope::Gpu));
        mem::store(results.add(1), word.load(Order::Relaxed, Scope::Gpu));
    }
}

/// Block 0 stores 1 and then 2; block 1 loads twice.
#[kernel]
unsafe fn stores_and_loads(words: *mut u32, results: *mut u32, _form: u32) {
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let word = AtomicU32::from_ptr(words);
        if thread::block_idx_x() == 0 {
            word.store(1, Order::Relaxed, Scope::Gpu);
            word.store(2, Order::Relaxed, Scope::Gpu);
        } else {
            load_twice(word, results);
        }
    }
}

#[test]
fn loads_of_one_word_see_its_stores_in_their_order() {
    let back = [[1, 0], [2, 0], [2, 1]];
    assert_eq!(outcomes::<stores_and_loads, 2>(2, 0), all_but(3, &back));
}

/// Blocks 0 and 1 store 1 and 2; blocks 2 and 3 load twice each.
#[kernel]
unsafe fn two_writers(words: *mut u32, results: *mut u32, _form: u32) {
    let block = thread::block_idx_x();
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let word = AtomicU32::from_ptr(words);
        match block {
            0 | 1 => word.store(block + 1, Order::Relaxed, Scope::Gpu),
            _ => load_twice(word, results.add(2 * (block as usize - 2))),
        }
    }
}

#[test]
fn all_threads_see_the_stores_to_a_word_in_one_order() {
    let seen = outcomes::<two_writers, 4>(4, 0);
    assert!(seen.contains(&[1, 2, 1, 2]) && seen.contains(&[2, 1, 2, 1]));
    for outcome in seen {
        let [a, b, c, d] = outcome;
        assert!(![[1, 2, 2, 1], [2, 1, 1, 2]].contains(&outcome), "{outcome:?}");
        assert!((a == 0 || b != 0) && (c == 0 || d != 0), "back to what was before: {outcome:?}");
    }
}

/// Block 0 stores 1 and loads; block 1 loads and stores 2. The outcome is what each has loaded.
#[kernel]
unsafe fn own_stores(words: *mut u32, results: *mut u32, _form: u32) {
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let word = AtomicU32::from_ptr(words);
        if thread::block_idx_x() == 0 {
            word.store(1, Order::Relaxed, Scope::Gpu);
            mem::store(results, word.load(Order::Relaxed, Scope::Gpu));
        } else {
            mem::store(results.add(1), word.load(Order::Relaxed, Scope::Gpu));
            word.store(2, Order::Relaxed, Scope::Gpu);
        }
    }
}

#[test]
fn a_thread_sees_its_own_stores_and_none_before_it_makes_them() {
    // Block 0 does not see 0; if block 1 loaded 1, the 2 that it then stored may follow.
    assert_eq!(outcomes::<own_stores, 2>(2, 0), [[1, 0], [1, 1], [2, 0], [2, 1]].into());
}

/// Three blocks add 1; the outcome is the values that they found.
#[kernel]
unsafe fn tickets(words: *mut u32, results: *mut u32, _form: u32) {
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let ticket = AtomicU32::from_ptr(words).fetch_add(1, Order::Relaxed, Scope::Gpu);
        mem::store(results.add(thread::block_idx_x() as usize), ticket);
    }
}

#[test]
fn read_modify_writes_are_never_of_an_old_value() {
    let permutations = all::<3>(3).into_iter().filter(|[a, b, c]| a != b && b != c && a != c);
    assert_eq!(outcomes::<tickets, 3>(3, 0), permutations.collect());
}
