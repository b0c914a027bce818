//! Tests of NCCL's reduce-copy functions: sums and copies, for each type.

use core::fmt::Debug;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::sim::{Error, Machine};
use devcomm::{DevCommRequirements, Simulation};
use devcomm_testing::simulated::{read, run, simulate, world};
use devcomm_types::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};
use nccl_device::raw;
use nccl_device::{DevComm, Window};

/// An odd number, so that no vector of elements of any type divides it.
const COUNT: usize = 37;

/// Defines a kernel and a test for each type, over LSA.
macro_rules! by_lsa {
    ($(
        $test:ident: $type:ty, $reduce:ident, $copy:ident, $both:ident, $local:ident;
    )*) => { $(
        mod $test {
            use super::*;

            /// Fills five parts of `out` with `COUNT` elements each: the sum of `input` over the
            /// team; the first rank's `input`, which it copies to all; the sum again, which rank 1
            /// stores to all; and the sum of the two halves of `input`, twice.
            #[kernel]
            unsafe fn $test(comm: DevComm, input: Window<$type>, out: Window<$type>) {
                let comm = comm.as_raw();
                let (team, coop) = (comm.lsa_team(), cta());
                let (src, dst, local) = (handle(&input), handle(&out), out.local().as_ptr());
                let bytes = COUNT * size_of::<$type>();
                // SAFETY: the windows have the elements.
                unsafe {
                    raw::$reduce(&coop, src, 0, local, COUNT, &team);
                    if team.rank == 0 {
                        raw::$copy(&coop, input.local().as_ptr(), dst, bytes, COUNT, &team);
                    }
                    if team.rank == 1 {
                        raw::$both(&coop, src, 0, dst, 2 * bytes, COUNT, &team);
                    }
                    raw::$local(
                        &coop,
                        2,
                        input.local().as_ptr(),
                        bytes,
                        2,
                        local.add(3 * COUNT),
                        bytes,
                        COUNT,
                    );
                }
            }

            #[test]
            fn sums_and_copies_over_lsa_are_nccls() {
                let value = |rank: usize, i: usize| <$type>::number(rank * 11 + i);
                let got = simulate(Simulation::new(6).team_size(3), |gpu| {
                    let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
                    let input: Vec<_> = (0..2 * COUNT).map(|i| value(gpu.rank(), i)).collect();
                    let input = gpu.window(&input)?;
                    let out = gpu.window(&[<$type>::default(); 5 * COUNT])?;
                    gpu.launch($test::args(&comm, &input, &out).grid(1).block(8))?;
                    read(&out)
                });
                for (rank, got) in got.iter().enumerate() {
                    let first = rank / 3 * 3;
                    for i in 0..COUNT {
                        let total = Reducible::sum(&[0, 1, 2].map(|k| value(first + k, i)));
                        let pair = Reducible::sum(&[value(rank, i), value(rank, i + COUNT)]);
                        let copied = value(first, i);
                        for (part, want) in
                            [total, copied, total, pair, pair].into_iter().enumerate()
                        {
                            assert_same(got[part * COUNT + i], want, (rank, part, i));
                        }
                    }
                }
            }
        }
    )* };
}

/// Asserts that two values have the same bits.
fn assert_same<T: Element + Debug>(got: T, want: T, at: impl Debug) {
    let bytes = |value: &T| {
        // SAFETY: an element is plain old data.
        unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>())
        }
        .to_vec()
    };
    assert_eq!(bytes(&got), bytes(&want), "{got:?} for {want:?} at {at:?}");
}

/// Returns the sum in half precision, rounded after each addition, as NCCL sums floats of 8 bits.
fn in_half(values: impl Iterator<Item = f32>) -> f32 {
    let add = |a: f16, b: f32| f16::from_f32(a.to_f32() + f16::from_f32(b).to_f32());
    values.fold(f16::ZERO, add).to_f32()
}

