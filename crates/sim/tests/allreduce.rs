//! Ranks that talk to each other by load and store.

use cuda_std::prelude::*;
use devcomm_sim::{DevCommConfig, LaunchConfig, Simulator};
use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Window};

/// `recv[i] = sum over ranks of send[i]`: each rank sums its share and stores it to all.
#[kernel]
unsafe fn allreduce(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {
    let team = comm.lsa_team();
    LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::this_block(), |barrier| {
        barrier.sync(MemoryOrder::Acquire);
        let each = count.div_ceil(team.n_ranks as usize);
        let begin = (each * team.rank as usize).min(count);
        let end = (begin + each).min(count);
        let mut i = begin + thread::index_1d() as usize;
        while i < end {
            let mut sum = 0.0;
            for peer in 0..team.n_ranks {
                // SAFETY: below `count`; the barriers order it.
                sum += unsafe { send.lsa(peer).load(i) };
            }
            for peer in 0..team.n_ranks {
                // SAFETY: as above.
                unsafe { recv.lsa(peer).store(i, sum) };
            }
            i += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
        }
        barrier.sync(MemoryOrder::Release);
    });
}

fn value(rank: usize, i: usize) -> f32 {
    (rank * 7 + i % 13) as f32
}

/// Runs `launches` all-reduces in one simulator, and checks every element; the trace hashes.
fn check(sim: &Simulator, grid: u32, block: u32, count: usize, launches: usize) -> Vec<u64> {
    let ranks = sim.ranks();
    let send = sim.window::<f32>(count).unwrap();
    let recv = sim.window::<f32>(count).unwrap();
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: grid, ..Default::default() }).unwrap();
    let mut traces = Vec::new();
    for launch in 0..launches {
        for rank in 0..ranks {
            let data: Vec<f32> = (0..count).map(|i| value(rank, i + launch)).collect();
            send.write(rank, &data).unwrap();
            recv.write(rank, &vec![-1.0; count]).unwrap();
        }
        let args = |rank: usize| (comm.rank(rank), send.rank(rank), recv.rank(rank), count);
        // SAFETY: both windows have `count` elements.
        let report = unsafe { sim.launch(allreduce, LaunchConfig::new(grid, block), args) };
        let report = report.unwrap();
        assert!(report.open_sessions.is_empty());
        traces.push(report.trace);
        for rank in 0..ranks {
            let got = recv.read(rank);
            for (i, got) in got.iter().enumerate() {
                let want: f32 = (0..ranks).map(|r| value(r, i + launch)).sum();
                assert_eq!(*got, want, "rank {rank} element {i} launch {launch}");
            }
        }
    }
    traces
}

#[test]
fn all_reduce_sums_for_any_number_of_ranks() {
    for ranks in [1, 2, 3, 8] {
        let sim = Simulator::new(ranks).unwrap();
        check(&sim, 3, 64, 1000, 1);
    }
}

#[test]
fn fewer_threads_than_peers_still_meet() {
    check(&Simulator::new(8).unwrap(), 2, 3, 100, 2);
}

#[test]
fn barriers_keep_their_epochs_between_launches() {
    check(&Simulator::new(4).unwrap(), 2, 32, 256, 5);
}

#[test]
fn any_order_gives_the_same_sums() {
    for seed in 0..8 {
        check(&Simulator::builder().ranks(3).seed(seed).build().unwrap(), 2, 48, 500, 2);
        let sim = Simulator::builder().ranks(3).seed(seed).preempt(true).build().unwrap();
        check(&sim, 2, 48, 100, 2);
    }
}

#[test]
fn a_seed_fixes_the_order() {
    let run = |seed| {
        let sim = Simulator::builder().ranks(2).seed(seed).preempt(true).build().unwrap();
        check(&sim, 2, 32, 100, 2)
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn sixteen_thousand_threads_run_at_once() {
    let sim = Simulator::new(8).unwrap();
    check(&sim, 8, 256, 4096, 2);
}

#[test]
fn teams_of_fewer_ranks_than_the_world_sum_apart() {
    let sim = Simulator::builder().ranks(4).lsa_ranks(2).build().unwrap();
    let (send, recv) = (sim.window::<f32>(10).unwrap(), sim.window::<f32>(10).unwrap());
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 1, ..Default::default() }).unwrap();
    for rank in 0..4 {
        send.write(rank, &[10_f32.powi(rank as i32); 10]).unwrap();
    }
    let args = |rank: usize| (comm.rank(rank), send.rank(rank), recv.rank(rank), 10_usize);
    // SAFETY: both windows have ten elements.
    unsafe { sim.launch(allreduce, LaunchConfig::new(1, 32), args) }.unwrap();
    assert_eq!(recv.read(0), [11.0; 10]);
    assert_eq!(recv.read(3), [1100.0; 10]);
}

/// One all-reduce of one element whose barrier session is never closed.
#[kernel]
unsafe fn forgets_to_close(comm: DevComm, send: Window<u32>, recv: Window<u32>, first: u32) {
    use core::mem::MaybeUninit;
    use nccl_device::raw;
    let team = comm.lsa_team();
    let mut coop = MaybeUninit::uninit();
    let mut session = MaybeUninit::uninit();
    // SAFETY: the objects live to the end of the kernel; the barrier has an index 0.
    unsafe {
        raw::ncclCoopAnyInitCta(coop.as_mut_ptr());
        let (coop, comm) = (coop.as_ptr(), comm.as_raw());
        let none = raw::MultimemHandle::NULL;
        let session = session.as_mut_ptr();
        let handle = &comm.lsa_barrier;
        raw::ncclLsaBarrierSessionInit(session, coop, comm, &team, handle, 0, false, &none);
        send.local().store(0, first + team.rank as u32);
        raw::ncclLsaBarrierSessionSync(session, coop, MemoryOrder::AcqRel as i32);
        let mut sum = 0;
        for peer in 0..team.n_ranks {
            sum += send.lsa(peer).load(0);
        }
        recv.local().store(0, sum);
    }
}

#[test]
fn a_session_that_is_not_closed_breaks_the_next_launch_as_on_a_gpu() {
    let sim = Simulator::new(2).unwrap();
    let (send, recv) = (sim.window::<u32>(1).unwrap(), sim.window::<u32>(1).unwrap());
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 1, ..Default::default() }).unwrap();
    let run = |first: u32| {
        let args = |rank: usize| (comm.rank(rank), send.rank(rank), recv.rank(rank), first);
        // SAFETY: the windows have an element.
        unsafe { sim.launch(forgets_to_close, LaunchConfig::new(1, 1), args) }.unwrap()
    };
    let report = run(10);
    assert_eq!(recv.read(0), [21]);
    assert_eq!(report.open_sessions.len(), 2);
    assert_eq!(report.open_sessions[1].rank, 1);
    // Rank 0 passes the barrier at once and reads what rank 1 stored in the first launch.
    run(100);
    assert_eq!(recv.read(0), [100 + 11]);
}
