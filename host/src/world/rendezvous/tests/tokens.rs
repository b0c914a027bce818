//! Jobs with a token, and those who do not have it.

use std::thread;
use std::time::Duration;

use super::super::token::{Challenge, Prover, Token};
use super::super::wire::{Kind, parse, receive, send, send_json};
use super::*;
use crate::error::{Error, WorldError};

/// Configurations with a token.
fn with_token(n: usize, timeout: Duration) -> Vec<RendezvousConfig> {
    let mut configs = configs(n, timeout);
    configs.iter_mut().for_each(|config| config.token = Some(Token::new("secret")));
    configs
}

#[test]
fn ranks_that_have_the_token_meet() {
    let configs = with_token(3, AMPLE);
    let all = together(&configs, |_, world| world?.barrier());
    assert!(all.iter().all(Result::is_ok), "{all:?}");
}

#[test]
fn who_does_not_have_the_token_is_refused_and_the_job_goes_on() {
    let configs = with_token(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        for token in [None, Some(Token::new("Secret"))] {
            let stranger = RendezvousConfig { token, timeout: DENIED, ..configs[1].clone() };
            let error = stranger.join().err().unwrap().to_string();
            assert!(error.contains("have the job's token (DEVCOMM_JOB_TOKEN)"), "{error}");
        }
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

const DENIED: Duration = Duration::from_millis(300);

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

#[test]
fn who_has_rank_0s_place_but_not_the_token_is_not_believed() {
    type Answer = fn(&mut TcpStream);
    let answers: [Answer; 3] = [
        |stream| send(stream, Kind::Waiting, &[]).unwrap(),
        |stream| send_json(stream, Kind::Welcome, &[hello(0, 2).peer, hello(1, 2).peer]).unwrap(),
        |stream| {
            let challenge = Challenge { nonce: [1; 32], proof: [2; 32] };
            send_json(stream, Kind::Challenge, &challenge).unwrap();
        },
    ];
    for answer in answers {
        let config = with_token(2, DENIED).remove(1);
        let listener = TcpListener::bind(("127.0.0.1", config.port)).unwrap();
        thread::scope(|scope| {
            let rank = scope.spawn(|| config.join().err().unwrap());
            listener.set_nonblocking(true).unwrap();
            while !rank.is_finished() {
                match listener.accept() {
                    Ok((mut stream, _)) => {
                        stream.set_nonblocking(false).unwrap();
                        assert_eq!(receive(&mut stream, 4096).unwrap().0, Kind::Hello);
                        answer(&mut stream);
                        // It proves nothing to who has proved nothing.
                        assert!(receive(&mut stream, 4096).is_err());
                    }
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
            let error = rank.join().unwrap();
            let Error::World(WorldError::RanksMissing { notes, .. }) = &error else {
                panic!("{error}")
            };
            assert!(notes[0].contains("does not have the job's token"), "{notes:?}");
        });
    }
}

#[test]
fn a_rank_takes_the_place_of_a_connection_that_was_left_behind() {
    let configs = with_token(3, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        // As rank 1 whose host went down after it had joined.
        let mut old = connect(&configs[0]);
        let hello = configs[1].hello(1).unwrap();
        send_json(&mut old, Kind::Hello, &hello).unwrap();
        let (kind, challenge) = receive(&mut old, 4096).unwrap();
        assert_eq!(kind, Kind::Challenge);
        let Challenge { nonce, .. } = parse(&challenge).unwrap();
        let proof = Token::new("secret").proof(Prover::Other, &hello, &nonce);
        send(&mut old, Kind::Proof, &proof).unwrap();
        assert_eq!(receive(&mut old, 4096).unwrap().0, Kind::Waiting);

        let rank_1 = scope.spawn(|| configs[1].join()?.barrier());
        let (kind, why) = next_message(&mut old);
        assert_eq!(kind, Kind::Refused);
        assert_eq!(why, b"another process has joined as rank 1");
        configs[2].join().unwrap().barrier().unwrap();
        rank_1.join().unwrap().unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn hundreds_of_silent_strangers_do_not_keep_the_ranks_away() {
    let configs = configs(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        let strangers: Vec<_> = (0..400).map(|_| connect(&configs[0])).collect();
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
        drop(strangers);
    });
}

/// Connections that say anything: random bytes, and frames of any kind and length.
#[test]
fn noise_neither_ends_nor_blocks_the_job() {
    let configs = with_token(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        let mut random = fastrand::Rng::with_seed(1);
        let mut left = number_of("DEVCOMM_FUZZ", 10_000);
        while left > 0 {
            let mut stream = connect(&configs[0]);
            let mut frames = Vec::new();
            let n = random.usize(1..64).min(left);
            for _ in 0..n {
                let kind = if random.bool() { random.u8(0xd0..0xe0) } else { random.u8(..) };
                let length = if random.u8(..8) == 0 { random.u32(..) } else { random.u32(..80) };
                frames.push(kind);
                frames.extend_from_slice(&length.to_le_bytes());
                frames.extend((0..length.min(80)).map(|_| random.u8(..)));
            }
            left -= n;
            // The other end may have closed the connection.
            let _ = std::io::Write::write_all(&mut stream, &frames);
        }
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}
