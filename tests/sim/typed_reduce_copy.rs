//! Tests of reduce-copy against sums on the host: every element type and operator, random counts
//! and offsets.

use std::fmt::Debug;

use cuda_std::prelude::*;
use cuda_std::reduce::{And, Avg, Max, Min, Or, PreMulSum, Prod, Sum, Xor, fold};
use devcomm::{DevCommRequirements, DevCommResource, F8E4M3, F8E5M2, Kernel, Result, Simulation};
use devcomm_testing::simulated::{Gpu, read, simulate};
use fastrand::Rng;
use nccl_device::reduce_copy as rc;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Runs `body` on one block per rank, between barriers.
#[inline(always)]
fn between_barriers(comm: &DevComm, body: impl FnOnce()) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    body();
    barrier.sync(MemoryOrder::Release);
}

/// An operator that is created for a number of ranks.
trait Operator<T: Accumulate>: ReduceOp<T> {
    fn for_ranks(ranks: u32) -> Self;
}

macro_rules! unit_operators {
    ($($op:ident)*) => { $(
        impl<T: Accumulate> Operator<T> for $op
        where
            $op: ReduceOp<T>,
        {
            fn for_ranks(_: u32) -> Self {
                $op
            }
        }
    )* };
}
unit_operators!(Sum Prod Min Max And Or Xor);

impl<T: Accumulate> Operator<T> for Avg {
    fn for_ranks(ranks: u32) -> Self {
        Self { of: ranks }
    }
}

type Scaled = PreMulSum<f32>;

impl<T: Accumulate<Acc = f32>> Operator<T> for Scaled {
    fn for_ranks(_: u32) -> Self {
        PreMulSum(0.5)
    }
}

/// Every rank reduces the same elements into its own memory.
#[kernel(
    T = [i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, F8E4M3, F8E5M2],
    Op = [Sum, Prod, Min, Max, Avg]
)]
unsafe fn reduce<T: Accumulate, Op: Operator<T>>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
) {
    let team = comm.lsa_team();
    let op = <Op as Operator<T>>::for_ranks(team.n_ranks as u32);
    // SAFETY: the windows are large enough, and each rank has its own destination.
    between_barriers(&comm, || unsafe {
        rc::lsa_reduce(Coop::cta(), op, src, src_index, dst, count, team);
    });
}

/// Does the same as [`reduce`], for bitwise operators.
#[kernel(T = [i8, u8, i32, u32, i64, u64], Op = [And, Or, Xor])]
unsafe fn reduce_bits<T: Accumulate, Op: Operator<T>>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
) {
    let team = comm.lsa_team();
    let op = <Op as Operator<T>>::for_ranks(team.n_ranks as u32);
    // SAFETY: the windows are large enough, and each rank has its own destination.
    between_barriers(&comm, || unsafe {
        rc::lsa_reduce(Coop::cta(), op, src, src_index, dst, count, team);
    });
}

/// Does the same as [`reduce`], for [`Scaled`].
#[kernel(T = [f16, f32, bf16, F8E4M3, F8E5M2], Op = [Scaled])]
unsafe fn reduce_scaled<T: Accumulate<Acc = f32>, Op: Operator<T>>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
) {
    let team = comm.lsa_team();
    let op = <Op as Operator<T>>::for_ranks(team.n_ranks as u32);
    // SAFETY: the windows are large enough, and each rank has its own destination.
    between_barriers(&comm, || unsafe {
        rc::lsa_reduce(Coop::cta(), op, src, src_index, dst, count, team);
    });
}

