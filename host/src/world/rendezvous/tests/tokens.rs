//! Tests of jobs with a token, and of connections without it.

use std::thread;
use std::time::Duration;

use super::super::connection::Connection;
use super::super::seal::{CODE, Seal};
use super::super::token::{Challenge, Prover, Token};
use super::super::wire::{Kind, parse};
use super::*;
use crate::error::{Error, WorldError};

/// The token of these jobs.
pub(super) const TOKEN: &[u8] = b"a secret of ranks";

pub(super) fn token() -> Token {
    Token::new(str::from_utf8(TOKEN).unwrap()).unwrap()
}

/// Returns configurations with a token.
pub(super) fn with_token(n: usize, timeout: Duration) -> Vec<RendezvousConfig> {
    let mut configs = configs(n, timeout);
    configs.iter_mut().for_each(|config| config.token = Some(token()));
    configs
}

#[test]
fn ranks_that_have_the_token_meet() {
    let configs = with_token(3, AMPLE);
    let all = together(&configs, |_, world| world?.barrier());
    assert!(all.iter().all(Result::is_ok), "{all:?}");
}

#[test]
fn a_process_without_the_token_is_refused_and_the_job_goes_on() {
    let configs = with_token(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        for token in [None, Some(Token::new("A secret of ranks").unwrap())] {
            let stranger = RendezvousConfig { token, timeout: DENIED, ..configs[1].clone() };
            let error = stranger.join().err().unwrap().to_string();
            assert!(error.contains("have the job's token (DEVCOMM_JOB_TOKEN)"), "{error}");
        }
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

/// The timeout of joining for a rank that does not succeed: it tries again until then.
pub(super) const DENIED: Duration = Duration::from_millis(400);

#[test]
fn a_rank_whose_root_has_no_token_is_told() {
    let mut configs = with_token(2, Duration::from_secs(1));
    configs[0].token = None;
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join().err().unwrap().to_string());
        let error = configs[1].join().err().unwrap().to_string();
        assert!(error.contains("it has a token for the job, rank 0 has none"), "{error}");
        let error = root.join().unwrap();
        assert!(error.contains("it has a token for the job"), "{error}");
    });
}

type Answer = fn(&mut TcpStream);

