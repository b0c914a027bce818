//! Tests of collectives and sends: the NCCL calls, the results, and arguments that are refused.

use devcomm_host::{
    Buffer, CollectiveConfig, Communicator, Configured, CtaPolicy, DataType, DeviceSlice, Dynamic,
    Element, Error, F8E4M3, F8E5M2, MultiGpu, Rank, ReduceOp, Result, Stream, SymmetricBuffer,
    group,
};

use crate::support::{
    assert_closed, assert_in_group, assert_invalid, calls, contents, count, filled, log_in, log_of,
    logged, makes_no_calls, ranks,
};

const N: usize = 4;
const PART: usize = 6;
const WHOLE: usize = N * PART;

/// `small` and `other` have one part, which is one rank's contribution; `large` and `wide` have
/// `N` parts.
struct Buffers {
    small: SymmetricBuffer<f32>,
    other: SymmetricBuffer<f32>,
    large: SymmetricBuffer<f32>,
    wide: SymmetricBuffer<f32>,
    stream: Stream,
}

impl Buffers {
    fn new(rank: &Rank) -> Result<Self> {
        let comm = rank.communicator()?;
        let (small, other) = (filled(comm, &own(rank.rank(), PART))?, comm.mem_alloc(PART)?);
        let (large, wide) = (filled(comm, &own(rank.rank(), WHOLE))?, comm.mem_alloc(WHOLE)?);
        Ok(Self { small, other, large, wide, stream: rank.stream()? })
    }
}

/// Returns the input of rank `rank`: each element encodes rank and index.
fn own(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (100 * rank + i) as f32).collect()
}

fn sum(len: usize) -> Vec<f32> {
    (0..len).map(|i| (0..N).map(|rank| (100 * rank + i) as f32).sum()).collect()
}

/// Calls every collective, on a `Communicator` or a `Configured`.
macro_rules! all_collectives {
    ($on:expr, $rank:expr, $b:expr) => {{
        let (on, b, root) = ($on, $b, |at: usize| ($rank == at).then_some(()));
        on.all_reduce(&b.small, &b.other, ReduceOp::Max, &b.stream)?;
        on.reduce(&b.small, root(2).map(|()| b.other.device_slice()), ReduceOp::Avg, 2, &b.stream)?;
        on.broadcast(root(1).map(|()| b.small.device_slice()), &b.other, 1, &b.stream)?;
        on.all_gather(&b.small, &b.wide, &b.stream)?;
        on.reduce_scatter(&b.large, &b.other, ReduceOp::Prod, &b.stream)?;
        on.all_to_all(&b.large, &b.wide, &b.stream)?;
        on.gather(&b.small, root(3).map(|()| b.wide.device_slice()), 3, &b.stream)?;
        on.scatter(root(0).map(|()| b.large.device_slice()), &b.other, 0, &b.stream)?;
    }};
}

fn on_communicator(comm: &Communicator, rank: usize, b: &Buffers) -> Result<()> {
    all_collectives!(comm, rank, b);
    Ok(())
}

fn on_configured(comm: &Configured<'_>, rank: usize, b: &Buffers) -> Result<()> {
    all_collectives!(comm, rank, b);
    Ok(())
}

/// The NCCL calls of `all_collectives`, with their arguments. Type 7 is `ncclFloat32`; operators 0
/// to 4 are `ncclSum`, `ncclProd`, `ncclMax`, `ncclMin` and `ncclAvg`.
const CALLS: [(&str, &str); 8] = [
    ("ncclAllReduce", "6 type 7 op 2"),
    ("ncclReduce", "6 type 7 op 4 root 2"),
    ("ncclBroadcast", "6 type 7 root 1"),
    ("ncclAllGather", "6 type 7"),
    ("ncclReduceScatter", "6 type 7 op 1"),
    ("ncclAlltoAll", "6 type 7"),
    ("ncclGather", "6 type 7 root 3"),
    ("ncclScatter", "6 type 7 root 0"),
];

