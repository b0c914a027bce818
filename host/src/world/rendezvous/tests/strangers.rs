//! Tests of connections that are not from a rank of this job, ranks that send invalid frames, and
//! other servers at rank 0's address.

use std::io::Write;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use super::super::wire::{Hello, Kind, contribution_header};
use super::*;
use crate::communicator::peers::contribution;
use crate::error::{Error, WorldError};

#[test]
fn strangers_are_refused_with_a_reason_and_the_job_goes_on() {
    let configs = configs(3, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());

        let mut garbage = connect(&configs[0]);
        garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let silent = connect(&configs[0]);
        let mut endless = connect(&configs[0]);
        endless.write_all(&[Kind::Hello as u8, 0xff, 0xff, 0xff, 0xff]).unwrap();

        let refused = |hello, reason: &str| {
            let (kind, why) = send_hello(&configs[0], &hello);
            assert_eq!(kind, Kind::Refused);
            assert!(why.contains(reason), "{why}");
        };
        refused(Hello { job: "another".into(), ..hello(2, 3) }, "another job");
        refused(hello(2, 4), "as one of 4 ranks, rank 0 as one of 3");
        refused(hello(3, 3), "rank 3 is not one of the ranks");
        refused(hello(0, 3), "rank 0 is not one of the ranks");
        refused(Hello { protocol: 9, ..hello(2, 3) }, "version 9");

        let mut rank_1 = join_twice(&configs[0], &hello(1, 3));
        let rank_2 = scope.spawn(|| configs[2].join()?.barrier());
        assert_eq!(next_message(&mut rank_1).0, Kind::Welcome);
        let barrier = [contribution_header(0, &[]), contribution("barrier", &[])].concat();
        send(&mut rank_1, Kind::Contribute, &barrier).unwrap();
        assert_eq!(next_message(&mut rank_1).0, Kind::Gathered);
        root.join().unwrap().unwrap();
        rank_2.join().unwrap().unwrap();
        drop((silent, endless, garbage));
    });
}

#[test]
fn a_stranger_has_five_seconds_and_four_kib() {
    let configs = configs(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        let start = Instant::now();
        let [mut silent, mut long] = [(); 2].map(|()| connect(&configs[0]));
        // A stranger that begins a greeting of allowed size has as long as one that sends nothing.
        silent.write_all(&header(Kind::Hello, 4 << 10).unwrap()).unwrap();
        long.write_all(&header(Kind::Hello, (4 << 10) + 1).unwrap()).unwrap();
        // An error is the end, too: what was sent was not read.
        assert!(long.read(&mut [0]).map_or(true, |read| read == 0));
        assert!(start.elapsed() < Duration::from_secs(5));
        assert!(silent.read(&mut [0]).map_or(true, |read| read == 0));
        assert!(start.elapsed() >= Duration::from_secs(5));
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

/// Joins twice as the same rank. Asserts that one connection is refused, and returns the other.
fn join_twice(config: &RendezvousConfig, hello: &Hello) -> TcpStream {
    let mut both = [connect(config), connect(config)];
    for stream in &mut both {
        send_json(stream, Kind::Hello, hello).unwrap();
    }
    // The accepted connection receives `Waiting`, the other one the reason of its refusal.
    let answers = both.each_mut().map(|stream| receive(stream, 4096).unwrap());
    let refused = usize::from(answers[0].0 == Kind::Waiting);
    assert_eq!(answers[1 - refused].0, Kind::Waiting);
    assert_eq!(answers[refused].0, Kind::Refused);
    assert_eq!(answers[refused].1, b"rank 1 has joined already");
    let [first, second] = both;
    if refused == 0 { second } else { first }
}

#[test]
fn refused_connections_are_named_when_a_rank_is_missing() {
    let configs = configs(2, Duration::from_secs(2));
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join().err().unwrap().to_string());
        let (kind, _) = send_hello(&configs[0], &hello(1, 5));
        assert_eq!(kind, Kind::Refused);
        let error = root.join().unwrap();
        assert!(error.contains("rank 1 did not arrive"), "{error}");
        assert!(error.contains("as one of 5 ranks"), "{error}");
    });
}

