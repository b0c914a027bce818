//! The all-reduce kernel, run by the simulator.

#[path = "../examples/lsa_allreduce/check.rs"]
mod check;

use check::{Number, checksum, count_wrong, inputs};
use devcomm::sim::{DevCommConfig, LaunchConfig, Simulator};
use devcomm::{HostKernel, device, kernels};
use half::{bf16, f16};

const SEED: u64 = 11;
const BLOCKS: u32 = 3;

/// Runs the kernel and returns every rank's result.
fn all_reduce<T: Number>(sim: &Simulator, count: usize, in_place: bool) -> Vec<Vec<T>>
where
    kernels::lsa_allreduce<T>:
        HostKernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    let ranks = sim.ranks();
    let (send, out) = (sim.window::<T>(count).unwrap(), sim.window::<T>(count).unwrap());
    let recv = if in_place { &send } else { &out };
    let config = DevCommConfig { lsa_barriers: BLOCKS, ..Default::default() };
    let comm = sim.dev_comm(config).unwrap();
    for rank in 0..ranks {
        send.write(rank, &inputs::<T>(SEED, rank, count)).unwrap();
    }
    let config = LaunchConfig::new(BLOCKS, 64);
    // SAFETY: both windows have `count` elements in every rank, and nothing else uses them.
    unsafe {
        sim.launch(kernels::lsa_allreduce::<T>, config, |rank| {
            (comm.rank(rank), send.rank(rank), recv.rank(rank), count)
        })
    }
    .unwrap();
    (0..ranks).map(|rank| recv.read(rank)).collect()
}

fn assert_right<T: Number>(ranks: usize, results: &[Vec<T>]) {
    let first = checksum(&results[0]);
    for (rank, result) in results.iter().enumerate() {
        assert_eq!(count_wrong(SEED, ranks, 1, result), 0, "{} ranks, rank {rank}", ranks);
        assert_eq!(checksum(result), first, "rank {rank} got other bits than rank 0");
    }
}

fn every_rank_count_and_odd_size<T: Number>()
where
    kernels::lsa_allreduce<T>:
        HostKernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    for ranks in [1, 2, 3, 4, 5, 8] {
        let sim = Simulator::new(ranks).unwrap();
        // Below a vector, around one, around a row of the grid, over several tiles of the unrolled loop.
        for count in [1, 3, 7, 8, 9, 31, 257, 1000, 4099, 40_001] {
            assert_right(ranks, &all_reduce::<T>(&sim, count, false));
        }
    }
}

#[test]
fn sums_f32_for_any_number_of_ranks_and_elements() {
    every_rank_count_and_odd_size::<f32>();
}

#[test]
fn sums_f16_for_any_number_of_ranks_and_elements() {
    every_rank_count_and_odd_size::<f16>();
}

#[test]
fn sums_bf16_for_any_number_of_ranks_and_elements() {
    every_rank_count_and_odd_size::<bf16>();
}

#[test]
fn works_in_place() {
    let sim = Simulator::new(4).unwrap();
    assert_right(4, &all_reduce::<f32>(&sim, 10_007, true));
}

#[test]
fn is_right_whatever_the_order_in_which_threads_run() {
    for seed in 0..20 {
        let sim = Simulator::builder().ranks(4).seed(seed).build().unwrap();
        assert_right(4, &all_reduce::<bf16>(&sim, 1003, false));
    }
}

#[test]
fn touches_nothing_behind_the_last_element() {
    let sim = Simulator::new(2).unwrap();
    let (count, longer) = (1001, 1100);
    let (send, recv) = (sim.window::<f32>(longer).unwrap(), sim.window::<f32>(longer).unwrap());
    let config = DevCommConfig { lsa_barriers: BLOCKS, ..Default::default() };
    let comm = sim.dev_comm(config).unwrap();
    for rank in 0..2 {
        send.write(rank, &inputs::<f32>(SEED, rank, longer)).unwrap();
        recv.write(rank, &vec![-7.0; longer]).unwrap();
    }
    let config = LaunchConfig::new(BLOCKS, 64);
    // SAFETY: both windows have more than `count` elements in every rank, and nothing else uses them.
    unsafe {
        sim.launch(kernels::lsa_allreduce::<f32>, config, |rank| {
            (comm.rank(rank), send.rank(rank), recv.rank(rank), count)
        })
    }
    .unwrap();
    for rank in 0..2 {
        let got: Vec<f32> = recv.read(rank);
        assert_eq!(count_wrong(SEED, 2, 1, &got[..count]), 0);
        assert!(got[count..].iter().all(|&x| x == -7.0), "rank {rank} wrote behind the end");
    }
}

#[test]
fn the_check_sees_a_wrong_element() {
    let mut sums: Vec<f32> = (0..100)
        .map(|i| check::input::<f32>(SEED, 0, i) + check::input::<f32>(SEED, 1, i))
        .collect();
    assert_eq!(count_wrong(SEED, 2, 1, &sums), 0);
    sums[41] += 1e-5;
    sums[77] = f32::NAN;
    assert_eq!(count_wrong(SEED, 2, 1, &sums), 2);
}
