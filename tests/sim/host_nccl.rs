//! Tests of the simulated NCCL's host functions.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use devcomm_sim::Simulation;
use devcomm_sys::driver::CUresult as R;
use devcomm_sys::nccl::{CollConfig, Config, RawComm, RawUniqueId, SimInfo};
use devcomm_types::{F8E4M3, F8E5M2, Team};
use half::{bf16, f16};

use crate::nccl_threads::*;

/// Returns `n` elements as the input of rank `rank`: each encodes rank and index.
fn own(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| (100 * rank + i) as f32).collect()
}

#[test]
fn every_collective_moves_the_right_data() {
    const PART: usize = 3;
    const N: usize = 4;
    let sum = |n| -> Vec<f32> { (0..n).map(|i| (600 + N * i) as f32).collect() };
    run_ranks(Simulation::new(N), |rank| {
        let (comm, stream, part) =
            (rank.init(), rank.stream(), rank.me * PART..(rank.me + 1) * PART);
        let small = || rank.filled(&own(rank.me, PART));
        let large = || rank.filled(&own(rank.me, N * PART));
        let done = |code: c_int| {
            ok(code);
            rank.synchronize(stream);
        };
        let gathered: Vec<f32> = (0..N).flat_map(|from| own(from, PART)).collect();
        let (a, b) = (small(), rank.zeroed(PART));
        done(nccl!(all_reduce(a.ptr(), b.ptr(), PART, F32, SUM, comm, stream)));
        assert_eq!(b.read::<f32>(PART), sum(PART));
        done(nccl!(all_reduce(a.ptr(), a.ptr(), PART, F32, SUM, comm, stream)));
        assert_eq!(a.read::<f32>(PART), sum(PART));
        let (a, b) = (small(), rank.zeroed(PART));
        let from = if rank.me == 2 { a.ptr() } else { null_mut() };
        done(nccl!(broadcast(from, b.ptr(), PART, F32, 2, comm, stream)));
        assert_eq!(b.read::<f32>(PART), own(2, PART));
        done(nccl!(bcast(a.ptr(), PART, F32, 1, comm, stream)));
        assert_eq!(a.read::<f32>(PART), own(1, PART));
        let (a, b) = (small(), rank.zeroed(PART));
        let to = if rank.me == 0 { b.ptr() } else { null_mut() };
        done(nccl!(reduce(a.ptr(), to, PART, F32, SUM, 0, comm, stream)));
        assert_eq!(b.read::<f32>(PART), if rank.me == 0 { sum(PART) } else { vec![0.0; PART] });
        let (a, b) = (small(), rank.zeroed(N * PART));
        done(nccl!(all_gather(a.ptr(), b.ptr(), PART, F32, comm, stream)));
        assert_eq!(b.read::<f32>(N * PART), gathered);
        let b = large();
        let mine = b.ptr().wrapping_byte_add(4 * part.start);
        done(nccl!(all_gather(mine, b.ptr(), PART, F32, comm, stream)));
        let parts = (0..N).flat_map(|from| own(from, N * PART)[from * PART..][..PART].to_vec());
        assert_eq!(b.read::<f32>(N * PART), parts.collect::<Vec<_>>());
        let (a, b) = (large(), rank.zeroed(PART));
        done(nccl!(reduce_scatter(a.ptr(), b.ptr(), PART, F32, SUM, comm, stream)));
        assert_eq!(b.read::<f32>(PART), sum(N * PART)[part.clone()]);
        let (a, b) = (large(), rank.zeroed(N * PART));
        done(nccl!(all_to_all(a.ptr(), b.ptr(), PART, F32, comm, stream)));
        let parts = (0..N).flat_map(|from| own(from, N * PART)[part.clone()].to_vec());
        assert_eq!(b.read::<f32>(N * PART), parts.collect::<Vec<_>>());
        let in_place = nccl!(all_to_all(a.ptr(), a.ptr(), PART, F32, comm, stream));
        assert_eq!(in_place, INVALID_ARGUMENT);
        let (a, b) = (small(), rank.zeroed(N * PART));
        let to = if rank.me == 3 { b.ptr() } else { null_mut() };
        done(nccl!(gather(a.ptr(), to, PART, F32, 3, comm, stream)));
        assert!(rank.me != 3 || b.read::<f32>(N * PART) == gathered);
        let (a, b) = (large(), rank.zeroed(PART));
        done(nccl!(scatter(a.ptr(), b.ptr(), PART, F32, 0, comm, stream)));
        assert_eq!(b.read::<f32>(PART), own(0, N * PART)[part.clone()]);
        // A count of 0 is valid.
        done(nccl!(all_reduce(null(), null_mut(), 0, F32, SUM, comm, stream)));
        rank.destroy(comm);
    });
}

