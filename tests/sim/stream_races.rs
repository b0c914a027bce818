//! Tests that copies, memsets and collectives race with other streams' kernels without an event.

use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::{
    Buffer, Communicator, DevCommRequirements, ReduceOp, Result, Simulation, Stream,
    SymmetricBuffer,
};
use devcomm_testing::simulated::{Gpu, simulate};
use nccl_device::{DevComm, Window};

use crate::races::race;

#[kernel]
unsafe fn add_1_in_stream(word: *mut u32) {
    // SAFETY: the buffer has a word.
    unsafe { mem::store(word, mem::load(word) + 1) };
}

/// Runs `first` on two words in one stream, and adds to the second word in another stream, which
/// waits for the first stream if `ordered`.
fn then_add(
    gpu: &Gpu<'_>,
    ordered: bool,
    first: impl Fn(&Stream, [&SymmetricBuffer<u32>; 2]) -> Result<()>,
) -> Result<()> {
    let (source, word) = (gpu.buffer(&[1_u32])?, gpu.buffer(&[0_u32])?);
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    first(&one, [&source, &word])?;
    if ordered {
        let event = gpu.context().event()?;
        one.record(&event)?;
        two.wait_event(&event)?;
    }
    // SAFETY: the buffer has a word; the races are what the tests are for.
    unsafe { add_1_in_stream::args(&word).grid(1).block(1).launch(&two)? };
    one.synchronize()?;
    two.synchronize()
}

#[test]
fn copies_memsets_and_collectives_race_with_kernels_that_nothing_orders() {
    let copy = |gpu: &Gpu<'_>, ordered| {
        then_add(gpu, ordered, |stream, [source, word]| stream.copy(source, word))
    };
    let fill =
        |gpu: &Gpu<'_>, ordered| then_add(gpu, ordered, |stream, [_, word]| stream.fill(word, 7));
    let reduce = |gpu: &Gpu<'_>, ordered| {
        let comm = gpu.communicator()?;
        then_add(gpu, ordered, |stream, [source, word]| {
            comm.all_reduce(source, word, ReduceOp::Sum, stream)
        })
    };
    type Program<'a> = &'a (dyn Fn(&Gpu<'_>, bool) -> Result<()> + Sync);
    let programs: [(&str, Program<'_>); 3] =
        [("a copy", &copy), ("a memset", &fill), ("ncclAllReduce", &reduce)];
    for (name, program) in programs {
        for simulation in [Simulation::new(2), Simulation::new(2).seed(1)] {
            simulate(simulation.clone(), |gpu| program(gpu, true));
            let race = race(simulation, |gpu| program(gpu, false));
            let operations = [&race.access, &race.other].map(|access| &*access.operation);
            assert!(
                operations.contains(&name) && operations.contains(&"add_1_in_stream"),
                "{race}"
            );
            assert!(race.memory.starts_with("element 0 of `word` (buffer "), "{race}");
        }
    }
}

/// Rank 1 reads its word, and then rank 0 stores to it, with an operation between.
fn read_then_store(
    gpu: &Gpu<'_>,
    between: impl Fn(&Communicator, [&SymmetricBuffer<u32>; 2], &Stream) -> Result<()>,
) -> Result<()> {
    let (comm, stream) = (gpu.communicator()?, gpu.stream()?);
    let (words, data, out) = (gpu.window(&[0_u32])?, gpu.buffer(&[1_u32])?, gpu.buffer(&[0_u32])?);
    let dev = gpu.dev_comm(DevCommRequirements::new())?;
    // SAFETY: the memory has the words; the races are what the test is for.
    unsafe {
        if gpu.rank() == 1 {
            read_word::args(&words, &out).grid(1).block(1).launch(&stream)?;
        }
        between(comm, [&data, &out], &stream)?;
        if gpu.rank() == 0 {
            store_in_peer::args(&dev, &words).grid(1).block(1).launch(&stream)?;
        }
    }
    stream.synchronize()
}

#[kernel]
unsafe fn read_word(words: Window<u32>, out: *mut u32) {
    // SAFETY: the memory has the words.
    unsafe { mem::store(out, words.local().load(0)) };
}

#[kernel]
unsafe fn store_in_peer(comm: DevComm, words: Window<u32>) {
    // SAFETY: the window has a word.
    unsafe { words.lsa(1 - comm.rank()).store(0, 9) };
}

#[test]
fn a_rank_that_receives_nothing_is_not_ordered_after_the_others() {
    simulate(Simulation::new(2), |gpu| {
        read_then_store(gpu, |comm, [data, out], stream| {
            comm.all_reduce(data, out, ReduceOp::Sum, stream)
        })
    });
    let broadcast = |gpu: &Gpu<'_>| {
        read_then_store(gpu, |comm, [data, out], stream| {
            comm.broadcast(Some(data.device_slice()), out, 0, stream)
        })
    };
    let send = |gpu: &Gpu<'_>| {
        read_then_store(gpu, |comm, [data, out], stream| match gpu.rank() {
            0 => comm.send(data, 1, stream),
            _ => comm.recv(out, 0, stream),
        })
    };
    type Program<'a> = &'a (dyn Fn(&Gpu<'_>) -> Result<()> + Sync);
    for program in [&broadcast as Program<'_>, &send] {
        let race = race(Simulation::new(2), program);
        let operations = [&race.access, &race.other].map(|access| &*access.operation);
        assert!(
            operations.contains(&"read_word") && operations.contains(&"store_in_peer"),
            "{race}"
        );
    }
}
