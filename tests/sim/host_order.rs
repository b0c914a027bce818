//! Tests of the order of work that the host threads of several ranks start: only waits order it.
//! Work that no wait orders is reported as a race, in every order in which the threads run.

use std::ptr::null_mut;
use std::sync::Barrier;

use cuda_std::prelude::*;
use devcomm::sim::{Error, Machine};
use devcomm::{
    Collectives, CommConfig, Communicator, DevCommRequirements, Lag, ReduceOp, Result, Simulation,
    World,
};
use devcomm_testing::simulated::{Gpu, failure, run, simulate, world};
use nccl_device::{DevComm, Window};

use crate::nccl_threads::{OK, cuda, retain};

/// A call that waits for the other ranks of a communicator.
type Call = fn(&Gpu<'_>, &Communicator) -> Result<()>;

#[test]
fn a_deadlock_of_the_ranks_on_the_host_names_the_call_that_each_rank_is_in() {
    let calls: [(&str, Call); 6] = [
        ("barrier", |_, comm| comm.barrier()),
        ("register_window", |_, comm| comm.window::<u32>(8).map(drop)),
        ("create_dev_comm", |_, comm| comm.create_dev_comm(DevCommRequirements::new()).map(drop)),
        ("split", |_, comm| comm.split(Some(0), 0, &CommConfig::new()).map(drop)),
        ("Collectives::new", |_, comm| Collectives::new(comm).map(drop)),
        ("ncclAllReduce", |gpu, comm| {
            let ones = gpu.buffer(&[1_u32; 8])?;
            comm.all_reduce(&ones, &ones, ReduceOp::Sum, &gpu.stream()?)
        }),
    ];
    for (name, call) in calls {
        let world = World::builder().checked(true).simulate(Simulation::new(2)).threads(2).unwrap();
        let ran = run(&world, |gpu| {
            let comm = gpu.new_communicator(&CommConfig::new())?;
            // Rank 0 is in an exchange of the world, rank 1 in one of the communicator.
            if gpu.rank() == 0 { gpu.barrier() } else { call(gpu, &comm) }
        });
        assert!(ran.is_err(), "{name}");
        let text = world.simulated_machine().and_then(Machine::failure).unwrap().to_string();
        for line in [
            "host: rank 0 is in a wait for another thread: exchange of 2 ranks for barrier",
            &format!(
                "host: rank 1 is in a wait for another thread: exchange of 2 ranks for {name}"
            ),
        ] {
            assert!(text.contains(line), "{name}: {text}");
        }
    }
}

#[test]
fn a_send_and_a_receive_of_different_lengths_are_an_error_that_names_both() {
    let world = world(Simulation::new(2));
    let ran = run(&world, |gpu| {
        let (comm, stream) = (gpu.communicator()?, gpu.stream()?);
        let (three, five) = (gpu.buffer(&[1_u32; 3])?, gpu.buffer(&[2_u32; 5])?);
        match gpu.rank() {
            0 => comm.send(&three, 1, &stream)?,
            _ => comm.recv(&five, 0, &stream)?,
        }
        stream.synchronize()
    });
    let text = ran.unwrap_err().to_string();
    assert!(text.contains("rank 0 posts a send to rank 1 of 3 "), "{text}");
    assert!(text.contains("rank 1 posts a receive from rank 0 of 5 "), "{text}");
}

/// Rank 1 reads from rank 0's part of `words`.
#[kernel]
unsafe fn reads_rank_0(comm: DevComm, words: Window<u32>, out: Window<u32>) {
    if comm.rank() == 1 {
        // SAFETY: the windows have an element; the race is what the test is for.
        unsafe { out.local().store(0, words.lsa(0).load(0)) };
    }
}

/// Writes by rank 0's stream, calls `order`, and reads by rank 1's kernel.
fn write_then_read(gpu: &Gpu<'_>, order: impl Fn(&Gpu<'_>) -> Result<()>) -> Result<()> {
    let (words, out) = (gpu.window(&[1_u32])?, gpu.window(&[0_u32])?);
    let comm = gpu.dev_comm(DevCommRequirements::new())?;
    let stream = gpu.stream()?;
    if gpu.rank() == 0 {
        stream.fill(&words, 7)?;
        stream.synchronize()?;
    }
    order(gpu)?;
    // SAFETY: the windows have an element.
    unsafe { reads_rank_0::args(&comm, &words, &out).grid(1).block(1).launch(&stream)? };
    stream.synchronize()?;
    gpu.barrier()
}

