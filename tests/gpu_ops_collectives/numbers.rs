//! Tests that reductions treat NaNs, infinities and zeros of either sign as `ReduceOp` documents.

use std::collections::HashSet;

use devcomm::{
    Algorithm, Buffer, Collective, Collectives, CollectivesOptions, F8E4M3, Parts, Rank, ReduceOp,
    Result,
};
use devcomm_testing::machines::on_gpus;
use half::{bf16, f16};

use super::Number;

/// Numbers that two ranks send, and their sum, product, maximum, minimum and average.
const CASES: [([f32; 2], [f32; 5]); 9] = {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    [
        ([NAN, 1.0], [NAN, NAN, 1.0, 1.0, NAN]),
        ([1.0, NAN], [NAN, NAN, 1.0, 1.0, NAN]),
        ([NAN, -INF], [NAN, NAN, -INF, -INF, NAN]),
        ([NAN, NAN], [NAN; 5]),
        ([INF, -INF], [NAN, -INF, INF, -INF, NAN]),
        ([INF, INF], [INF; 5]),
        ([INF, 0.0], [INF, NAN, INF, 0.0, INF]),
        ([-0.0, -0.0], [0.0; 5]),
        ([-0.0, 1.0], [1.0, 0.0, 1.0, 0.0, 0.5]),
    ]
};

/// Returns whether the numbers are equal or both NaN; zeros of both signs are equal.
fn same(got: f32, expected: f32) -> bool {
    got == expected || got.is_nan() && expected.is_nan()
}

/// Reduces `cases` by a plan of each algorithm; all ranks get the same bits of an all-reduce.
fn reduce<T: Number>(rank: &Rank, cases: &[([f32; 2], [f32; 5])], to: fn(f32) -> T) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = CollectivesOptions::new().push_blocks(2).build(comm)?;
    // Each case occurs several times, in vectors and in the elements after the last vector.
    let all = || cases.iter().cycle().take(10 * cases.len() + 3);
    let own: Vec<T> = all().map(|(sent, _)| to(sent[rank.rank()])).collect();
    let (send, recv) = (comm.window::<T>(own.len())?, comm.window::<T>(own.len())?);
    send.copy_from_host(&own)?;
    let parts = comm.window::<T>(2 * own.len())?;
    parts.copy_from_host(&own.repeat(2))?;
    for (index, op) in ReduceOp::ALL.into_iter().enumerate() {
        let mut plans = collectives.plans(&Collective::all_reduce(&send, &recv, op))?;
        let by_kernel = size_of::<T>() > 1 && op != ReduceOp::Prod;
        assert_eq!(plans.iter().any(|plan| plan.algorithm == Algorithm::Push), by_kernel);
        // The first plan of each algorithm is tested.
        plans.dedup_by_key(|plan| plan.algorithm);
        for plan in plans {
            collectives.set_plan(Some(plan));
            let case = format!("{op:?} of {} by {plan}", T::NAME);
            let reduced = collectives.all_reduce(&send, &recv, op, &stream);
            let reduced = reduced.and_then(|()| stream.synchronize());
            reduced.unwrap_or_else(|error| panic!("{case}: {error}"));
            let mut got = own.clone();
            recv.copy_to_host(&mut got)?;
            for (got, (sent, expected)) in got.iter().zip(all()) {
                let (got, expected) = (got.value(), expected[index]);
                assert!(same(got, expected), "{case}: {got} of {sent:?}");
            }
            // Bits are compared, as a NaN does not equal itself.
            let bits: Vec<u32> = got.iter().map(|got| got.value().to_bits()).collect();
            let bits = rank.all_gather(&bits)?;
            assert_eq!(bits[0], bits[1], "{case}");
        }
        // Each rank gets the reduction of a part with the same elements.
        let mut plans = collectives.plans(&Collective::reduce_scatter(&parts, &recv, op))?;
        plans.dedup_by_key(|plan| plan.algorithm);
        for plan in plans {
            collectives.set_plan(Some(plan));
            let case = format!("a part's {op:?} of {} by {plan}", T::NAME);
            let reduced = collectives.reduce_scatter(&parts, &recv, op, &stream);
            let reduced = reduced.and_then(|()| stream.synchronize());
            reduced.unwrap_or_else(|error| panic!("{case}: {error}"));
            let mut got = own.clone();
            recv.copy_to_host(&mut got)?;
            for (got, (sent, expected)) in got.iter().zip(all()) {
                let (got, expected) = (got.value(), expected[index]);
                assert!(same(got, expected), "{case}: {got} of {sent:?}");
            }
        }
        collectives.set_plan(None);
    }
    Ok(())
}

