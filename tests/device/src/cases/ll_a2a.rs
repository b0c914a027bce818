//! Test cases of the LL all-to-all.

use devcomm_device_test_kernels as kernels;

use super::require_all;
use crate::job::{Setup, TestKernel};
use crate::world::TestWorld;

fn setup(world: &TestWorld, bytes: u32) -> Setup {
    let ll = (2, 3 * world.lsa_size() as u32, bytes);
    Setup { ll, ..Setup::new(2, 48) }
}

/// Elements of every size arrive unchanged, in every epoch and launch, in each `mode`: 0 send and
/// receive, 1 broadcast, 2 broadcast by multicast, 3 several received at once.
pub fn every_size(world: &TestWorld, mode: u32) {
    fn one<K: TestKernel>(world: &TestWorld, bytes: u32, mode: u32) {
        let setup = Setup { multimem: mode == 2, ..setup(world, bytes) };
        let n = mode << 8 | 5;
        require_all(&format!("{bytes} bytes, mode {mode}"), &world.run::<K>(&setup, &[n, n]), 0);
    }
    one::<kernels::ll_exchange<kernels::B1>>(world, 1, mode);
    one::<kernels::ll_exchange<kernels::B4>>(world, 4, mode);
    one::<kernels::ll_exchange<kernels::B6>>(world, 6, mode);
    one::<kernels::ll_exchange<kernels::B8>>(world, 8, mode);
    one::<kernels::ll_exchange<kernels::B12>>(world, 12, mode);
    one::<kernels::ll_exchange<kernels::B16>>(world, 16, mode);
    one::<kernels::ll_exchange<kernels::B29>>(world, 29, mode);
    one::<kernels::ll_exchange<kernels::B64>>(world, 64, mode);
}

/// Checks that epochs wrap around.
pub fn wraps(world: &TestWorld) {
    let (setup, n) = (setup(world, 12), 5);
    for before in 0..5 {
        let found = world.run_two::<kernels::ll_near_the_end, kernels::ll_exchange<kernels::B12>>(
            &setup,
            &[before],
            &[n, n],
        );
        require_all(&format!("{before} before the last"), &found, 0);
    }
}

/// Checks that elements are reduced as they arrive.
pub fn reduces(world: &TestWorld) {
    let l = world.lsa_size() as u64;
    let setup = Setup { ll: (2, 40 * l as u32, 4), ..Setup::new(2, 40) };
    let rounds = 4;
    for words in world.run::<kernels::ll_reduce>(&setup, &[rounds]) {
        for (i, &got) in words.iter().enumerate() {
            let t = i as u64 % 40;
            let expected: u64 =
                (0..u64::from(rounds)).map(|round| l * (l + 1) / 2 * (t + round)).sum();
            assert_eq!(got, expected, "thread {i}");
        }
    }
}

/// Checks that a wait for an element that no rank sends times out, and that the session continues.
pub fn times_out(world: &TestWorld) {
    let l = world.lsa_size();
    let setup = Setup { ll: (1, l as u32 + 1, 8), ..Setup::new(1, 40) };
    let found = world.run::<kernels::ll_late>(&setup, &[0, 0]);
    require_all("late", &found, 2 * 5 * l as u64 + 1);
}
