//! The sizes of expert parallelism, the memory for the tokens that a rank has received, and the
//! number of ranks: a constant of a kernel, or [`ANY_RANKS`].

use super::prelude::*;

/// Sizes on which all ranks agree.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Shape {
    /// The most tokens of a rank.
    pub tokens: u32,
    /// Vectors of 16 bytes of a token's row in transit, after any conversion to 8-bit floats.
    pub vectors: u32,
    /// Number of a token's experts, from 1 to [`TOP_K`](Self::TOP_K).
    pub top_k: u32,
    /// Number of a rank's experts, at most [`EXPERTS`](Self::EXPERTS).
    pub experts: u32,
}

impl Shape {
    /// The most experts of a token.
    pub const TOP_K: usize = 16;
    /// The most experts of a rank.
    pub const EXPERTS: usize = 1024;

    /// Returns the number of slots that a rank has for vectors from each rank.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.tokens * self.vectors
    }

    /// Returns how many vectors the scales of a row of 8-bit floats have: one (four f32 scales) for
    /// each 32 vectors of the row, so one scale for 128 floats.
    #[must_use]
    pub const fn scale_vectors(self) -> u32 {
        self.vectors.div_ceil(warp::WARP_SIZE)
    }

    /// Returns [`scale_vectors`](Self::scale_vectors) for rows that have scales, and 0 otherwise.
    #[must_use]
    pub const fn scale_vectors_if(self, has_scales: bool) -> u32 {
        if has_scales { self.scale_vectors() } else { 0 }
    }

    /// Returns the number of slots for rows with scales: one for each vector of either.
    #[must_use]
    pub const fn scaled_slots(self) -> u32 {
        self.tokens * (self.vectors + self.scale_vectors())
    }
}

/// Bits that say what a launch does. After a launch that only sends one that only receives follows,
/// in this rank, before any other launch with the same memory.
pub struct Steps;

impl Steps {
    /// Sends this rank's rows.
    pub const SEND: u32 = 1;
    /// Receives what all ranks sent in this launch or, with `RECEIVE` alone, in the one before it.
    pub const RECEIVE: u32 = 2;
}

/// The tokens that a rank sends.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Tokens {
    /// A row for each token.
    pub input: *const bf16,
    /// [`Shape::top_k`] expert ids for each: from 0 up to [`Shape::experts`] times the number of
    /// ranks, or -1 for none.
    pub ids: *const i32,
    /// The weights of these experts.
    pub weights: *const f32,
    /// The number of tokens, also 0.
    pub count: u32,
}

impl Tokens {
    /// Loads the id and the weight of this lane's expert of a token; the id is -1 if there is none.
    #[track_caller]
    pub(super) unsafe fn expert(&self, shape: Shape, token: u32) -> (i32, f32) {
        if warp::lane_id() >= shape.top_k {
            return (-1, 0.0);
        }
        let at = (token * shape.top_k + warp::lane_id()) as usize;
        // SAFETY: the token has the expert, as the kernel's caller guarantees.
        unsafe { (mem::load(self.ids.wrapping_add(at)), mem::load(self.weights.wrapping_add(at))) }
    }
}

/// The memory for the tokens that a rank has received from all ranks. Those of rank `r` begin at
/// index `r * Shape::tokens`.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Received {
    /// Rows, as words: only those of tokens with an expert in this rank.
    pub rows: *mut u32,
    /// The scales of these rows: [`Shape::scale_vectors`] vectors each. Null if there are none.
    pub scales: *mut f32,
    /// 1 + the index of each of a token's experts among this rank's, or 0 for experts elsewhere.
    pub experts: *mut u32,
    /// The weights of these experts.
    pub weights: *mut f32,
    /// How many tokens each rank has.
    pub counts: *mut u32,
    /// A bit for each rank that gets the row, for each token of this rank.
    pub targets: *mut u64,
    /// A bit for each absent rank: nothing is sent to it or awaited from it, and its tokens and
    /// experts are ignored. The mask must not change during a launch.
    pub absent: *const u64,
}

