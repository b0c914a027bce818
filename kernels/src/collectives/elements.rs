//! Elements of any number and alignment, as vectors of 16 bytes.

use crate::prelude::*;

/// `count` elements from an address on. The last vector may be partial.
#[derive(Clone, Copy)]
pub(crate) struct Elements<T> {
    address: *mut T,
    count: usize,
}

impl<T: Accumulate> Elements<T> {
    pub(crate) fn new(address: *mut T, count: usize) -> Self {
        Self { address, count }
    }

    pub(crate) fn vectors(self) -> usize {
        self.count.div_ceil(Vec16::<T>::LANES)
    }

    /// Returns the address of a vector, and whether it is whole and aligned.
    fn vector(self, at: usize) -> (*mut T, bool) {
        let lanes = Vec16::<T>::LANES;
        // All vectors are aligned if the first one is, as they are 16 bytes apart.
        let is_aligned = self.address.addr().is_multiple_of(16);
        (self.address.wrapping_add(at * lanes), at < self.count / lanes && is_aligned)
    }

    /// Returns the number of elements from a vector on.
    fn left(self, at: usize) -> usize {
        // Opaque to the compiler, which would otherwise compute this for whole vectors, too.
        self.count.saturating_sub(hint::opaque_usize(at) * Vec16::<T>::LANES)
    }

    /// Prefetches a vector, if there is one. The elements are allocated.
    pub(crate) unsafe fn prefetch(self, at: usize) {
        if at < self.vectors() {
            // SAFETY: the elements are allocated, as the caller guarantees.
            unsafe { mem::prefetch(self.vector(at).0) };
        }
    }

    /// Loads a vector. Elements after the last one are 0: all of them if there is no such vector.
    /// The elements are allocated, and nothing writes those of the vector.
    #[track_caller]
    pub(crate) unsafe fn load(self, at: usize) -> Vec16<T> {
        let (address, is_plain) = self.vector(at);
        // SAFETY: only elements below `count` are read, which the caller guarantees.
        unsafe {
            if is_plain {
                return mem::load_vec(address);
            }
            let left = self.left(at);
            Vec16::from_fn(|i| match i < left {
                true => mem::load(address.wrapping_add(i)),
                false => Vec16::from_bits([0; 4]).lane(0),
            })
        }
    }

    /// Stores a vector, without the lanes after the last element. The elements are allocated, and
    /// nothing else accesses those of the vector.
    #[track_caller]
    pub(crate) unsafe fn store(self, at: usize, vector: Vec16<T>) {
        let (address, is_plain) = self.vector(at);
        // SAFETY: only elements below `count` are written, which the caller guarantees.
        unsafe {
            if is_plain {
                return mem::store_vec(address, vector);
            }
            let left = self.left(at);
            for i in 0..Vec16::<T>::LANES {
                if i < left {
                    mem::store(address.wrapping_add(i), vector.lane(i));
                }
            }
        }
    }
}
