//! Test cases of LSA barriers.

use devcomm_device_test_kernels as kernels;

use super::require_all;
use crate::job::Setup;
use crate::world::TestWorld;

/// Returns a setup of `blocks` blocks of `threads` threads, with a row of words in `mail` per warp.
fn setup(world: &TestWorld, blocks: u32, threads: u32) -> Setup {
    let rows = (blocks * threads.div_ceil(32)) as usize;
    Setup { mail: (rows * world.lsa_size()).max(128), ..Setup::new(blocks, threads) }
}

/// Checks that stores before the barrier are visible after it, with memory orders that guarantee
/// it, over several launches.
pub fn lsa_orders(world: &TestWorld) {
    let setup = setup(world, 3, 40);
    // `lsa_sync` numbers acquire-release and sequentially consistent so.
    for order in [4, 5] {
        let n = order | 4 << 3;
        require_all("sync", &world.run::<kernels::lsa_sync>(&setup, &[n, n, n]), 0);
    }
}

/// Checks that with weaker memory orders all ranks pass the barrier, and later syncs of it order
/// memory.
pub fn lsa_weaker_orders(world: &TestWorld) {
    let setup = setup(world, 2, 32);
    let ns: Vec<u32> = [0, 2, 3].iter().map(|order| order | 3 << 3).collect();
    let last = 4 | 3 << 3;
    require_all(
        "sync",
        &world.run_two::<kernels::lsa_sync, kernels::lsa_sync>(&setup, &ns, &[last]),
        0,
    );
}

/// Checks that separate arrive and wait, a dropped arrival, and waits with a timeout work on one
/// barrier.
pub fn lsa_split(world: &TestWorld) {
    require_all("split", &world.run::<kernels::lsa_split>(&setup(world, 3, 40), &[6, 5]), 0);
}

/// Checks that each warp has its own barrier.
pub fn lsa_warps(world: &TestWorld) {
    let setup = Setup { lsa_barriers: 9, ..setup(world, 3, 96) };
    require_all("warps", &world.run::<kernels::lsa_warps>(&setup, &[5, 5]), 0);
}

/// Checks barriers of coops of one thread, of lanes, and of a span of warps.
pub fn lsa_coops(world: &TestWorld) {
    let setup = Setup { lsa_barriers: 3, ..setup(world, 1, 96) };
    require_all("coops", &world.run::<kernels::lsa_coops>(&setup, &[5, 4]), 0);
}

/// Checks barriers by multicast stores.
pub fn lsa_multicast(world: &TestWorld) {
    let setup = Setup { multimem: true, more_lsa_barriers: 2, ..setup(world, 2, 40) };
    require_all("multicast", &world.run::<kernels::lsa_multicast>(&setup, &[5, 4]), 0);
}

/// Checks that sessions of NCCL and of devcomm alternate on one barrier.
pub fn lsa_with_raw(world: &TestWorld) {
    let setup = Setup { more_lsa_barriers: 2, ..setup(world, 2, 40) };
    require_all("mixed", &world.run::<kernels::lsa_with_raw>(&setup, &[5, 4]), 0);
}

/// Checks that epochs wrap around.
pub fn lsa_wraps(world: &TestWorld) {
    let setup = Setup { more_lsa_barriers: 2, ..setup(world, 2, 40) };
    require_all(
        "wrapped",
        &world.run_two::<kernels::lsa_near_the_end, kernels::lsa_with_raw>(&setup, &[3], &[5, 4]),
        0,
    );
}

/// Does the same as [`lsa_wraps`], by multicast.
pub fn lsa_multicast_wraps(world: &TestWorld) {
    let setup = Setup { multimem: true, more_lsa_barriers: 2, ..setup(world, 2, 40) };
    require_all(
        "wrapped",
        &world.run_two::<kernels::lsa_near_the_end, kernels::lsa_multicast>(&setup, &[5], &[5, 4]),
        0,
    );
}

/// Checks that, when one rank arrives late, the other ranks time out in all threads, and the
/// barrier works afterwards.
pub fn lsa_late(world: &TestWorld) {
    let found = world.run::<kernels::lsa_late>(&setup(world, 1, 70), &[4]);
    let l = world.lsa_size();
    for (rank, words) in found.into_iter().enumerate() {
        let expected = u64::from(rank % l != l - 1);
        assert!(words.iter().all(|&word| word == expected), "rank {rank}: {words:?}");
    }
}

/// Checks that, when one rank never arrives, all threads of every waiting coop time out.
pub fn lsa_never(world: &TestWorld) {
    let setup = Setup { lsa_barriers: 2, out: 3 * 96, ..setup(world, 1, 96) };
    for (rank, words) in world.run::<kernels::lsa_never>(&setup, &[0]).into_iter().enumerate() {
        let expected = if rank % world.lsa_size() == 0 { Setup::UNTOUCHED } else { 1 };
        assert!(words.iter().all(|&word| word == expected), "rank {rank}: {words:?}");
    }
}