/// Returns the reduction of two ranks' values, in the type with number `data_type`.
fn reduced<T: Copy + Send + Sync>(values: [T; 2], data_type: c_int, op: c_int) -> T {
    let results = run_ranks(Simulation::new(2), |rank| {
        let (comm, stream, b) = (rank.init(), rank.stream(), rank.filled(&[values[rank.me]]));
        ok(rank.all_reduce(&b, 1, data_type, op, comm, stream));
        rank.synchronize(stream);
        b.read::<T>(1)[0]
    });
    results[0]
}

#[test]
fn all_types_are_reduced_as_what_they_are_by_every_operator() {
    // These are NCCL's numbers of sum, product, maximum, minimum and average.
    for (op, result) in [(0, 8.0), (1, 15.0), (2, 5.0), (3, 3.0), (4, 4.0)] {
        assert_eq!(reduced([3.0_f32, 5.0], 7, op), result);
        assert_eq!(reduced([3.0_f64, 5.0], 8, op), f64::from(result));
        assert_eq!(reduced([3_i8, 5], 0, op), result as i8);
        assert_eq!(reduced([3_u8, 5], 1, op), result as u8);
        assert_eq!(reduced([3_i32, 5], 2, op), result as i32);
        assert_eq!(reduced([3_u32, 5], 3, op), result as u32);
        assert_eq!(reduced([3_i64, 5], 4, op), result as i64);
        assert_eq!(reduced([3_u64, 5], 5, op), result as u64);
        assert_eq!(reduced([3.0, 5.0].map(f16::from_f32), 6, op).to_f32(), result);
        assert_eq!(reduced([3.0, 5.0].map(bf16::from_f32), 9, op).to_f32(), result);
        assert_eq!(reduced([3.0, 5.0].map(F8E4M3::from_f32), 10, op).to_f32(), result);
        // 15 needs three mantissa bits; the type has two.
        let rounded = if op == 1 { 16.0 } else { result };
        assert_eq!(reduced([3.0, 5.0].map(F8E5M2::from_f32), 11, op).to_f32(), rounded);
    }
    // An average of integers is rounded towards zero, and sums wrap around.
    assert_eq!(reduced([-3_i32, -4], 2, 4), -3);
    assert_eq!(reduced([200_u8, 100], 1, 0), 44);
}

#[test]
fn a_scalar_multiplies_each_ranks_part_before_the_sum() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let mut factor = [2.0_f32, 10.0][rank.me];
        let on_device = rank.filled(&[factor]);
        for (residence, scalar) in [(1, (&raw mut factor).cast()), (0, on_device.ptr())] {
            let (mut op, b) = (0, rank.filled(&[1.0 + rank.me as f32]));
            ok(nccl!(red_op_create_pre_mul_sum(&raw mut op, scalar, F32, residence, comm)));
            assert_eq!(op, 5, "the number after those of the built-in operators");
            let other_type = rank.all_reduce(&b, 1, 8, op, comm, stream);
            assert_eq!(other_type, INVALID_ARGUMENT, "an operator on another type");
            ok(rank.all_reduce(&b, 1, F32, op, comm, stream));
            // A launched operation no longer needs the operator.
            ok(nccl!(red_op_destroy(op, comm)));
            rank.synchronize(stream);
            assert_eq!(b.read::<f32>(1), [22.0]);
            assert_eq!(rank.all_reduce(&b, 1, F32, op, comm, stream), INVALID_ARGUMENT);
        }
    });
}

#[test]
fn a_collective_with_a_configuration_records_its_event() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let (b, mut event, mut ms) = (rank.filled(&[1.0_f32]), null_mut(), 0.0);
        let all_reduce = |config: CollConfig| {
            let config = &raw const config;
            nccl!(all_reduce_config(b.ptr(), b.ptr(), 1, F32, SUM, comm, stream, config))
        };
        assert_eq!(cuda!(cuEventCreate(&raw mut event, 0)), R::CUDA_SUCCESS);
        let elapsed = cuda!(cuEventElapsedTime_v2(&raw mut ms, event, event));
        assert_eq!(elapsed, R::CUDA_ERROR_INVALID_HANDLE, "not recorded yet");
        let config = CollConfig { launch_completion_event: event.cast(), ..CollConfig::new() };
        ok(all_reduce(config));
        rank.synchronize(stream);
        let elapsed = cuda!(cuEventElapsedTime_v2(&raw mut ms, event, event));
        assert_eq!(elapsed, R::CUDA_SUCCESS);
        let bad = all_reduce(CollConfig { magic: 0, ..config });
        assert_eq!(bad, INVALID_ARGUMENT);
        assert_eq!(b.read::<f32>(1), [2.0]);
    });
}

