//! Tests of ranks that are alive but absent: they come too late, or their processes are stopped.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::super::wire::contribution_header;
use super::processes::{as_rank, job, print_to, printed_by, require_nothing_left, shared_memory};
use super::*;
use crate::communicator::peers::{NEVER, Peers, contribution};
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::local_job::Ranks;
use crate::world::run::run_threads;

const DEADLINE: Duration = Duration::from_millis(400);

/// Comes to an exchange of this name, rank 1 too late. Checks that all ranks are told.
fn come(world: &Rendezvous, call: &str) {
    if world.rank() == 1 {
        // It waits until it is lost.
        while world.health().check().is_ok() {
            world.health().machine().sleep(Duration::from_millis(5));
        }
    }
    let error = Peers::all_gather(world, call.into(), &[], NEVER).unwrap_err();
    let Error::World(WorldError::RankLost { rank: 1, why }) = &error else { panic!("{error}") };
    assert_eq!(*why, format!("after 0 s in {call}, ranks 0, 2 waited and rank 1 has not come"));
}

#[test]
fn a_rank_that_comes_too_late_is_named_with_the_waiting_rank_and_call() {
    run_threads(&Machine::Gpus, 3, Some(DEADLINE), |world| {
        come(world, "register_window");
        Ok::<_, Error>(())
    })
    .unwrap();
    let mut configs = configs(3, AMPLE);
    configs.iter_mut().for_each(|config| config.deadline = Some(DEADLINE));
    together(&configs, |_, world| come(&world.unwrap(), "split"));
}

#[test]
#[cfg(feature = "simulator")]
fn simulated_ranks_wait_by_the_simulated_clock() {
    let machine = Machine::simulate(&devcomm_sim::Simulation::new(3), None).unwrap();
    let start = Instant::now();
    run_threads(&machine, 3, Some(Duration::from_secs(3600)), |world| {
        if world.rank() == 1 {
            machine.sleep(Duration::from_secs(7200));
        }
        let error = world.barrier().unwrap_err().to_string();
        assert!(error.contains("after 3600 s in barrier, ranks 0, 2 waited"), "{error}");
        Ok::<_, Error>(())
    })
    .unwrap();
    assert!(start.elapsed() < AMPLE);
}

#[test]
fn a_rank_whose_frame_takes_longer_than_it_may_be_silent_is_not_lost() {
    let mut configs = configs(2, AMPLE);
    configs.iter_mut().for_each(|config| config.deadline = Some(Duration::from_secs(2)));
    let sent = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let world = configs[0].join().unwrap();
            sent.wait();
            world.barrier().unwrap();
        });
        let mut rank_1 = connect(&configs[1]);
        let ends = Ends::of_rank(&rank_1).unwrap();
        send_json(&mut rank_1, Kind::Hello, &Hello { ends, ..hello(1, 2) }).unwrap();
        assert_eq!(next_message(&mut rank_1).0, Kind::Welcome);
        let payload = [contribution_header(0, &[]), contribution("barrier", &[])].concat();
        let head = header(Kind::Contribute, payload.len()).unwrap();
        for byte in head.iter().chain(&payload) {
            rank_1.write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_millis(100));
        }
        sent.wait();
        assert_eq!(next_message(&mut rank_1).0, Kind::Gathered);
    });
}

/// How many processes are stopped, unless DEVCOMM_STOPS says another number.
const STOPS: usize = 16;
const SOCKET: &str = "DEVCOMM_TEST_SOCKET";
/// Exit code of a rank, plus the number of the rank that was lost.
const LOST: i32 = 100;

/// Exchanges until a rank is lost; exits with its number. What it prints goes to a file.
fn exchange_until_lost(config: &RendezvousConfig) -> ! {
    let world = config.join().unwrap();
    world.barrier().unwrap();
    let socket = std::env::var_os(SOCKET).unwrap();
    print_to(&printed_by(config.rank, &socket));
    let supervisor = UnixDatagram::unbound().unwrap();
    supervisor.send_to(&[0], socket).unwrap();
    let error = loop {
        if let Err(error) = world.barrier() {
            break error;
        }
    };
    let Error::World(WorldError::RankLost { rank, .. }) = error else { panic!("{error}") };
    std::process::exit(LOST + rank as i32)
}

fn signal(process: &std::process::Child, signal: i32) {
    // SAFETY: a child that was not waited for, so that its number is its own.
    assert_eq!(unsafe { libc::kill(process.id() as i32, signal) }, 0);
}

/// Stops one process of a job. The others end, and name it.
fn stop_one(test: &str, seed: u64, folder: &Path) {
    let mut random = fastrand::Rng::with_seed(seed);
    let n = 2 + random.usize(..3);
    let victim = random.usize(..n);
    let path = folder.join(seed.to_string());
    let started = UnixDatagram::bind(&path).unwrap();
    started.set_read_timeout(Some(AMPLE)).unwrap();
    let job = job(test, n).env(SOCKET, &path).env("DEVCOMM_OPERATION_TIMEOUT", "1");
    let mut ranks = Ranks::start(&job).unwrap();
    for _ in 0..n {
        started.recv(&mut [0]).unwrap();
    }
    thread::sleep(Duration::from_micros(random.u64(..12_000)));
    let stopped = ranks.running[victim].take().unwrap();
    signal(&stopped, libc::SIGSTOP);
    for (rank, process) in ranks.running.iter_mut().enumerate() {
        let Some(process) = process.take() else { continue };
        let code = wait(process).code();
        let printed = std::fs::read_to_string(printed_by(rank, &path)).unwrap();
        let place = format!("seed {seed}: rank {rank} of {n}: {printed}");
        assert_eq!(code, Some(LOST + victim as i32), "{place}");
        let head = format!("rank {rank} of {n}: the last ");
        assert!(printed.starts_with(&head), "{place}");
        assert!(printed.ends_with(" ranks for barrier: has not returned\n"), "{place}");
    }
    // When the stopped process is continued, it finds that it is lost.
    signal(&stopped, libc::SIGCONT);
    assert!(wait(stopped).code().is_some_and(|code| code >= LOST), "seed {seed}");
}

fn wait(mut process: std::process::Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > AMPLE {
            process.kill().unwrap();
            panic!("a process does not end");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn when_a_process_is_stopped_all_others_end_and_name_it() {
    const TEST: &str =
        "world::rendezvous::tests::absence::when_a_process_is_stopped_all_others_end_and_name_it";
    if let Some(config) = as_rank(TEST) {
        exchange_until_lost(&config);
    }
    let (folder, shared_before) = (tempfile::tempdir().unwrap(), shared_memory());
    let stops = number_of("DEVCOMM_STOPS", STOPS);
    let next = std::sync::atomic::AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= stops {
                        return;
                    }
                    stop_one(TEST, seed as u64, folder.path());
                }
            });
        }
    });
    require_nothing_left(folder.path(), &shared_before);
}
