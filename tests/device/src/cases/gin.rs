//! Test cases of GIN, GIN barriers, and hybrid barriers.

use devcomm::GinConnectionType;
use devcomm_device_test_kernels as kernels;

use super::{require_all, require_each};
use crate::job::Setup;
use crate::world::TestWorld;

/// Puts to all ranks arrive before their signals; each block uses its own context.
pub fn put(world: &TestWorld) {
    let words = 33;
    let setup = Setup { mail: 2 * 2 * words * world.n_ranks(), ..Setup::with_gin(2, 40) };
    let n = (words as u32) << 4;
    require_each("put", &world.run_often::<kernels::gin_put>(&setup, n), 0);
    require_each("put, own context", &world.run_often::<kernels::gin_put>(&setup, n | 2), 0);
}

/// Does the same as [`put`], to the ranks of the rail, with a RAIL connection.
pub fn put_along_the_rail(world: &TestWorld) {
    let setup = Setup {
        mail: 2 * 2 * 9 * world.n_ranks(),
        gin: GinConnectionType::Rail,
        ..Setup::with_gin(2, 40)
    };
    require_each("put", &world.run_often::<kernels::gin_put>(&setup, 9 << 4 | 1), 0);
}

/// Checks `put_value` of every size.
pub fn put_value(world: &TestWorld) {
    let n = world.n_ranks() as u64;
    let setup = Setup { out: n as usize, mail: n as usize, ..Setup::with_gin(1, 32) };
    for found in world.run_often::<kernels::gin_put_value>(&setup, 0) {
        for (rank, words) in found.into_iter().enumerate() {
            let word = |from: u64| from << 40 | (rank as u64) << 20 | 3;
            assert_eq!(words, (0..n).map(word).collect::<Vec<_>>());
        }
    }
    let setup = Setup { out: 4, mail: 4, ..Setup::with_gin(1, 32) };
    for words in world.run::<kernels::gin_value_sizes>(&setup, &[0]) {
        let expected = [0xab, 0x1234 << 16, 0xffff_fffe << 32, 1.5_f64.to_bits()];
        // The f16 is at bytes 10 and 11 of the window, in word 1; the i32 at bytes 20 to 23, the
        // high half of word 2.
        assert_eq!(words, expected);
    }
}

/// Checks that the data of a get has arrived after a flush.
pub fn get(world: &TestWorld) {
    let words = 17;
    let setup = Setup { mail: 2 * words * world.n_ranks(), ..Setup::with_gin(1, 40) };
    require_all("get", &world.run::<kernels::gin_get>(&setup, &[words as u32]), 0);
}

/// Checks that when a strong signal arrives, the puts before it have arrived.
pub fn strong_signals(world: &TestWorld) {
    let setup = Setup { mail: 60, ..Setup::with_gin(1, 40) };
    require_each("strong", &world.run_often::<kernels::gin_strong>(&setup, 30), 0);
}

/// Checks that when a weak signal arrives, the put that carries it has arrived; VA signals count.
pub fn weak_and_va_signals(world: &TestWorld) {
    let n = world.n_ranks();
    let setup = Setup { mail: 2 * n + 2, out: 3 * 40, va: true, ..Setup::with_gin(1, 40) };
    for words in world.run::<kernels::gin_weak_and_va>(&setup, &[0]) {
        let (ones, more) = (n as u64, (100 * n + n * (n - 1) / 2) as u64);
        for (t, got) in words.chunks(3).enumerate() {
            // Thread 0 multiplies by 10 and adds the value after a reset, which is 0.
            let ones = if t == 0 { 10 * ones } else { ones };
            assert_eq!(got, [0, ones, more], "thread {t}");
        }
    }
}

/// Checks that a counter tells when the source of a put has been read.
pub fn counters(world: &TestWorld) {
    let setup = Setup { mail: 21, out: 3 * 32, ..Setup::with_gin(1, 32) };
    for words in world.run_often::<kernels::gin_counter>(&setup, 20).into_iter().flatten() {
        assert!(words.chunks(3).all(|got| got == [0, 20, 0]), "{words:?}");
    }
}

/// Checks that a flush to one peer tells when the sources of the puts to this peer have been read.
pub fn requests(world: &TestWorld) {
    let n = world.n_ranks();
    let setup = Setup { mail: n + 12 * n, ..Setup::with_gin(1, 40) };
    require_all("requests", &world.run::<kernels::gin_requests>(&setup, &[12]), 0);
}

/// Checks that each context has its own signals.
pub fn contexts(world: &TestWorld) {
    let setup = Setup { contexts: 3, out: 3, ..Setup::with_gin(1, 32) };
    for words in world.run_often::<kernels::gin_contexts>(&setup, 0).into_iter().flatten() {
        let n = world.n_ranks() as u64;
        assert_eq!(words, [n, 2 * n, 3 * n]);
    }
}

/// Checks that `expect` raises a signal's shadow, and that waits with `follow_shadow` set it to the
/// signal's value.
pub fn shadows(world: &TestWorld) {
    let setup = Setup { out: 6 * 40, ..Setup::with_gin(1, 40) };
    for words in world.run_often::<kernels::gin_shadows>(&setup, 1000).into_iter().flatten() {
        for got in words.chunks(6) {
            // The left neighbor may be ahead of this rank: then a wait sees both amounts, and the
            // next wait of the second signal nothing. Else that one sees 2 after 1,000.
            assert!(got[0] == 3 || got[0] == 7, "{got:?}");
            assert_eq!(got[1..4], [0, 7, 0], "{got:?}");
            assert!(got[4..] == [1000, 100_002] || got[4] == 1002, "{got:?}");
        }
    }
}

