//! Tests that the simulator reports wrong uses of Lamport messages and of LL all-to-alls.

use cuda_std::prelude::*;
use devcomm::sim::{Error, Waiting};
use devcomm::{DevCommRequirements, DevCommResource, LlA2a, Result, Simulation};
use devcomm_testing::simulated::{Gpu, failure, simulate};
use devcomm_types::nccl::LlA2aHandle;
use nccl_device::{Coop, DevComm, LamportMemory, LamportSlots, LlA2aBuffer};

/// Slots for each source rank.
const CAPACITY: u32 = 4;

/// Returns what kernels with messages need.
fn lamport(gpu: &Gpu<'_>) -> Result<(devcomm::LamportMemory, DevCommResource)> {
    let memory = devcomm::LamportMemory::new(gpu.communicator()?, CAPACITY)?;
    Ok((memory, gpu.dev_comm(DevCommRequirements::new())?))
}

/// Returns the line, from 1, on which this file has a text.
fn line(text: &str) -> String {
    let found = include_str!("messages.rs").lines().position(|line| line.contains(text));
    format!("tests/sim/messages.rs:{}:", found.unwrap() + 1)
}

/// Two threads send the same vector: to slots of their own, or both to slot 0 in launch `wrong`.
#[kernel]
unsafe fn sends_of_two_threads(comm: DevComm, memory: LamportMemory, wrong: u32) {
    let thread = thread::thread_idx_x();
    // SAFETY: the memory is for two ranks.
    unsafe {
        let session = LamportSlots::<2>::new(&comm, &memory).begin(2);
        let (mine, is_right) = (Vec16::from_bits([7; 4]), session.launch() != wrong);
        if thread == 0 {
            session.send::<f32>(1, 0, mine); // The first thread's.
        } else {
            session.send::<f32>(1, u32::from(is_right), mine); // The second thread's.
        }
        thread::sync_threads();
        session.end(Coop::cta());
        if is_right || thread == 0 {
            session.receive_all(thread, mine);
        }
    }
}

#[test]
fn a_second_message_to_a_slot_is_reported_with_both_lines() {
    let launches = |gpu: &Gpu<'_>, wrong: u32| {
        let (memory, comm) = lamport(gpu)?;
        for _ in 0..5 {
            gpu.launch(sends_of_two_threads::args(&comm, &memory, wrong).grid(1).block(2))?;
        }
        Ok(())
    };
    // Between two accesses of a thread that is not preempted no other thread runs.
    let random = |seed: u64| Simulation::new(2).seed(seed).preempt(false).weak(seed % 2 == 1);
    for simulation in (0..16).map(random).chain([Simulation::new(2)]) {
        let text = failure(simulation.clone(), |gpu| launches(gpu, 2)).to_string();
        let second = text.contains(" gets a second message in this launch, ");
        assert!(second || text.contains(" still has the message that was sent at "), "{text}");
        assert!(text.contains(": slot 0 of rank "), "{text}");
        let names = ["// The first", "// The second"].map(|mark| text.contains(&line(mark)));
        assert!(!second || names == [true; 2], "{text}");
        // The failed run's messages may be in memory that this one gets again.
        simulate(simulation, |gpu| launches(gpu, u32::MAX));
    }
}

/// Uses a slot, or slots for four ranks, that there are not.
#[kernel]
unsafe fn asks_for_slots(comm: DevComm, memory: LamportMemory, which: u32) {
    // SAFETY: the simulator reports that the slots are not there.
    unsafe {
        if which == 5 {
            LamportSlots::<4>::new(&comm, &memory);
            return;
        }
        let (slots, vector) = (LamportSlots::<2>::new(&comm, &memory), Vec16::from_bits([1; 4]));
        let session = slots.begin(2);
        match which {
            0 => session.send::<f32>(1, 2, vector),
            1 => drop(session.receive::<f32>(1, 2)),
            2 => drop(session.continue_after_abort().receive_all::<f32>(2, vector)),
            3 => drop(session.receive_each::<f32, 2>([vector; 2], |i| Some((1, 2 * i as u32)), 0)),
            _ => slots.join().send::<f32>(1, CAPACITY, vector),
        }
    }
}

#[test]
fn slots_that_are_not_there_are_reported() {
    let began = "slot 2, but the session began with 2";
    for (which, message) in [
        (0, began),
        (1, began),
        (2, began),
        (3, began),
        (4, "slot 4, but the session began with 4"),
        (5, "the slots are for 4 ranks, but the team has 2"),
    ] {
        let error = failure(Simulation::new(2), |gpu| {
            let (memory, comm) = lamport(gpu)?;
            gpu.launch(asks_for_slots::args(&comm, &memory, which).grid(1).block(1))
        });
        let text = error.to_string();
        let Error::Panic { at, .. } = &*error else { panic!("{which}: {text}") };
        assert!(at.starts_with("tests/sim/messages.rs:"), "{which}: {text}");
        assert!(text.ends_with(message), "{which}: {text}");
    }
}

/// A thread of the last block may begin after the first thread has ended the session.
#[kernel]
unsafe fn ends_without_a_barrier(comm: DevComm, memory: LamportMemory) {
    let slot = thread::index_1d();
    // SAFETY: the memory is for two ranks, with a slot for each thread.
    unsafe {
        let session = LamportSlots::<2>::new(&comm, &memory).begin(CAPACITY);
        let mine = Vec16::<f32>::from_bits([7; 4]);
        session.send(1, slot, mine);
        session.end(Coop::cta());
        session.receive_all(slot, mine);
    }
}

