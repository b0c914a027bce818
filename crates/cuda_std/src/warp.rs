//! Warps: 32 threads that can read each other's registers.
//!
//! Each operation comes in two forms. The short one ([`shuffle_xor`], [`ballot`], ..) is for the
//! whole warp; the one with Rust-CUDA's name ([`warp_shuffle_xor`], [`warp_vote_ballot`], ..) takes
//! a mask of lanes and, for shuffles, a width. [`collective`](crate::collective) has reductions.
//!
//! # Safety model
//!
//! A warp operation is undefined unless every lane of its mask executes it, with the same mask and
//! at the same point in the code; so these operations are `unsafe`, and the caller guarantees
//! convergence. Functions such as [`lane_id`] are safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::warp;
//! /// Returns the value of the lane on the other side of the warp's middle.
//! ///
//! /// # Safety
//! ///
//! /// All 32 lanes call this together.
//! unsafe fn mirrored(value: f32) -> f32 {
//!     // SAFETY: all lanes call this, by the caller's contract.
//!     unsafe { warp::shuffle_xor(value, 31) }
//! }
//! ```

pub use crate::thread::WARP_SIZE;
use crate::{arch, thread};

/// All lanes.
pub const FULL_MASK: u32 = u32::MAX;

/// The mode of a shuffle: which lane it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// `shfl.sync.idx`: the given lane.
    Index,
    /// `shfl.sync.up`: a lower lane.
    Up,
    /// `shfl.sync.down`: a higher lane.
    Down,
    /// `shfl.sync.bfly`: this lane's number xor a mask.
    Xor,
}

/// Returns the index of the thread in its warp, 0 to 31.
pub fn lane_id() -> u32 {
    arch::lane_id()
}

/// Returns the index of the warp in its block.
pub fn warp_id() -> u32 {
    thread::index_in_block() / WARP_SIZE
}

/// Returns the lanes that are converged at this instruction. The hardware decides which: use it as
/// a hint, not as the mask of a warp operation.
#[doc(alias = "__activemask")]
#[track_caller]
pub fn activemask() -> u32 {
    arch::active_mask()
}

/// Executes a barrier of the lanes of `mask`; a lane's writes before it are visible to the others
/// after it. PTX: `bar.warp.sync`.
///
/// # Safety
///
/// The caller is in `mask`, and every lane of `mask` calls it with the same mask.
#[doc(alias = "__syncwarp")]
#[track_caller]
pub unsafe fn sync_warp(mask: u32) {
    arch::sync_warp(mask);
}

/// Does the same as [`sync_warp`], for all lanes.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn sync() {
    arch::sync_warp(FULL_MASK);
}

/// A value that shuffles can move: a number of 1 to 8 bytes, or a pair or an array of such values
/// in up to four 32-bit words, of which a number of up to 4 bytes takes one.
pub trait WarpShuffleValue: Copy {
    /// The number of words that the value takes.
    #[doc(hidden)]
    const WORDS: usize;
    /// Returns the value as words, low word first; only the first [`Self::WORDS`] are used.
    #[doc(hidden)]
    fn to_words(self) -> [u32; 4];
    /// Returns the inverse of [`Self::to_words`].
    #[doc(hidden)]
    fn from_words(words: [u32; 4]) -> Self;
}

macro_rules! shuffle_values {
    ($($type:ty: $to:expr, $from:expr;)*) => { $(
        impl WarpShuffleValue for $type {
            const WORDS: usize = size_of::<Self>().div_ceil(4);

            fn to_words(self) -> [u32; 4] {
                let bits: u64 = $to(self);
                [bits as u32, (bits >> 32) as u32, 0, 0]
            }

            fn from_words([low, high, ..]: [u32; 4]) -> Self {
                $from(u64::from(low) | u64::from(high) << 32)
            }
        }
    )* };
}

shuffle_values! {
    u8: u64::from, |bits| bits as u8;
    i8: |v| v as u8 as u64, |bits| bits as i8;
    u16: u64::from, |bits| bits as u16;
    i16: |v| v as u16 as u64, |bits| bits as i16;
    u32: u64::from, |bits| bits as u32;
    i32: |v| v as u32 as u64, |bits| bits as i32;
    u64: |v| v, |bits| bits;
    i64: |v| v as u64, |bits| bits as i64;
    usize: |v| v as u64, |bits| bits as usize;
    isize: |v| v as u64, |bits| bits as isize;
    f32: |v: f32| v.to_bits().into(), |bits| f32::from_bits(bits as u32);
    f64: f64::to_bits, f64::from_bits;
    half::f16: |v: half::f16| v.to_bits().into(), |bits| half::f16::from_bits(bits as u16);
    half::bf16: |v: half::bf16| v.to_bits().into(), |bits| half::bf16::from_bits(bits as u16);
}

impl<A: WarpShuffleValue, B: WarpShuffleValue> WarpShuffleValue for (A, B) {
    const WORDS: usize = {
        assert!(A::WORDS + B::WORDS <= 4, "a shuffled value has at most four words");
        A::WORDS + B::WORDS
    };

    fn to_words(self) -> [u32; 4] {
        let (mut words, second) = (self.0.to_words(), self.1.to_words());
        let mut i = 0;
        while i < B::WORDS {
            words[A::WORDS + i] = second[i];
            i += 1;
        }
        words
    }

