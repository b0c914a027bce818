//! Tests that copies, memsets and collectives race with other streams' kernels without an event.

use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm::{ReduceOp, Result, Simulation, Stream, SymmetricBuffer};
use devcomm_testing::simulated::{Gpu, simulate};

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
