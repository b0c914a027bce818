//! Tests of reduce-copy over multicast addresses: the kernels of `reduce_copy_kernels` at several
//! offsets and counts.

use std::fmt::Debug;

use cuda_std::prelude::*;
use cuda_std::reduce::{Max, Sum, fold};
use devcomm::device::{self, DevComm};
use devcomm::{
    DevCommRequirements, DevCommResource, Element, Kernel, Result, Simulation, SymmetricBuffer,
    Window,
};
use devcomm_testing::simulated::{Gpu, read, simulate};
use reduce_copy_kernels::multimem::{
    lsa_reduce_multimem_copy, multimem_copy, multimem_reduce, multimem_reduce_copy,
    multimem_reduce_lsa_copy,
};

/// The number of elements of windows and buffers.
const LEN: usize = 700;

/// A rank's memory, and the initial `src` elements of all ranks.
struct Memory<T: Element> {
    comm: DevCommResource,
    inputs: Vec<Vec<T>>,
    untouched: T,
    src: Window<T>,
    dst: Window<T>,
    buffer: SymmetricBuffer<T>,
}

impl<T: Accumulate + PartialEq + Debug> Memory<T> {
    fn new(gpu: &Gpu<'_>, element: fn(usize) -> T) -> Result<Self> {
        let requirements = DevCommRequirements::new().lsa_multimem(true).lsa_barriers(1);
        let input = |rank: usize| (0..LEN).map(|i| element(3 * rank + i)).collect();
        let inputs: Vec<Vec<T>> = (0..gpu.n_ranks()).map(input).collect();
        let untouched = element(1);
        Ok(Self {
            comm: gpu.dev_comm(requirements)?,
            src: gpu.window(&inputs[gpu.rank()])?,
            dst: gpu.window(&[untouched; LEN])?,
            buffer: gpu.buffer(&[untouched; LEN])?,
            untouched,
            inputs,
        })
    }

    /// Returns the address of an element of the buffer.
    fn at(&self, index: usize) -> u64 {
        self.buffer.device_address() + (index * size_of::<T>()) as u64
    }

    /// Returns the expected destination after a copy of `count` elements to index `to`.
    fn wanted(&self, to: usize, count: usize, element: impl Fn(usize) -> T) -> Vec<T> {
        let mut wanted = vec![self.untouched; LEN];
        for i in 0..count {
            wanted[to + i] = element(i);
        }
        wanted
    }

    /// Returns the reduction of all ranks' elements `i`.
    fn folded<Op: ReduceOp<T>>(&self, op: Op, i: usize) -> T {
        let of_ranks: Vec<T> = self.inputs.iter().map(|input| input[i]).collect();
        fold(op, &of_ranks).unwrap()
    }
}

