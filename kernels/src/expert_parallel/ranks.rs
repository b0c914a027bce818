//! The number of ranks: a constant of a kernel, or [`ANY_RANKS`].

use crate::prelude::*;

/// The most ranks: each has a bit of a word.
pub const RANKS: usize = 64;

/// Some of the ranks: a bit for each.
#[derive(Clone, Copy)]
pub(super) struct Ranks(pub(super) u64);

impl Ranks {
    pub(super) fn contains(self, rank: usize) -> bool {
        self.0 >> rank & 1 == 1
    }

    pub(super) fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }
}

/// Calls a method with the number of ranks and the vectors of each lane as constants. Numbers of
/// ranks that have no code of their own are [`ANY_RANKS`].
macro_rules! with_ranks {
    ($comm:ident, $lane_vectors:ident, $of:ident.$method:ident($($argument:expr),*)) => {{
        const ANY: usize = nccl_device::ANY_RANKS;
        match $comm.lsa_team().n_ranks {
            2 => $of.$method::<2, { $lane_vectors(2) }>($($argument),*),
            4 => $of.$method::<4, { $lane_vectors(4) }>($($argument),*),
            8 => $of.$method::<8, { $lane_vectors(8) }>($($argument),*),
            _ => $of.$method::<ANY, { $lane_vectors(ANY) }>($($argument),*),
        }
    }};
}
pub(super) use with_ranks;

/// Returns the number of ranks.
pub(super) fn ranks<const N: usize>(comm: &DevComm) -> usize {
    if N == ANY_RANKS { comm.lsa_team().n_ranks as usize } else { N }
}

/// Returns the number of ranks, for a loop that is not unrolled for many ranks, whose addresses
/// would take registers.
pub(super) fn rolled<const N: usize>(comm: &DevComm) -> usize {
    let ranks = ranks::<N>(comm);
    if N > 2 { hint::opaque_usize(ranks) } else { ranks }
}