/// Each rank reduces its share to all ranks, by warps; then it copies its share of the result to
/// all ranks, two elements further.
#[kernel(T = [u8, i64, f16, f32, F8E5M2])]
unsafe fn reduce_copy<T: Accumulate>(
    comm: DevComm,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    again: Window<T>,
    count: usize,
) {
    let team = comm.lsa_team();
    let (rank, ranks) = (team.rank as usize, team.n_ranks as usize);
    let share = |rank: usize| count * rank / ranks;
    let (begin, len) = (share(rank), share(rank + 1) - share(rank));
    let warp = warp::warp_id() as usize;
    let warps = thread::block_dim_x().div_ceil(32) as usize;
    let of_warp = |warp: usize| len * warp / warps;
    let (from, n) = (begin + of_warp(warp), of_warp(warp + 1) - of_warp(warp));
    // SAFETY: the windows are large enough; one warp of one rank accesses each element.
    between_barriers(&comm, || unsafe {
        let coop = Coop::warp();
        rc::lsa_reduce_copy(coop, Sum, src, src_index + from, dst, dst_index + from, n, team);
    });
    // SAFETY: the windows have the elements.
    between_barriers(&comm, || unsafe {
        let mine = dst.local().as_ptr().wrapping_add(dst_index + begin);
        rc::lsa_copy(Coop::cta(), mine, again, dst_index + begin + 2, len, team);
    });
}

/// Stores the minimum of `n` buffers to `m` buffers, and copies their sum to `m` other buffers.
#[kernel(T = [i8, f64, bf16])]
unsafe fn local<T: Accumulate>(
    src: *const T,
    n: usize,
    stride: usize,
    dst: *mut T,
    m: usize,
    dst_stride: usize,
    sum: *mut T,
    copies: *mut T,
    count: usize,
) {
    let coop = Coop::cta();
    // SAFETY: the buffers are large enough.
    unsafe {
        rc::local_reduce_copy(coop, Min, n, src, stride, m, dst, dst_stride, count);
        rc::local_reduce(coop, Sum, n, src, stride, sum, count);
        coop.sync();
        rc::local_copy(coop, sum, m, copies, dst_stride, count);
    }
}

/// Returns `len` random elements: small numbers, whose sums are exact in every type and order.
fn elements<T: Small>(rng: &mut Rng, len: usize) -> Vec<T> {
    (0..len).map(|_| T::small(rng.u8(..4))).collect()
}

/// An element type with a few small values, also negative ones.
trait Small: Accumulate + PartialEq + Debug {
    fn small(n: u8) -> Self;
}

macro_rules! small {
    ($($type:ty: $from:expr;)*) => { $(
        impl Small for $type {
            fn small(n: u8) -> Self {
                let values: [f32; 4] = [0.5, -1.0, 2.0, 1.0];
                $from(values[usize::from(n)])
            }
        }
    )* };
}

small! {
    i8: |v: f32| (v * 2.0) as i8;
    u8: |v: f32| (v * 2.0) as i8 as u8;
    i32: |v: f32| (v * 2.0) as i32;
    u32: |v: f32| (v * 2.0) as i32 as u32;
    i64: |v: f32| (v * 2.0) as i64;
    u64: |v: f32| (v * 2.0) as i64 as u64;
    f16: f16::from_f32;
    f32: |v: f32| v;
    f64: |v: f32| f64::from(v);
    bf16: bf16::from_f32;
    F8E4M3: F8E4M3::from_f32;
    F8E5M2: F8E5M2::from_f32;
}

/// Returns the initial elements of a window or buffer that is written.
fn untouched<T: Small>(len: usize) -> Vec<T> {
    vec![T::small(2); len]
}

/// The number of elements before and after those that are written.
const ROOM: usize = 40;

/// Runs random trials with several numbers of ranks. All ranks draw the same random numbers.
fn trials(seed: u64, trial: impl Fn(&Gpu<'_>, &mut Rng) -> Result<()> + Sync) {
    for ranks in [1, 2, 3, 4, 5, 8] {
        simulate(Simulation::new(ranks), |gpu| {
            let mut rng = Rng::with_seed(seed << 8 | ranks as u64);
            (0..3).try_for_each(|_| trial(gpu, &mut rng))
        });
    }
}

/// Returns a number of threads, a count, and two offsets, equal or not.
fn shape(rng: &mut Rng) -> (u32, usize, [usize; 2]) {
    let threads = [1, 7, 32, 64][rng.usize(..4)];
    let longest = [20, 200, 3000][rng.usize(..3)];
    let (count, first) = (rng.usize(..longest), rng.usize(..ROOM / 2));
    let second = if rng.bool() { first } else { rng.usize(..ROOM / 2) };
    (threads, count, [first, second])
}

fn barrier(gpu: &Gpu<'_>) -> Result<DevCommResource> {
    gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))
}

