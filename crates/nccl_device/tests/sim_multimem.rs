//! Reduce-copy over multicast addresses, in the simulator: the kernels that are compiled to PTX, at any offset and count.

use std::fmt::Debug;

use cuda_std::prelude::*;
use cuda_std::reduce::{Max, Sum, fold};
use devcomm_sim::{Buffer, DevComm, DevCommConfig, LaunchConfig, Simulator, Window};
use reduce_copy_kernels::multimem::{
    lsa_reduce_multimem_copy, multimem_copy, multimem_reduce, multimem_reduce_copy,
    multimem_reduce_lsa_copy,
};

/// Elements of windows and buffers.
const LEN: usize = 700;

/// Ranks, and their memory.
struct World<T> {
    sim: Simulator,
    comm: DevComm,
    inputs: Vec<Vec<T>>,
    src: Window<T>,
    dst: Window<T>,
    buffers: Vec<Buffer<T>>,
}

impl<T: Accumulate + PartialEq + Debug> World<T> {
    fn new(ranks: usize, element: fn(usize) -> T) -> Self {
        let sim = Simulator::new(ranks).unwrap();
        #[allow(clippy::needless_update, reason = "what else there is")]
        let config = DevCommConfig { lsa_multimem: true, lsa_barriers: 1, ..Default::default() };
        let comm = sim.dev_comm(config).unwrap();
        let (src, dst) = (sim.window::<T>(LEN).unwrap(), sim.window::<T>(LEN).unwrap());
        let buffers: Vec<_> = (0..ranks).map(|rank| sim.buffer::<T>(rank, LEN).unwrap()).collect();
        let input = |rank: usize| (0..LEN).map(|i| element(3 * rank + i)).collect();
        let inputs: Vec<Vec<T>> = (0..ranks).map(input).collect();
        for (rank, input) in inputs.iter().enumerate() {
            src.write(rank, input).unwrap();
            dst.write(rank, &[element(1); LEN]).unwrap();
            buffers[rank].write(&[element(1); LEN]).unwrap();
        }
        Self { sim, comm, inputs, src, dst, buffers }
    }

    /// What a destination holds that gets `count` elements at `to`.
    fn wanted(&self, to: usize, count: usize, of: impl Fn(usize) -> T) -> Vec<T> {
        // The last element is beyond every range.
        let mut wanted = vec![self.dst.read(0)[LEN - 1]; LEN];
        for i in 0..count {
            wanted[to + i] = of(i);
        }
        wanted
    }

    /// Element `i` of all ranks, reduced.
    fn folded<Op: ReduceOp<T>>(&self, op: Op, i: usize) -> T {
        let of_ranks: Vec<T> = self.inputs.iter().map(|input| input[i]).collect();
        fold(op, &of_ranks).unwrap()
    }
}

/// Counts and offsets, in vectors and out of step with them.
const RANGES: [(usize, usize, usize); 6] =
    [(0, 0, 0), (1, 3, 3), (640, 0, 0), (613, 5, 5), (600, 1, 2), (31, 7, 0)];

#[test]
fn all_copies_are_summed_into_a_pointer() {
    fn check<T: Accumulate + PartialEq + Debug, K>(kernel: K, element: fn(usize) -> T)
    where
        K: devcomm_types::HostKernel<
                Args = (nccl_device::DevComm, nccl_device::Window<T>, usize, *mut T, usize),
            >,
    {
        for ranks in [1, 3] {
            for (count, from, to) in RANGES {
                let world = World::new(ranks, element);
                let args = |rank: usize| {
                    let dst = world.buffers[rank].address() + (to * size_of::<T>()) as u64;
                    (world.comm.rank(rank), world.src.rank(rank), from, dst, count)
                };
                // SAFETY: window and buffers have room.
                unsafe { world.sim.launch(kernel, LaunchConfig::new(1, 32), args) }.unwrap();
                let wanted = world.wanted(to, count, |i| world.folded(Sum, from + i));
                for buffer in &world.buffers {
                    assert_eq!(buffer.read(), wanted, "{count} from {from} to {to}");
                }
            }
        }
    }
    check(multimem_reduce::<f32>, |i| (i % 9) as f32);
    check(multimem_reduce::<f64>, |i| (i % 9) as f64);
    check(multimem_reduce::<i32>, |i| (i % 9) as i32 - 4);
    check(multimem_reduce::<f16>, |i| f16::from_f32((i % 9) as f32));
    check(multimem_reduce::<bf16>, |i| bf16::from_f32((i % 9) as f32));
}