#[test]
fn every_collective_reaches_nccl_with_its_counts_types_operators_and_roots() {
    ranks(N, |rank| {
        let (comm, buffers) = (rank.communicator()?, Buffers::new(rank)?);
        let log = calls(rank, || on_communicator(comm, rank.rank(), &buffers))?;
        assert_eq!(log, CALLS.map(|(name, rest)| format!("{name} {rest}")));
        buffers.stream.synchronize()
    });
}

#[test]
fn every_collective_with_a_configuration_reaches_nccl_with_it() {
    ranks(N, |rank| {
        let (comm, buffers) = (rank.communicator()?, Buffers::new(rank)?);
        let event = rank.context().event_without_timing()?;
        let config = CollectiveConfig::new().min_ctas(2).max_ctas(4).alg_selection("ring");
        let config = config.user_profiler_tag(7).vendor_option(1, 2, 3).vendor_option(1, 3, "x");
        // SAFETY: the event outlives the collectives.
        let config = unsafe { config.launch_completion_event(event.as_raw()) };
        let configured = comm.configured(&config)?;
        let log = calls(rank, || on_configured(&configured, rank.rank(), &buffers))?;
        let settings = "config min_ctas 2 max_ctas 4 selection ring tag 7 event options 2";
        assert_eq!(log, CALLS.map(|(name, rest)| format!("{name}Config {rest} {settings}")));
        let meaningless = CollectiveConfig::new().cta_policy(CtaPolicy::DEFAULT);
        assert_invalid(comm.configured(&meaningless));
        buffers.stream.synchronize()
    });
}

#[test]
fn every_collective_gives_the_right_data() {
    ranks(N, |rank| {
        let (comm, b, me) = (rank.communicator()?, Buffers::new(rank)?, rank.rank());
        let at_root = |root: usize, buffer: &SymmetricBuffer<f32>| {
            (me == root).then(|| buffer.device_slice())
        };
        let part = |rank: usize| rank * PART..(rank + 1) * PART;
        comm.all_reduce(&b.small, &b.other, ReduceOp::Sum, &b.stream)?;
        assert_eq!(contents(&b.other), sum(PART));
        b.other.fill_bytes(0)?;
        comm.reduce(&b.small, at_root(2, &b.other), ReduceOp::Sum, 2, &b.stream)?;
        assert_eq!(contents(&b.other), if me == 2 { sum(PART) } else { vec![0.0; PART] });
        comm.broadcast(at_root(1, &b.small), &b.other, 1, &b.stream)?;
        assert_eq!(contents(&b.other), own(1, PART));
        let gathered: Vec<f32> = (0..N).flat_map(|rank| own(rank, PART)).collect();
        comm.all_gather(&b.small, &b.wide, &b.stream)?;
        assert_eq!(contents(&b.wide), gathered);
        comm.reduce_scatter(&b.large, &b.other, ReduceOp::Sum, &b.stream)?;
        assert_eq!(contents(&b.other), sum(WHOLE)[part(me)]);
        comm.all_to_all(&b.large, &b.wide, &b.stream)?;
        let parts = (0..N).flat_map(|rank| own(rank, WHOLE)[part(me)].to_vec());
        assert_eq!(contents(&b.wide), parts.collect::<Vec<_>>());
        b.wide.fill_bytes(0)?;
        comm.gather(&b.small, at_root(3, &b.wide), 3, &b.stream)?;
        assert_eq!(contents(&b.wide), if me == 3 { gathered } else { vec![0.0; WHOLE] });
        comm.scatter(at_root(0, &b.large), &b.other, 0, &b.stream)?;
        assert_eq!(contents(&b.other), own(0, WHOLE)[part(me)]);
        Ok(())
    });
}