#[test]
fn reductions_combine_nans_infinities_and_zeros_as_documented() {
    on_gpus("reductions_combine_nans_infinities_and_zeros_as_documented", 2, |rank| {
        reduce::<f32>(rank, &CASES, |value| value)?;
        reduce::<f16>(rank, &CASES, f16::from_f32)?;
        reduce::<bf16>(rank, &CASES, bf16::from_f32)?;
        // The type has no infinities: numbers that are too large become the largest one.
        let (nan, most) = (f32::NAN, 448.0);
        let cases = [
            ([nan, 1.0], [nan, nan, 1.0, 1.0, nan]),
            ([nan, nan], [nan; 5]),
            ([most, most], [most; 5]),
            ([-most, -most], [-most, most, -most, -most, -most]),
            ([-0.0, 0.0], [0.0; 5]),
        ];
        reduce::<F8E4M3>(rank, &cases, F8E4M3::from_f32)
    });
}

/// Moves patterns of bits by a plan of each algorithm.
fn moves(rank: &Rank) -> Result<()> {
    /// The elements that a rank sends to each rank: more than are sent in one step.
    const COUNT: usize = 100;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    // One object sends all messages in one step, the other one none.
    let objects = [1024, 64].map(|bytes| {
        let options = CollectivesOptions::new().lamport_bytes(bytes).push_blocks(2);
        options.build(comm)
    });
    let patterns = [0x8000_0000_u32, 0, 0x7fc0_0001, 0xffff_ffff, 0x7f80_0001, 0xff80_0000];
    let patterns = patterns.iter().cycle().take(COUNT);
    let own: Vec<f32> = patterns.map(|bits| f32::from_bits(*bits)).collect();
    let (send, recv) = (comm.window::<f32>(2 * COUNT)?, comm.window::<f32>(2 * COUNT)?);
    send.copy_from_host(&own.repeat(2))?;
    let (one, first) = (send.slice(..COUNT)?, recv.slice(..COUNT)?);
    let require = |what: &str, result: Result<()>, n: usize| {
        result.and_then(|()| stream.synchronize()).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut got = vec![0.0_f32; n];
        recv.slice(..n)?.copy_to_host(&mut got)?;
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        got.chunks(COUNT).for_each(|part| assert_eq!(bits(part), bits(&own), "{what}"));
        recv.fill_bytes(1)
    };
    let parts = Parts { counts: &[COUNT; 2], offsets: &[0, COUNT] };
    let (sent, all) = (|| Some(one.clone()), 2 * COUNT);
    type Call<'a> = (&'a str, usize, Collective<'a>, &'a dyn Fn(&Collectives) -> Result<()>);
    let calls: [Call<'_>; 4] = [
        ("all_gather", all, Collective::all_gather(&one, &recv), &|by| {
            by.all_gather(&one, &recv, &stream)
        }),
        ("all_to_all", all, Collective::all_to_all(&send, &recv), &|by| {
            by.all_to_all(&send, &recv, &stream)
        }),
        ("broadcast", COUNT, Collective::broadcast(sent(), &first, 1), &|by| {
            by.broadcast(sent(), &first, 1, &stream)
        }),
        ("all_to_all_v", all, Collective::all_to_all_v(&send, parts, &recv, parts), &|by| {
            by.all_to_all_v(&send, parts, &recv, parts, &stream)
        }),
    ];
    let mut algorithms = HashSet::new();
    for collectives in objects {
        let collectives = collectives?;
        for (name, n, call, run) in &calls {
            for plan in collectives.plans(call)? {
                if algorithms.insert((*name, plan.algorithm.to_string())) {
                    collectives.set_plan(Some(plan));
                    require(&format!("{name} by {plan}"), run(&collectives), *n)?;
                }
            }
        }
    }
    // `all_to_all_v` has one plan for each length of messages.
    let kernels = ["lamport", "push"].map(str::to_owned);
    let by_kernels = algorithms.iter().filter(|(_, algorithm)| kernels.contains(algorithm));
    assert!(by_kernels.count() == 2 * calls.len(), "{algorithms:?}");
    require("all_gather of NCCL", comm.all_gather(&one, &recv, &stream), all)?;
    require("all_to_all of NCCL", comm.all_to_all(&send, &recv, &stream), all)
}