#[test]
fn ranks_that_make_different_calls_are_told_which_and_do_not_hang() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream, b) = (rank.init(), rank.stream(), rank.zeroed(8));
        ok(rank.all_reduce(&b, 7 + rank.me, F32, SUM, comm, stream));
        rank.synchronize(stream);
        assert_eq!(rank.async_error(comm), INVALID_USAGE);
        let text = rank.last_error(comm);
        for part in ["rank 0 calls", "rank 1 calls", "AllReduce of 7 Float32", "of 8 Float32"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(rank.all_reduce(&b, 8, F32, SUM, comm, stream), INVALID_USAGE);
        rank.abort(comm);
    });
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_the_reason() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.zeroed(4);
        let refused = |code: c_int, reason: &str| {
            assert_eq!(code, INVALID_ARGUMENT);
            let text = rank.last_error(null_mut());
            assert!(text.contains(reason) && text.starts_with("ncclAllReduce: "), "{text}");
        };
        refused(rank.all_reduce(&b, 5, F32, SUM, comm, stream), "which GPU");
        refused(rank.all_reduce(&b, 1, 12, SUM, comm, stream), "no data type has number 12");
        refused(rank.all_reduce(&b, 1, F32, 9, comm, stream), "no operator has number 9");
        refused(rank.all_reduce(&b, 1, F32, SUM, null_mut(), stream), "NULL");
        refused(rank.all_reduce(&b, 1, F32, SUM, 64 as RawComm, stream), "not a communicator");
        refused(rank.all_reduce(&b, usize::MAX, F32, SUM, comm, stream), "elements");
        let root = nccl!(bcast(b.ptr(), 1, F32, 2, comm, stream));
        assert_eq!(root, INVALID_ARGUMENT);
        rank.destroy(comm);
        refused(rank.all_reduce(&b, 1, F32, SUM, comm, stream), "was destroyed");
        assert_eq!(nccl!(comm_abort(comm)), INVALID_ARGUMENT);
    });
}

#[test]
fn a_ring_of_sends_and_receives_passes_on_what_each_rank_has() {
    run_ranks(Simulation::new(3).seed(1), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let (a, b) = (rank.filled(&own(rank.me, 5)), rank.zeroed(5));
        let (next, previous) = ((rank.me + 1) % 3, (rank.me + 2) % 3);
        ok(nccl!(group_start()));
        ok(nccl!(send(a.ptr(), 5, F32, next as c_int, comm, stream)));
        ok(nccl!(recv(b.ptr(), 5, F32, previous as c_int, comm, stream)));
        ok(nccl!(group_end()));
        rank.synchronize(stream);
        assert_eq!(b.read::<f32>(5), own(previous, 5));
    });
}

#[test]
fn a_send_and_a_receive_of_different_lengths_are_reported() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.zeroed(4);
        ok(match rank.me {
            0 => nccl!(send(b.ptr(), 3, F32, 1, comm, stream)),
            _ => nccl!(recv(b.ptr(), 4, F32, 0, comm, stream)),
        });
        rank.synchronize(stream);
        assert_eq!(rank.async_error(comm), INVALID_USAGE);
        assert!(rank.last_error(comm).contains("send to rank 1 of 3 Float32"));
    });
}

