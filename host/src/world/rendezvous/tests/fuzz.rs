//! Tests with valid frames that were mutated: read in memory, sent by strangers, and sent by a
//! rank.
//!
//! DEVCOMM_FUZZ is the number of frames in memory, and that of strangers' connections;
//! DEVCOMM_FUZZ_JOBS that of jobs with a rank that sends them.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::super::Hub;
use super::super::subset::Subset;
use super::super::token::{Challenge, Prover, Token};
use super::super::wire::{
    LostRank, MAX_FRAME, MissingRanks, contribution_header, pack, parse, read_contribution,
    request, unpack,
};
use super::tokens::{prove, token, with_token};
use super::*;
use crate::communicator::peers::{contribution, same_call};
use crate::error::{Error, WorldError};
use crate::machine::Machine;

/// The number of ranks that the frames are about.
const N: usize = 3;

/// Returns one frame of each kind, or several if its content varies. None is [`Kind::Lost`], by
/// which a rank may say that rank 0 is lost.
fn valid_frames() -> Vec<Vec<u8>> {
    let hello = Hello { nonce: Some([7; 32]), ..hello(1, N) };
    let member = |rank| Member { rank, peer: hello.peer.clone(), address: ("host".into(), 9) };
    let missing = MissingRanks { missing: vec![1, 2], waited_ms: 1500, notes: vec!["so".into()] };
    let call = |subset: &[u64], bytes| {
        [contribution_header(3, subset), contribution("barrier", bytes)].concat()
    };
    let all = pack(&[&[1][..], &[], &[5; 40]].map(|bytes| contribution("barrier", bytes)));
    let nested = [0, 2, 1, 2, 0, 1, 1];
    let frames = [
        (Kind::Hello, json(&hello)),
        (Kind::Hello, json(&Hello { nonce: None, ..hello.clone() })),
        (Kind::Waiting, vec![]),
        (Kind::Welcome, json(&[0, 1, 2].map(member))),
        (Kind::Refused, b"rank 1 has joined already".to_vec()),
        (Kind::Missing, json(&missing)),
        (Kind::Contribute, call(&[], &[0; 9])),
        (Kind::Contribute, call(&[0, 2, 2, 1], &[])),
        (Kind::Contribute, call(&nested, b"bytes")),
        (Kind::Withdraw, contribution_header(3, &nested)),
        (Kind::Gathered, [&3_u64.to_le_bytes(), all.as_slice()].concat()),
        (Kind::Finished, vec![]),
        (Kind::Failed, b"out of memory".to_vec()),
        (Kind::Alive, vec![]),
        (Kind::Challenge, json(&Challenge { nonce: [1; 32], proof: [2; 32] })),
        (Kind::Proof, vec![3; 32]),
        (Kind::Relayed, vec![]),
    ];
    let framed = |(kind, payload): (Kind, Vec<u8>)| {
        [&header(kind, payload.len()).unwrap(), payload.as_slice()].concat()
    };
    frames.into_iter().map(framed).collect()
}

/// Makes invalid frames of valid ones.
struct Mutator {
    random: fastrand::Rng,
    valid: Vec<Vec<u8>>,
}