#[test]
fn a_pointer_is_copied_to_all_copies_and_neighbours_stay() {
    fn check<T: Accumulate + PartialEq + Debug, K>(kernel: K, element: fn(usize) -> T)
    where
        K: devcomm_types::HostKernel<
                Args = (nccl_device::DevComm, *const T, nccl_device::Window<T>, usize, usize),
            >,
    {
        for (count, from, to) in RANGES {
            let world = World::new(2, element);
            let source: Vec<T> = (0..LEN).map(|i| element(i * i)).collect();
            world.buffers[1].write(&source).unwrap();
            // One rank writes, the other nothing.
            let args = |rank: usize| {
                let src = world.buffers[rank].address() + (from * size_of::<T>()) as u64;
                (world.comm.rank(rank), src, world.dst.rank(rank), to, count * rank)
            };
            // SAFETY: window and buffers have room.
            unsafe { world.sim.launch(kernel, LaunchConfig::new(1, 32), args) }.unwrap();
            let wanted = world.wanted(to, count, |i| source[from + i]);
            for rank in 0..2 {
                assert_eq!(world.dst.read(rank), wanted, "{count} from {from} to {to}");
            }
        }
    }
    check(multimem_copy::<f32>, |i| (i % 99) as f32);
    check(multimem_copy::<f16>, |i| f16::from_f32((i % 99) as f32));
    check(multimem_copy::<u8>, |i| (i % 251) as u8);
}

/// A kernel from windows to windows, in which each rank does a part.
fn check_windows<T: Accumulate + PartialEq + Debug, K, Op: ReduceOp<T>>(
    kernel: K,
    op: Op,
    element: fn(usize) -> T,
) where
    K: devcomm_types::HostKernel<
            Args = (
                nccl_device::DevComm,
                nccl_device::Window<T>,
                usize,
                nccl_device::Window<T>,
                usize,
                usize,
            ),
        >,
{
    for ranks in [1, 2, 3, 4, 8] {
        for (count, from, to) in RANGES {
            let world = World::new(ranks, element);
            let share = |rank: usize| count * rank / ranks;
            let args = |rank: usize| {
                let (begin, len) = (share(rank), share(rank + 1) - share(rank));
                let (src, dst) = (world.src.rank(rank), world.dst.rank(rank));
                (world.comm.rank(rank), src, from + begin, dst, to + begin, len)
            };
            // SAFETY: the windows have room.
            unsafe { world.sim.launch(kernel, LaunchConfig::new(1, 32), args) }.unwrap();
            let wanted = world.wanted(to, count, |i| world.folded(op, from + i));
            for rank in 0..ranks {
                assert_eq!(world.dst.read(rank), wanted, "{ranks}: {count} from {from} to {to}");
            }
        }
    }
}

#[test]
fn all_copies_are_reduced_into_all_copies() {
    check_windows(multimem_reduce_copy::<f32>, Sum, |i| (i % 9) as f32);
    check_windows(multimem_reduce_copy::<f16>, Sum, |i| f16::from_f32((i % 9) as f32));
    check_windows(multimem_reduce_copy::<bf16>, Sum, |i| bf16::from_f32((i % 9) as f32));
}

#[test]
fn load_and_store_and_multicast_mix() {
    check_windows(lsa_reduce_multimem_copy::<f32>, Max, |i| (i % 19) as f32);
    check_windows(lsa_reduce_multimem_copy::<bf16>, Max, |i| bf16::from_f32((i % 19) as f32));
    check_windows(multimem_reduce_lsa_copy::<f16>, Max, |i| f16::from_f32((i % 19) as f32));
    check_windows(multimem_reduce_lsa_copy::<i64>, Max, |i| (i % 19) as i64 - 9);
}
