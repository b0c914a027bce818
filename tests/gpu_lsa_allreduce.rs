//! The all-reduce kernel on GPUs, ranks as threads.

#[path = "../examples/lsa_allreduce/check.rs"]
mod check;
mod gpu;

use check::{Number, checksum, count_wrong, inputs};
use devcomm::{
    DevCommRequirements, Error, KERNELS, Kernel, LaunchConfig, Rank, ReduceOp, device, kernels,
};
use gpu::with_gpus;
use half::{bf16, f16};

const SEED: u64 = 5;
const BLOCKS: u32 = 32;
/// Below a vector, around one, around a row of the grid, over several unrolled rows.
const COUNTS: [usize; 8] = [1, 7, 9, 1000, 65_537, 1 << 20, 3_000_001, 8 << 20];

/// One all-reduce on this rank; its result.
fn all_reduce<T: Number>(rank: &Rank, count: usize, in_place: bool) -> Result<Vec<T>, Error>
where
    kernels::lsa_allreduce<T>:
        Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    let comm = rank.communicator()?;
    let (send, out) = (comm.window::<T>(count)?, comm.window::<T>(count)?);
    let recv = if in_place { &send } else { &out };
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    out.fill(0xff)?;
    send.copy_from_host(&inputs::<T>(SEED, rank.rank(), count))?;
    let (config, args) = (LaunchConfig::new(BLOCKS, 256), (&dev_comm, &send, recv, count));
    // SAFETY: both windows have `count` elements in every rank, every rank does the same, and the barrier below keeps the
    // windows until all are done.
    unsafe { kernels.launch(&stream, kernels::lsa_allreduce::<T>, config, args)? };
    stream.synchronize()?;
    rank.barrier()?;
    let mut result = vec![T::nearest(0.0); count];
    recv.copy_to_host(&mut result)?;
    Ok(result)
}

fn is_right_for_every_count<T: Number>(name: &str, ranks: usize)
where
    kernels::lsa_allreduce<T>:
        Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    with_gpus(name, ranks, |world| {
        for count in COUNTS {
            let sums = world
                .run(|rank| {
                    let result = all_reduce::<T>(rank, count, count == COUNTS[3])?;
                    let wrong = count_wrong(SEED, ranks, 1, &result);
                    assert_eq!(wrong, 0, "{count} elements, rank {}", rank.rank());
                    Ok::<_, Error>(checksum(&result))
                })
                .unwrap();
            assert!(sums.iter().all(|sum| *sum == sums[0]), "the ranks' results differ");
        }
    });
}

#[test]
fn sums_f32_on_two_gpus() {
    is_right_for_every_count::<f32>("sums_f32_on_two_gpus", 2);
}

#[test]
fn sums_f16_on_two_gpus() {
    is_right_for_every_count::<f16>("sums_f16_on_two_gpus", 2);
}

#[test]
fn sums_bf16_on_two_gpus() {
    is_right_for_every_count::<bf16>("sums_bf16_on_two_gpus", 2);
}

#[test]
fn sums_bf16_on_three_gpus() {
    is_right_for_every_count::<bf16>("sums_bf16_on_three_gpus", 3);
}

#[test]
fn sums_f32_on_four_gpus() {
    is_right_for_every_count::<f32>("sums_f32_on_four_gpus", 4);
}

/// The same launch again and again on one device communicator: the barriers' epochs go on.
#[test]
fn can_be_launched_many_times() {
    with_gpus("can_be_launched_many_times", 2, |world| {
        const COUNT: usize = 4096;
        world
            .run(|rank| {
                let comm = rank.communicator()?;
                let (a, b) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
                let requirements = DevCommRequirements::new().lsa_barriers(4);
                let dev_comm = comm.create_dev_comm(requirements)?;
                let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
                a.copy_from_host(&[1.0; COUNT])?;
                for i in 0..60 {
                    let (send, recv) = if i % 2 == 0 { (&a, &b) } else { (&b, &a) };
                    let args = (&dev_comm, send, recv, COUNT);
                    // SAFETY: both windows have `COUNT` elements in every rank, and every rank does the same.
                    unsafe {
                        let kernel = kernels::lsa_allreduce::<f32>;
                        kernels.launch(&stream, kernel, LaunchConfig::new(4, 128), args)?;
                    }
                }
                stream.synchronize()?;
                rank.barrier()?;
                let mut result = vec![0.0; COUNT];
                a.copy_to_host(&mut result)?;
                // Every launch doubles: 2^60, exactly.
                assert!(result.iter().all(|&x| x == (1u64 << 60) as f32));
                Ok::<_, Error>(())
            })
            .unwrap();
    });
}

#[test]
fn nccl_all_reduce_gives_the_same_sums() {
    with_gpus("nccl_all_reduce_gives_the_same_sums", 2, |world| {
        const COUNT: usize = 100_003;
        world
            .run(|rank| {
                let ours = all_reduce::<f32>(rank, COUNT, false)?;
                let comm = rank.communicator()?;
                let (send, recv) = (comm.mem_alloc::<f32>(COUNT)?, comm.mem_alloc::<f32>(COUNT)?);
                let stream = rank.stream()?;
                send.copy_from_host(&inputs::<f32>(SEED, rank.rank(), COUNT))?;
                comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
                stream.synchronize()?;
                let mut theirs = vec![0.0; COUNT];
                recv.copy_to_host(&mut theirs)?;
                // Two addends: one rounding, whatever the order.
                assert_eq!(checksum(&ours), checksum(&theirs));
                Ok::<_, Error>(())
            })
            .unwrap();
    });
}
