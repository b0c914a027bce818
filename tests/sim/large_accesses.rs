//! Tests of accesses of more bytes than an instruction of a GPU accesses at once.

use cuda_std::prelude::*;
use devcomm::sim::{Change, Error, Mutation};
use devcomm::{Simulation, SymmetricBuffer};
use devcomm_testing::simulated::{failure, read, simulate};

/// A value of 256 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct Message {
    flag: u64,
    data: [u64; 31],
}

/// Polls a whole message.
#[kernel]
unsafe fn polls_a_message(message: *const u64) {
    // SAFETY: the buffer has room for an aligned message.
    while unsafe { mem::load(message.cast::<Message>()) }.flag != 7 {}
}

#[test]
fn a_poll_of_a_large_value_is_reported_with_its_first_bytes() {
    let error = failure(Simulation::new(1), |gpu| {
        gpu.launch(polls_a_message::args(&gpu.buffer(&[5_u64; 32])?).grid(1).block(1))
    });
    let Error::Livelock(stall) = &*error else { panic!("{error}") };
    let polled = stall.waiters[0].polled.as_deref().unwrap();
    assert!(polled.contains("element 0 of `message` (buffer "), "{polled}");
    assert!(polled.ends_with(" begins with 0x50000000000000005"), "{polled}");
}

/// Copies a message from the first half of the buffer to the second one.
#[kernel]
unsafe fn copies_a_message(memory: *mut u64) {
    let messages = memory.cast::<Message>();
    // SAFETY: the buffer has room for two aligned messages.
    unsafe {
        let message = mem::load(messages); // the load
        let Message { flag, data } = message;
        let sum = data.iter().fold(flag, |sum, word| sum + word);
        mem::store(messages.add(1), Message { flag: sum, data }); // the store
    }
}

#[test]
fn a_removed_access_of_a_large_value_changes_no_memory() {
    let copied = |simulation: Simulation| {
        let read_all = |memory: &SymmetricBuffer<u64>| read(memory);
        let copied = simulate(simulation, |gpu| {
            let memory = gpu.buffer(&[[3_u64; 32], [9; 32]].concat())?;
            gpu.launch(copies_a_message::args(&memory).grid(1).block(64))?;
            read_all(&memory)
        });
        (copied[0][32], copied[0][63])
    };
    let without = |text: &str| {
        let mut lines = include_str!("large_accesses.rs").lines();
        let line = 1 + lines.position(|line| line.ends_with(text)).unwrap();
        let removed = Mutation::new("large_accesses.rs", line as u32, Change::Remove);
        Simulation::new(1).races(false).mutation(removed)
    };
    assert_eq!(copied(Simulation::new(1).races(false)), (96, 3));
    assert_eq!(copied(without("// the load")), (0, 0));
    assert_eq!(copied(without("// the store")), (9, 9));
}
