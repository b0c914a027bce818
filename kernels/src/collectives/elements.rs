//! Elements of any number and alignment, as vectors of 16 bytes.

use crate::prelude::*;

/// `count` elements from an address on. The last vector may be partial. `LOOP` is whether its bytes
/// are loaded and stored in a loop, which is shorter, and may take more registers.
#[derive(Clone, Copy)]
pub(crate) struct Elements<T, const LOOP: bool = false> {
    address: *mut T,
    count: usize,
}

impl<T: Element, const LOOP: bool> Elements<T, LOOP> {
    pub(crate) fn new(address: *mut T, count: usize) -> Self {
        Self { address, count }
    }

    pub(crate) fn vectors(self) -> usize {
        self.count.div_ceil(Vec16::<T>::LANES)
    }

    /// Returns the address of a vector.
    pub(crate) fn address(self, at: usize) -> *mut T {
        self.address.wrapping_add(at * Vec16::<T>::LANES)
    }

    /// Returns the address of a vector, and whether it is whole and aligned.
    fn vector(self, at: usize) -> (*mut T, bool) {
        // All vectors are aligned if the first one is, as they are 16 bytes apart.
        let is_aligned = self.address.addr().is_multiple_of(16);
        (self.address(at), at < self.count / Vec16::<T>::LANES && is_aligned)
    }

    /// Returns the number of elements from a vector on.
    pub(crate) fn left(self, at: usize) -> usize {
        self.count.saturating_sub(at * Vec16::<T>::LANES)
    }

    /// Prefetches a vector, if there is one. The elements are allocated.
    pub(crate) unsafe fn prefetch(self, at: usize) {
        if at < self.vectors() {
            // SAFETY: the elements are allocated, as the caller guarantees.
            unsafe { mem::prefetch(self.address(at)) };
        }
    }

    /// Loads a vector. Elements after the last one are 0: all of them if there is no such vector.
    /// The elements are allocated, and nothing writes those of the vector.
    #[track_caller]
    pub(crate) unsafe fn load(self, at: usize) -> Vec16<T> {
        let (address, is_plain) = self.vector(at);
        // SAFETY: the caller guarantees the elements.
        unsafe {
            match is_plain {
                true => mem::load_vec(address),
                // Opaque to the compiler, which would otherwise count for whole vectors, too.
                false => load_each::<T, LOOP>(address, self.left(hint::opaque_usize(at))),
            }
        }
    }

    /// Stores a vector, without the lanes after the last element. The elements are allocated, and
    /// nothing else accesses those of the vector.
    #[track_caller]
    pub(crate) unsafe fn store(self, at: usize, vector: Vec16<T>) {
        let (address, is_plain) = self.vector(at);
        // SAFETY: the caller guarantees the elements.
        unsafe {
            match is_plain {
                true => mem::store_vec(address, vector),
                false => store_each::<T, LOOP>(address, self.left(hint::opaque_usize(at)), vector),
            }
        }
    }
}

/// Loads the first `left` elements of a vector one at a time; the others are 0.
#[track_caller]
pub(crate) unsafe fn load_each<T: Element, const LOOP: bool>(
    address: *const T,
    left: usize,
) -> Vec16<T> {
    let (nothing, mut bits) = (Vec16::from_bits([0; 4]), 0);
    // SAFETY: the caller guarantees the elements.
    unsafe {
        if size_of::<T>() > 1 || !LOOP {
            return Vec16::from_fn(|i| match i < left {
                true => mem::load(address.wrapping_add(i)),
                false => nothing.lane(0),
            });
        }
        each_byte(left, |i| {
            let byte = mem::load(address.cast::<u8>().wrapping_add(i));
            bits |= u128::from(byte) << (8 * i);
        });
    }
    Vec16::from_bits([0, 32, 64, 96].map(|shift| (bits >> shift) as u32))
}

/// Stores the first `left` elements of a vector one at a time.
#[track_caller]
pub(crate) unsafe fn store_each<T: Element, const LOOP: bool>(
    address: *mut T,
    left: usize,
    vector: Vec16<T>,
) {
    // SAFETY: the caller guarantees the elements.
    let store = |i| unsafe { mem::store(address.wrapping_add(i), vector.lane(i)) };
    if size_of::<T>() == 1 && LOOP {
        return each_byte(left, store);
    }
    for i in 0..Vec16::<T>::LANES {
        if i < left {
            store(i);
        }
    }
}

/// Calls `f` with the index of each of a vector's first bytes: `left`, or all of them.
fn each_byte(left: usize, mut f: impl FnMut(usize)) {
    let mut i = 0; // A range would be unrolled.
    while i < hint::opaque_usize(16) && i < left {
        f(i);
        i += 1;
    }
}
