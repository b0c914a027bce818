//! Tests of the all-reduce kernel by load and store.

use std::time::Duration;

use devcomm::{
    DevCommRequirements, Error, KERNELS, Kernel, LaunchConfig, LaunchError, Rank, ReduceOp, Safe,
    Simulation, device, kernels,
};
use devcomm_testing::machines::{Gpus, on_gpus};
use devcomm_testing::numbers::{Number, checksum, count_wrong, inputs};
use half::{bf16, f16};

const SEED: u64 = 5;

type AllReduce<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// Returns the element counts: below and around a 16-byte vector, around one vector per thread, and
/// enough for several iterations of the unrolled loop.
fn counts(rank: &Rank) -> &'static [usize] {
    match rank.is_simulated() {
        true => &[1, 3, 7, 8, 9, 31, 257, 1000, 4099, 40_001],
        false => &[1, 7, 9, 1000, 65_537, 1 << 20, 3_000_001, 8 << 20],
    }
}

/// Runs an all-reduce of `count` elements, checks the sums, and that all ranks' bits are equal;
/// returns this rank's sums.
fn all_reduce<T: Number>(rank: &Rank, count: usize, in_place: bool) -> Result<Vec<T>, Error>
where
    kernels::lsa_allreduce<T>: Kernel<Args = AllReduce<T>, Safety = Safe>,
{
    let comm = rank.communicator()?;
    let config = match rank.is_simulated() {
        true => LaunchConfig::new(3, 64),
        false => LaunchConfig::new(32, 256),
    };
    // The elements after `count` must not change.
    let len = count + 100;
    let (send, out) = (comm.window::<T>(len)?, comm.window::<T>(len)?);
    let recv = if in_place { &send } else { &out };
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(config.grid.x))?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    out.fill_bytes(0xff)?;
    let sent = inputs::<T>(SEED, rank.rank(), len);
    send.copy_from_host(&sent)?;
    rank.barrier()?;
    let sum = kernels::lsa_allreduce::<T>::args(&dev_comm, &send, recv, count);
    sum.config(config).launch(&stream)?;
    stream.synchronize()?;
    rank.barrier()?;
    let mut got = vec![T::nearest(0.0); len];
    recv.copy_to_host(&mut got)?;
    let (sums, after) = got.split_at(count);
    let what = format!("rank {rank:?}, {count} elements of {}", T::NAME);
    assert_eq!(count_wrong(SEED, rank.n_ranks(), 1, sums), 0, "{what}");
    let all = rank.all_gather(&checksum(sums).to_le_bytes())?;
    assert!(all.iter().all(|other| *other == all[0]), "{what}: the ranks' results differ");
    let untouched = |(i, x): (usize, &T)| match in_place {
        true => x.bits() == sent[count + i].bits(),
        false => x.bits() == u64::MAX >> (64 - 8 * size_of::<T>()),
    };
    assert!(after.iter().enumerate().all(untouched), "{what}: written after the end");
    Ok(sums.to_vec())
}

fn sums_any_number_of_elements<T: Number>(name: &str)
where
    kernels::lsa_allreduce<T>: Kernel<Args = AllReduce<T>, Safety = Safe>,
{
    for ranks in [1, 2, 3, 4, 5, 8] {
        on_gpus(&format!("{name} on {ranks}"), ranks, |rank| {
            counts(rank).iter().try_for_each(|&count| all_reduce::<T>(rank, count, false).map(drop))
        });
    }
}

#[test]
fn sums_f32_for_any_number_of_ranks_and_elements() {
    sums_any_number_of_elements::<f32>("sums_f32_for_any_number_of_ranks_and_elements");
}

#[test]
fn sums_f16_for_any_number_of_ranks_and_elements() {
    sums_any_number_of_elements::<f16>("sums_f16_for_any_number_of_ranks_and_elements");
}

#[test]
fn sums_bf16_for_any_number_of_ranks_and_elements() {
    sums_any_number_of_elements::<bf16>("sums_bf16_for_any_number_of_ranks_and_elements");
}