/// Runs `trial` with new memory for each of [`RANGES`]: a count, and offsets of source and
/// destination.
fn trials<T: Accumulate + PartialEq + Debug>(
    ranks: usize,
    element: fn(usize) -> T,
    trial: impl Fn(&Gpu<'_>, Memory<T>, [usize; 3]) -> Result<()> + Sync,
) {
    simulate(Simulation::new(ranks), |gpu| {
        let run = |&(count, from, to)| trial(gpu, Memory::new(gpu, element)?, [count, from, to]);
        RANGES.iter().try_for_each(run)
    });
}

/// Counts, and offsets of source and destination: multiples of a vector's length and others.
const RANGES: [(usize, usize, usize); 6] =
    [(0, 0, 0), (1, 3, 3), (640, 0, 0), (613, 5, 5), (600, 1, 2), (31, 7, 0)];

#[test]
fn all_copies_are_summed_into_a_pointer() {
    fn check<T, K>(element: fn(usize) -> T)
    where
        T: Accumulate + PartialEq + Debug,
        K: Kernel<Args = (DevComm, device::Window<T>, usize, *mut T, usize)>,
    {
        for ranks in [1, 3] {
            trials(ranks, element, |gpu, it, [count, from, to]| {
                gpu.launch(
                    K::with_args((&it.comm, &it.src, from, it.at(to), count)).grid(1).block(32),
                )?;
                let wanted = it.wanted(to, count, |i| it.folded(Sum, from + i));
                assert_eq!(read(&it.buffer)?, wanted, "{count} from {from} to {to}");
                Ok(())
            });
        }
    }
    check::<f32, multimem_reduce<f32>>(|i| (i % 9) as f32);
    check::<f64, multimem_reduce<f64>>(|i| (i % 9) as f64);
    check::<i32, multimem_reduce<i32>>(|i| (i % 9) as i32 - 4);
    check::<f16, multimem_reduce<f16>>(|i| f16::from_f32((i % 9) as f32));
    check::<bf16, multimem_reduce<bf16>>(|i| bf16::from_f32((i % 9) as f32));
}

#[test]
fn a_pointer_is_copied_to_all_copies_and_neighbours_stay() {
    fn check<T, K>(element: fn(usize) -> T)
    where
        T: Accumulate + PartialEq + Debug,
        K: Kernel<Args = (DevComm, *const T, device::Window<T>, usize, usize)>,
    {
        trials(2, element, |gpu, it, [count, from, to]| {
            let source: Vec<T> = (0..LEN).map(|i| element(i * i)).collect();
            it.buffer.copy_from_host(&source)?;
            // Rank 1 writes; rank 0 copies 0 elements.
            let args = (&it.comm, it.at(from), &it.dst, to, count * gpu.rank());
            gpu.launch(K::with_args(args).grid(1).block(32))?;
            let wanted = it.wanted(to, count, |i| source[from + i]);
            assert_eq!(read(&it.dst)?, wanted, "{count} from {from} to {to}");
            Ok(())
        });
    }
    check::<f32, multimem_copy<f32>>(|i| (i % 99) as f32);
    check::<f16, multimem_copy<f16>>(|i| f16::from_f32((i % 99) as f32));
    check::<u8, multimem_copy<u8>>(|i| (i % 251) as u8);
}

type FromWindowToWindow<T> = (DevComm, device::Window<T>, usize, device::Window<T>, usize, usize);

/// Checks a kernel from window to window, where each rank reduces or copies a share.
fn check_windows<T, K>(op: impl ReduceOp<T> + Sync, element: fn(usize) -> T)
where
    T: Accumulate + PartialEq + Debug,
    K: Kernel<Args = FromWindowToWindow<T>>,
{
    for ranks in [1, 2, 3, 4, 8] {
        trials(ranks, element, |gpu, it, [count, from, to]| {
            let share = |rank: usize| count * rank / ranks;
            let (begin, end) = (share(gpu.rank()), share(gpu.rank() + 1));
            let args = (&it.comm, &it.src, from + begin, &it.dst, to + begin, end - begin);
            gpu.launch(K::with_args(args).grid(1).block(32))?;
            let wanted = it.wanted(to, count, |i| it.folded(op, from + i));
            assert_eq!(read(&it.dst)?, wanted, "{ranks}: {count} from {from} to {to}");
            Ok(())
        });
    }
}

#[test]
fn all_copies_are_reduced_into_all_copies() {
    check_windows::<f32, multimem_reduce_copy<f32>>(Sum, |i| (i % 9) as f32);
    check_windows::<f16, multimem_reduce_copy<f16>>(Sum, |i| f16::from_f32((i % 9) as f32));
    check_windows::<bf16, multimem_reduce_copy<bf16>>(Sum, |i| bf16::from_f32((i % 9) as f32));
}

#[test]
fn load_and_store_and_multicast_mix() {
    check_windows::<f32, lsa_reduce_multimem_copy<f32>>(Max, |i| (i % 19) as f32);
    check_windows::<bf16, lsa_reduce_multimem_copy<bf16>>(Max, |i| bf16::from_f32((i % 19) as f32));
    check_windows::<f16, multimem_reduce_lsa_copy<f16>>(Max, |i| f16::from_f32((i % 19) as f32));
    check_windows::<i64, multimem_reduce_lsa_copy<i64>>(Max, |i| (i % 19) as i64 - 9);
}

#[test]
fn ranks_and_threads_reduce_the_halves_of_a_word_in_place() {
    // The shares begin at odd elements, and threads take the elements at both ends one by one.
    trials(
        2,
        |i| bf16::from_f32((i % 9) as f32),
        |gpu, it, [count, from, _]| {
            let share = |rank: usize| count * rank / 2;
            let (begin, end) = (share(gpu.rank()), share(gpu.rank() + 1));
            let at = from + begin;
            let args = (&it.comm, &it.src, at, &it.src, at, end - begin);
            gpu.launch(multimem_reduce_copy::<bf16>::with_args(args).grid(1).block(32))?;
            let mut wanted = it.inputs[gpu.rank()].clone();
            for (i, element) in wanted.iter_mut().enumerate().skip(from).take(count) {
                *element = it.folded(Sum, i);
            }
            assert_eq!(read(&it.src)?, wanted, "{count} from {from}");
            Ok(())
        },
    );
}
