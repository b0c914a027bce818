//! Tests that the simulator reports misuse of GIN, and waits for signals that no rank sends.

use core::mem::MaybeUninit;
use core::ptr::null_mut;

use crate::common::*;
use cuda_std::prelude::*;
use devcomm::sim::{Change, Error, Machine, Mutation, Waiting};
use devcomm::{DevCommRequirements, GinConnectionType, Simulation};
use devcomm_testing::simulated::{Gpu, failure, run, simulate, world};
use nccl_device::gin::Proxy;
use nccl_device::raw::{self, GinRequest};
use nccl_device::{Coop, DevComm, Window};

/// Rank 0 puts an element to `peer` at byte `offset`, with signal `id` and counter `counter`.
#[kernel]
unsafe fn puts_to(
    comm: DevComm,
    out: Window<u32>,
    peer: i32,
    offset: usize,
    id: u32,
    counter: u32,
) {
    let comm = comm.as_raw();
    if comm.rank == 0 {
        let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
        let then = SignalMode::Inc(id, true);
        // SAFETY: the simulator reports invalid arguments.
        unsafe {
            put(&mut net, &team, peer, (window, offset), (window, 0), 4, then, Some(counter))
        };
    }
}

/// Returns the error report of a put; empty for a valid put.
fn report_of_put(
    connection: GinConnectionType,
    peer: i32,
    offset: usize,
    id: u32,
    counter: u32,
) -> String {
    let world = world(Simulation::new(4).team_size(2));
    let result = run(&world, |gpu| {
        let comm = gpu.dev_comm(full().gin_connection(connection))?;
        let out = gpu.window(&[0_u32; 2])?;
        gpu.launch(puts_to::args(&comm, &out, peer, offset, id, counter).grid(1).block(1))
    });
    match (result, world.simulated_machine().and_then(Machine::failure).as_deref()) {
        (Ok(_), None) => String::new(),
        (Err(_), Some(error @ Error::Misuse { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_put_may_not_do_is_reported_when_it_is_posted() {
    use GinConnectionType::{CustomStride, Full, Rail};
    // The last signal and the last counter of `full()`.
    for (connection, peer) in [(Full, 0), (Full, 3), (Rail, 0), (Rail, 2), (CustomStride, 3)] {
        assert_eq!(report_of_put(connection, peer, 4, 15, 3), "");
    }
    let all = [
        (
            report_of_put(Rail, 1, 0, 0, 0),
            "rank 1 is not connected to rank 0 over the network: only ranks 2 apart are",
        ),
        (report_of_put(Full, 4, 0, 0, 0), "peer 4 of a team of 4 ranks"),
        (report_of_put(Full, 1, 5, 0, 0), "a put to 4 bytes at byte 5 of `out`"),
        (report_of_put(Full, 1, usize::MAX, 0, 0), "rank 1's part), which has 8"),
        (report_of_put(Full, 1, 0, 16, 0), "signal 16: the device communicator has 16"),
        (report_of_put(Full, 1, 0, 0, 4), "counter 4: the device communicator has 4"),
    ];
    for (report, want) in all {
        assert!(report.contains(want), "{report}");
        assert!(
            report.contains("rank 0 block 0 thread 0 at ") && report.contains("gin_misuse.rs"),
            "{report}"
        );
    }
}

/// Rank 0 signals `peer`.
#[kernel]
fn signals(comm: DevComm, peer: i32) {
    let team = comm.world_team();
    if team.rank == 0 {
        comm.gin::<Proxy>(0).signal(Coop::thread(), team, peer, comm.signal(0).inc());
    }
}

/// The network connects all ranks, but the device communicator's contexts only those of a rail.
#[test]
fn a_peer_that_the_contexts_do_not_connect_is_refused_before_nccl_is_called() {
    for (peer, refused) in [(2, false), (1, true), (3, true)] {
        let world = world(Simulation::new(4).team_size(2));
        let result = run(&world, |gpu| {
            let comm = gpu.dev_comm(full().gin_connection(GinConnectionType::Rail))?;
            gpu.launch(signals::args(&comm, peer).grid(1).block(1))
        });
        let failure = world.simulated_machine().and_then(Machine::failure);
        let panicked = matches!(failure.as_deref(), Some(Error::Panic { .. }));
        assert_eq!((result.is_err(), panicked), (refused, refused), "{peer}: {failure:?}");
    }
}

/// Makes the mistake with number `which`.
#[kernel]
unsafe fn mistakes(comm: DevComm, out: Window<u64>, which: u32) {
    let comm = comm.as_raw();
    let (team, window) = (comm.world_team(), handle(&out));
    // SAFETY: the simulator reports misuse.
    unsafe {
        if which == 0 {
            gin(comm, 4);
        }
        let mut net = MaybeUninit::uninit();
        if which == 1 {
            // The mask of GDAKI.
            raw::ncclGin_C_init(net.as_mut_ptr(), 1 << 3, comm, 0);
        }
        let mut net = gin(comm, 0);
        match which {
            2 => {
                signal(&mut net, &team, 0, SignalMode::Inc(0, true));
                signal(&mut net, &team, 0, SignalMode::AddTo(0, 1));
            }
            3 => {
                signal(&mut net, &team, 0, SignalMode::Inc(0, true));
                raw::ncclGinResetSignal(&mut net, 0);
            }
            4 => signal(&mut net, &team, 0, SignalMode::IncVa((window, 4), true)),
            5 => {
                let (mut request, one) = (GinRequest([0; 2]), thread_coop());
                raw::ncclGinWait(&mut net, &mut request, &one, false, null_mut(), ACQ_REL);
            }
            6 => {
                raw::ncclGinReadSignal(&mut net, 0, 65, ACQ_REL);
            }
            7 => put_value(&mut net, &team, 0, (window, 0), (1, 3), SignalMode::Nothing),
            8 => flush(&mut *MaybeUninit::<raw::Gin>::zeroed().as_mut_ptr()),
            _ => {}
        }
    }
}

#[test]
fn misuse_of_the_network_is_reported() {
    let wants = [
        "GIN context 4: the device communicator has 4",
        "lacks PROXY",
        "signal 0 of rank 0 is both incremented and added to without a reset",
        "signal 0 is reset while an operation that signals it is under way",
        "signals are aligned to 8 bytes",
        "the request was not made by ncclGinFlushAsync",
        "a value of 65 bits",
        "a put of a value of 3 bytes",
        "the GIN handle was not made by ncclGin_C_init",
    ];
    let report = |requirements: &DevCommRequirements, which: u32| {
        let error = failure(Simulation::new(1), |gpu| {
            let (comm, out) = (gpu.dev_comm(requirements.clone())?, gpu.window(&[0_u64; 2])?);
            gpu.launch(mistakes::args(&comm, &out, which).grid(1).block(1))
        });
        assert!(matches!(*error, Error::Misuse { .. }), "{error}");
        error.to_string()
    };
    for (which, want) in (0..).zip(wants) {
        let report = report(&full(), which);
        assert!(report.contains(want), "{report}");
    }
    let without = report(&DevCommRequirements::new().lsa_barriers(1), 9);
    assert!(without.contains("made without a gin_connection"), "{without}");
}

/// Resets a signal to 0 between two kinds of signal operations.
#[kernel]
unsafe fn resets_between(comm: DevComm) {
    let comm = comm.as_raw();
    let (team, mut net) = (comm.world_team(), gin(comm, 0));
    // SAFETY: the handle is valid.
    unsafe {
        signal(&mut net, &team, 0, SignalMode::Inc(0, true));
        wait(&mut net, 0, 1);
        raw::ncclGinResetSignal(&mut net, 0);
        signal(&mut net, &team, 0, SignalMode::AddTo(0, 5));
        wait(&mut net, 0, 5);
    }
}

#[test]
fn a_reset_lets_a_signal_be_counted_another_way() {
    simulate(Simulation::new(1), |gpu| {
        gpu.launch(resets_between::args(&gpu.dev_comm(full())?).grid(1).block(1))
    });
}

#[kernel]
unsafe fn waits_for_nobody(comm: DevComm) {
    let comm = comm.as_raw();
    let mut net = gin(comm, 3);
    // SAFETY: the handle is valid.
    unsafe { raw::ncclGinWaitSignal(&mut net, &cta(), 5, 2, SIGNAL_BITS, ACQ_REL) };
}

#[test]
fn a_wait_for_a_signal_that_no_rank_sends_is_a_deadlock_that_names_it() {
    let error = failure(Simulation::new(2), |gpu| {
        gpu.launch(waits_for_nobody::args(&gpu.dev_comm(full())?).grid(1).block(4))
    });
    let text = error.to_string();
    let Error::Deadlock(stall) = &*error else { panic!("{text}") };
    let waiter = stall.waiters.iter().find(|w| matches!(w.what, Waiting::For(_))).unwrap();
    assert_eq!((waiter.rank, waiter.threads), (0, 1));
    assert!(waiter.at.unwrap().file().ends_with("gin_misuse.rs"));
    assert!(
        text.contains("1 thread waits for signal 5 of context 3, which is 0 and not yet 2"),
        "{text}"
    );
    assert!(
        text.contains("3 threads wait for the rest of its coop in a wait for a signal"),
        "{text}"
    );
}

/// Rank 0 puts an element to rank 1, which waits for it. Rank 0 then waits for nothing (`which` 0),
/// a flush (1) or the counter (2).
#[kernel]
unsafe fn puts_and_ends(comm: DevComm, out: Window<u32>, which: u32) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let counter = (which == 2).then_some(0);
    // SAFETY: the window has two elements, and the handles are valid.
    unsafe {
        if comm.rank == 0 {
            let then = SignalMode::Inc(0, true);
            put(&mut net, &team, 1, (window, 4), (window, 0), 4, then, counter);
            match which {
                1 => flush(&mut net),
                2 => raw::ncclGinWaitCounter(&mut net, &thread_coop(), 0, 1, COUNTER_BITS, ACQ_REL),
                _ => {}
            }
        } else {
            wait(&mut net, 0, 1);
        }
    }
}

#[test]
fn a_put_that_is_not_flushed_when_its_kernel_ends_is_noted_with_its_line() {
    for (which, notes) in [(0, 1), (1, 0), (2, 0)] {
        let world = world(Simulation::new(2));
        let ran = run(&world, |gpu| {
            let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
            gpu.launch(puts_and_ends::args(&comm, &out, which).grid(1).block(1))
        });
        ran.unwrap();
        let unflushed = world.simulated_machine().unwrap().activity().unflushed;
        assert_eq!(unflushed.len(), notes, "{which}: {unflushed:?}");
        for put in unflushed {
            assert_eq!((put.thread.rank, put.thread.block, put.is_get), (0, 0, false));
            assert!(put.memory.starts_with("`out` (window "), "{put}");
            assert!(put.at.file().ends_with("gin_misuse.rs"), "{}", put.at);
        }
    }
    let strict = Simulation::new(2).flush(true);
    let put = |gpu: &Gpu<'_>, which| {
        let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
        gpu.launch(puts_and_ends::args(&comm, &out, which).grid(1).block(1))
    };
    simulate(strict.clone(), |gpu| put(gpu, 1));
    let error = failure(strict, |gpu| put(gpu, 0));
    let want = "its kernel ends, and its put from `out` (window ";
    assert!(error.to_string().contains(want), "{error}");
}

#[test]
fn a_put_that_the_last_kernel_to_end_has_not_flushed_is_an_error_too() {
    let error = failure(Simulation::new(2).flush(true), |gpu| {
        let (comm, out) = (gpu.dev_comm(full())?, gpu.window(&[7_u32, 0])?);
        if gpu.rank() == 0 {
            let (stream, put) = (gpu.stream()?, puts_and_ends::args(&comm, &out, 0));
            // SAFETY: the window has two elements.
            unsafe { put.grid(1).block(1).launch(&stream) }?;
            stream.synchronize()?;
        }
        gpu.barrier()
    });
    assert!(error.to_string().contains("its kernel ends, and its put"), "{error}");
}

/// Rank 0 puts its first element to its other ones.
#[kernel]
unsafe fn puts_often(comm: DevComm, out: Window<u32>) {
    let comm = comm.as_raw();
    let (team, mut net, window) = (comm.world_team(), gin(comm, 0), handle(&out));
    let none = SignalMode::Nothing;
    for at in [4, 8, 12] {
        // SAFETY: the window has four elements, and the handles are valid.
        unsafe {
            put(&mut net, &team, 0, (window, at), (window, 0), 4, none, None); // often
        }
    }
    // SAFETY: the handle is valid.
    unsafe { flush(&mut net) };
}

#[test]
fn a_put_whose_wait_is_removed_does_not_wait_for_space_in_its_queue() {
    let mut lines = include_str!("gin_misuse.rs").lines();
    let line = 1 + lines.position(|line| line.ends_with("// often")).unwrap() as u32;
    let no_wait = Mutation::new("gin_misuse.rs", line, Change::NoWait);
    for simulation in [Simulation::new(1), Simulation::new(1).mutation(no_wait)] {
        simulate(simulation, |gpu| {
            let comm = gpu.dev_comm(full().gin_queue_depth(1))?;
            let out = gpu.window(&[7_u32; 4])?;
            gpu.launch(puts_often::args(&comm, &out).grid(1).block(1))
        });
    }
}

/// Adds to a signal at the start of a window: 1, as an increment if `increments`.
#[kernel]
unsafe fn signals_in_window(comm: DevComm, mail: Window<u64>, increments: bool) {
    let comm = comm.as_raw();
    let (team, mut net, place) = (comm.world_team(), gin(comm, 0), (handle(&mail), 0));
    // SAFETY: the window has the signal, and the handles are valid.
    unsafe {
        if increments {
            signal(&mut net, &team, 0, SignalMode::IncVa(place, true));
        } else {
            signal(&mut net, &team, 0, SignalMode::AddVa(place, 1));
        }
        flush(&mut net);
    }
}

#[test]
fn a_signal_in_a_new_window_may_be_counted_another_way() {
    simulate(Simulation::new(1), |gpu| {
        let comm = gpu.dev_comm(full())?;
        for increments in [true, false, true] {
            let mail = gpu.window(&[0_u64])?;
            gpu.launch(signals_in_window::args(&comm, &mail, increments).grid(1).block(1))?;
            mail.close()?;
        }
        Ok(())
    });
}
