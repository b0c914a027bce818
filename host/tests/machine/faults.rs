//! Tests of ranks that die, or are absent for a while, at any moment of a job.

use std::time::Duration;

use devcomm_host::{
    CallRecord, CommConfig, DevCommRequirements, Error, Rank, ReduceOp, Result, SimulatedMachine,
    Simulation, ThreadEffect, ThreadFault, World, WorldError, group,
};

use crate::kernels::{NO_PTX, meet};
use crate::support::{contents, filled, sleep};

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(1);
/// How long a rank is absent.
const ABSENCE: Duration = Duration::from_secs(4);
/// The latest end of a job, on the simulated machine's clock: a rank that is lost is noticed by the
/// deadline, running calls have 2 s, aborts and destructors at most 5 s and 10 s.
const LATEST: Duration = Duration::from_secs(25);

/// Makes one of every kind of operation that waits for other ranks.
fn job(rank: &Rank) -> Result<()> {
    rank.load(&NO_PTX)?;
    let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
    let window = comm.window::<f32>(64)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
    let (sum, ones) = (comm.mem_alloc::<f32>(4)?, filled(comm, &[1.0_f32; 4])?);
    for _ in 0..2 {
        // SAFETY: the kernel accesses no memory but barriers.
        unsafe { meet::args(&dev, 0).grid(1).block(32).launch(&stream) }?;
        comm.all_reduce(&ones, &sum, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&sum), [RANKS as f32; 4]);
    }
    group(|_| {
        comm.send(&ones, (me + 1) % RANKS, &stream)?;
        comm.recv(&sum, (me + RANKS - 1) % RANKS, &stream)
    })?;
    let graph = stream.capture(|| comm.all_reduce(&window, &window, ReduceOp::Sum, &stream))?;
    graph.launch(&stream)?;
    let child = comm.split(Some((me > 0).into()), 0, &CommConfig::new())?;
    child.map_or(Ok(()), |child| child.barrier().and_then(|()| child.destroy()))?;
    assert_eq!(rank.all_gather(&[me])?.concat(), [0, 1, 2]);
    drop((window, dev));
    let other = rank.new_communicator(&CommConfig::new().blocking(false))?;
    other.wait(2 * ABSENCE)?;
    rank.barrier()?;
    other.finalize()
}

fn world(seed: u64) -> World {
    let simulation = Simulation::new(RANKS).seed(seed);
    let builder = World::builder().checked(true).deadline(Some(DEADLINE)).simulate(simulation);
    let world = builder.threads(RANKS).unwrap();
    world.simulated_machine().unwrap().record_calls();
    world
}

/// Checks that every communicator has ended. After a loss, memory and contexts in use are left.
#[track_caller]
fn nothing_is_left(machine: &SimulatedMachine, dead: Option<usize>, what: &str) {
    // After a loss, communicators are aborted in the background.
    let attached = machine.ticket("the test").attach();
    sleep(machine, LATEST);
    drop(attached);
    let calls = machine.calls();
    let log = || {
        let line = |call: &CallRecord| format!("{:?} {call}: {:?}", call.gpu, call.code);
        calls.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    for gpu in 0..RANKS {
        let count = |functions: [&str; 2]| {
            // Calls that succeeded or are in progress (7); a split without a color makes nothing.
            let is_one = |call: &&CallRecord| {
                functions.contains(&call.function)
                    && call.gpu == Some(gpu)
                    && matches!(call.code, Some(0 | 7))
                    && !call.detail.starts_with("color -1")
            };
            calls.iter().filter(is_one).count()
        };
        let made = count(["ncclCommInitRankScalable", "ncclCommSplit"]);
        let ended = count(["ncclCommDestroy", "ncclCommAbort"]);
        // The call at which a rank dies may be the one that ends its communicator.
        let lost = usize::from(dead == Some(gpu) && made > ended);
        assert_eq!(made, ended + lost, "{what}, GPU {gpu}:\n{}", log());
    }
}

/// Runs the job many times, with a rank that suffers `effect` at a random moment.
fn run_often(effect: ThreadEffect, check: impl Fn(usize, Result<()>)) {
    let times = std::env::var("DEVCOMM_SIM_FAULTS");
    let times = times.map_or(50, |times| times.parse().unwrap());
    let healthy = world(0);
    healthy.run(job).unwrap();
    let entries: Vec<usize> = (0..RANKS)
        .map(|rank| healthy.simulated_machine().unwrap().entries(&format!("rank {rank}")))
        .collect();
    // Each rank enters the machine often enough for many different moments.
    assert!(entries.iter().all(|count| *count > 50), "{entries:?}");
    let (mut random, mut hits) = (fastrand::Rng::with_seed(7), 0);
    for round in 0..times {
        let victim = random.usize(..RANKS);
        let nth = random.usize(..entries[victim]);
        let world = world(random.u64(..));
        let machine = world.simulated_machine().unwrap();
        let thread = format!("rank {victim}");
        machine.inject_into_thread(ThreadFault { thread: thread.clone(), nth, effect });
        let what = format!("round {round}: rank {victim} at entry {nth}");
        let ended = world.run(job).map(drop);
        // The call by which a rank joins a communicator cannot be aborted: a simulated rank stays
        // in it until the machine reports that it never ends.
        let report = machine.failure().map(|failure| failure.to_string()).unwrap_or_default();
        let joins = report.lines().filter(|line| line.contains(" is in ")).all(|line| {
            ["ncclCommInitRankScalable", "a wait"].iter().any(|call| line.contains(call))
        });
        assert!(report.is_empty() || joins, "{what}: {report}");
        assert!(machine.now() < LATEST, "{what}: {:?}, {ended:?}", machine.now());
        let dead = (effect == ThreadEffect::Die).then_some(victim);
        nothing_is_left(machine, dead, &what);
        // In another order of the threads, a rank may make fewer calls.
        let is_hit = machine.entries(&thread) > nth;
        if is_hit {
            check(victim, ended);
        } else {
            ended.unwrap();
        }
        hits += usize::from(is_hit);
    }
    assert!(hits > times / 2, "{hits} of {times} faults took effect");
    println!("{effect:?}: {hits} of {times} faults took effect");
}

#[test]
fn a_rank_that_dies_at_any_moment_ends_the_job_and_is_named() {
    run_often(ThreadEffect::Die, |victim, ended| match ended {
        Err(Error::World(WorldError::RankPanicked { rank, message })) => {
            assert_eq!((rank, &*message), (victim, "an injected fault"));
        }
        other => panic!("rank {victim} died: {other:?}"),
    });
}

#[test]
fn a_rank_that_is_absent_at_any_moment_is_waited_for_or_ends_the_job_and_is_named() {
    run_often(ThreadEffect::Sleep(ABSENCE), |victim, ended| match ended {
        Ok(()) => {}
        Err(Error::World(WorldError::RankLost { rank, .. })) if rank == victim => {}
        // Another rank waits for it in another call, and both have not come to this exchange.
        Err(Error::World(WorldError::RankLost { why, .. })) => {
            let (_, absent) = why.split_once("ranks ").expect("several ranks");
            assert!(
                absent.contains(&victim.to_string()) && why.ends_with("have not come"),
                "{why}"
            );
        }
        other => panic!("rank {victim} was absent: {other:?}"),
    });
}
