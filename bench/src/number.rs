//! Random inputs that every rank can compute for every rank, and the reference sum; numbers are the example's.

#[path = "../../examples/lsa_allreduce/check.rs"]
mod check;

pub use check::{Number, checksum, count_wrong, inputs};

/// Word `index` of rank `rank`'s input: random bits (SplitMix64).
pub fn word(seed: u64, rank: usize, index: usize) -> u64 {
    splitmix(seed ^ ((rank as u64) << 48) ^ index as u64)
}

/// The output of SplitMix64 for this state.
pub fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
