//! Memory that the ranks of a test register.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that all ranks may access at the same time, so by copies and atomics only.
pub struct Memory(Box<[UnsafeCell<u64>]>);

// SAFETY: it is read and written through raw pointers only, as device memory is.
unsafe impl Sync for Memory {}
// SAFETY: it belongs to no thread.
unsafe impl Send for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(8)).map(|_| UnsafeCell::new(0)).collect())
    }

    pub fn filled(bytes: usize, mut byte: impl FnMut(usize) -> u8) -> Self {
        let memory = Self::new(bytes);
        memory.write(0, &(0..bytes).map(&mut byte).collect::<Vec<_>>());
        memory
    }

    pub fn base(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }

    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.bytes());
        let mut copy = vec![0; bytes];
        // SAFETY: the range is inside the memory.
        unsafe { std::ptr::copy(self.base().add(offset), copy.as_mut_ptr(), bytes) };
        copy
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes());
        // SAFETY: the range is inside the memory.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.base().add(offset), bytes.len()) };
    }

    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the pointer is to an aligned word of the memory.
        unsafe { AtomicU64::from_ptr(self.0[index].get()) }
    }

    pub fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }
}