/// A type's inputs, and their sums as NCCL computes them.
trait Reducible: Element {
    fn number(i: usize) -> Self;
    fn sum(values: &[Self]) -> Self;
}

macro_rules! numbers {
    ($( $type:ty: |$i:ident| $number:expr, |$values:ident| $sum:expr; )*) => { $(
        impl Reducible for $type {
            fn number($i: usize) -> Self {
                $number
            }

            fn sum($values: &[Self]) -> Self {
                $sum
            }
        }
    )* };
}

numbers! {
    i8: |i| (i * 37) as i8, |values| values.iter().copied().fold(0, Self::wrapping_add);
    u8: |i| (i * 37) as u8, |values| values.iter().copied().fold(0, Self::wrapping_add);
    i32: |i| i32::MAX - i as i32, |values| values.iter().copied().fold(0, Self::wrapping_add);
    u32: |i| u32::MAX - i as u32, |values| values.iter().copied().fold(0, Self::wrapping_add);
    i64: |i| i64::MIN + i as i64, |values| values.iter().copied().fold(0, Self::wrapping_add);
    u64: |i| u64::MAX - i as u64, |values| values.iter().copied().fold(0, Self::wrapping_add);
    f32: |i| 0.1 + i as f32, |values| values.iter().fold(0.0, |a, b| a + b);
    f64: |i| 0.1 + i as f64, |values| values.iter().fold(0.0, |a, b| a + b);
    f16: |i| f16::from_f32(1000.0 + i as f32 * 0.37),
        |values| f16::from_f32(values.iter().map(|v| v.to_f32()).sum());
    bf16: |i| bf16::from_f32(1000.0 + i as f32 * 0.37),
        |values| bf16::from_f32(values.iter().map(|v| v.to_f32()).sum());
    F8E4M3: |i| F8E4M3::from_f32(i as f32 * 3.7),
        |values| F8E4M3::from_f32(in_half(values.iter().map(|v| v.to_f32())));
    F8E5M2: |i| F8E5M2::from_f32(i as f32 * 3.7),
        |values| F8E5M2::from_f32(in_half(values.iter().map(|v| v.to_f32())));
}

by_lsa! {
    i8s: i8, ncclLsaReduceSum_I8, ncclLsaCopy_I8,
        ncclLsaReduceSumCopy_I8, ncclLocalReduceSumCopy_I8;
    u8s: u8, ncclLsaReduceSum_U8, ncclLsaCopy_U8,
        ncclLsaReduceSumCopy_U8, ncclLocalReduceSumCopy_U8;
    i32s: i32, ncclLsaReduceSum_I32, ncclLsaCopy_I32,
        ncclLsaReduceSumCopy_I32, ncclLocalReduceSumCopy_I32;
    u32s: u32, ncclLsaReduceSum_U32, ncclLsaCopy_U32,
        ncclLsaReduceSumCopy_U32, ncclLocalReduceSumCopy_U32;
    i64s: i64, ncclLsaReduceSum_I64, ncclLsaCopy_I64,
        ncclLsaReduceSumCopy_I64, ncclLocalReduceSumCopy_I64;
    u64s: u64, ncclLsaReduceSum_U64, ncclLsaCopy_U64,
        ncclLsaReduceSumCopy_U64, ncclLocalReduceSumCopy_U64;
    f16s: f16, ncclLsaReduceSum_F16, ncclLsaCopy_F16,
        ncclLsaReduceSumCopy_F16, ncclLocalReduceSumCopy_F16;
    f32s: f32, ncclLsaReduceSum_F32, ncclLsaCopy_F32,
        ncclLsaReduceSumCopy_F32, ncclLocalReduceSumCopy_F32;
    f64s: f64, ncclLsaReduceSum_F64, ncclLsaCopy_F64,
        ncclLsaReduceSumCopy_F64, ncclLocalReduceSumCopy_F64;
    bf16s: bf16, ncclLsaReduceSum_BF16, ncclLsaCopy_BF16,
        ncclLsaReduceSumCopy_BF16, ncclLocalReduceSumCopy_BF16;
    e4m3s: F8E4M3, ncclLsaReduceSum_F8E4M3, ncclLsaCopy_F8E4M3,
        ncclLsaReduceSumCopy_F8E4M3, ncclLocalReduceSumCopy_F8E4M3;
    e5m2s: F8E5M2, ncclLsaReduceSum_F8E5M2, ncclLsaCopy_F8E5M2,
        ncclLsaReduceSumCopy_F8E5M2, ncclLocalReduceSumCopy_F8E5M2;
}