#[test]
fn sums_are_right_in_place() {
    for ranks in [2, 4] {
        on_gpus(&format!("sums_are_right_in_place on {ranks}"), ranks, |rank| {
            all_reduce::<f32>(rank, 10_007, true).map(drop)
        });
    }
}

#[test]
fn sums_are_right_in_any_order_of_threads() {
    let name = "sums_are_right_in_any_order_of_threads";
    Gpus::new(4).run_seeds(name, 0..20, |rank, _| all_reduce::<bf16>(rank, 1003, false).map(drop));
}

#[test]
fn sums_are_right_when_threads_are_interrupted_anywhere() {
    let name = "sums_are_right_when_threads_are_interrupted_anywhere";
    let gpus = Gpus::from(Simulation::new(2).preempt(true));
    gpus.run_seeds(name, 0..2, |rank, _| all_reduce::<f32>(rank, 201, true).map(drop));
}

/// The barriers' epochs continue over many launches on one device communicator.
#[test]
fn the_kernel_can_be_launched_many_times() {
    on_gpus("the_kernel_can_be_launched_many_times", 2, |rank| {
        const COUNT: usize = 4096;
        let comm = rank.communicator()?;
        let (a, b) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(4))?;
        rank.load(&KERNELS)?;
        let stream = rank.stream()?;
        a.copy_from_host(&[1.0; COUNT])?;
        rank.barrier()?;
        for i in 0..60 {
            let (send, recv) = if i % 2 == 0 { (&a, &b) } else { (&b, &a) };
            let sum = kernels::lsa_allreduce::args(&dev_comm, send, recv, COUNT);
            sum.grid(4).block(128).launch(&stream)?;
        }
        stream.synchronize()?;
        rank.barrier()?;
        let mut result = vec![0.0; COUNT];
        a.copy_to_host(&mut result)?;
        // Every launch doubles the values, to 2^60 at the end, which `f32` represents exactly.
        assert!(result.iter().all(|&x| x == (1u64 << 60) as f32));
        Ok(())
    });
}

#[test]
fn nccl_all_reduce_gives_the_same_sums() {
    on_gpus("nccl_all_reduce_gives_the_same_sums", 2, |rank| {
        const COUNT: usize = 100_003;
        let ours = all_reduce::<f32>(rank, COUNT, false)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (send, recv) = (comm.mem_alloc::<f32>(COUNT)?, comm.mem_alloc::<f32>(COUNT)?);
        send.copy_from_host(&inputs::<f32>(SEED, rank.rank(), COUNT))?;
        comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        let mut theirs = vec![0.0; COUNT];
        recv.copy_to_host(&mut theirs)?;
        // A sum of two numbers is rounded once, in either order.
        assert_eq!(checksum(&ours), checksum(&theirs));
        Ok(())
    });
}

#[test]
fn a_late_rank_finds_the_windows_of_one_that_a_deadline_has_ended() {
    let name = "a_late_rank_finds_the_windows_of_one_that_a_deadline_has_ended";
    on_gpus(name, 2, |rank| {
        const COUNT: usize = 1000;
        let comm = rank.communicator()?;
        rank.load(&KERNELS)?;
        let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let stream = rank.stream()?;
        let late = || {
            let sum = kernels::lsa_allreduce::args(&dev_comm, &send, &recv, COUNT);
            sum.config(LaunchConfig::new(1, 32)).launch(&stream)?;
            match stream.synchronize_within(Duration::from_millis(50)) {
                Err(Error::Launch(LaunchError::KernelAborted { .. })) => Ok::<_, Error>(()),
                other => panic!("{other:?}"),
            }
        };
        // The arrival of rank 0 at the first barrier counts, although its kernel has left.
        if rank.is_root() {
            late()?;
            drop((send, recv, dev_comm));
            rank.barrier()?;
        } else {
            rank.barrier()?;
            late()?;
        }
        rank.barrier()
    });
}
