//! Test cases of the device API, for any world.

pub mod barriers;
pub mod gin;
pub mod ll_a2a;
pub mod memory;

/// Checks that all words of all ranks are `wanted`.
#[track_caller]
pub fn require_all(what: &str, words: &[Vec<u64>], wanted: u64) {
    for (rank, words) in words.iter().enumerate() {
        let wrong: Vec<_> = words.iter().enumerate().filter(|(_, word)| **word != wanted).collect();
        assert!(
            wrong.is_empty() && !words.is_empty(),
            "{what}: rank {rank} has {wrong:?}, wanted {wanted}"
        );
    }
}

/// Does the same as [`require_all`], for each launch.
#[track_caller]
pub fn require_each(what: &str, launches: &[Vec<Vec<u64>>], wanted: u64) {
    assert!(!launches.is_empty());
    for (i, words) in launches.iter().enumerate() {
        require_all(&format!("{what}, launch {i}"), words, wanted);
    }
}