/// Waits that never succeed time out in every thread of the coop; a reset sets signal and shadow to
/// 0.
pub fn timeouts(world: &TestWorld) {
    let setup = Setup { va: true, ..Setup::with_gin(1, 64) };
    for coop in [0, 1] {
        let found = world.run::<kernels::gin_never>(&setup, &[coop]);
        // The first five waits time out, and the shadow is 5 until the reset.
        require_all("timeouts", &found, 0b1_1111 | 5 << 8);
    }
}

/// Puts and gets copy exactly the requested bytes, at any alignment, with one context per block,
/// between all ranks or between the ranks of a rail.
pub fn bytes(world: &TestWorld, gin: GinConnectionType) {
    const BLOCKS: u32 = 6;
    let rail = u32::from(gin == GinConnectionType::Rail);
    let slots = world.n_ranks() * kernels::MESSAGES;
    let setup = Setup {
        gin,
        mail: BLOCKS as usize * 3 * slots * kernels::SLOT / size_of::<u64>(),
        contexts: BLOCKS,
        world_barriers: if rail == 0 { BLOCKS } else { 0 },
        rail_barriers: BLOCKS,
        ..Setup::with_gin(BLOCKS, 40)
    };
    let ns: Vec<u32> = (0..world.launches() as u32).map(|i| rail | i << 1).collect();
    require_each("bytes", &world.run_each::<kernels::gin_bytes>(&setup, &ns), 0);
}

/// Signals, also VA signals, carry at 2^32 and wrap around at 2^64.
pub fn wraps(world: &TestWorld) {
    let setup = Setup { va: true, world_barriers: 1, ..Setup::with_gin(1, 40) };
    require_each("wraps", &world.run_often::<kernels::gin_wraps>(&setup, 5), 0);
}

/// Checks that a signal that was reset counts from 0 again.
pub fn resets(world: &TestWorld) {
    let setup = Setup { world_barriers: 1, ..Setup::with_gin(1, 40) };
    require_each("resets", &world.run_often::<kernels::gin_resets>(&setup, 3), 0);
}

/// Checks GIN barriers with every fence level, over one context or over all: of the world (`which`
/// is 0), of the rail (4) or additional ones (8).
pub fn barriers(world: &TestWorld, which: u32, gin: GinConnectionType) {
    for strong in [true, false] {
        let setup = Setup {
            gin,
            strong,
            mail: 2 * 4 * world.n_ranks(),
            world_barriers: if gin == GinConnectionType::Full { 2 } else { 0 },
            rail_barriers: 2,
            more_gin_barriers: if which == 8 { 2 } else { 0 },
            contexts: 3,
            ..Setup::with_gin(2, 40)
        };
        let forms = |fence: u32| [0, 16, 32].map(|form| fence | which | form | 4 << 8);
        let ns: Vec<u32> = (0..4).flat_map(forms).flat_map(|n| [n, n]).collect();
        for (n, found) in ns.iter().zip(world.run_each::<kernels::gin_barrier>(&setup, &ns)) {
            require_all(&format!("form {n:#x}, strong {strong}"), &found, 0);
        }
    }
}

/// Checks the hybrid barrier with every fence level, for puts and gets between all ranks, or with
/// RAIL connections between the ranks of a rail.
pub fn hybrid(world: &TestWorld, gin: GinConnectionType) {
    let rail = if gin == GinConnectionType::Full { 0 } else { 4 };
    for strong in [true, false] {
        let mail = 2 * 4 * world.n_ranks();
        let setup = Setup { gin, strong, mail, hybrid_barriers: 2, ..Setup::with_gin(2, 40) };
        let forms = |fence: u32| [0, 32].map(|form| fence | rail | form | 4 << 8);
        let ns: Vec<u32> = (0..4).flat_map(forms).flat_map(|n| [n, n]).collect();
        for (n, found) in ns.iter().zip(world.run_each::<kernels::hybrid_barrier>(&setup, &ns)) {
            require_all(&format!("form {n:#x}, strong {strong}"), &found, 0);
        }
    }
}

/// Checks that the inner (LSA) and outer (rail) barriers of a hybrid barrier work separately.
pub fn hybrid_parts(world: &TestWorld, gin: GinConnectionType) {
    let setup = Setup { gin, hybrid_barriers: 1, ..Setup::with_gin(1, 40) };
    require_each("parts", &world.run_often::<kernels::hybrid_parts>(&setup, 7), 0);
}

/// Checks that, when one rank never arrives at GIN barriers, all threads of the other ranks time
/// out.
pub fn barrier_timeouts(world: &TestWorld) {
    let setup = Setup { world_barriers: 1, hybrid_barriers: 1, ..Setup::with_gin(1, 40) };
    let found = world.run::<kernels::gin_barrier_never>(&setup, &[0]);
    for (rank, words) in found.into_iter().enumerate() {
        // All three waits time out.
        let expected = if rank == 0 { Setup::UNTOUCHED } else { 0b111 };
        assert!(words.iter().all(|&word| word == expected), "rank {rank}: {words:?}");
    }
}
