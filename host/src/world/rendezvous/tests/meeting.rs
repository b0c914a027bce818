//! Tests of joining, with ranks that are late, missing, or disconnect again.

use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use super::super::config::RendezvousConfig;
use super::super::wire::Kind;
use super::*;
use crate::error::{Error, NcclError, WorldError};

#[test]
fn a_late_rank_is_waited_for() {
    let configs = configs(3, AMPLE);
    let late = |config: &RendezvousConfig| {
        // A late rank 0 is the harder case: the others find a closed port.
        thread::sleep(Duration::from_millis(if config.rank == 0 { 400 } else { 0 }));
        config.join()?.barrier()
    };
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = configs.iter().map(|m| scope.spawn(move || late(m))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_rank_that_never_arrives_is_named_to_everyone_after_the_deadline() {
    let mut configs = configs(4, Duration::from_millis(1500));
    configs.remove(2);
    let start = Instant::now();
    for error in together(&configs, |_, rendezvous| rendezvous.err().unwrap()) {
        let Error::World(WorldError::RanksMissing { missing, .. }) = &error else {
            panic!("{error}")
        };
        assert_eq!(*missing, [2]);
        assert!(error.to_string().starts_with("rank 2 did not arrive at 127.0.0.1:"), "{error}");
    }
    assert!(start.elapsed() < AMPLE / 4);
}

#[test]
fn without_rank_0_the_others_name_it_and_why() {
    let mut configs = configs(2, Duration::from_millis(300));
    configs.remove(0);
    let error = together(&configs, |_, rendezvous| rendezvous.err().unwrap()).remove(0);
    let Error::World(WorldError::RanksMissing { missing, notes, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(*missing, [0]);
    assert!(notes[0].to_lowercase().contains("refused"), "{notes:?}");
}

#[test]
fn rank_0s_verdict_is_everyones_however_long_ago_they_started() {
    let mut configs = configs(4, Duration::from_secs(2));
    configs.remove(3);
    configs[0].timeout = Duration::from_secs(9);
    let start_after = [1, 0, 8].map(Duration::from_secs);
    let errors: Vec<Error> = thread::scope(|scope| {
        let run = |(config, after): (&RendezvousConfig, Duration)| {
            thread::sleep(after);
            config.join().err().unwrap()
        };
        let threads: Vec<_> =
            configs.iter().zip(start_after).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        let Error::World(WorldError::RanksMissing { missing, waited, .. }) = &error else {
            panic!("{error}")
        };
        assert_eq!((missing.as_slice(), waited.as_secs()), (&[3][..], 9), "{error}");
    }
}

#[test]
fn a_rank_that_is_let_in_waits_as_long_as_rank_0_does() {
    let mut config = configs(2, Duration::from_millis(200)).remove(1);
    let root = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    config.port = root.local_addr().unwrap().port();
    let (peer, address) = (config.peer.clone(), ("127.0.0.1".to_owned(), 1));
    let member = |rank| Member { rank, peer: peer.clone(), address: address.clone() };
    let members = [0, 1].map(member);
    thread::scope(|scope| {
        let rank = scope.spawn(|| config.join());
        let (mut stream, _) = root.accept().unwrap();
        for _ in 0..4 {
            send(&mut stream, Kind::Waiting, &[]).unwrap();
            thread::sleep(Duration::from_millis(100));
        }
        send_json(&mut stream, Kind::Welcome, &members).unwrap();
        assert_eq!(rank.join().unwrap().unwrap().n_ranks(), 2);
    });
}

#[test]
fn a_rank_that_came_and_went_is_missing_and_the_note_says_so() {
    let configs = configs(3, Duration::from_secs(3));
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join().err().unwrap());
        let mut stream = connect(&configs[0]);
        send_json(&mut stream, Kind::Hello, &hello(1, 3)).unwrap();
        assert_eq!(receive(&mut stream, 4096).unwrap().0, Kind::Waiting);
        drop(stream);
        // Time for rank 0 to notice that the connection is closed.
        thread::sleep(Duration::from_millis(500));
        let error = configs[2].join().err().unwrap();
        for error in [error, root.join().unwrap()] {
            let Error::World(WorldError::RanksMissing { missing, notes, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(*missing, [1]);
            assert_eq!(*notes, ["rank 1 connected and disconnected again"]);
        }
    });
}

/// Returns the configurations of two ranks, with a socket that listens before rank 0 starts.
fn with_socket() -> (Vec<RendezvousConfig>, TcpListener) {
    let mut configs = configs(2, AMPLE);
    let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = socket.local_addr().unwrap().port();
    configs.iter_mut().for_each(|config| config.port = port);
    configs[0].listener = Some(socket.as_raw_fd());
    (configs, socket)
}

#[test]
fn a_rank_whose_connection_broke_may_join_again_and_no_rank_is_welcomed_before() {
    let (configs, _socket) = with_socket();
    // Rank 1 sends its greeting and disconnects before rank 0 starts. Rank 0 reads the greeting,
    // after which all ranks seem to have joined.
    send_json(&mut connect(&configs[0]), Kind::Hello, &hello(1, 2)).unwrap();
    thread::sleep(Duration::from_millis(300));
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        thread::sleep(Duration::from_millis(100));
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_port_that_gets_free_in_time_is_waited_for_and_one_that_does_not_is_an_error() {
    let configs = configs(2, AMPLE);
    let taken = TcpListener::bind(("127.0.0.1", configs[0].port)).unwrap();
    let error = configs[0].join().err().unwrap().to_string();
    assert!(error.contains("cannot listen there") && error.contains("DEVCOMM_PORT"), "{error}");
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        thread::sleep(Duration::from_millis(200));
        drop(taken);
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_may_come_before_rank_0_has_started() {
    let (configs, _socket) = with_socket();
    thread::scope(|scope| {
        let early = scope.spawn(|| configs[1].join()?.barrier());
        thread::sleep(Duration::from_millis(300));
        configs[0].join().unwrap().barrier().unwrap();
        early.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_with_different_nccls_all_learn_both_versions() {
    let mut configs = configs(3, AMPLE);
    configs[2].peer.nccl = 22809;
    for error in together(&configs, |_, rendezvous| rendezvous.err().unwrap()) {
        let text = error.to_string();
        assert!(matches!(error, Error::Nccl(NcclError::VersionsDiffer { .. })), "{text}");
        assert!(text.contains("rank 0 loaded NCCL 2.32.3 but rank 2 loaded NCCL 2.28.9"), "{text}");
    }
}
