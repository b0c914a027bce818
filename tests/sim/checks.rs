//! Tests of the reports and notes of `Check`.

use cuda_std::prelude::*;
use devcomm::sim::{self, Error};
use devcomm::{Check, DevCommRequirements, Rank, Result, Simulation, WITHOUT_PTX, kernels};
use devcomm_testing::simulated::{run, world};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

/// Each rank stores to the next rank's `words`, and loads its own, after a barrier if `meets`.
#[kernel]
unsafe fn pass_once(comm: DevComm, words: Window<u32>, meets: bool) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // SAFETY: the window has an element.
    unsafe {
        words.lsa(team.next()).store(0, 1);
        if meets {
            barrier.sync(MemoryOrder::AcqRel);
        }
        words.local().load(0);
    }
}

/// Uses its own memory only.
#[kernel]
unsafe fn stays_at_home(words: Window<u32>) {
    // SAFETY: the window has an element.
    unsafe { words.local().store(0, 1) };
}

fn launch(rank: &Rank, meets: bool) -> Result<()> {
    rank.load(&WITHOUT_PTX)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let words = comm.window::<u32>(1)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    // SAFETY: the window has an element; the race without the barrier is what the test is for.
    unsafe { pass_once::args(&dev, &words, meets).grid(1).block(1).launch(&stream)? };
    stream.synchronize()
}

#[test]
fn reports_are_those_of_all_schedules_that_fail() {
    let check = Check::new(Simulation::new(2)).in_order().random(3);
    let right = check.reports(|rank| launch(rank, true)).unwrap();
    assert!(right.is_empty(), "{right:?}");

    let reports = check.reports(|rank| launch(rank, false)).unwrap();
    let schedules: Vec<_> = reports.iter().map(|report| report.schedule.to_string()).collect();
    assert_eq!(schedules, ["2", "2,preempt=1", "2,seed=0", "2,seed=1", "2,seed=2"]);
    for report in reports {
        assert!(matches!(report.error.as_deref(), Some(Error::Race(_))), "{report}");
        let replay = format!("devcomm::replay(\"{}\", |rank| ..)", report.schedule);
        assert!(report.to_string().ends_with(&replay), "{report}");
    }
    let exhaustive = Check::new(Simulation::new(2)).exhaustive(100);
    assert_eq!(exhaustive.reports(|rank| launch(rank, false)).unwrap().len(), 1);
    let refused = Check::new(Simulation::new(0)).reports(|rank| launch(rank, true)).unwrap_err();
    assert!(refused.to_string().contains("0 GPUs"), "{refused}");
}

#[test]
fn a_check_of_a_weak_machine_runs_the_fixed_orders_too() {
    let check = Check::new(Simulation::new(2).weak(true)).in_order().random(2);
    assert_eq!(check.run(|rank| launch(rank, true)), 4);
}

#[test]
fn a_check_says_what_it_cannot_show() {
    const IN_CHILD: &str = "DEVCOMM_TEST_NOTES";
    const NAME: &str = "checks::a_check_says_what_it_cannot_show";
    if std::env::var_os(IN_CHILD).is_some() {
        Check::new(Simulation::new(2).weak(true)).in_order().run(|rank| launch(rank, true));
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", NAME]).env(IN_CHILD, "1").output().unwrap();
    let notes = String::from_utf8(child.stderr).unwrap();
    assert!(child.status.success(), "{notes}");
    for note in [
        "note: pass_once uses peers' memory and was launched once: if it needs a barrier at its",
        "note: all schedules ran without weak loads, which need a seed: give one, or add a series",
    ] {
        assert!(notes.contains(note), "{notes}");
    }
}

#[test]
fn kernels_that_use_peers_and_are_launched_once_are_listed() {
    let launched_once = |launches: u32| {
        let world = world(Simulation::new(2));
        run(&world, |gpu| {
            let words = gpu.window(&[0_u32])?;
            let dev = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            gpu.launch(stays_at_home::args(&words).grid(1).block(1))?;
            let (from, to) = (gpu.window(&[1_f32])?, gpu.window(&[0_f32])?);
            let of_devcomm = kernels::lsa_allreduce::<f32>::args(&dev, &from, &to, 1);
            gpu.launch(of_devcomm.grid(1).block(32))?;
            for _ in 0..launches {
                gpu.launch(pass_once::args(&dev, &words, true).grid(1).block(1))?;
            }
            Ok(())
        })
        .unwrap();
        world.simulated_machine().map(sim::Machine::activity).unwrap().launched_once
    };
    assert_eq!(launched_once(1), ["pass_once"]);
    assert!(launched_once(2).is_empty());
}
