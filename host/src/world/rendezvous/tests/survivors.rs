//! Tests of ranks that go on after a loss in a world of their own.

use std::collections::BTreeMap;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use super::super::acceptor::wait_for_survivors;
use super::super::connect::join_survivors;
use super::super::listen::listen_at;
use super::super::survivors::Members;
use super::super::token::Token;
use super::super::wire::{Kind, parse};
use super::processes::{as_rank, job, print_to, printed_by, require_nothing_left, shared_memory};
use super::tokens::{DENIED, prove, with_token};
use super::*;
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::local_job::Ranks;
use crate::world::run::run_threads;

/// Exchanges until a rank is lost; returns its number.
fn wait_for_loss(world: &Rendezvous) -> usize {
    loop {
        match world.barrier() {
            Ok(()) => {}
            Err(Error::World(WorldError::RankLost { rank, .. })) => return rank,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns the numbers that the ranks of a world had in the first one; `own` is this rank's.
fn originals(world: &Rendezvous, own: usize) -> Vec<u8> {
    world.all_gather(&[own as u8]).unwrap().concat()
}

/// Runs one of 4 ranks, of which rank 2 fails, and then rank 0. Returns its number in the last
/// world.
fn fails_one_after_the_other(world: &Rendezvous) -> Result<usize> {
    let own = world.rank();
    assert!(world.survivors().err().unwrap().to_string().contains("no rank is lost"));
    world.barrier()?;
    let failure = Err(Error::invalid("it fails"));
    if own == 2 {
        world.fail("it fails");
        return failure;
    }
    assert_eq!(wait_for_loss(world), 2);
    let three = world.survivors()?;
    assert_eq!((three.rank(), three.n_ranks()), ([0, 1, 9, 2][own], 3));
    assert_eq!(originals(&three, own), [0, 1, 3]);
    assert!(world.survivors().err().unwrap().to_string().contains("a world already"));
    if own == 0 {
        // A rank's function would do the same, which knows the first world only.
        world.fail("it fails, too");
        return failure;
    }
    assert_eq!(wait_for_loss(&three), 0);
    let two = three.survivors()?;
    assert_eq!((two.rank(), two.n_ranks()), ([9, 0, 9, 1][own], 2));
    assert_eq!(originals(&two, own), [1, 3]);
    world.finish()?;
    Ok(two.rank())
}

#[test]
fn threads_go_on_after_a_loss() {
    let mut machines = vec![Machine::Gpus];
    #[cfg(feature = "simulator")]
    machines.push(Machine::simulate(&devcomm_sim::Simulation::new(4), None).unwrap());
    for machine in machines {
        let ended = std::sync::Mutex::new(Vec::new());
        let failed = run_threads(&machine, 4, None, |world| {
            let result = fails_one_after_the_other(world);
            ended.lock().unwrap().push((world.rank(), result.as_ref().ok().copied()));
            result
        });
        assert!(failed.unwrap_err().to_string().contains("it fails"));
        let mut ended = ended.into_inner().unwrap();
        ended.sort_unstable();
        assert_eq!(ended, [(0, None), (1, Some(0)), (2, None), (3, Some(1))]);
    }
}

#[test]
fn two_threads_of_a_rank_do_not_both_go_on_after_a_loss() {
    let twice = |world: &Rendezvous| {
        if world.rank() == 2 {
            return world.fail("it fails");
        }
        while world.health().check().is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
        let worlds = thread::scope(|scope| {
            let join = || scope.spawn(|| world.survivors());
            [join(), join()].map(|thread| thread.join().unwrap())
        });
        let why: Vec<String> =
            worlds.iter().filter_map(|world| Some(world.as_ref().err()?.to_string())).collect();
        assert!(why.len() == 1 && why[0].contains("a world already"), "{why:?}");
        let two = worlds.into_iter().find_map(Result::ok).unwrap();
        assert_eq!(originals(&two, world.rank()), [0, 1]);
    };
    together(&configs(3, AMPLE), |_, world| twice(&world.unwrap()));
    let done = run_threads(&Machine::Gpus, 3, None, |world| -> Result<()> {
        twice(world);
        Ok(())
    });
    done.unwrap();
}

#[test]
fn ranks_that_come_too_late_are_excluded_and_too_few_do_not_go_on() {
    let mut configs = configs(5, Duration::from_secs(2));
    configs.iter_mut().for_each(|config| config.deadline = Some(AMPLE));
    let left_behind = std::sync::Barrier::new(2);
    together(&configs, |config, world| {
        let world = world.unwrap();
        if config.rank == 4 {
            // This is as if the rank's process had ended.
            return drop(world);
        }
        assert_eq!(wait_for_loss(&world), 4);
        if config.rank == 3 {
            thread::sleep(Duration::from_secs(3));
            // The remaining ranks listen, but not for this one.
            let error = world.survivors().err().unwrap().to_string();
            left_behind.wait();
            assert!(error.ends_with("only 1 of 5 ranks are left, fewer than half"), "{error}");
            return;
        }
        let three = world.survivors().unwrap();
        assert_eq!(originals(&three, config.rank), [0, 1, 2]);
        if config.rank > 0 {
            return drop((three, world));
        }
        wait_for_loss(&three);
        let error = three.survivors().err().unwrap().to_string();
        left_behind.wait();
        assert!(error.ends_with("only 1 of 3 ranks are left, fewer than half"), "{error}");
    });
}

#[test]
fn the_remaining_ranks_go_on_without_a_first_one_that_is_silent() {
    let mut configs = configs(5, Duration::from_secs(4));
    configs.iter_mut().for_each(|config| config.deadline = Some(AMPLE));
    let gone_on = std::sync::Barrier::new(4);
    together(&configs, |config, world| {
        let world = world.unwrap();
        if config.rank == 0 {
            // This is as if the rank's process had ended.
            return drop(world);
        }
        assert_eq!(wait_for_loss(&world), 0);
        if config.rank == 1 {
            // It does something else until the others have gone on.
            gone_on.wait();
            let error = world.survivors().err().unwrap().to_string();
            assert!(error.ends_with("only 1 of 5 ranks are left, fewer than half"), "{error}");
            return;
        }
        let three = world.survivors();
        gone_on.wait();
        assert_eq!(originals(&three.unwrap(), config.rank), [2, 3, 4]);
    });
}

#[test]
fn of_two_halves_that_lose_each_other_only_that_with_rank_0_goes_on() {
    let mut configs = configs(2, Duration::from_secs(1));
    configs.iter_mut().for_each(|config| config.deadline = Some(AMPLE));
    let tried = std::sync::Barrier::new(2);
    together(&configs, |config, world| {
        let world = world.unwrap();
        // This is as if the network between them had failed.
        world.health().mark_lost(1 - config.rank, "the network failed");
        let half = world.survivors();
        tried.wait();
        if config.rank == 0 {
            assert_eq!(originals(&half.unwrap(), 0), [0]);
        } else {
            let error = half.err().unwrap().to_string();
            let why = "only 1 of 2 ranks are left, half, without rank 0, whose process has not \
                ended";
            assert!(error.ends_with(why), "{error}");
        }
    });
}

#[test]
fn strangers_are_refused_where_the_remaining_ranks_meet() {
    let configs = with_token(3, AMPLE);
    let refused = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        let left = [0, 1].map(|rank| {
            let (config, refused) = (&configs[rank], &refused);
            scope.spawn(move || {
                let world = config.join().unwrap();
                assert_eq!(wait_for_loss(&world), 2);
                if rank == 1 {
                    refused.wait();
                }
                assert_eq!(originals(&world.survivors().unwrap(), rank), [0, 1]);
            })
        });
        // Rank 2 learns where the others listen, and ends.
        let connection = prove(&configs[2]).0;
        let receive = || connection.receive(4096, Instant::now() + AMPLE).unwrap();
        let (_, list) =
            std::iter::repeat_with(receive).find(|(kind, _)| *kind == Kind::Welcome).unwrap();
        let port = parse::<Vec<Member>>(&list).unwrap()[0].address.1;
        drop(connection);

        let job = format!("{}/survivors", configs[0].job);
        let rank_1 = RendezvousConfig { port, job, timeout: DENIED, ..configs[1].clone() };
        let without = RendezvousConfig { token: None, ..rank_1.clone() };
        let other = Token::new("A secret of ranks").unwrap();
        let with_other = RendezvousConfig { token: Some(other), ..rank_1.clone() };
        let rank_2 = RendezvousConfig { rank: 2, ..rank_1.clone() };
        let of_world = RendezvousConfig { job: configs[0].job.clone(), ..rank_1 };
        for (stranger, why) in [
            (without, "have the job's token"),
            (with_other, "have the job's token"),
            (rank_2, "rank 2 counts as lost"),
            (of_world, "it belongs to another job"),
        ] {
            let error = stranger.join().err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        }
        refused.wait();
        left.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// Returns an address that answers no more, since its queue is full, as long as the sockets live.
fn silent(port: u16) -> (SocketAddr, Vec<Socket>) {
    let listening = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listening.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
    listening.listen(0).unwrap();
    let address = listening.local_addr().unwrap();
    let fill = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        // An error says that it is in progress.
        let _ = socket.connect(&address);
        socket
    };
    let queue = std::iter::repeat_with(fill).take(8);
    (address.as_socket().unwrap(), queue.chain([listening]).collect())
}

#[test]
fn a_host_that_does_not_answer_is_passed_over_before_the_time_of_one_that_does() {
    let config = configs(2, AMPLE).remove(1);
    let _sockets = silent(config.port);
    let start = Instant::now();
    assert!(join_survivors(&config, AMPLE).unwrap().is_none());
    assert!(start.elapsed() < AMPLE / 2, "{:?}", start.elapsed());
}

#[test]
fn ranks_that_have_joined_are_told_to_wait_while_hundreds_of_others_do_not_answer() {
    const MISSING: usize = 300;
    let config = configs(3 + MISSING, Duration::from_secs(4)).remove(0);
    let own = listen_at(&config.host, config.port).unwrap();
    let (address, _sockets) = silent(0);
    let member = |rank| Member {
        rank,
        peer: config.peer.clone(),
        address: (address.ip().to_string(), address.port()),
    };
    let list = (0..config.n_ranks).map(member).collect();
    let members = Members::new(&config, list, own).unwrap();
    thread::scope(|scope| {
        // Rank 2 is the lost one, rank 1 joins.
        let waiting = scope.spawn(|| wait_for_survivors(&config, &members, 2).err().unwrap());
        let mut rank_1 = connect(&config);
        let ends = Ends::of_rank(&rank_1).unwrap();
        let hello = Hello { ends, ..hello(1, config.n_ranks) };
        send_json(&mut rank_1, Kind::Hello, &hello).unwrap();
        // 15 seconds of silence end a rank's wait.
        rank_1.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut told = 0;
        let why = loop {
            match receive(&mut rank_1, 4096).unwrap() {
                (Kind::Waiting, _) => told += 1,
                (Kind::Refused, why) => break String::from_utf8(why).unwrap(),
                (other, _) => panic!("{other:?}"),
            }
        };
        assert!(told >= 3, "{told}");
        assert_eq!(why, "only 2 of 303 ranks are left, fewer than half");
        assert!(waiting.join().unwrap().to_string().ends_with(&why));
    });
}

const SOCKET: &str = "DEVCOMM_TEST_SOCKET";

/// Goes on as a rank after each loss, and reports it. Exits with code 0 when it is the last rank,
/// and with code 7 when the others have gone on without it.
fn go_on(config: &RendezvousConfig) -> ! {
    let (own, supervisor) = (config.rank as u8, UnixDatagram::unbound().unwrap());
    let socket = std::env::var_os(SOCKET).unwrap();
    print_to(&printed_by(config.rank, &socket));
    let mut worlds = vec![config.join().unwrap()];
    loop {
        let world = worlds.last().unwrap();
        // Another rank may be lost already.
        if let Ok(originals) = world.all_gather(&[own]) {
            assert!(originals.concat().is_sorted());
            let report = [own, world.rank() as u8, world.n_ranks() as u8];
            supervisor.send_to(&report, &socket).unwrap();
            if world.n_ranks() == 1 {
                worlds[0].finish().unwrap();
                std::process::exit(0);
            }
        }
        wait_for_loss(world);
        match world.survivors() {
            Ok(next) => worlds.push(next),
            Err(Error::World(WorldError::RankLost { rank, .. })) if rank == world.rank() => {
                std::process::exit(7);
            }
            Err(error) => panic!("rank {own}: {error}"),
        }
    }
}

/// Returns what the ranks of a job have printed.
fn printed(n: usize, path: &Path) -> String {
    let read = |rank| std::fs::read_to_string(printed_by(rank, path)).unwrap_or_default();
    (0..n).map(|rank| format!("\n--- rank {rank}\n{}", read(rank))).collect()
}

/// Ends processes of a job, one after the other or two at once, until one is left.
fn end_all_but_one(test: &str, seed: u64, folder: &Path) {
    let mut random = fastrand::Rng::with_seed(seed);
    let n = 2 + random.usize(..5);
    let path = folder.join(seed.to_string());
    let reports = UnixDatagram::bind(&path).unwrap();
    reports.set_read_timeout(Some(AMPLE)).unwrap();
    let job = job(test, n).env(SOCKET, &path).env("DEVCOMM_OPERATION_TIMEOUT", "1");
    let mut ranks = Ranks::start(&job).unwrap();
    let mut alive: Vec<u8> = (0..n as u8).collect();
    let mut stopped = Vec::new();
    loop {
        // Waits until all remaining ranks are in one world.
        let mut known = BTreeMap::new();
        let expected: BTreeMap<u8, [u8; 2]> =
            (0..).zip(&alive).map(|(rank, own)| (*own, [rank, alive.len() as u8])).collect();
        while known != expected {
            let mut report = [0; 3];
            let read = reports.recv(&mut report);
            assert!(read.is_ok(), "seed {seed}: {alive:?} of {n}: {known:?}{}", printed(n, &path));
            known.insert(report[0], [report[1], report[2]]);
            known.retain(|own, _| alive.contains(own));
        }
        if alive.len() == 1 {
            break;
        }
        thread::sleep(Duration::from_micros(random.u64(..12_000)));
        let at_once = if alive.len() > 3 && random.bool() { 2 } else { 1 };
        for _ in 0..at_once {
            let victim = alive.remove(random.usize(..alive.len()));
            let mut process = ranks.running[victim as usize].take().unwrap();
            // The second of two ranks goes on alone only if the first one's process has ended.
            let may_stop = at_once == 1 && (alive.len() > 1 || alive[0] < victim);
            if may_stop && random.u8(..4) == 0 {
                // SAFETY: a child that was not waited for, so that its number is its own.
                assert_eq!(unsafe { libc::kill(process.id() as i32, libc::SIGSTOP) }, 0);
                stopped.push(process);
            } else {
                process.kill().unwrap();
                process.wait().unwrap();
            }
        }
    }
    let mut last = ranks.running[alive[0] as usize].take().unwrap();
    assert!(last.wait().unwrap().success(), "seed {seed}: {}", printed(n, &path));
    // When they are continued, they find that they are lost, or that all others have ended.
    for mut process in stopped {
        // SAFETY: the process is a child that was not waited for.
        assert_eq!(unsafe { libc::kill(process.id() as i32, libc::SIGCONT) }, 0);
        let code = process.wait().unwrap().code();
        assert_eq!(code, Some(7), "seed {seed}: stopped, of {n}: {}", printed(n, &path));
    }
}

#[test]
fn when_processes_are_killed_or_stopped_the_remaining_ranks_go_on() {
    const TEST: &str = "world::rendezvous::tests::survivors::\
        when_processes_are_killed_or_stopped_the_remaining_ranks_go_on";
    if let Some(config) = as_rank(TEST) {
        go_on(&config);
    }
    let (folder, shared_before) = (tempfile::tempdir().unwrap(), shared_memory());
    let next = std::sync::atomic::AtomicUsize::new(0);
    let jobs = number_of("DEVCOMM_SHRINKS", 16);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= jobs {
                        return;
                    }
                    end_all_but_one(TEST, seed as u64, folder.path());
                }
            });
        }
    });
    require_nothing_left(folder.path(), &shared_before);
}
