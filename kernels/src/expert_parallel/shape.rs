//! The sizes of expert parallelism, and what a rank keeps of the tokens that it has received.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;

use super::ranks::Ranks;

/// Sizes on which all ranks agree.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Shape {
    /// The most tokens of a rank.
    pub tokens: u32,
    /// Vectors of 16 bytes of a token's row, as it is on its way.
    pub vectors: u32,
    /// Experts of a token, from 1 to [`TOP_K`](Self::TOP_K).
    pub top_k: u32,
    /// Experts of a rank, at most [`EXPERTS`](Self::EXPERTS).
    pub experts: u32,
}

impl Shape {
    /// The most experts of a token.
    pub const TOP_K: usize = 16;
    /// The most experts of a rank.
    pub const EXPERTS: usize = 1024;

    /// The slots that a rank has for vectors from each rank.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.tokens * self.vectors
    }

    /// Vectors of the scales of a row of 8-bit floats: one for each 32 of the row.
    #[must_use]
    pub const fn scale_vectors(self) -> u32 {
        self.vectors.div_ceil(warp::WARP_SIZE)
    }

    /// [`scale_vectors`](Self::scale_vectors) of rows that have scales, or not.
    #[must_use]
    pub const fn scale_vectors_if(self, has_scales: bool) -> u32 {
        if has_scales { self.scale_vectors() } else { 0 }
    }

    /// [`slots`](Self::slots) of rows with scales.
    #[must_use]
    pub const fn scaled_slots(self) -> u32 {
        self.tokens * (self.vectors + self.scale_vectors())
    }
}

/// What a launch does.
pub struct Steps;

impl Steps {
    /// It sends.
    pub const SEND: u32 = 1;
    /// It receives what this launch, or the one before it, and its peers have sent.
    pub const RECEIVE: u32 = 2;
}

/// What a rank has of the tokens of all ranks. Those of rank `r` begin at index `r *
/// Shape::tokens`.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Received {
    /// Rows, as words: only those of tokens with an expert in this rank.
    pub rows: *mut u32,
    /// The scales of these rows: [`Shape::scale_vectors`] vectors each. Null if there are none.
    pub scales: *mut f32,
    /// For each expert of a token 1 plus its number among this rank's, or 0 if it is elsewhere.
    pub experts: *mut u32,
    /// The weights of these experts.
    pub weights: *mut f32,
    /// How many tokens each rank has.
    pub counts: *mut u32,
    /// For each token of this rank, a bit for each rank that gets its row.
    pub targets: *mut u64,
    /// A bit for each rank that is absent: nothing is sent to it, nothing awaited from it, its
    /// tokens count as none, and its experts too. The same during a launch.
    pub absent: *const u64,
}

impl Received {
    /// The ranks that are absent.
    ///
    /// # Safety
    ///
    /// The word is allocated, and nothing writes it.
    #[track_caller]
    pub(super) unsafe fn absent(&self) -> Ranks {
        // SAFETY: the caller's contract.
        Ranks(unsafe { mem::load(self.absent) })
    }

    /// Where rows, scales, experts, weights and counts begin in memory that has them all, in words,
    /// and the words of all of it. Only rows of 8-bit floats have scales.
    #[must_use]
    pub const fn offsets(shape: Shape, ranks: usize, has_scales: bool) -> [usize; 6] {
        let tokens = ranks * shape.tokens as usize;
        let scales = 4 * tokens * shape.vectors as usize;
        let experts = scales + 4 * tokens * shape.scale_vectors_if(has_scales) as usize;
        let weights = experts + tokens * shape.top_k as usize;
        let counts = weights + tokens * shape.top_k as usize;
        [0, scales, experts, weights, counts, counts + ranks]
    }
}

/// Offsets of the words that tell the host of wrong routing; all are 0 if there was none.
pub struct Faults;

impl Faults {
    /// How many numbers of experts do not exist.
    pub const IDS: usize = 0;
    /// 1 plus the index of one of them among the experts of this rank's tokens.
    pub const INDEX: usize = 1;
    /// That number.
    pub const ID: usize = 2;
    /// The rows that were needed in the order of the experts, if there was no room for them.
    pub const ROWS: usize = 3;
    /// 1 plus the rank that needs these rows, or 0 for this one.
    pub const RANK: usize = 4;
    /// The number of words.
    pub const WORDS: usize = 5;

    /// Records the number of an expert that does not exist.
    ///
    /// # Safety
    ///
    /// `words` points to [`WORDS`](Self::WORDS) words of this GPU.
    pub(super) unsafe fn record_id(words: *mut u32, index: u32, id: i32) {
        // SAFETY: the caller's contract; all accesses are atomic.
        unsafe {
            let word = |at| AtomicU32::from_ptr(words.wrapping_add(at));
            word(Self::IDS).fetch_add(1, Order::Relaxed, Scope::Gpu);
            let first = word(Self::INDEX);
            if first.compare_exchange(0, index + 1, Order::Relaxed, Scope::Gpu).is_ok() {
                word(Self::ID).store(id as u32, Order::Relaxed, Scope::Gpu);
            }
        }
    }

    /// Records that there is no room for so many rows.
    ///
    /// # Safety
    ///
    /// As [`record_id`](Self::record_id).
    pub(super) unsafe fn record_rows(words: *mut u32, needed: u32) {
        // SAFETY: the caller's contract.
        let word = unsafe { AtomicU32::from_ptr(words.wrapping_add(Self::ROWS)) };
        word.fetch_max(needed, Order::Relaxed, Scope::Gpu);
    }

    /// Records that a rank has no room for so many rows; of several the one that needs most.
    ///
    /// # Safety
    ///
    /// As [`record_id`](Self::record_id); only this thread records rows.
    pub(super) unsafe fn record_rows_of(words: *mut u32, needed: u32, rank: u32) {
        let (rows, of) = (words.wrapping_add(Self::ROWS), words.wrapping_add(Self::RANK));
        // SAFETY: the caller's contract.
        unsafe {
            if needed > mem::load(rows) {
                mem::store(rows, needed);
                mem::store(of, rank + 1);
            }
        }
    }
}