/// Defines a kernel and a test for each type, over multimem.
macro_rules! by_multimem {
    ($( $test:ident: $type:ty, $reduce:ident, $copy:ident, $both:ident; )*) => { $(
        mod $test {
            use super::*;

            /// An even number, since elements of 16 bits are accessed in pairs.
            const COUNT: usize = super::COUNT + 1;

            #[kernel]
            unsafe fn $test(comm: DevComm, input: Window<$type>, out: Window<$type>) {
                let comm = comm.as_raw();
                let coop = cta();
                let bytes = COUNT * size_of::<$type>();
                // SAFETY: the windows have the elements.
                unsafe {
                    let src =
                        raw::ncclGetLsaMultimemPointer(handle(&input), 0, comm).cast::<$type>();
                    let dst =
                        raw::ncclGetLsaMultimemPointer(handle(&out), bytes, comm).cast::<$type>();
                    raw::$reduce(&coop, src, out.local().as_ptr(), COUNT);
                    if comm.lsa_rank == 0 {
                        raw::$copy(&coop, input.local().as_ptr(), dst, COUNT);
                        raw::$both(&coop, src, dst.wrapping_add(COUNT), COUNT);
                    }
                }
            }

            #[test]
            fn sums_and_copies_over_multimem_are_nccls() {
                let value = |rank: usize, i: usize| <$type>::number(rank * 11 + i);
                let got = simulate(Simulation::new(4).team_size(2), |gpu| {
                    let asked = DevCommRequirements::new().lsa_barriers(1).lsa_multimem(true);
                    let input: Vec<_> = (0..COUNT).map(|i| value(gpu.rank(), i)).collect();
                    let (comm, input) = (gpu.dev_comm(asked)?, gpu.window(&input)?);
                    let out = gpu.window(&[<$type>::default(); 3 * COUNT])?;
                    gpu.launch($test::args(&comm, &input, &out).grid(1).block(8))?;
                    read(&out)
                });
                for (rank, got) in got.iter().enumerate() {
                    let first = rank / 2 * 2;
                    for i in 0..COUNT {
                        let total = Reducible::sum(&[value(first, i), value(first + 1, i)]);
                        for (part, want) in [total, value(first, i), total].into_iter().enumerate()
                        {
                            assert_same(got[part * COUNT + i], want, (rank, part, i));
                        }
                    }
                }
            }
        }
    )* };
}

by_multimem! {
    mc_i32s: i32, ncclMultimemReduceSum_I32, ncclMultimemCopy_I32,
        ncclMultimemReduceSumCopy_I32;
    mc_u32s: u32, ncclMultimemReduceSum_U32, ncclMultimemCopy_U32,
        ncclMultimemReduceSumCopy_U32;
    mc_i64s: i64, ncclMultimemReduceSum_I64, ncclMultimemCopy_I64,
        ncclMultimemReduceSumCopy_I64;
    mc_u64s: u64, ncclMultimemReduceSum_U64, ncclMultimemCopy_U64,
        ncclMultimemReduceSumCopy_U64;
    mc_f16s: f16, ncclMultimemReduceSum_F16, ncclMultimemCopy_F16,
        ncclMultimemReduceSumCopy_F16;
    mc_f32s: f32, ncclMultimemReduceSum_F32, ncclMultimemCopy_F32,
        ncclMultimemReduceSumCopy_F32;
    mc_f64s: f64, ncclMultimemReduceSum_F64, ncclMultimemCopy_F64,
        ncclMultimemReduceSumCopy_F64;
    mc_bf16s: bf16, ncclMultimemReduceSum_BF16, ncclMultimemCopy_BF16,
        ncclMultimemReduceSumCopy_BF16;
}

