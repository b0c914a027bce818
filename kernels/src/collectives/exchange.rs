//! What ranks send to each other, as bytes: all-gather, broadcast and all-to-all.

use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use cuda_std::{hint, mem};

/// A message of the same length from each rank, or only one, to each rank.
///
/// The message to rank `p` begins `p * input_stride` bytes behind the beginning of the input. The
/// output is the messages in the order of the ranks that send.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Messages {
    /// The length of a message in bytes.
    pub bytes: usize,
    /// Bytes between the messages to two ranks; 0 if they get the same.
    pub input_stride: usize,
    /// The length of the output in bytes.
    pub output_bytes: usize,
    /// The rank that sends, or [`ALL`](Self::ALL).
    pub sender: u32,
}

impl Messages {
    /// The `sender` if all ranks send.
    pub const ALL: u32 = u32::MAX;

    /// Whether a rank sends.
    #[inline(always)]
    pub(super) fn are_from(self, rank: i32) -> bool {
        self.sender == Self::ALL || self.sender == rank as u32
    }

    /// The offset of the message to a rank.
    #[inline(always)]
    pub(super) fn input(self, to: i32) -> usize {
        to as usize * self.input_stride
    }

    /// The offset of the message from a rank.
    #[inline(always)]
    pub(super) fn output(self, from: i32) -> usize {
        if self.sender == Self::ALL { from as usize * self.bytes } else { 0 }
    }
}

/// A message in memory, as vectors of 16 bytes. The last one may be partial.
#[derive(Clone, Copy)]
pub(super) struct Bytes {
    pub address: *mut u8,
    pub len: usize,
}

impl Bytes {
    /// The address of a vector, and the bytes from there on.
    #[inline(always)]
    fn vector(self, at: usize) -> (*mut u8, usize) {
        (self.address.wrapping_add(16 * at), self.len.saturating_sub(16 * at))
    }

    /// Loads a vector. Bytes behind the last one are 0.
    ///
    /// # Safety
    ///
    /// The bytes are allocated, and nothing writes these.
    #[inline(always)]
    pub(super) unsafe fn load(self, at: usize) -> Vec16<u8> {
        let (address, left) = self.vector(at);
        // SAFETY: the caller's contract; only bytes that there are are read.
        unsafe {
            if left >= 16 && address.addr().is_multiple_of(16) {
                return mem::load_vec(address);
            }
            if left >= 16 && address.addr().is_multiple_of(4) {
                let words = address.cast::<u32>();
                return Vec16::from_bits([0, 1, 2, 3].map(|i| mem::load(words.wrapping_add(i))));
            }
            // Loops that are not unrolled.
            let (mut bits, mut i, lanes) = (0, 0, hint::opaque_usize(16));
            while i < lanes && i < left {
                bits |= u128::from(mem::load(address.wrapping_add(i))) << (8 * i);
                i += 1;
            }
            Vec16::from_bits([0, 32, 64, 96].map(|shift: u32| (bits >> shift) as u32))
        }
    }

    /// Stores the bytes of a vector that there are.
    ///
    /// # Safety
    ///
    /// The bytes are allocated, and nothing else accesses these.
    #[inline(always)]
    pub(super) unsafe fn store(self, at: usize, vector: Vec16<u8>) {
        let (address, left) = self.vector(at);
        // SAFETY: the caller's contract; only bytes that there are are written.
        unsafe {
            if left >= 16 && address.addr().is_multiple_of(16) {
                return mem::store_vec(address, vector);
            }
            let [a, b, c, d] = vector.to_bits();
            if left >= 16 && address.addr().is_multiple_of(4) {
                let words = address.cast::<u32>();
                mem::store(words, a);
                mem::store(words.wrapping_add(1), b);
                mem::store(words.wrapping_add(2), c);
                return mem::store(words.wrapping_add(3), d);
            }
            let [low, high] =
                [[a, b], [c, d]].map(|[low, high]| u64::from(high) << 32 | u64::from(low));
            let (bits, mut i, lanes) =
                (u128::from(high) << 64 | u128::from(low), 0, hint::opaque_usize(16));
            while i < lanes && i < left {
                mem::store(address.wrapping_add(i), (bits >> (8 * i)) as u8);
                i += 1;
            }
        }
    }
}