#[test]
fn moved_elements_keep_their_bits() {
    on_gpus("moved_elements_keep_their_bits", 2, moves);
}

/// The test has four rows, a weight of ones, and a residual of zeros.
#[test]
fn rows_with_nans_infinities_and_zeros_are_normalised_as_documented() {
    on_gpus("rows_with_nans_infinities_and_zeros_are_normalised_as_documented", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let (nan, infinite) = (f32::NAN, f32::INFINITY);
        let rows = [
            [nan, 1.0, 2.0, 3.0],
            [infinite, 1.0, -0.0, -3.0],
            [0.0; 4],
            [3e19, 3e19, -3e19, 3e19],
        ];
        // The squares of the last row are too large for f32.
        let expected = [[nan; 4], [nan, 0.0, 0.0, 0.0], [0.0; 4], [0.0; 4]];
        let (x, residual) = (comm.mem_alloc::<f32>(16)?, comm.mem_alloc::<f32>(16)?);
        let (weight, output) = (comm.mem_alloc::<f32>(4)?, comm.mem_alloc::<f32>(16)?);
        // One rank has the numbers, the other one zeros.
        let own = if rank.is_root() { rows.concat() } else { vec![0.0; 16] };
        x.copy_from_host(&own)?;
        weight.copy_from_host(&[1.0; 4])?;
        residual.fill_bytes(0)?;
        collectives.all_reduce_rmsnorm(&x, &residual, &weight, &output, 1e-6, &stream)?;
        stream.synchronize()?;
        let mut got = [[0.0; 4]; 4];
        output.copy_to_host(got.as_flattened_mut())?;
        for (got, expected) in got.as_flattened().iter().zip(expected.as_flattened()) {
            assert!(same(*got, *expected), "{got}, not {expected}");
        }
        residual.copy_to_host(got.as_flattened_mut())?;
        for (got, sent) in got.as_flattened().iter().zip(rows.as_flattened()) {
            assert!(same(*got, *sent), "{got}, not {sent}");
        }
        // In 8-bit floats NaNs stay NaNs, and numbers that are too large become the largest one.
        let (bytes, scale) = (comm.mem_alloc::<F8E4M3>(16)?, comm.mem_alloc::<f32>(1)?);
        residual.fill_bytes(0)?;
        x.copy_from_host(&own)?;
        scale.copy_from_host(&[1e-3])?;
        weight.copy_from_host(&[1.0, -1.0, 1.0, 1.0])?;
        let third_row = if rank.is_root() { [1.0; 4] } else { [0.0; 4] };
        x.slice(8..12)?.copy_from_host(&third_row)?;
        collectives.all_reduce_rmsnorm_quantised(
            &x,
            &residual,
            &weight,
            (&bytes, &scale),
            1e-6,
            &stream,
        )?;
        stream.synchronize()?;
        let mut got = [F8E4M3::from_f32(1.0); 16];
        bytes.copy_to_host(&mut got)?;
        let most = 448.0;
        let expected = [[nan; 4], [nan, 0.0, 0.0, 0.0], [most, -most, most, most], [0.0; 4]];
        for (got, expected) in got.iter().zip(expected.as_flattened()) {
            assert!(same(got.to_f32(), *expected), "{got:?}, not {expected}");
        }
        Ok(())
    });
}
