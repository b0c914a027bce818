//! Lamport messages, which need no separate flags. Three launches use a bank of slots twice.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use devcomm::sim::Change;
use devcomm::{Result, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::{Coop, DevComm, EMPTY, Lamport, LamportMemory, LamportSlots, Window};

use crate::{check_report, explore};

/// The ranks send each other a vector of the launch's number.
#[kernel]
unsafe fn swap_by_lamport(comm: DevComm, slots: Window<u32>, state: *mut u32, launch: u32) {
    // SAFETY: the window and the state are for one slot.
    let received = unsafe {
        let memory = LamportMemory { slots, state, capacity: 1, alone: false };
        let session = LamportSlots::<2>::new(&comm, &memory).begin(1);
        let mine = Vec16::from_bits([launch; 4]);
        session.send(1, 0, mine);
        session.end(Coop::cta());
        let [_, theirs] = session.receive_all::<f32>(0, mine);
        theirs.to_bits()
    };
    assert_eq!(received, [launch; 4]);
}

fn swaps(gpu: &Gpu<'_>, launches: u32) -> Result<()> {
    let slots = gpu.window(&[EMPTY; LamportSlots::<2>::words(1)])?;
    let (state, comm) = (gpu.buffer(&[0; Lamport::<2>::STATE])?, gpu.dev_comm(Default::default())?);
    let stream = gpu.stream()?;
    for launch in 1..=launches {
        let args = swap_by_lamport::args(&comm, &slots, &state, launch);
        // SAFETY: both ranks launch the same.
        unsafe { args.grid(1).block(1).launch(&stream)? };
    }
    stream.synchronize()
}

#[test]
fn messages_arrive_whole_in_every_launch_and_only_after_a_wait() {
    let two = Simulation::new(2).preemptions(0);
    explore(two.clone(), |gpu| swaps(gpu, 3));
    // Here loads see old values and halves of vectors.
    explore(two.clone().weak(true), |gpu| swaps(gpu, 1));
    let (send, receive) = ("session.send(", "session.receive_all::<");
    check_report(&two, (send, Change::Narrow(Scope::Gpu)), &[send], |gpu| swaps(gpu, 1));
    check_report(&two, (receive, Change::NoWait), &["assert_eq!(received"], |gpu| swaps(gpu, 1));
}
