//! Tests of host threads that wait by a loop of queries, each of which returns at once, and of what
//! happens while a host thread is outside the machine.

use std::ptr::null_mut;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cuda_std::atomic::{Order, Scope};
use cuda_std::prelude::*;
use devcomm::sim::{Error, Limit, Machine};
use devcomm::{Check, DevCommRequirements, Kernel, Lag, Launch, Result, Simulation, World};
use devcomm_sys::driver::CUresult;
use devcomm_sys::nccl::Config;
use devcomm_testing::simulated::{Gpu, failure, read, simulate};
use devcomm_types::LaunchArgs;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Timeout, Window};

use crate::nccl_threads::{IN_PROGRESS, OK, cuda, nccl, run_ranks_on};

/// Launches a kernel, and asks without a pause whether it has ended.
fn launch_and_poll<K: Kernel, A: LaunchArgs<K::Args>, S>(
    gpu: &Gpu<'_>,
    launch: Launch<K, A, S>,
) -> Result<()> {
    let stream = gpu.stream()?;
    // SAFETY: the arguments are buffers that live until the kernel has ended.
    unsafe { launch.into_unsafe().launch(&stream) }?;
    while !stream.is_idle()? {}
    Ok(())
}

/// Half of the block waits for the other half, which waits for the other rank's kernel.
#[kernel]
unsafe fn half_waits(comm: DevComm) {
    if thread::thread_idx_x() < 32 || comm.rank() == 1 {
        thread::sync_threads();
    } else {
        comm.lsa_barrier(Coop::warp(), BarrierIndex::new(0)).sync(MemoryOrder::AcqRel);
    }
}

#[test]
fn a_thread_that_polls_a_stream_gets_the_report_of_its_kernels_deadlock() {
    let lagging = Simulation::new(2).lag(Lag::Thread);
    for simulation in [Simulation::new(2), Simulation::new(2).seed(1), lagging] {
        let error = failure(simulation, |gpu| {
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            launch_and_poll(gpu, half_waits::args(&comm).grid(1).block(64))
        });
        let Error::Deadlock(stall) = &*error else { panic!("{error}") };
        assert_eq!(stall.threads(), 64, "{error}");
        assert!(error.to_string().contains("where rank 1 has not arrived"), "{error}");
    }
}

/// Polls a word that nobody sets.
#[kernel]
unsafe fn polls_for_nobody(flag: *const u32) {
    // SAFETY: the buffer has one element.
    while unsafe { mem::load_ordered(flag, Order::Acquire, Scope::Sys) } == 0 {}
}

#[test]
fn a_thread_that_polls_a_stream_gets_the_report_of_its_kernels_livelock_or_limit() {
    let polls = |simulation| {
        failure(simulation, |gpu| {
            launch_and_poll(gpu, polls_for_nobody::args(&gpu.buffer(&[0_u32])?).grid(1).block(2))
        })
    };
    let error = polls(Simulation::new(1));
    assert!(matches!(*error, Error::Livelock(_)), "{error}");
    let error = polls(Simulation::new(1).step_limit(1000));
    assert!(matches!(*error, Error::Limit { limit: Limit::Steps(1000), .. }), "{error}");
}

#[test]
fn kernels_of_ranks_that_poll_their_streams_end_in_schedules_in_which_some_are_late() {
    /// Each rank passes a value to the next one, which waits for it.
    #[kernel]
    unsafe fn passes_to_the_next(comm: DevComm, slot: Window<u32>) {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        let (team, tid) = (comm.lsa_team(), thread::thread_idx_x() as usize);
        // SAFETY: the window has an element per thread; the barriers order the accesses.
        unsafe {
            barrier.sync(MemoryOrder::AcqRel);
            slot.lsa(team.next()).store(tid, 1);
            barrier.sync(MemoryOrder::AcqRel);
            assert_eq!(slot.local().load(tid), 1);
        }
    }
    let late = [Lag::Thread, Lag::Warp, Lag::Block, Lag::Rank];
    for simulation in late.into_iter().map(|late| Simulation::new(2).lag(late)) {
        Check::new(simulation).in_order().run(|rank| {
            let gpu = Gpu::new(rank)?;
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            let slot = gpu.window(&[0_u32; 64])?;
            (0..2).try_for_each(|_| {
                launch_and_poll(&gpu, passes_to_the_next::args(&comm, &slot).grid(1).block(64))
            })
        });
    }
}

/// Waits for what never comes, and records that the wait has timed out.
#[kernel]
unsafe fn times_out_beside_polls(comm: DevComm, word: *mut u32, nanos: u64) {
    // SAFETY: the buffer has two elements.
    unsafe {
        let is_set = || mem::load_volatile(word) != 0;
        let waited = comm.wait_until_timeout(Coop::cta(), Timeout::nanos(nanos), is_set);
        if thread::thread_idx_x() == 0 {
            mem::store(word.add(1), u32::from(waited.is_err()));
        }
    }
}

