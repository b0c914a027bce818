//! Flags: a rank stores a message to the other and posts a flag; the other one reads the message
//! and posts that its place is free. Two messages go through the same place.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use devcomm::sim::Change;
use devcomm::{DevCommRequirements, Result, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::{Coop, DevComm, Flag, Window};

use crate::{check_report, explore};

/// Rank 0 sends 1 and 2 to rank 1.
#[kernel]
unsafe fn send_two(comm: DevComm, flags: Window<u32>, place: Window<u32>) {
    let (rank, coop) = (comm.lsa_team().rank, Coop::cta());
    // SAFETY: the windows have a word.
    let flag = unsafe { Flag::new(&comm, flags, 0) };
    for message in 1..=2 {
        if rank == 0 {
            // SAFETY: the window has one element.
            unsafe { place.lsa(1).store(0, message) };
            flag.post(coop, 1, message);
            flag.wait_at_least(coop, message); // free
        } else {
            flag.wait_at_least(coop, message); // full
            // SAFETY: the window has one element.
            let received = unsafe { place.local().load(0) };
            flag.post(coop, 0, message); // free
            assert_eq!(received, message);
        }
    }
}

fn sends_two(gpu: &Gpu<'_>) -> Result<()> {
    let (flags, place) = (gpu.window(&[0])?, gpu.window(&[0])?);
    let comm = gpu.dev_comm(DevCommRequirements::new())?;
    gpu.launch(send_two::args(&comm, &flags, &place).grid(1).block(1))
}

#[test]
fn messages_through_one_place_arrive_and_every_part_of_the_protocol_is_needed() {
    let two = Simulation::new(2).preemptions(1);
    explore(two.clone(), sends_two);
    // Here loads see old values.
    explore(two.clone().preemptions(0).weak(true), sends_two);
    let narrow = Change::Narrow(Scope::Gpu);
    // Each row weakens one line; the simulator must report it at a line with the given text.
    for (line, change, reported_at) in [
        ("flag.post(coop, 1, message)", Change::Relax, "place.local()"),
        ("flag.post(coop, 1, message)", narrow, "flag.post(coop, 1, message)"),
        ("flag.wait_at_least(coop, message); // full", Change::Relax, "place.local()"),
        ("flag.wait_at_least(coop, message); // full", Change::NoWait, "place.local()"),
        ("flag.wait_at_least(coop, message); // full", narrow, "message); // full"),
        ("flag.post(coop, 0, message)", Change::Relax, "place.lsa(1)"),
        ("flag.wait_at_least(coop, message); // free", Change::Relax, "place.lsa(1)"),
        ("flag.wait_at_least(coop, message); // free", Change::NoWait, "place.lsa(1)"),
    ] {
        let reported_at = [reported_at, "assert_eq!(received"];
        check_report(&two, (line, change), &reported_at, sends_two);
    }
}