/// Returns the fixed order, random ones, and some in which a rank is late.
fn orders() -> impl Iterator<Item = Simulation> {
    let random = (0..4).map(|seed| Simulation::new(2).seed(seed));
    let late = (0..4).map(|seed| Simulation::new(2).seed(seed).lag(Lag::Rank));
    [Simulation::new(2)].into_iter().chain(random).chain(late)
}

#[test]
fn work_of_two_ranks_races_although_the_host_happens_to_start_one_after_the_other() {
    for simulation in orders() {
        let error = failure(simulation, |gpu| write_then_read(gpu, |_| Ok(())));
        let Error::Race(race) = &*error else { panic!("{error}") };
        // These are ranks 0 and 1, in either order.
        assert_eq!([race.access.rank, race.other.rank].iter().sum::<usize>(), 1, "{race}");
        let text = race.to_string();
        // The report has the kernel's name of the memory, whichever of the two comes later.
        assert!(text.contains("a race on element 0 of `words` (window "), "{text}");
        assert!(text.contains("a memset of rank 0 stores"), "{text}");
        assert!(text.contains("reads_rank_0 loads (tests/sim/host_order.rs:"), "{text}");
        assert!(text.contains("a barrier of the ranks between them"), "{text}");
    }
}

#[test]
fn barriers_of_the_ranks_and_calls_that_wait_for_all_ranks_order_their_work() {
    for simulation in orders() {
        simulate(simulation, |gpu| {
            write_then_read(gpu, |gpu| gpu.barrier())?;
            write_then_read(gpu, |gpu| {
                let split = gpu.communicator()?.split(Some(0), 0, &CommConfig::new())?;
                drop(split);
                Ok(())
            })?;
            write_then_read(gpu, |gpu| {
                let (sum, stream) = (gpu.buffer(&[1_u32])?, gpu.stream()?);
                let comm = gpu.communicator()?;
                comm.all_reduce(&sum, &sum, devcomm::ReduceOp::Sum, &stream)?;
                stream.synchronize()
            })
        });
    }
}

/// The simulator does not see a wait for a barrier of the standard library. It takes a thread that
/// does not come back for a tenth of a second as one that waits outside the machine, and orders it
/// after what the others have done meanwhile.
#[test]
fn threads_that_wait_for_each_other_outside_the_machine_do_not_race() {
    let outside = Barrier::new(2);
    simulate(Simulation::new(2), |gpu| {
        write_then_read(gpu, |_| {
            outside.wait();
            Ok(())
        })
    });
}

/// Writes to a word by a new stream of this GPU, and waits for it, which fails after a race.
fn write(gpu: usize, word: usize) {
    retain(gpu);
    let mut stream = null_mut();
    assert_eq!(cuda!(cuStreamCreate(&raw mut stream, 1)), OK);
    assert_eq!(cuda!(cuMemsetD32Async(word as u64, 7, 1, stream)), OK);
    assert_eq!(cuda!(cuStreamSynchronize(stream)), OK);
}

#[test]
fn the_start_and_the_end_of_a_thread_order_its_work() {
    let machine = Machine::new(&Simulation::new(3)).unwrap();
    let _attached = machine.ticket("the first thread").attach();
    retain(0);
    let mut word = null_mut();
    assert_eq!(cuda!(cuMemHostAlloc(&raw mut word, 4, 0)), OK);
    let word = word.addr();
    write(0, word);
    std::thread::scope(|scope| {
        let ticket = machine.ticket("a worker");
        scope.spawn(move || {
            let _attached = ticket.attach();
            write(1, word);
        });
    });
    write(2, word);
}
