//! Accesses of 16 bytes: they may tear, but words of 8 bytes do not.

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;

use crate::outcomes;

/// Block 0 stores ones to 16 bytes, and block 1 loads them. The outcome is the words. Form 0 uses a
/// vector; form 1 uses two words of 8 bytes, the second one with release and acquire.
#[kernel]
unsafe fn store_and_load(words: *mut u32, results: *mut u32, form: u32) {
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        let word = |i: usize| Atomic::from_ptr(words.cast::<u64>().add(i));
        let ones = u64::MAX / u64::from(u32::MAX);
        match (form, thread::block_idx_x()) {
            (0, 0) => mem::store_vec_relaxed(words, Vec16::from_bits([1; 4]), Scope::Gpu),
            (0, _) => {
                let vector = mem::load_vec_relaxed(words, Scope::Gpu).to_bits();
                (0..4).for_each(|i| mem::store(results.add(i), vector[i]));
            }
            (_, 0) => {
                word(0).store(ones, Order::Relaxed, Scope::Gpu);
                word(1).store(ones, Order::Release, Scope::Gpu);
            }
            (..) => {
                let second = word(1).load(Order::Acquire, Scope::Gpu);
                let first = word(0).load(Order::Relaxed, Scope::Gpu);
                mem::store(results.cast::<u64>(), first);
                mem::store(results.cast::<u64>().add(1), second);
            }
        }
    }
}

#[test]
fn a_vector_tears_in_halves_of_8_bytes() {
    let halves = [[0; 4], [0, 0, 1, 1], [1, 1, 0, 0], [1; 4]];
    assert_eq!(outcomes::<store_and_load, 4>(2, 0), halves.into());
    // With release and acquire, the second half never arrives alone.
    assert_eq!(outcomes::<store_and_load, 4>(2, 1), [[0; 4], [1, 1, 0, 0], [1; 4]].into());
}