/// Makes the mistake with number `which`; 0 and 1 are correct calls.
#[kernel]
unsafe fn mistakes_of_reduce_copy(
    comm: DevComm,
    fp8: Window<F8E4M3>,
    floats: Window<f32>,
    which: u32,
) {
    let comm = comm.as_raw();
    let (team, coop) = (comm.lsa_team(), cta());
    // SAFETY: the simulator reports misuse.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&fp8), 0, comm).cast::<F8E4M3>();
        let (fp8, e4m3) = (fp8.local().as_ptr(), all);
        let (window, local) = (handle(&floats), floats.local().as_ptr());
        match which {
            0 => raw::ncclMultimemCopy_F8E4M3(&coop, fp8, all, 4),
            1 => raw::ncclMultimemCopy_F8E5M2(&coop, fp8.cast(), all.cast(), 4),
            2 => raw::ncclMultimemReduceSum_F8E4M3(&coop, e4m3, fp8, 4),
            3 => raw::ncclMultimemReduceSumCopy_F8E5M2(&coop, e4m3.cast(), e4m3.cast(), 4),
            4 => raw::ncclLsaReduceSum_F32(&coop, window, 4, local, 4, &team),
            5 => raw::ncclLsaReduceSum_F32(&coop, window, 2, local, 1, &team),
            6 => raw::ncclLocalReduceSumCopy_F32(&coop, 0, local, 4, 1, local, 4, 1),
            7 => raw::ncclMultimemCopy_F32(&coop, local, local, 1),
            8 => raw::ncclLsaCopy_F32(&coop, all.cast(), window, 0, 1, &team),
            _ => raw::ncclMultimemReduceSum_F32(&coop, all.cast::<f32>().byte_add(2), local, 1),
        }
    }
}

#[test]
fn misuse_of_reduce_copy_is_reported() {
    let report = |which: u32| {
        let world = world(Simulation::new(2).races(false));
        let result = run(&world, |gpu| {
            let asked = DevCommRequirements::new().lsa_barriers(1).lsa_multimem(true);
            let (fp8, floats) = (gpu.window(&[F8E4M3::default(); 4])?, gpu.window(&[0_f32; 4])?);
            gpu.launch(
                mistakes_of_reduce_copy::args(&gpu.dev_comm(asked)?, &fp8, &floats, which)
                    .grid(1)
                    .block(2),
            )
        });
        let failure = world.simulated_machine().and_then(Machine::failure);
        assert_eq!(result.is_err(), failure.is_some(), "{result:?}");
        failure
    };
    // 8-bit floats can be copied, but not summed.
    assert!(report(0).is_none() && report(1).is_none());
    for (which, want) in [
        (2, "a multimem sum of f8e4m3: NCCL's device library traps here"),
        (3, "a multimem sum of f8e5m2: NCCL's device library traps here"),
        (4, "loads 4 bytes at"),
        (5, "is not a multiple of 4"),
        (6, "a sum of no sources"),
        (7, "is not a multicast address"),
        (8, "a multicast address, which is for multimem instructions only"),
        (9, "is not a multiple of 4"),
    ] {
        let error = report(which).unwrap();
        assert!(matches!(*error, Error::Misuse { .. } | Error::OutOfBounds { .. }), "{error}");
        assert!(error.to_string().contains(want), "{error}");
        assert!(error.to_string().contains("reduce_copy.rs"), "{error}");
    }
}