impl Mutator {
    fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), valid: valid_frames() }
    }

    /// Returns a frame of this kind, or of any. The length of most is right, so that the payload is
    /// read.
    fn frame(&mut self, kind: Option<Kind>) -> Vec<u8> {
        let of_kind = |frame: &&Vec<u8>| kind.is_none_or(|kind| frame[0] == kind as u8);
        let valid: Vec<_> = self.valid.iter().filter(of_kind).collect();
        let mut frame = valid[self.random.usize(..valid.len())].clone();
        for _ in 0..self.random.usize(..4) {
            self.mutate(&mut frame);
        }
        if self.random.u8(..8) > 0 && frame.len() >= HEAD {
            let length = (frame.len() - HEAD) as u32;
            frame[1..HEAD].copy_from_slice(&length.to_le_bytes());
        }
        frame
    }

    fn mutate(&mut self, frame: &mut Vec<u8>) {
        let random = &mut self.random;
        let at = random.usize(..=frame.len());
        let end = (at + random.usize(..16)).min(frame.len());
        match random.u8(..9) {
            0 if at < end => frame[at] ^= 1 << random.u8(..8),
            1 if at < end => frame[at] = random.u8(..),
            2 => drop(frame.splice(at..at, std::iter::repeat_with(|| random.u8(..)).take(9))),
            3 => drop(frame.drain(at..end)),
            4 => frame.truncate(at),
            5 => drop(frame.splice(at..at, frame[at..end].to_vec())),
            // The rest of another frame.
            6 => {
                let other = &self.valid[random.usize(..self.valid.len())];
                frame.truncate(at);
                frame.extend_from_slice(&other[at.min(other.len())..]);
            }
            // A word, such as a length.
            7 if at + 8 <= frame.len() => {
                let words = [0, 1, 2, N as u64, 1 << 32, 1 << 61, u64::MAX - 1, u64::MAX];
                let word = words[random.usize(..words.len())];
                frame[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
            // A number in JSON.
            _ => {
                let texts =
                    ["0", "-1", "3", "1e99", "18446744073709551616", "null", "\"\"", "[[[[", "{}"];
                let text = texts[random.usize(..texts.len())].bytes();
                let digit = |at: usize| frame.get(at).is_some_and(u8::is_ascii_digit);
                if let Some(start) = (at..frame.len()).find(|&at| digit(at)) {
                    let end = (start..frame.len()).find(|&at| !digit(at)).unwrap_or(frame.len());
                    frame.splice(start..end, text);
                }
            }
        }
    }
}

/// The receiver of frames.
struct Receiver {
    config: RendezvousConfig,
    token: Token,
    hub: Hub,
}

impl Receiver {
    fn new() -> Self {
        let (config, token) = (configs(N, AMPLE).remove(0), token());
        Self { config, token, hub: Hub::new(Machine::Gpus, N, None) }
    }

    /// Reads a frame as the ranks do. Fails if it is invalid.
    fn read(&self, frame: &[u8]) -> io::Result<()> {
        let Self { config, token, hub } = self;
        let (head, payload) = frame.split_first_chunk().ok_or(io::ErrorKind::UnexpectedEof)?;
        let (kind, length) = read_header(*head, MAX_FRAME)?;
        let payload = payload.get(..length).ok_or(io::ErrorKind::UnexpectedEof)?;
        match kind {
            Kind::Hello => {
                parse::<Hello>(payload)?;
                assert!(!token.handshake(payload, &[1; 32]).verify(Prover::Other, &[0; 32]));
            }
            Kind::Welcome => drop(parse::<Vec<Member>>(payload)?),
            Kind::Missing => {
                let missing = config.missing(parse(payload)?);
                assert!(missing.to_string().contains("did not arrive"));
            }
            Kind::Contribute | Kind::Withdraw => {
                let part = read_contribution(payload)?;
                let again = [&contribution_header(part.request, &part.subset)[..], &part.bytes];
                assert_eq!(again.concat(), payload);
                let subset = Arc::new(Subset::from_key(part.subset, N)?);
                assert!(subset.members().iter().all(|&member| member < N));
                let _ = hub.contribute(1, &subset, part.request, part.bytes);
                hub.withdraw(1, &subset);
            }
            Kind::Gathered => {
                let (_, parts) = request(payload)?;
                let all = unpack(parts)?;
                assert_eq!(pack(&all), parts);
                same_call(&all).map_err(io::Error::other)?;
            }
            Kind::Lost => drop(parse::<LostRank>(payload)?),
            Kind::Challenge => {
                let Challenge { nonce, proof } = parse(payload)?;
                assert!(!token.handshake(&json(&hello(1, N)), &nonce).verify(Prover::Root, &proof));
            }
            Kind::Waiting | Kind::Refused | Kind::Relayed => {}
            Kind::Finished | Kind::Failed | Kind::Alive => {}
            Kind::Proof => {
                assert!(
                    !token.handshake(&json(&hello(1, N)), &[1; 32]).verify(Prover::Other, payload)
                );
            }
        }
        Ok(())
    }
}

#[test]
fn every_frame_is_read_or_refused() {
    let n = number_of("DEVCOMM_FUZZ", 10_000);
    let receiver = Receiver::new();
    assert!(valid_frames().iter().all(|frame| receiver.read(frame).is_ok()));
    let (mut mutator, start) = (Mutator::new(1), Instant::now());
    let valid = (0..n).filter(|_| receiver.read(&mutator.frame(None)).is_ok()).count();
    println!("{n} frames in memory, {valid} of them valid, in {:.1?}", start.elapsed());
    // Neither kind is rare.
    assert!((n / 5..n - n / 5).contains(&valid), "{valid} of {n}");
}

/// Returns the threads and the most memory that this process has used.
fn usage() -> (usize, String) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |name| {
        let line = status.lines().find_map(|line: &str| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    };
    (of("Threads:").parse().unwrap(), of("VmHWM:"))
}

/// Makes one connection of a stranger. Returns whether rank 0 has answered, or closed it.
fn visit(mutator: &mut Mutator, root: &RendezvousConfig) -> bool {
    // There are enough addresses that none fails too often.
    let mut stream = connect_from(mutator.random.u8(2..), root);
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    stream.set_read_timeout(Some(AMPLE)).unwrap();
    let frame = match mutator.random.u8(..8) {
        0 => mutator.frame(None),
        // A rank without the token.
        1 | 2 => {
            let nonce = Some([mutator.random.u8(..); 32]);
            let hello = Hello { nonce, ..hello(1, 2) };
            send_json(&mut stream, Kind::Hello, &hello).unwrap();
            assert_eq!(receive(&mut stream, 4096).unwrap().0, Kind::Challenge);
            mutator.frame(Some(Kind::Proof))
        }
        _ => mutator.frame(Some(Kind::Hello)),
    };
    // The other end may have closed the connection.
    let _ = stream.write_all(&frame);
    let complete = match frame.split_first_chunk() {
        Some((head, payload)) => {
            // A longer frame is refused at once.
            read_header(*head, 4096).map_or(true, |(_, length)| payload.len() >= length)
        }
        None => false,
    };
    if complete {
        let answer = stream.read(&mut [0; 64]);
        let late = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        assert!(!answer.is_err_and(|error| late(&error)), "no answer to {frame:?}");
    }
    complete
}

#[test]
fn no_stranger_ends_the_job_or_keeps_the_ranks_away() {
    let n = number_of("DEVCOMM_FUZZ", 10_000);
    let configs = with_token(2, AMPLE * 60);
    let (start, [next, read, threads]) = (Instant::now(), [0; 3].map(AtomicUsize::new));
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        let strangers: Vec<_> = (0..4)
            .map(|seed| {
                let (next, read, threads, root) = (&next, &read, &threads, &configs[0]);
                scope.spawn(move || {
                    let mut mutator = Mutator::new(seed);
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= n {
                            return;
                        }
                        if index % 1000 == 0 {
                            threads.fetch_max(usage().0, Ordering::Relaxed);
                        }
                        let complete = visit(&mut mutator, root);
                        read.fetch_add(usize::from(complete), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        strangers.into_iter().for_each(|stranger| stranger.join().unwrap());
        let (took, memory) = (start.elapsed(), usage().1);
        println!(
            "{n} connections, {read:?} of whose frames were answered, in {took:.1?}; at most \
             {threads:?} threads, 4 of them strangers, and {memory}"
        );
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
    });
}

/// Joins as rank 1, and sends mutated frames up to one that is invalid. Returns how many.
fn misbehave(mutator: &mut Mutator, config: &RendezvousConfig) -> usize {
    let (connection, mut seal) = prove(config);
    while connection.receive(4096, Instant::now() + AMPLE).unwrap().0 != Kind::Welcome {}
    let mut stream = connection.stream();
    stream.set_nonblocking(false).unwrap();
    let kinds = [Kind::Contribute, Kind::Contribute, Kind::Withdraw, Kind::Alive];
    let (receiver, mut sent, mut valid) = (Receiver::new(), 0, true);
    while valid && sent < 100 {
        let kind = kinds.get(mutator.random.usize(..5)).copied();
        let frame = mutator.frame(kind);
        // Rank 0 may have closed the connection: what is valid here may not be at this time.
        let (head, payload) = frame.split_at(HEAD.min(frame.len()));
        let sealed = [&frame, &seal.code(head, &[payload])[..]].concat();
        valid = stream.write_all(&sealed).is_ok() && receiver.read(&frame).is_ok();
        sent += 1;
    }
    let _ = stream.shutdown(Shutdown::Write);
    // Reads until rank 0 closes the connection.
    let _ = io::copy(&mut stream, &mut io::sink());
    sent
}

#[test]
fn a_rank_that_sends_anything_is_lost_to_all_others() {
    let jobs = number_of("DEVCOMM_FUZZ_JOBS", 100);
    let (start, mut frames) = (Instant::now(), 0);
    let mut mutator = Mutator::new(3);
    for job in 0..jobs {
        let configs = with_token(N, AMPLE);
        thread::scope(|scope| {
            let others = [0, 2].map(|rank| {
                let config = &configs[rank];
                scope.spawn(move || {
                    let world = config.join().unwrap();
                    std::iter::repeat_with(|| world.all_gather(&[1])).find_map(Result::err)
                })
            });
            frames += misbehave(&mut mutator, &configs[1]);
            for error in others.map(|rank| rank.join().unwrap()) {
                let named =
                    matches!(error, Some(Error::World(WorldError::RankLost { rank: 1, .. })));
                assert!(named, "job {job}: {error:?}");
            }
        });
    }
    let (took, (_, memory)) = (start.elapsed(), usage());
    println!("{frames} frames of a rank in {jobs} jobs, in {took:.1?}; at most {memory}");
}
