//! Test cases of teams, windows, resource buffers, multicast addresses, polls and coops.

use devcomm_device_test_kernels as kernels;

use crate::job::Setup;
use crate::world::TestWorld;

/// Checks that a kernel sees the right teams.
pub fn teams(world: &TestWorld) {
    let setup = Setup { out: 16, lsa_barriers: 3, ..Setup::new(1, 32) };
    let (n, l) = (world.n_ranks() as u64, world.lsa_size() as u64);
    for (rank, words) in world.run::<kernels::teams>(&setup, &[0]).into_iter().enumerate() {
        let r = rank as u64;
        let expected = [r, n, n, r, 1, l, r % l, 1, n / l, r / l, l, r / l, 3, r / l * l, 0, 0];
        assert_eq!(words, expected, "rank {rank}");
    }
}

/// Checks that each kind of peer address of a window reaches the right rank's memory.
pub fn windows(world: &TestWorld) {
    let l = world.lsa_size();
    let setup = Setup { mail: 4 * l, out: 6 * l, ..Setup::new(1, 32) };
    for (rank, words) in world.run::<kernels::windows>(&setup, &[0, 0]).into_iter().enumerate() {
        let first = rank / l * l;
        for t in 0..l {
            let peer = (first + t) as u64;
            // What the peer's thread whose index is this rank has written to the peer's memory.
            let theirs = 300 + 10 * peer + (rank - first) as u64;
            let got: Vec<u64> = (0..6).map(|row| words[row * l + t]).collect();
            assert_eq!(got, [peer, 100 + peer, 200 + peer, theirs, theirs, theirs], "rank {rank}");
        }
    }
}

/// Vectors of 16 bytes are copied unchanged.
pub fn vectors(world: &TestWorld) {
    let setup = Setup { mail: 128, out: 128, ..Setup::new(1, 64) };
    for words in world.run::<kernels::vectors>(&setup, &[0]) {
        assert!(words.chunks(2).all(|pair| pair == [1, 0]), "{words:?}");
    }
}

/// Checks that, after `wait_until` has seen a release store by an acquire load, earlier writes are
/// visible.
pub fn flags(world: &TestWorld) {
    let setup = Setup { mail: 2 + 96, ..Setup::new(1, 96) };
    // One launch, as a second one would see the flags of the first.
    super::require_all("flags", &world.run::<kernels::flags>(&setup, &[25]), 0);
}

/// Checks that a poll ends when its condition holds or at its timeout, in every thread of the coop.
pub fn polls(world: &TestWorld) {
    for coop in [0, 1] {
        let found = world.run::<kernels::polls>(&Setup::new(1, 72), &[coop]);
        // Only the first poll times out.
        super::require_all("polls", &found, 1);
    }
}

/// Checks that a resource buffer is zeroed and aligned, and each kind of peer address reaches the
/// right rank's memory.
pub fn resources(world: &TestWorld) {
    let l = world.lsa_size();
    let words = 1000;
    let setup = Setup { buffer: 8 * words, out: 5 * l, ..Setup::new(1, 64) };
    let found = world.run::<kernels::resources>(&setup, &[words as u32]);
    for (rank, found) in found.into_iter().enumerate() {
        let first = rank / l * l;
        for t in 0..l {
            let peer = (first + t) as u64;
            let got: Vec<u64> = (0..5).map(|row| found[row * l + t]).collect();
            assert_eq!(got, [peer + 1, peer + 2, peer + 3, 0, 0], "rank {rank}");
        }
    }
}

/// Checks that multicast addresses reach every rank of the LSA team, which has at most 8 ranks.
pub fn multicast(world: &TestWorld) {
    let setup = Setup { buffer: 16, mail: 2, out: 4, multimem: true, ..Setup::new(1, 32) };
    let all = (0..world.lsa_size()).fold(0, |sum, rank| sum | 1 << (8 * rank));
    super::require_all("multicast", &world.run::<kernels::multicast>(&setup, &[0]), all);
}

/// Checks that threads have the right rank and size in every kind of coop, and `sync` and `any`.
pub fn coops(world: &TestWorld) {
    let setup = Setup { mail: 96, out: 6 * 96, ..Setup::new(1, 96) };
    for kind in 0..6 {
        for words in world.run::<kernels::coops>(&setup, &[kind]) {
            for (t, got) in words.chunks(6).enumerate() {
                let members = members(kind, t as u32);
                let rank = members.iter().position(|&member| member == t as u32).unwrap() as u64;
                let (size, last) = (members.len() as u64, u64::from(*members.last().unwrap()));
                assert_eq!(got, [rank, size, 0, 1, 7 + last, 9 + last], "kind {kind}, thread {t}");
            }
        }
    }
}

/// Returns the threads of thread `t`'s coop.
fn members(kind: u32, t: u32) -> Vec<u32> {
    let warp = t / 32;
    let together = |other: u32| match kind {
        0 => other == t,
        1 => other / 32 == warp,
        2 => other / 32 == warp && other % 2 == t % 2,
        3 => other / 32 == warp && (other % 32 < 5) == (t % 32 < 5),
        4 => (other < 64) == (t < 64),
        _ => true,
    };
    (0..96).filter(|other| together(*other)).collect()
}