impl Received {
    /// Loads how many tokens a rank has.
    #[track_caller]
    pub(super) unsafe fn tokens_of(&self, rank: usize) -> u32 {
        // SAFETY: there is a count for each rank, as the kernel's caller guarantees.
        unsafe { mem::load(self.counts.wrapping_add(rank)) }
    }

    /// Returns the offsets, in 32-bit words, of rows, scales, experts, weights and counts in one
    /// allocation that holds them all, followed by the allocation's size. Only rows of 8-bit floats
    /// have scales.
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
    /// How many expert ids were out of range.
    pub const IDS: usize = 0;
    /// 1 + the position of one such id among the experts of this rank's tokens.
    pub const INDEX: usize = 1;
    /// The id at that position.
    pub const ID: usize = 2;
    /// How many rows the buffer sorted by expert would have needed, if it was too small, or 0.
    pub const ROWS: usize = 3;
    /// 1 + the rank that needs these rows, or 0 for this rank.
    pub const RANK: usize = 4;
    /// The number of words.
    pub const WORDS: usize = 5;

    /// Records an expert id that is out of range, in [`WORDS`](Self::WORDS) words of this GPU.
    pub(super) unsafe fn record_id(words: *mut u32, index: u32, id: i32) {
        // SAFETY: the caller passes all `WORDS` words; all accesses are atomic.
        unsafe {
            let word = |at| AtomicU32::from_ptr(words.wrapping_add(at));
            word(Self::IDS).fetch_add(1, Order::Relaxed, Scope::Gpu);
            let first = word(Self::INDEX);
            if first.compare_exchange(0, index + 1, Order::Relaxed, Scope::Gpu).is_ok() {
                word(Self::ID).store(id as u32, Order::Relaxed, Scope::Gpu);
            }
        }
    }

    /// Records that there is no room for `needed` rows in the rank `of`, or in this one if `None`;
    /// of several ranks, the one that needs most. Only this thread of the grid records rows.
    pub(super) unsafe fn record_rows(words: *mut u32, needed: u32, of: Option<u32>) {
        let (rows, rank) = (words.wrapping_add(Self::ROWS), words.wrapping_add(Self::RANK));
        // SAFETY: `words` has both, and only this thread records rows.
        unsafe {
            if needed > mem::load(rows) {
                mem::store(rows, needed);
                mem::store(rank, of.map_or(0, |of| of + 1));
            }
        }
    }
}

/// The most ranks: each has a bit of a word.
pub const RANKS: usize = 64;

/// Some of the ranks: a bit for each.
#[derive(Clone, Copy)]
pub(super) struct Ranks(pub(super) u64);

impl Ranks {
    pub(super) fn contains(self, rank: usize) -> bool {
        self.0 >> rank & 1 == 1
    }
}

/// Runs a launch with the number of ranks and the vectors of each lane as constants. Numbers of
/// ranks that have no code of their own are [`ANY_RANKS`].
macro_rules! with_ranks {
    ($comm:ident, $launch:ident.run($messages:ident), $lane_vectors:ident($($scales:literal)?)) => {
        match $comm.lsa_team().n_ranks {
            2 => $launch.run::<2, { $lane_vectors(2, $($scales)?) }>($messages),
            4 => $launch.run::<4, { $lane_vectors(4, $($scales)?) }>($messages),
            8 => $launch.run::<8, { $lane_vectors(8, $($scales)?) }>($messages),
            _ => $launch.run::<0, { $lane_vectors(0, $($scales)?) }>($messages), // `ANY_RANKS`.
        }
    };
}
pub(super) use with_ranks;

pub(super) fn ranks<const N: usize>(comm: &DevComm) -> usize {
    if N == ANY_RANKS { comm.lsa_team().n_ranks as usize } else { N }
}

/// Returns the number of ranks, for a loop that is not unrolled for many ranks, whose addresses
/// would take registers.
pub(super) fn rolled<const N: usize>(comm: &DevComm) -> usize {
    let ranks = ranks::<N>(comm);
    if N > 2 { hint::opaque_usize(ranks) } else { ranks }
}