#[test]
fn collectives_in_place_give_the_same_data() {
    ranks(N, |rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let range = me * PART..(me + 1) * PART;
        let fresh = || Buffers::new(rank);
        let b = fresh()?;
        comm.all_reduce(&b.small, &b.small, ReduceOp::Sum, &b.stream)?;
        assert_eq!(contents(&b.small), sum(PART));
        let b = fresh()?;
        comm.broadcast((me == 1).then(|| b.small.device_slice()), &b.small, 1, &b.stream)?;
        assert_eq!(contents(&b.small), own(1, PART));
        let b = fresh()?;
        let mine = b.large.slice(range.clone())?;
        comm.reduce_scatter(&b.large, &mine, ReduceOp::Sum, &b.stream)?;
        assert_eq!(contents(&mine), sum(WHOLE)[range.clone()]);
        let b = fresh()?;
        comm.all_gather(&b.large.slice(range.clone())?, &b.large, &b.stream)?;
        let parts = (0..N).flat_map(|r| own(r, WHOLE)[r * PART..(r + 1) * PART].to_vec());
        assert_eq!(contents(&b.large), parts.collect::<Vec<_>>());
        let b = fresh()?;
        comm.reduce(
            &b.small,
            (me == 0).then(|| b.small.device_slice()),
            ReduceOp::Sum,
            0,
            &b.stream,
        )?;
        assert_eq!(contents(&b.small), if me == 0 { sum(PART) } else { own(me, PART) });
        Ok(())
    });
}

#[test]
fn lengths_that_do_not_fit_are_refused_before_nccl_is_called() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let (five, six) = (comm.mem_alloc::<f32>(5)?, comm.mem_alloc::<f32>(6)?);
        let (stream, me) = (rank.stream()?, rank.rank());
        makes_no_calls(rank, || {
            assert_invalid(comm.all_reduce(&five, &six, ReduceOp::Sum, &stream));
            assert_invalid(comm.reduce(
                &five,
                Some(six.device_slice()),
                ReduceOp::Sum,
                me,
                &stream,
            ));
            assert_invalid(comm.broadcast(Some(five.device_slice()), &six, me, &stream));
            assert_invalid(comm.all_gather(&five, &six, &stream));
            assert_invalid(comm.reduce_scatter(&six, &five, ReduceOp::Sum, &stream));
            assert_invalid(comm.all_to_all(&five, &six, &stream));
            assert_invalid(comm.all_to_all(&five, &five, &stream));
            assert_invalid(comm.gather(&five, Some(six.device_slice()), me, &stream));
            assert_invalid(comm.scatter(Some(five.device_slice()), &six, me, &stream));
            assert_invalid(five.slice(3..6).map(drop));
            assert_invalid(five.copy_from_host(&[0.0; 6]));
            assert_invalid(five.copy_to_host(&mut [0.0; 6]));
        });
        Ok(())
    });
}

#[test]
fn roots_and_buffers_that_are_not_there_are_refused_before_nccl_is_called() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let (b, stream, me) = (comm.mem_alloc::<f32>(6)?, rank.stream()?, rank.rank());
        makes_no_calls(rank, || {
            let slice = || Some(b.device_slice());
            assert_invalid(comm.reduce(&b, slice(), ReduceOp::Sum, 2, &stream));
            assert_invalid(comm.broadcast(slice(), &b, 2, &stream));
            assert_invalid(comm.gather(&b, slice(), usize::MAX, &stream));
            assert_invalid(comm.scatter(slice(), &b, 1 << 32, &stream));
            assert_invalid(comm.send(&b, 2, &stream));
            assert_invalid(comm.recv(&b, 2, &stream));
            assert_invalid(comm.reduce(&b, None, ReduceOp::Sum, me, &stream));
            assert_invalid(comm.broadcast(None, &b, me, &stream));
            assert_invalid(comm.gather(&b, None, me, &stream));
            assert_invalid(comm.scatter(None, &b, me, &stream));
        });
        Ok(())
    });
}

#[test]
fn memory_and_streams_of_another_context_are_refused_before_nccl_is_called() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let other = devcomm_host::Context::new(3 - rank.device())?;
        let foreign = SymmetricBuffer::<f32>::new(rank.library(), &other, 6)?;
        let (b, stream) = (comm.mem_alloc::<f32>(6)?, rank.stream()?);
        let ((), log) = logged(rank, || {
            assert_invalid(comm.all_reduce(&foreign, &b, ReduceOp::Sum, &stream));
            assert_invalid(comm.all_reduce(&b, &foreign, ReduceOp::Sum, &stream));
            assert_invalid(comm.send(&foreign, 0, &stream));
            assert_invalid(comm.all_reduce(&b, &b, ReduceOp::Sum, &other.stream().unwrap()));
            assert_invalid(comm.register_window(&foreign, devcomm_host::WindowFlags::empty()));
            assert_invalid(comm.register_buffer(&foreign));
        });
        assert!(!log.iter().any(|line| line.starts_with("nccl")), "{log:?}");
        Ok(())
    });
}