/// Runs a kernel with [`reduce`]'s parameters on random elements.
fn reduces<T, Op, K>(gpu: &Gpu<'_>, rng: &mut Rng) -> Result<()>
where
    T: Small,
    Op: Operator<T>,
    K: Kernel<Args = (DevComm, Window<T>, usize, *mut T, usize)>,
{
    let ((threads, count, [from, to]), ranks) = (shape(rng), gpu.n_ranks());
    let len = count + ROOM;
    let inputs: Vec<Vec<T>> = (0..ranks).map(|_| elements(rng, len)).collect();
    let output = gpu.buffer(&untouched::<T>(len))?;
    let dst = output.device_address() + (to * size_of::<T>()) as u64;
    let args = (&barrier(gpu)?, &gpu.window(&inputs[gpu.rank()])?, from, dst, count);
    gpu.launch(K::with_args(args).grid(1).block(threads))?;
    let mut wanted = untouched::<T>(len);
    for i in 0..count {
        let of_ranks: Vec<T> = inputs.iter().map(|input| input[from + i]).collect();
        wanted[to + i] = fold(<Op as Operator<T>>::for_ranks(ranks as u32), &of_ranks).unwrap();
    }
    let what = (std::any::type_name::<T>(), std::any::type_name::<Op>());
    assert_eq!(read(&output)?, wanted, "{what:?}: {threads} threads, {count} from {from} to {to}");
    Ok(())
}

macro_rules! check_types {
    ($name:ident: $kernel:ident $ops:tt; $($type:ident)*) => {
        #[test]
        fn $name() {
            // Each invocation has its own seed: its line.
            trials(line!().into(), |gpu, rng| {
                $( check_types!(@ gpu rng $kernel $type $ops); )*
                Ok(())
            });
        }
    };
    (@ $gpu:ident $rng:ident $kernel:ident $type:ident [$($op:ident)*]) => {
        $( reduces::<$type, $op, $kernel<$type, $op>>($gpu, $rng)?; )*
    };
}

check_types!(integers_reduce_by_every_operator: reduce [Sum Prod Min Max Avg];
    i8 u8 i32 u32 i64 u64);
check_types!(floats_reduce_by_every_operator: reduce [Sum Prod Min Max Avg];
    f16 f32 f64 bf16 F8E4M3 F8E5M2);
check_types!(integers_reduce_by_their_bits: reduce_bits [And Or Xor]; i8 u8 i32 u32 i64 u64);
check_types!(floats_are_scaled_before_they_are_summed: reduce_scaled [Scaled];
    f16 f32 bf16 F8E4M3 F8E5M2);

fn reduces_to_all<T, K>(gpu: &Gpu<'_>, rng: &mut Rng) -> Result<()>
where
    T: Small,
    K: Kernel<Args = (DevComm, Window<T>, usize, Window<T>, usize, Window<T>, usize)>,
{
    let (warps, count, [from, to]) = shape(rng);
    let (warps, len) = (warps.min(8), count + ROOM);
    let inputs: Vec<Vec<T>> = (0..gpu.n_ranks()).map(|_| elements(rng, len)).collect();
    let src = gpu.window(&inputs[gpu.rank()])?;
    let (dst, again) = (gpu.window(&untouched(len))?, gpu.window(&untouched(len))?);
    let args = (&barrier(gpu)?, &src, from, &dst, to, &again, count);
    gpu.launch(K::with_args(args).grid(1).block(32 * warps))?;
    let (mut wanted, mut moved) = (untouched::<T>(len), untouched(len));
    for i in 0..count {
        let of_ranks: Vec<T> = inputs.iter().map(|input| input[from + i]).collect();
        wanted[to + i] = fold(Sum, &of_ranks).unwrap();
        moved[to + i + 2] = wanted[to + i];
    }
    let what = format!("{warps} warps, {count} from {from} to {to}");
    assert_eq!(read(&dst)?, wanted, "{what}");
    assert_eq!(read(&again)?, moved, "copied again: {what}");
    Ok(())
}

#[test]
fn a_share_reduced_by_each_rank_arrives_in_all() {
    trials(1, |gpu, rng| {
        reduces_to_all::<u8, reduce_copy<u8>>(gpu, rng)?;
        reduces_to_all::<i64, reduce_copy<i64>>(gpu, rng)?;
        reduces_to_all::<f16, reduce_copy<f16>>(gpu, rng)?;
        reduces_to_all::<f32, reduce_copy<f32>>(gpu, rng)?;
        reduces_to_all::<F8E5M2, reduce_copy<F8E5M2>>(gpu, rng)
    });
}

/// Reduces and copies `n_ranks` local buffers, which have the same contents in each rank.
fn reduces_buffers<T, K>(gpu: &Gpu<'_>, rng: &mut Rng) -> Result<()>
where
    T: Small,
    K: Kernel<Args = (*const T, usize, usize, *mut T, usize, usize, *mut T, *mut T, usize)>,
{
    let ((threads, count, offsets), n) = (shape(rng), gpu.n_ranks());
    let ([stride, dst_stride], m) = (offsets.map(|offset| count + offset), 1 + n % 3);
    let input: Vec<T> = elements(rng, n * stride + 1);
    let room = m * dst_stride + 1;
    let (src, dst) = (gpu.buffer(&input)?, gpu.buffer(&untouched::<T>(room))?);
    let sum = gpu.buffer(&untouched::<T>(count + 1))?;
    let copies = gpu.buffer(&untouched::<T>(room))?;
    let args = (&src, n, stride, &dst, m, dst_stride, &sum, &copies, count);
    gpu.launch(K::with_args(args).grid(1).block(threads))?;
    let (mut least, mut total) = (untouched::<T>(room), untouched::<T>(count + 1));
    let mut copied = untouched::<T>(room);
    for i in 0..count {
        let of_buffers: Vec<T> = (0..n).map(|k| input[k * stride + i]).collect();
        total[i] = fold(Sum, &of_buffers).unwrap();
        for k in 0..m {
            least[k * dst_stride + i] = fold(Min, &of_buffers).unwrap();
            copied[k * dst_stride + i] = total[i];
        }
    }
    let what = format!("{n} to {m} buffers of {count}, {stride} and {dst_stride} apart");
    assert_eq!([read(&dst)?, read(&sum)?, read(&copies)?], [least, total, copied], "{what}");
    Ok(())
}

#[test]
fn parts_at_any_distance_are_reduced_and_copied() {
    trials(2, |gpu, rng| {
        reduces_buffers::<i8, local<i8>>(gpu, rng)?;
        reduces_buffers::<f64, local<f64>>(gpu, rng)?;
        reduces_buffers::<bf16, local<bf16>>(gpu, rng)
    });
}

#[test]
fn an_operator_may_be_a_closure() {
    use reduce_copy_kernels::lsa::reduce_by_closure;
    let of_rank = |rank: usize| [1.0, -7.0, 5.0].map(|x: f32| bf16::from_f32(x - rank as f32));
    let outputs = simulate(Simulation::new(3), |gpu| {
        let (comm, src) = (barrier(gpu)?, gpu.window(&of_rank(gpu.rank()).repeat(6))?);
        let output = gpu.buffer(&[bf16::ZERO; 9])?;
        gpu.launch(
            reduce_by_closure::<bf16>::args(&comm, &src, 3_usize, &output, 9_usize)
                .grid(1)
                .block(32),
        )?;
        read(&output)
    });
    let wanted = [-1.0, -9.0, 5.0].map(bf16::from_f32).repeat(3);
    assert!(outputs.iter().all(|output| *output == wanted));
}
