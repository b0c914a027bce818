//! All-reduce kernels over LSA, with different sizes and thread orders.

use cuda_std::prelude::*;
use devcomm::sim::Activity;
use devcomm::{DevCommRequirements, Simulation};
use devcomm_testing::simulated::{read, run, simulate, world};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Computes `recv[i] = sum over ranks of send[i]`: each rank sums its share and stores it to all
/// ranks.
#[kernel]
unsafe fn allreduce(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let share = count.div_ceil(team.n_ranks as usize);
    let begin = (share * team.rank as usize).min(count);
    let end = (begin + share).min(count);
    let mut i = begin + thread::index_1d() as usize;
    while i < end {
        let mut sum = 0.0;
        for peer in 0..team.n_ranks {
            // SAFETY: `i` is below `count`; the barriers order the accesses.
            sum += unsafe { send.lsa(peer).load(i) };
        }
        for peer in 0..team.n_ranks {
            // SAFETY: the windows have `count` elements, and each thread stores its own ones.
            unsafe { recv.lsa(peer).store(i, sum) };
        }
        i += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    }
    barrier.sync(MemoryOrder::Release);
}

fn value(rank: usize, i: usize) -> f32 {
    (rank * 7 + i % 13) as f32
}

/// Runs `launches` all-reduces on one machine and checks every element.
fn check(simulation: Simulation, grid: u32, block: u32, count: usize, launches: usize) -> Activity {
    let world = world(simulation);
    let summed = run(&world, |gpu| {
        let (send, recv) = (gpu.window(&vec![0.0; count])?, gpu.window(&vec![0.0; count])?);
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(grid))?;
        for launch in 0..launches {
            let sent = |rank| (0..count).map(move |i| value(rank, i + launch));
            send.copy_from_host(&sent(gpu.rank()).collect::<Vec<_>>())?;
            recv.fill_bytes(0xff)?;
            gpu.launch(allreduce::args(&comm, &send, &recv, count).grid(grid).block(block))?;
            let all: Vec<Vec<f32>> = (0..gpu.n_ranks()).map(|rank| sent(rank).collect()).collect();
            let want: Vec<f32> = (0..count).map(|i| all.iter().map(|sent| sent[i]).sum()).collect();
            assert_eq!(read(&recv)?, want, "launch {launch}");
        }
        Ok(())
    });
    summed.unwrap_or_else(|error| panic!("{error}"));
    let activity = world.simulated_machine().unwrap().activity();
    assert!(activity.open_sessions.is_empty());
    activity
}

#[test]
fn all_reduce_sums_for_any_number_of_ranks() {
    for ranks in [1, 2, 3, 8] {
        check(Simulation::new(ranks), 3, 64, 1000, 1);
    }
}

#[test]
fn fewer_threads_than_peers_still_meet() {
    check(Simulation::new(8), 2, 3, 100, 2);
}

#[test]
fn barriers_keep_their_epochs_between_launches() {
    check(Simulation::new(4), 2, 32, 256, 5);
}

#[test]
fn any_order_gives_the_same_sums() {
    for seed in 0..8 {
        check(Simulation::new(3).seed(seed), 2, 48, 500, 2);
        check(Simulation::new(3).seed(seed).preempt(true), 2, 48, 100, 2);
    }
}

#[test]
fn a_seed_fixes_the_order() {
    let trace = |seed| check(Simulation::new(2).seed(seed).preempt(true), 2, 32, 100, 2).trace;
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}

#[test]
fn sixteen_thousand_threads_run_at_once() {
    check(Simulation::new(8), 8, 256, 4096, 2);
}

#[test]
fn teams_of_fewer_ranks_than_the_world_sum_apart() {
    let sums = simulate(Simulation::new(4).team_size(2), |gpu| {
        let (send, recv) =
            (gpu.window(&[10_f32.powi(gpu.rank() as i32); 10])?, gpu.window(&[0.0; 10])?);
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        gpu.launch(allreduce::args(&comm, &send, &recv, 10_usize).grid(1).block(32))?;
        read(&recv)
    });
    assert_eq!((&sums[0][..], &sums[3][..]), (&[11.0; 10][..], &[1100.0; 10][..]));
}

/// An all-reduce of one element whose barrier session is never closed.
#[kernel]
unsafe fn forgets_to_close(comm: DevComm, send: Window<u32>, recv: Window<u32>, first: u32) {
    use core::mem::MaybeUninit;
    use nccl_device::raw;
    let team = comm.lsa_team();
    let mut coop = MaybeUninit::uninit();
    let mut session = MaybeUninit::uninit();
    // SAFETY: the objects live until the end of the kernel; barrier 0 exists.
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
    // The detection of races is off, since it would report the missing barrier first.
    let world = world(Simulation::new(2).races(false));
    let sums = run(&world, |gpu| {
        let (send, recv) = (gpu.window(&[0])?, gpu.window(&[0])?);
        let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let sum = |first: u32| {
            gpu.launch(forgets_to_close::args(&comm, &send, &recv, first).grid(1).block(1))?;
            read(&recv).map(|sums| sums[0])
        };
        Ok((sum(10)?, sum(100)?))
    });
    let sums = sums.unwrap();
    assert_eq!((sums[0].0, sums[1].0), (21, 21));
    // The first rank to arrive passes at once and reads the other rank's value of the first launch.
    assert!(sums.iter().any(|(_, again)| *again == 111), "{sums:?}");
    let open = world.simulated_machine().unwrap().activity().open_sessions;
    // Each of the two launches leaves one open on each rank.
    assert_eq!(open.iter().map(|session| session.rank).collect::<Vec<_>>(), [0, 0, 1, 1]);
}