#[test]
fn one_thread_drives_several_gpus_in_groups() {
    run_ranks(Simulation::new(4), |rank| {
        if rank.me > 0 {
            return;
        }
        let mut comms = [null_mut(); 4];
        let mut id = RawUniqueId([0; 128]);
        ok(nccl!(get_unique_id(&raw mut id)));
        ok(nccl!(group_start()));
        for (gpu, comm) in comms.iter_mut().enumerate() {
            retain(gpu);
            ok(nccl!(comm_init_rank(comm, 4, id, gpu as c_int)));
        }
        ok(nccl!(group_end()));
        let mut all = Vec::new();
        ok(nccl!(group_start()));
        for (gpu, comm) in comms.iter().enumerate() {
            retain(gpu);
            let (stream, b) = (rank.stream(), rank.filled(&[gpu as f32]));
            for _ in 0..3 {
                ok(rank.all_reduce(&b, 1, F32, SUM, *comm, stream));
            }
            all.push((stream, b));
        }
        ok(nccl!(group_end()));
        for (gpu, (stream, b)) in all.iter().enumerate() {
            retain(gpu);
            rank.synchronize(*stream);
            assert_eq!(b.read::<f32>(1), [96.0]);
        }
        assert_eq!(nccl!(group_end()), INVALID_USAGE);
        let mut again = [null_mut(); 2];
        ok(nccl!(comm_init_all(again.as_mut_ptr(), 2, [3, 1].as_ptr())));
        let mut device = -1;
        ok(nccl!(comm_cu_device(again[0], &raw mut device)));
        assert_eq!(device, 3);
        comms.iter().chain(&again).for_each(|comm| rank.destroy(*comm));
    });
}

#[test]
fn a_group_in_which_a_call_fails_or_that_is_simulated_makes_nothing() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.filled(&[1.0_f32]);
        let (mut child, mut info) = (null_mut(), SimInfo::new());
        ok(nccl!(group_start()));
        ok(nccl!(comm_split(comm, 0, 0, &raw mut child, null_mut())));
        ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        assert_eq!(rank.all_reduce(&b, 1, 99, SUM, comm, stream), INVALID_ARGUMENT);
        assert_eq!(nccl!(group_end()), INVALID_ARGUMENT);
        assert!(child.is_null());
        ok(nccl!(group_start()));
        ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        ok(nccl!(group_simulate_end(&raw mut info)));
        assert_eq!(info.estimated_time, 0.0);
        rank.synchronize(stream);
        assert_eq!((b.read::<f32>(1), rank.async_error(comm)), (vec![1.0], 0));
    });
}

#[test]
fn a_group_on_two_streams_is_one_operation_on_both() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, streams) = (rank.init(), [rank.stream(), rank.stream()]);
        let b = rank.filled(&[1.0_f32 + rank.me as f32]);
        // Ranks may use the streams in different order.
        let order = if rank.me == 0 { [0, 1] } else { [1, 0] };
        ok(nccl!(group_start()));
        for stream in order {
            ok(rank.all_reduce(&b, 1, F32, SUM, comm, streams[stream]));
        }
        ok(nccl!(group_end()));
        rank.synchronize(streams[1]);
        assert_eq!(b.read::<f32>(1), [6.0]);
        rank.synchronize(streams[0]);
    });
}

#[test]
fn communicators_split_by_color_and_key_and_shrink() {
    run_ranks(Simulation::new(4).team_size(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let pair = rank.split(comm, [0, 7, 0, -1][rank.me], -(rank.me as c_int));
        match rank.me {
            3 => assert!(pair.is_null()),
            1 => assert_eq!(rank.rank_and_size(pair), (0, 1)),
            // The parent's higher rank has the lower key.
            me => assert_eq!(rank.rank_and_size(pair), (usize::from(me == 0), 2)),
        }
        if rank.me == 0 || rank.me == 2 {
            assert_eq!(rank.sum(rank.me as f32 + 1.0, pair, stream), 4.0);
        }
        if rank.me == 1 {
            return;
        }
        // Rank 1 does not take part in this operation; the shrink cancels it.
        let b = rank.zeroed(1);
        ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        let (mut excluded, mut rest) = ([1], null_mut());
        ok({
            let (out, excluded) = (&raw mut rest, excluded.as_mut_ptr());
            nccl!(comm_shrink(comm, excluded, 1, out, null_mut(), 1))
        });
        rank.synchronize(stream);
        assert_eq!(rank.rank_and_size(rest), ([0, 9, 1, 2][rank.me], 3));
        assert_eq!(rank.sum(1.0, rest, stream), 3.0);
        // GPUs 0, 2 and 3 cannot form LSA teams of equal size above 1.
        let lsa = nccl!(team_lsa(rest));
        assert_eq!(lsa, Team { n_ranks: 1, rank: 0, stride: 1 });
    });
}