#[test]
fn a_kernels_wait_times_out_while_its_rank_polls_the_stream() {
    let seen = simulate(Simulation::new(1), |gpu| {
        let (comm, words) = (gpu.dev_comm(DevCommRequirements::new())?, gpu.buffer(&[0_u32; 2])?);
        let nanos = 3_600_000_000_000;
        launch_and_poll(gpu, times_out_beside_polls::args(&comm, &words, nanos).grid(1).block(32))?;
        read(&words)
    });
    assert_eq!(seen, [[0, 1]]);
}

#[test]
fn a_timeout_beyond_the_clock_never_ends() {
    let error = failure(Simulation::new(1), |gpu| {
        let (comm, words) = (gpu.dev_comm(DevCommRequirements::new())?, gpu.buffer(&[0_u32; 2])?);
        gpu.launch(times_out_beside_polls::args(&comm, &words, u64::MAX).grid(1).block(32))
    });
    assert!(matches!(*error, Error::Deadlock(_)), "{error}");
    let machine = Machine::new(&Simulation::new(1)).unwrap();
    machine.enter();
    let waited = machine.wait(machine.event_count(), Some(Duration::MAX));
    assert!(waited.unwrap_err().contains("deadlock"));
    // A deadline that the clock has is waited for, and calls advance the clock no further.
    let last = Duration::from_nanos(u64::MAX - 1);
    machine.wait(machine.event_count(), Some(last)).unwrap();
    let _ = machine.activity();
    assert!(machine.now() >= last);
}

/// Waits until the word at this address is set.
#[kernel]
unsafe fn waits_for_a_polling_host(word: u64) {
    // SAFETY: the launch passes a word that the host sets.
    while unsafe { mem::load_ordered(word as *const u32, Order::Acquire, Scope::Sys) } == 0 {}
}

#[test]
fn a_kernel_that_polls_what_a_thread_will_write_after_many_queries_is_not_livelocked() {
    for simulation in [Simulation::new(1), Simulation::new(1).seed(1), Simulation::new(1).pct(2)] {
        simulate(simulation, |gpu| {
            let mut word = gpu.context().pinned::<u32>(1)?;
            let address = word.as_mut_slice()?.as_mut_ptr();
            let stream = gpu.stream()?;
            let launch = waits_for_a_polling_host::args(address as u64).grid(1).block(1024);
            // SAFETY: the word is live until the kernel has ended.
            unsafe { launch.launch(&stream) }?;
            for _ in 0..3000 {
                assert!(!stream.is_idle()?);
            }
            // SAFETY: pinned memory of four bytes, which the kernel only reads.
            unsafe { address.write_volatile(1) };
            while !stream.is_idle()? {}
            stream.synchronize()
        });
    }
}

#[test]
fn queries_of_idle_streams_and_of_communicators_are_no_deadlock_unless_all_wait() {
    let machine = Machine::new(&Simulation::new(2)).unwrap();
    run_ranks_on(&machine, |thread| {
        let stream = thread.stream();
        for _ in 0..70_000 {
            assert_eq!(cuda!(cuStreamQuery(stream.cast())), OK);
        }
        let _ = thread.machine.activity();
    });
    assert!(machine.failure().is_none());
    let returned = run_ranks_on(&machine, |thread| {
        if thread.me == 1 {
            // It never joins.
            return 0;
        }
        let mut config = Config::new();
        config.blocking = 0;
        let (comm, _) = thread.init_with(config);
        let mut state = IN_PROGRESS;
        while state == IN_PROGRESS {
            let code = nccl!(comm_get_async_error(comm, &raw mut state));
            if code != 0 {
                return code;
            }
        }
        0
    });
    assert_ne!(returned[0], 0);
    assert!(matches!(&*machine.failure().unwrap(), Error::Deadlock(_)));
}

#[test]
fn time_passes_as_it_does_outside_while_a_thread_is_outside_the_machine() {
    let (sender, receiver) = channel::<()>();
    let ends = (std::sync::Mutex::new(Some(sender)), std::sync::Mutex::new(receiver));
    let limit = Duration::from_secs(60);
    let world = World::builder().simulate(Simulation::new(2)).deadline(Some(limit));
    let start = Instant::now();
    let ran = world.threads(2).unwrap().run(|rank| {
        if rank.rank() == 1 {
            // It waits for a thread that the machine does not know.
            let sender = ends.0.lock().unwrap().take();
            let other = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                drop(sender);
            });
            assert!(ends.1.lock().unwrap().recv().is_err());
            other.join().unwrap();
        }
        rank.barrier()?;
        Ok::<_, devcomm::Error>(rank.simulated_machine().unwrap().now())
    });
    for now in ran.unwrap() {
        assert!(now <= start.elapsed() + Duration::from_secs(1), "{now:?}");
    }
}

#[test]
fn a_query_of_one_machine_leaves_a_thread_attached_to_another() {
    let [one, other] = [(); 2].map(|()| Machine::new(&Simulation::new(1)).unwrap());
    run_ranks_on(&one, |thread| {
        let stream = thread.stream();
        assert_eq!(other.activity().switches, 0);
        assert!(other.traffic().is_empty());
        // The context is still current.
        thread.synchronize(stream);
        assert_eq!(cuda!(cuStreamQuery(null_mut())), CUresult::CUDA_SUCCESS);
    });
    assert!(!Machine::is_attached());
}