#[test]
fn a_refused_rank_gets_an_error_not_a_timeout() {
    let mut configs = configs(2, AMPLE);
    configs[1].job = "another".into();
    thread::scope(|scope| {
        let mut short = configs[0].clone();
        short.timeout = Duration::from_millis(1500);
        let root = scope.spawn(move || short.join().err().unwrap());
        let error = configs[1].join().err().unwrap();
        assert!(matches!(error, Error::World(WorldError::Rendezvous { .. })), "{error}");
        assert!(error.to_string().contains("another job"), "{error}");
        assert!(matches!(root.join().unwrap(), Error::World(WorldError::RanksMissing { .. })));
    });
}

/// Runs another server at rank 0's address. Returns the error of a rank that connects there.
fn in_place_of_rank_0(answer: impl Fn(TcpStream) + Send) -> Error {
    let mut config = configs(2, Duration::from_millis(400)).remove(1);
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    config.port = other.local_addr().unwrap().port();
    other.set_nonblocking(true).unwrap();
    thread::scope(|scope| {
        let rank = scope.spawn(|| config.join().err().unwrap());
        let mut kept = Vec::new();
        while !rank.is_finished() {
            match other.accept() {
                Ok((stream, _)) => {
                    answer(stream.try_clone().unwrap());
                    kept.push(stream);
                }
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
        rank.join().unwrap()
    })
}

#[test]
fn another_program_at_rank_0s_address_is_not_taken_for_rank_0() {
    let server =
        |mut stream: TcpStream| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    let error = in_place_of_rank_0(server);
    let Error::World(WorldError::RanksMissing { missing, notes, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(*missing, [0]);
    assert!(notes.iter().any(|note| note.contains("not a rank of this program")), "{notes:?}");
    let silent = in_place_of_rank_0(drop);
    assert!(
        matches!(
            &silent,
            Error::World(WorldError::RanksMissing { missing, .. }) if *missing == [0]
        ),
        "{silent}"
    );
    let unexpected = |mut stream: TcpStream| drop(send(&mut stream, Kind::Gathered, &[0; 9]));
    let error = in_place_of_rank_0(unexpected);
    assert!(error.to_string().contains("rank 0 answered with Gathered"), "{error}");
}

#[test]
fn a_rank_that_sends_invalid_frames_is_lost_to_all_with_the_reason() {
    let subset = |key: &[u64]| [contribution_header(0, key), b"bytes".to_vec()].concat();
    let cut = contribution_header(0, &[1])[..20].to_vec();
    let not_a_member = "it contributed to the exchange of a subset that it is not in";
    let invalid = [
        (Kind::Contribute, vec![1, 2, 3], "it sent a frame without a request number"),
        (Kind::Contribute, cut, "it sent an invalid contribution"),
        (Kind::Contribute, subset(&[0, 2, 0, 7]), "it sent an invalid subset"),
        (Kind::Contribute, subset(&[0, 2, 0, 2]), not_a_member),
        (Kind::Welcome, Vec::new(), "it sent an unexpected Welcome frame"),
    ];
    for (kind, payload, why) in invalid {
        let configs = configs(3, AMPLE);
        thread::scope(|scope| {
            let others = [0, 2].map(|rank| {
                let config = &configs[rank];
                scope.spawn(move || config.join().unwrap().barrier().unwrap_err().to_string())
            });
            let mut stream = connect(&configs[0]);
            send_json(&mut stream, Kind::Hello, &hello(1, 3)).unwrap();
            assert_eq!(next_message(&mut stream).0, Kind::Welcome);
            send(&mut stream, kind, &payload).unwrap();
            for error in others.map(|rank| rank.join().unwrap()) {
                assert_eq!(error, format!("rank 1 is lost: {why}"));
            }
        });
    }
}

#[test]
fn bytes_that_are_no_frame_lose_the_rank_that_sent_them() {
    let configs = configs(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join().unwrap().barrier().unwrap_err().to_string());
        let mut stream = connect(&configs[0]);
        send_json(&mut stream, Kind::Hello, &hello(1, 2)).unwrap();
        assert_eq!(next_message(&mut stream).0, Kind::Welcome);
        stream.write_all(&[Kind::Contribute as u8, 0xff, 0xff, 0xff, 0xff]).unwrap();
        let error = root.join().unwrap();
        assert!(error.contains("rank 1 is lost") && error.contains("4294967295 bytes"), "{error}");
    });
}