#[test]
fn a_session_that_a_thread_begins_after_its_end_is_reported() {
    let error = failure(Simulation::new(2), |gpu| {
        let (memory, comm) = lamport(gpu)?;
        gpu.launch(ends_without_a_barrier::args(&comm, &memory).grid(2).block(2))
    });
    let text = error.to_string();
    assert!(matches!(*error, Error::Misuse { .. }), "{text}");
    for part in ["session.end (begun in launch 1), but", "session.end (begun in launch 0), at"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Rank 2 sends nothing.
#[kernel]
unsafe fn sends_all_but_one(comm: DevComm, memory: LamportMemory) {
    let thread = thread::thread_idx_x();
    // SAFETY: the memory is for four ranks.
    unsafe {
        let session = LamportSlots::<4>::new(&comm, &memory).begin(2);
        let mine = Vec16::<f32>::from_bits([7; 4]);
        if comm.rank() != 2 {
            (1..4).for_each(|distance| session.send(distance, thread, mine));
        }
        if comm.rank() == 0 {
            session.receive_all(thread, mine);
        }
    }
}

#[test]
fn a_wait_for_messages_names_the_rank_that_sent_none() {
    let error = failure(Simulation::new(4), |gpu| {
        let (memory, comm) = lamport(gpu)?;
        gpu.launch(sends_all_but_one::args(&comm, &memory).grid(1).block(1))
    });
    let Error::Deadlock(stall) = &*error else { panic!("{error}") };
    let [waiter] = &stall.waiters[..] else { panic!("{error}") };
    let Waiting::Messages { first, .. } = &waiter.what else { panic!("{error}") };
    assert_eq!((first.index, first.peer), (0, 2), "{error}");
    let text = error.to_string();
    assert!(text.contains("slot 0 of a Lamport session, of rank 2 ("), "{text}");
    assert!(text.contains(" is 0x80000000800000008000000080000000"), "{text}");
}

/// Launches a kernel with an all-to-all of a block of its own.
macro_rules! all_to_all {
    ($simulation:expr, $kernel:ident, $grid:expr) => {
        failure($simulation, |gpu| {
            let mut asked = DevCommRequirements::new();
            let key = asked.add(LlA2a { blocks: 1, max_elements: 3, element_size: 12 });
            let comm = gpu.dev_comm(asked)?;
            gpu.launch($kernel::args(&comm, comm.resource(key)?).grid($grid).block(2))
        })
    };
}

/// Rank 1 takes no part in the second reduction, and in none after it.
#[kernel]
unsafe fn reduces_without_one(comm: DevComm, exchange: LlA2aHandle) {
    let team = comm.lsa_team();
    // SAFETY: the host made the memory for one block and an element for each rank.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, 1) };
    buffer.with(Coop::cta(), 0, team.n_ranks as u32, |session| {
        for round in 0..2 + u32::from(team.rank != 1) {
            session.all_reduce(round, |a, b| a + b);
        }
    });
}

#[test]
fn a_wait_for_an_element_names_its_rank_and_its_epoch() {
    let error = all_to_all!(Simulation::new(3), reduces_without_one, 1);
    let text = error.to_string();
    assert!(matches!(*error, Error::Deadlock(_)), "{text}");
    assert!(text.contains("wait for element 1 of an LL all-to-all, of rank 1 ("), "{text}");
    // The third epoch uses the first one's lines. The first epoch is 2.
    assert!(text.contains(" has epoch 2, not 4), at tests/sim/messages.rs:"), "{text}");
}

/// The threads of a coop reduce different numbers.
#[kernel]
unsafe fn reduces_unequal(comm: DevComm, exchange: LlA2aHandle) {
    // SAFETY: the host made the memory for one block and an element for each rank.
    let buffer = unsafe { LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, 1) };
    buffer.all_reduce(Coop::cta(), 0, thread::thread_idx_x(), |a, _| a);
}

/// The threads of a coop reduce elements whose last words are different.
#[kernel]
unsafe fn reduces_unequal_arrays(comm: DevComm, exchange: LlA2aHandle) {
    // SAFETY: the host made the memory for one block and an element for each rank.
    let buffer = unsafe { LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, 1) };
    buffer.all_reduce(Coop::cta(), 0, [1, 2, thread::thread_idx_x()], |a, _| a);
}

#[test]
fn unequal_numbers_of_a_coop_are_reported() {
    for (error, what) in [
        (all_to_all!(Simulation::new(2), reduces_unequal, 1), "(bits of mine 1), but"),
        (all_to_all!(Simulation::new(2), reduces_unequal_arrays, 1), "(hash of mine "),
    ] {
        let text = error.to_string();
        assert!(matches!(*error, Error::Misuse { .. }), "{text}");
        assert!(text.contains(&format!(": session.all_reduce {what}")), "{text}");
        assert!(text.contains(" at tests/sim/messages.rs:"), "{text}");
    }
}

/// All blocks use the memory of block 0.
#[kernel]
unsafe fn shares_a_session(comm: DevComm, exchange: LlA2aHandle) {
    // SAFETY: the simulator reports the second block.
    let buffer = unsafe { LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, 1) };
    buffer.all_reduce(Coop::cta(), 0, 1, |a: u32, b| a + b);
}

#[test]
fn a_session_with_two_users_is_reported() {
    let error = all_to_all!(Simulation::new(2), shares_a_session, 2);
    let text = error.to_string();
    assert!(matches!(*error, Error::Panic { .. }), "{text}");
    assert!(text.ends_with(": LL session 0 is in use by block 0 thread 0"), "{text}");
}