#[test]
fn slices_typed_raw_and_dynamic_reach_nccl_with_their_address_length_and_type() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 8])?;
        // SAFETY: a range of `b`, which is dropped after the stream was synchronized.
        let raw = unsafe {
            DeviceSlice::<f32>::from_raw_parts(rank.context(), b.device_address() + 8, 2)
        };
        let typed = b.slice(4..=5)?;
        let dynamic: DeviceSlice<Dynamic> = b.slice(6..)?.into_dynamic();
        assert_eq!((typed.len(), typed.byte_len(), dynamic.byte_len()), (2, 8, 8));
        assert_eq!(typed.device_address(), b.device_address() + 16);
        let log = calls(rank, || {
            comm.all_reduce(&raw, &raw, ReduceOp::Sum, &stream)?;
            comm.all_reduce(&typed, &typed, ReduceOp::Sum, &stream)?;
            comm.all_reduce(&dynamic, &dynamic, ReduceOp::Sum, &stream)
        })?;
        assert_eq!(log, ["ncclAllReduce 2 type 7 op 0"; 3]);
        assert_eq!(contents(&b), [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        // SAFETY: as above; `i32` and `f32` have the same size.
        let other = unsafe {
            let (context, address) = (rank.context(), b.device_address());
            DeviceSlice::from_raw_parts_dynamic(context, address, 2, DataType::Int32)
        };
        assert_invalid(comm.all_reduce(&dynamic, &other, ReduceOp::Sum, &stream));
        Ok(())
    });
}

/// Returns the sum of 1.5 and 2.5 over two ranks, in a type whose `ncclDataType_t` is `tag`.
fn summed<T: Element>(rank: &Rank, tag: i32, of: impl Fn(f32) -> T) -> Result<T> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let b = filled(comm, &[of(1.5 + rank.rank() as f32)])?;
    let log = calls(rank, || comm.all_reduce(&b, &b, ReduceOp::Sum, &stream))?;
    assert_eq!(log, [format!("ncclAllReduce 1 type {tag} op 0")]);
    let mut sum = [of(0.0)];
    b.copy_to_host(&mut sum)?;
    Ok(sum[0])
}

#[test]
fn eight_bit_floats_are_summed_as_what_they_are() {
    ranks(2, |rank| {
        assert_eq!(summed(rank, 10, F8E4M3::from_f32)?.to_f32(), 4.0);
        assert_eq!(summed(rank, 11, F8E5M2::from_f32)?.to_f32(), 4.0);
        assert_eq!(summed(rank, 8, f64::from)?, 4.0);
        assert_eq!(summed(rank, 4, |x| x as i64)?, 3);
        Ok(())
    });
}

#[test]
fn every_operator_combines_as_its_name_says() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (filled(comm, &[[3.0_f32, 5.0][rank.rank()]])?, comm.mem_alloc::<f32>(1)?);
        use ReduceOp::{Avg, Max, Min, Prod, Sum};
        for (op, result) in [(Sum, 8.0), (Prod, 15.0), (Max, 5.0), (Min, 3.0), (Avg, 4.0)] {
            comm.all_reduce(&a, &b, op, &stream)?;
            assert_eq!(contents(&b), [result], "{op:?}");
        }
        Ok(())
    });
}

#[test]
fn a_scalar_multiplies_each_ranks_part_before_the_sum() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(1)?;
        let factor = [2.0, 10.0][rank.rank()];
        let on_host = comm.pre_mul_sum(factor)?;
        let scalar = filled(comm, &[factor])?;
        let on_device = comm.pre_mul_sum_from(&scalar)?;
        // The operator keeps its scalar alive.
        drop(scalar);
        for op in [&on_host, &on_device] {
            b.copy_from_host(&[1.0 + rank.rank() as f32])?;
            comm.all_reduce(&b, &b, op, &stream)?;
            assert_eq!(contents(&b), [22.0]);
        }
        // `ncclScalarHostImmediate` is 1, `ncclScalarDevice` is 0.
        let created: Vec<_> =
            log_of(rank).into_iter().filter(|line| line.contains("PreMulSum")).collect();
        assert_eq!(
            created,
            [1, 0].map(|at| { format!("ncclRedOpCreatePreMulSum type 7 residence {at}") })
        );
        Ok(())
    });
}

