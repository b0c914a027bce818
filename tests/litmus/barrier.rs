//! LSA barriers: in each round the ranks store to each other between two barriers.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use devcomm::sim::Change;
use devcomm::{DevCommRequirements, Result, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use crate::{check_report, explore};

/// The ranks pass each other the number of the round.
#[kernel]
unsafe fn exchange(comm: DevComm, place: Window<u32>, rounds: u32) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    for round in 1..=rounds {
        // SAFETY: the window has a word.
        unsafe { place.lsa(comm.lsa_team().next()).store(0, round) };
        barrier.sync(MemoryOrder::AcqRel); // all have stored
        // SAFETY: the window has a word.
        let received = unsafe { place.local().load(0) };
        barrier.sync(MemoryOrder::AcqRel); // all have read
        assert_eq!(received, round);
    }
}

fn exchanges(gpu: &Gpu<'_>) -> Result<()> {
    run_rounds(gpu, 2)
}

fn run_rounds(gpu: &Gpu<'_>, rounds: u32) -> Result<()> {
    let place = gpu.window(&[0])?;
    let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    gpu.launch(exchange::args(&comm, &place, rounds).grid(1).block(1))
}

#[test]
fn barriers_order_what_is_before_them_and_each_of_them_is_needed() {
    let two = Simulation::new(2).preemptions(1);
    explore(two.clone(), exchanges);
    // Here loads see every old value that they may.
    explore(two.clone().preemptions(0).weak(true), |gpu| run_rounds(gpu, 1));
    for line in ["// all have stored", "// all have read"] {
        for change in [Change::Relax, Change::Remove, Change::NoWait] {
            let names = ["place.lsa(", "assert_eq!(received"];
            check_report(&two, (line, change), &names, exchanges);
        }
        check_report(&two, (line, Change::Narrow(Scope::Gpu)), &[line], exchanges);
    }
}
