//! Outcomes that PTX's memory model allows and the simulator does not show: those in which a store
//! takes effect before an earlier access of its thread. A simulated store is late for some threads,
//! but the stores to a word keep the order of the run. If a test fails, the simulator shows more.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;

use crate::{all_but, outcomes};

/// Load buffering: each of two blocks loads the other's word and then stores to its own.
#[kernel]
unsafe fn load_and_store(words: *mut u32, results: *mut u32, _form: u32) {
    let me = thread::block_idx_x() as usize;
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let other = AtomicU32::from_ptr(words.add(4 - 4 * me));
        mem::store(results.add(me), other.load(Order::Relaxed, Scope::Gpu));
        AtomicU32::from_ptr(words.add(4 * me)).store(1, Order::Relaxed, Scope::Gpu);
    }
}

#[test]
fn a_load_does_not_see_a_store_that_comes_after_it_in_a_cycle() {
    assert_eq!(outcomes::<load_and_store, 2>(2, 0), all_but(2, &[[1, 1]]));
}

/// Two times two stores: each of two blocks stores 1 to one word and then 2 to the other. The
/// outcome is what the words are at the end.
#[kernel]
unsafe fn store_twice(_words: *mut u32, results: *mut u32, _form: u32) {
    let me = thread::block_idx_x() as usize;
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        AtomicU32::from_ptr(results.add(me)).store(1, Order::Relaxed, Scope::Gpu);
        AtomicU32::from_ptr(results.add(1 - me)).store(2, Order::Relaxed, Scope::Gpu);
    }
}

#[test]
fn stores_to_two_words_do_not_both_end_up_in_the_reverse_of_their_order() {
    assert_eq!(outcomes::<store_twice, 2>(2, 0), [[1, 2], [2, 1], [2, 2]].into());
}
