//! Tile exchange: in each launch two ranks push a tile to each other, post an epoch, and read the
//! tile that has arrived. No barrier separates the launches: two slots for the tiles take turns.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use devcomm::sim::Change;
use devcomm::{DevCommRequirements, Result, Simulation};
use devcomm_testing::simulated::Gpu;
use nccl_device::{Coop, DevComm, Flag, Window};

use crate::{check_report, explore, report};

/// Sends the peer the number of the epoch through slot `slot`, and checks what the peer has sent.
#[kernel]
unsafe fn exchange_tiles(
    comm: DevComm,
    flags: Window<u32>,
    inbox: Window<u32>,
    epoch: u32,
    slot: usize,
) {
    let (peer, coop) = (comm.lsa_team().next(), Coop::cta());
    // SAFETY: the windows have these elements.
    let flag = unsafe { Flag::new(&comm, flags, 0) };
    // SAFETY: the window has the slot.
    unsafe { inbox.lsa(peer).store(slot, epoch) };
    flag.post(coop, peer, epoch);
    flag.wait_at_least(coop, epoch);
    // SAFETY: the window has the slot.
    let received = unsafe { inbox.local().load(slot) };
    assert_eq!(received, epoch);
}

/// Launches the exchange with each of the epochs and slots.
fn exchanges(launches: &[(u32, usize)]) -> impl Fn(&Gpu<'_>) -> Result<()> + Sync {
    move |gpu| {
        let (flags, inbox) = (gpu.window(&[0])?, gpu.window(&[0; 2])?);
        let (comm, stream) = (gpu.dev_comm(DevCommRequirements::new())?, gpu.stream()?);
        for &(epoch, slot) in launches {
            let launch = exchange_tiles::args(&comm, &flags, &inbox, epoch, slot).grid(1).block(1);
            // SAFETY: both ranks launch the same.
            unsafe { launch.launch(&stream)? };
        }
        stream.synchronize()
    }
}

/// Two slots in turns: a peer that has posted an epoch has read the tile of the epoch before.
const IN_TURNS: [(u32, usize); 3] = [(1, 0), (2, 1), (3, 0)];

#[test]
fn tiles_arrive_and_every_part_of_the_protocol_is_needed() {
    let two = Simulation::new(2).preemptions(0);
    explore(two.clone(), exchanges(&IN_TURNS));
    // Here loads see every old value that they may, in two launches: three have too many orders.
    explore(two.clone().weak(true), exchanges(&IN_TURNS[..2]));
    for (line, change, names) in [
        ("flag.post(", Change::Relax, "inbox.local()"),
        ("flag.post(", Change::Narrow(Scope::Gpu), "flag.post("),
        ("flag.wait_at_least(", Change::Relax, "inbox.local()"),
        ("flag.wait_at_least(", Change::NoWait, "inbox.local()"),
        ("flag.wait_at_least(", Change::Narrow(Scope::Gpu), "flag.wait_at_least("),
    ] {
        check_report(&two, (line, change), &[names, "assert_eq!(received"], exchanges(&IN_TURNS));
    }
}

#[test]
fn a_slot_that_is_used_again_too_early_and_an_epoch_that_stands_still_are_races() {
    let two = Simulation::new(2).preemptions(0);
    for launches in [[(1, 0), (2, 0)], [(1, 0), (1, 1)]] {
        let found = report(two.clone(), exchanges(&launches));
        assert!(found.contains("a race on element") && found.contains("of `inbox`"), "{found}");
    }
}
