//! LL messages, whose lines carry their epoch. Three epochs use a bank of lines twice.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use devcomm::sim::Change;
use devcomm::{DevCommRequirements, LlA2a, Result, Simulation};
use devcomm_testing::simulated::Gpu;
use devcomm_types::nccl::LlA2aHandle;
use nccl_device::{Coop, DevComm, LlA2aBuffer};

use crate::{check_report, explore};

/// The ranks send each other the number of the epoch.
#[kernel]
unsafe fn swap(comm: DevComm, exchange: LlA2aHandle, epochs: u32) {
    let team = comm.lsa_team();
    // SAFETY: the host made the exchange for one block and an element for each rank.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, 1) };
    buffer.with(Coop::cta(), 0, team.n_ranks as u32, |session| {
        for epoch in 1..=epochs {
            session.send(team.next(), team.rank as u32, epoch);
            let received: u32 = session.receive(team.next() as u32);
            assert_eq!(received, epoch);
            session.end_epoch();
        }
    });
}

fn swaps(gpu: &Gpu<'_>, epochs: u32) -> Result<()> {
    let mut requirements = DevCommRequirements::new();
    let exchange = requirements.add(LlA2a { blocks: 1, max_elements: 2, element_size: 4 });
    let comm = gpu.dev_comm(requirements)?;
    gpu.launch(swap::args(&comm, comm.resource(exchange)?, epochs).grid(1).block(1))
}

#[test]
fn lines_arrive_whole_in_every_epoch_and_only_after_a_wait() {
    let two = Simulation::new(2).preemptions(0);
    explore(two.clone(), |gpu| swaps(gpu, 3));
    // Here loads see old values and halves of lines.
    explore(two.clone().weak(true), |gpu| swaps(gpu, 1));
    let (send, receive) = ("session.send(", "session.receive(");
    check_report(&two, (send, Change::Narrow(Scope::Gpu)), &[send], |gpu| swaps(gpu, 1));
    check_report(&two, (receive, Change::NoWait), &["assert_eq!(received"], |gpu| swaps(gpu, 1));
}