#[test]
fn an_operator_is_good_for_its_communicator_its_type_and_its_life_only() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let other = rank.new_communicator(&devcomm_host::CommConfig::new())?;
        let (b, two) = (comm.mem_alloc::<f32>(1)?, comm.mem_alloc::<f32>(2)?);
        let op = comm.pre_mul_sum(2.0_f32)?;
        assert!(op.is_valid() && op.as_raw()? >= ReduceOp::ALL.len() as i32);
        assert_invalid(other.all_reduce(&b, &b, &op, &stream));
        let integers = comm.mem_alloc::<i32>(1)?;
        let dynamic = integers.device_slice().into_dynamic();
        assert_invalid(comm.all_reduce(&dynamic, &dynamic, &op, &stream));
        assert_invalid(comm.pre_mul_sum_from(&two));
        op.close()?;
        let (again, log) = logged(rank, || op.close());
        again?;
        assert!(log.is_empty() && !op.is_valid());
        assert_closed(comm.all_reduce(&b, &b, &op, &stream));
        assert_closed(op.as_raw());
        Ok(())
    });
}

#[test]
fn several_gpus_of_one_thread_are_driven_together() {
    let ran = ranks(1, |rank| {
        let gpus = MultiGpu::all(rank.library())?;
        assert_eq!(gpus.communicators().len(), N);
        let fresh = |len| {
            let of = |comm: &Communicator| filled(comm, &own(comm.rank(), len));
            gpus.communicators().iter().map(of).collect::<Result<Vec<_>>>()
        };
        let (small, other, large) = (fresh(PART)?, fresh(PART)?, fresh(WHOLE)?);
        gpus.all_reduce(&small, &other, ReduceOp::Sum)?;
        gpus.all_gather(&small, &large)?;
        gpus.synchronize()?;
        assert!(other.iter().all(|buffer| contents(buffer) == sum(PART)));
        assert!(large.iter().all(|buffer| contents(buffer)[WHOLE - 1] == own(3, PART)[PART - 1]));
        gpus.broadcast(&small, 2)?;
        assert!(small.iter().all(|buffer| contents(buffer) == own(2, PART)));
        let (small, large) = (fresh(PART)?, fresh(WHOLE)?);
        gpus.reduce_scatter(&large, &other, ReduceOp::Sum)?;
        gpus.reduce(&small, &small[1], ReduceOp::Sum, 1)?;
        assert_eq!(contents(&other[3]), sum(WHOLE)[3 * PART..]);
        assert_eq!(contents(&small[1]), sum(PART));
        assert_invalid(gpus.all_reduce(&small[1..], &small, ReduceOp::Sum));
        assert_in_group(gpus.for_each(|_, comm, _| comm.destroy()));
        Ok(())
    });
    for gpu in 0..N {
        let log = log_in(&ran.world, gpu);
        // `ncclCommFinalize` would block the only thread of these ranks.
        assert_eq!(count(&log, "ncclCommFinalize"), 0, "{log:?}");
        assert_eq!(count(&log, "ncclCommDestroy"), 1, "{log:?}");
    }
}

#[test]
fn a_ring_of_sends_and_receives_moves_each_ranks_data_to_the_next() {
    ranks(3, |rank| {
        let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
        let (a, b) = (filled(comm, &own(me, 5))?, comm.mem_alloc::<f32>(5)?);
        let (next, previous) = ((me + 1) % 3, (me + 2) % 3);
        let log = calls(rank, || {
            group(|_| {
                comm.send(&a, next, &stream)?;
                comm.recv(&b, previous, &stream)
            })
        })?;
        let calls = [
            format!("ncclSend 5 type 7 peer {next}"),
            format!("ncclRecv 5 type 7 peer {previous}"),
        ];
        assert_eq!(log[1..3], calls);
        assert_eq!(contents(&b), own(previous, 5));
        Ok::<_, Error>(())
    });
}