/// The answers of an impostor that has rank 0's place, but not the token.
const LIES: [Answer; 6] = [
    |stream| send(stream, Kind::Waiting, &[]).unwrap(),
    |stream| send_json(stream, Kind::Welcome, &[hello(0, 2).peer, hello(1, 2).peer]).unwrap(),
    |stream| {
        let challenge = Challenge { nonce: [1; 32], proof: [2; 32] };
        send_json(stream, Kind::Challenge, &challenge).unwrap();
    },
    |stream| send(stream, Kind::Refused, b"go away").unwrap(),
    |stream| send(stream, Kind::Gathered, &[0; 9]).unwrap(),
    |stream| std::io::Write::write_all(stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap(),
];

/// Answers `n` connections of a rank, as an impostor.
fn lie(listener: &TcpListener, n: usize, answer: Answer) {
    for _ in 0..n {
        let mut stream = listener.accept().unwrap().0;
        assert_eq!(receive(&mut stream, 4096).unwrap().0, Kind::Hello);
        answer(&mut stream);
        // The rank proves nothing to an end that has proved nothing.
        assert!(receive(&mut stream, 4096).is_err());
    }
}

#[test]
fn a_process_at_rank_0s_address_without_the_token_is_not_believed() {
    for answer in LIES {
        let config = with_token(2, DENIED).remove(1);
        let listener = TcpListener::bind(("127.0.0.1", config.port)).unwrap();
        thread::scope(|scope| {
            let rank = scope.spawn(|| config.join().err().unwrap());
            lie(&listener, 1, answer);
            drop(listener);
            let error = rank.join().unwrap();
            let Error::World(WorldError::RanksMissing { notes, .. }) = &error else {
                panic!("{error}")
            };
            let known = ["does not have the job's token", "not a rank of this program"];
            assert!(known.iter().any(|known| notes[0].contains(known)), "{notes:?}");
        });
    }
}

#[test]
fn an_impostor_turns_no_rank_away_for_good() {
    for answer in LIES {
        let configs = with_token(2, AMPLE);
        let listener = TcpListener::bind(("127.0.0.1", configs[0].port)).unwrap();
        thread::scope(|scope| {
            let rank = scope.spawn(|| configs[1].join()?.barrier());
            lie(&listener, 2, answer);
            drop(listener);
            configs[0].join().unwrap().barrier().unwrap();
            rank.join().unwrap().unwrap();
        });
    }
}

#[test]
fn nor_does_a_silent_impostor() {
    let configs = with_token(2, AMPLE);
    let listener = TcpListener::bind(("127.0.0.1", configs[0].port)).unwrap();
    thread::scope(|scope| {
        let rank = scope.spawn(|| configs[1].join()?.barrier());
        let _silent = listener.accept().unwrap();
        drop(listener);
        configs[0].join().unwrap().barrier().unwrap();
        rank.join().unwrap().unwrap();
    });
}

/// Connects as a rank, and proves that it has the token. Returns the connection, and the seal of
/// the frames that it sends.
pub(super) fn prove(config: &RendezvousConfig) -> (Connection, Seal) {
    let mut stream = connect(config);
    let hello = config.hello(Ends::of_rank(&stream).unwrap(), 1).unwrap();
    send_json(&mut stream, Kind::Hello, &hello).unwrap();
    let (kind, challenge) = receive(&mut stream, 4096).unwrap();
    assert_eq!(kind, Kind::Challenge);
    let Challenge { nonce, .. } = parse(&challenge).unwrap();
    let handshake = token().handshake(&json(&hello), &nonce);
    send(&mut stream, Kind::Proof, &handshake.proof(Prover::Other)).unwrap();
    let connection = Connection::new(stream).unwrap();
    let seal = |sender| handshake.seal(sender);
    connection.seal(seal(Prover::Other), seal(Prover::Root));
    (connection, seal(Prover::Other))
}

#[test]
fn a_rank_takes_the_place_of_an_abandoned_connection() {
    let configs = with_token(3, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        // As rank 1 whose host went down after it had joined.
        let old = prove(&configs[1]).0;
        let receive = || old.receive(4096, Instant::now() + AMPLE).unwrap();
        assert_eq!(receive().0, Kind::Waiting);

        let rank_1 = scope.spawn(|| configs[1].join()?.barrier());
        let (kind, why) =
            std::iter::repeat_with(receive).find(|(kind, _)| *kind != Kind::Waiting).unwrap();
        assert_eq!(kind, Kind::Refused);
        assert_eq!(why, b"another process has joined as rank 1");
        configs[2].join().unwrap().barrier().unwrap();
        rank_1.join().unwrap().unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_whose_frame_was_made_changed_repeated_or_left_out_on_the_way_is_lost_to_all() {
    let head = header(Kind::Alive, 0).unwrap();
    let alive = |seal: &mut Seal| [&head[..], &seal.code(&head, &[])].concat();
    type Faults = [fn(Vec<u8>, Vec<u8>) -> Vec<u8>; 4];
    let faults: Faults = [
        |first, _| [&first[..HEAD], &[0; CODE]].concat(),
        |first, _| [&[Kind::Finished as u8], &first[1..]].concat(),
        |first, _| first.repeat(2),
        |_, second| second,
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let configs = with_token(3, AMPLE);
        thread::scope(|scope| {
            let others = [0, 2].map(|rank| {
                let config = &configs[rank];
                scope.spawn(move || config.join().unwrap().barrier().unwrap_err())
            });
            let (connection, mut seal) = prove(&configs[1]);
            while connection.receive(4096, Instant::now() + AMPLE).unwrap().0 != Kind::Welcome {}
            let [first, second] = [(); 2].map(|()| alive(&mut seal));
            connection.stream().write_all(&fault(first, second)).unwrap();
            for error in others.map(|rank| rank.join().unwrap()) {
                let Error::World(WorldError::RankLost { rank: 1, why }) = &error else {
                    panic!("fault {number}: {error}")
                };
                assert!(why.contains("changed"), "{why}");
            }
        });
    }
}