    fn from_words(words: [u32; 4]) -> Self {
        (A::from_words(words), B::from_words(from_word(words, A::WORDS)))
    }
}

impl<T: WarpShuffleValue, const N: usize> WarpShuffleValue for [T; N] {
    const WORDS: usize = {
        assert!(N * T::WORDS <= 4, "a shuffled value has at most four words");
        N * T::WORDS
    };

    fn to_words(self) -> [u32; 4] {
        let (mut words, mut i) = ([0; 4], 0);
        while i < Self::WORDS {
            words[i] = self[i / T::WORDS].to_words()[i % T::WORDS];
            i += 1;
        }
        words
    }

    fn from_words(words: [u32; 4]) -> Self {
        let mut values = [T::from_words(words); N];
        let mut i = 1;
        while i < N {
            values[i] = T::from_words(from_word(words, i * T::WORDS));
            i += 1;
        }
        values
    }
}

/// Returns the words from `first` on.
fn from_word(words: [u32; 4], first: usize) -> [u32; 4] {
    let (mut rest, mut i) = ([0; 4], first);
    while i < 4 {
        rest[i - first] = words[i];
        i += 1;
    }
    rest
}

#[track_caller]
fn shuffle<T: WarpShuffleValue>(
    mask: u32,
    mode: Shuffle,
    value: T,
    lane: u32,
    width: u32,
) -> (T, bool) {
    assert!(
        width.is_power_of_two() && width <= WARP_SIZE,
        "the width of a shuffle is a power of two up to 32"
    );
    let (mut words, mut in_range, mut i) = (value.to_words(), false, 0);
    while i < T::WORDS {
        (words[i], in_range) = arch::shuffle(mask, mode, words[i], lane, width);
        i += 1;
    }
    (T::from_words(words), in_range)
}

macro_rules! shuffles {
    ($(
        $mode:ident $whole:ident $some:ident, $lane:ident,
        $doc:literal, $ptx:literal, $segments:literal;
    )*) => { $(
        #[doc = concat!("Returns the value of the lane ", $doc, ", over the whole warp.")]
        #[doc = concat!("PTX: `", $ptx, "`.")]
        ///
        /// Only the low five bits of the number count. A lane whose source would be outside the
        /// warp gets its own value.
        ///
        /// # Safety
        ///
        /// All 32 lanes call this together.
        #[track_caller]
        pub unsafe fn $whole<T: WarpShuffleValue>(value: T, $lane: u32) -> T {
            shuffle(FULL_MASK, Shuffle::$mode, value, $lane, WARP_SIZE).0
        }

        #[doc = concat!("Returns the value of the lane ", $doc, ", among the lanes of `mask`,")]
        /// and whether that lane was in range.
        ///
        /// `width` (a power of two up to 32) splits the warp into segments that shuffle separately.
        #[doc = $segments]
        #[doc = concat!("PTX: `", $ptx, "`.")]
        /// An 8-byte value takes two shuffles. The value of a lane outside `mask` is unspecified.
        ///
        /// # Panics
        ///
        /// When `width` is not a power of two up to 32.
        ///
        /// # Safety
        ///
        /// The caller is in `mask`, and every lane of `mask` calls it with the same mask and width.
        #[track_caller]
        pub unsafe fn $some<T: WarpShuffleValue>(
            mask: u32,
            value: T,
            $lane: u32,
            width: u32,
        ) -> (T, bool) {
            shuffle(mask, Shuffle::$mode, value, $lane, width)
        }
    )* };
}

shuffles! {
    Index shuffle_idx warp_shuffle_idx, lane, "`lane`", "shfl.sync.idx", "";
    Up shuffle_up warp_shuffle_up, delta, "`delta` below", "shfl.sync.up", "";
    Down shuffle_down warp_shuffle_down, delta, "`delta` above", "shfl.sync.down", "";
    Xor shuffle_xor warp_shuffle_xor, lane_mask, "whose number is this one's xor `lane_mask`",
        "shfl.sync.bfly",
        "With a `lane_mask` of `width` or more it reads a lane of an earlier segment, which is in \
         range; one of a later segment is not.";
}

macro_rules! votes {
    ($($result:ty, $whole:ident $some:ident, $arch:ident, $doc:literal;)*) => { $(
        #[doc = concat!($doc, " over the whole warp.")]
        ///
        /// # Safety
        ///
        /// All 32 lanes call this together.
        #[track_caller]
        pub unsafe fn $whole(predicate: bool) -> $result {
            arch::$arch(FULL_MASK, predicate)
        }

        #[doc = concat!($doc, " among the lanes of `mask`.")]
        ///
        /// # Safety
        ///
        /// The caller is in `mask`, and every lane of `mask` calls it with the same mask.
        #[track_caller]
        pub unsafe fn $some(mask: u32, predicate: bool) -> $result {
            arch::$arch(mask, predicate)
        }
    )* };
}

votes! {
    u32, ballot warp_vote_ballot, ballot, "Returns a bit for each lane whose `predicate` is true,";
    bool, all warp_vote_all, vote_all, "Returns whether every `predicate` is true";
    bool, any warp_vote_any, vote_any, "Returns whether any `predicate` is true";
}

/// Returns a bit for each lane of the warp that has the same `value`. PTX: `match.any.sync`.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn match_any(value: u32) -> u32 {
    arch::match_any(value)
}