#[test]
fn a_communicator_grows_by_ranks_that_have_its_id() {
    let id = std::sync::Mutex::new(None);
    run_ranks(Simulation::new(3), |rank| {
        let mut grown = null_mut();
        let all = rank.init();
        let comm = rank.split(all, if rank.me == 2 { -1 } else { 0 }, 0);
        if rank.me == 0 {
            let mut new = RawUniqueId([0; 128]);
            ok(nccl!(comm_get_unique_id(comm, &raw mut new)));
            assert_eq!(nccl!(comm_get_unique_id(comm, &raw mut new)), INVALID_USAGE);
            *id.lock().unwrap() = Some(new);
        }
        rank.barrier(all);
        let id = id.lock().unwrap().unwrap();
        let (out, config) = (&raw mut grown, null_mut());
        ok(match rank.me {
            0 => nccl!(comm_grow(comm, 3, &raw const id, -1, out, config)),
            1 => nccl!(comm_grow(comm, 3, null(), -1, out, config)),
            _ => nccl!(comm_grow(null_mut(), 3, &raw const id, 2, out, config)),
        });
        assert_eq!(rank.rank_and_size(grown), (rank.me, 3));
        rank.barrier(all);
        if rank.me == 2 {
            let again = nccl!(comm_grow(null_mut(), 3, &raw const id, 2, out, null_mut()));
            assert_eq!(again, INVALID_ARGUMENT);
        }
    });
}

#[test]
fn an_abort_releases_its_own_rank_and_a_revoked_communicator_can_be_split() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.zeroed(1);
        let peer = 1 - rank.me as c_int;
        ok(nccl!(recv(b.ptr(), 1, F32, peer, comm, stream)));
        ok(nccl!(comm_revoke(comm, 0)));
        rank.synchronize(stream);
        assert_eq!(rank.all_reduce(&b, 1, F32, SUM, comm, stream), INVALID_USAGE);
        assert_eq!(nccl!(comm_finalize(comm)), INVALID_USAGE);
        let child = rank.split(comm, 0, 0);
        rank.destroy(comm);
        ok(nccl!(recv(b.ptr(), 1, F32, peer, child, stream)));
        rank.abort(child);
        rank.synchronize(stream);
    });
}

#[test]
fn a_suspended_communicator_waits_for_its_resume() {
    run_ranks(Simulation::new(1), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let (b, mut stat) = (rank.zeroed(1), 9);
        assert_eq!(nccl!(comm_resume(comm)), INVALID_USAGE);
        ok(nccl!(comm_suspend(comm, 1)));
        ok(nccl!(comm_mem_stats(comm, 1, &raw mut stat)));
        assert_eq!(stat, 1);
        assert_eq!(rank.all_reduce(&b, 1, F32, SUM, comm, stream), INVALID_USAGE);
        ok(nccl!(comm_resume(comm)));
        ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        ok(nccl!(comm_finalize(comm)));
        assert_eq!(rank.all_reduce(&b, 1, F32, SUM, comm, stream), INVALID_USAGE);
        rank.destroy(comm);
    });
}

#[test]
fn a_communicator_that_does_not_block_is_in_progress_until_all_have_come() {
    run_ranks(Simulation::new(2), |rank| {
        let config = Config { blocking: 0, ..Config::new() };
        let (comm, code) = rank.init_with(config);
        assert_eq!((code, rank.async_error(comm)), (IN_PROGRESS, IN_PROGRESS));
        rank.wait(comm);
        let (b, stream) = (rank.filled(&[1.0_f32]), rank.stream());
        assert_eq!(rank.all_reduce(&b, 1, F32, SUM, comm, stream), IN_PROGRESS);
        rank.wait(comm);
        rank.synchronize(stream);
        assert_eq!(b.read::<f32>(1), [2.0]);
        let mut child = null_mut();
        let code = nccl!(comm_split(comm, 0, 0, &raw mut child, null_mut()));
        assert_eq!(code, IN_PROGRESS);
        rank.wait(comm);
        rank.wait(child);
        assert_eq!(rank.rank_and_size(child), (rank.me, 2));
    });
}

#[test]
fn a_graph_with_collectives_does_them_at_each_launch() {
    run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.filled(&[1.0_f32]);
        let exec = rank.capture(stream, || {
            ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
            ok(rank.all_reduce(&b, 1, F32, SUM, comm, stream));
        });
        assert_eq!(b.read::<f32>(1), [1.0]);
        for _ in 0..3 {
            rank.launch(exec, stream);
        }
        rank.synchronize(stream);
        assert_eq!(b.read::<f32>(1), [64.0]);
    });
}
