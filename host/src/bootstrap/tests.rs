//! What a rendezvous promises, over real connections of this machine.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::join::Meeting;
use super::wire::{Hello, Kind, PROTOCOL, Peer, receive, send, send_json};
use super::world::{run_rank, run_threads};
use super::{Rendezvous, host_name};
use crate::{Error, Result};

const NCCL: u32 = 23203;
/// Longer than anything here takes, on a machine that does ten other things.
const AMPLE: Duration = Duration::from_secs(60);

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Meetings of `n` ranks at a port of their own.
fn meetings(n: usize, timeout: Duration) -> Vec<Meeting> {
    let port = free_port();
    let meeting = |rank| Meeting {
        host: "127.0.0.1".into(),
        port,
        job: "test".into(),
        rank,
        n_ranks: n,
        timeout,
        peer: Peer { host: format!("host{rank}"), nccl: NCCL },
    };
    (0..n).map(meeting).collect()
}

/// Runs `f` for every meeting at the same time.
fn together<T: Send>(
    meetings: &[Meeting],
    f: impl Fn(&Meeting, Result<Rendezvous>) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let f = &f;
        let start = |meeting| scope.spawn(move || f(meeting, Meeting::join(meeting)));
        let threads: Vec<_> = meetings.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A connection to rank 0 as a program that is no rank makes it; rank 0 may still be about to listen.
fn knock(meeting: &Meeting) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect((meeting.host.as_str(), meeting.port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < AMPLE, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn introduce(meeting: &Meeting, hello: &Hello) -> (Kind, String) {
    let mut stream = knock(meeting);
    send_json(&mut stream, Kind::Hello, hello).unwrap();
    let (kind, payload) = receive(&mut stream, 4096).unwrap();
    (kind, String::from_utf8(payload).unwrap())
}

fn hello(rank: usize, n_ranks: usize) -> Hello {
    let peer = Peer { host: "elsewhere".into(), nccl: NCCL };
    Hello { protocol: PROTOCOL, job: "test".into(), rank, n_ranks, peer }
}

#[test]
fn sixteen_ranks_meet_and_exchange() {
    let results = together(&meetings(16, AMPLE), |meeting, rendezvous| -> Result<()> {
        let rendezvous = rendezvous?;
        let rank = meeting.rank;
        assert_eq!((rendezvous.rank(), rendezvous.n_ranks()), (rank, 16));
        assert_eq!(rendezvous.hosts()[7], "host7");
        for round in 0..20 {
            // Lengths differ from rank to rank, and some are 0.
            let all = rendezvous.all_gather(&vec![round; rank * usize::from(round % 3)])?;
            for (other, part) in all.iter().enumerate() {
                assert_eq!(*part, vec![round; other * usize::from(round % 3)]);
            }
        }
        assert_eq!(rendezvous.broadcast(5, format!("from {rank}").as_bytes())?, b"from 5");
        assert!(rendezvous.broadcast(16, b"").is_err());
        rendezvous.barrier()?;
        rendezvous.finish()
    });
    for result in results {
        result.unwrap();
    }
}

#[test]
fn a_late_rank_is_waited_for() {
    let meetings = meetings(3, AMPLE);
    let late = |meeting: &Meeting| {
        // Rank 0 late is the harder case: the others knock at a closed door.
        thread::sleep(Duration::from_millis(if meeting.rank == 0 { 400 } else { 0 }));
        meeting.join()?.barrier()
    };
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = meetings.iter().map(|m| scope.spawn(move || late(m))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_rank_that_never_arrives_is_named_to_everyone_after_the_deadline() {
    let mut meetings = meetings(4, Duration::from_millis(700));
    meetings.remove(2);
    let start = Instant::now();
    for error in together(&meetings, |_, rendezvous| rendezvous.err().unwrap()) {
        let Error::RanksMissing { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [2]);
        assert!(error.to_string().starts_with("rank 2 did not arrive at 127.0.0.1:"), "{error}");
    }
    assert!(start.elapsed() < AMPLE / 4);
}

#[test]
fn without_rank_0_the_others_name_it_and_why() {
    let mut meetings = meetings(2, Duration::from_millis(300));
    meetings.remove(0);
    let error = together(&meetings, |_, rendezvous| rendezvous.err().unwrap()).remove(0);
    let Error::RanksMissing { missing, notes, .. } = &error else { panic!("{error}") };
    assert_eq!(*missing, [0]);
    assert!(notes[0].to_lowercase().contains("refused"), "{notes:?}");
}

#[test]
fn strangers_are_refused_with_a_reason_and_the_job_goes_on() {
    let meetings = meetings(3, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| meetings[0].join()?.barrier());

        let mut garbage = knock(&meetings[0]);
        garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let silent = knock(&meetings[0]);
        let mut endless = knock(&meetings[0]);
        endless.write_all(&[Kind::Hello as u8, 0xff, 0xff, 0xff, 0xff]).unwrap();

        let refused = |hello, reason: &str| {
            let (kind, why) = introduce(&meetings[0], &hello);
            assert_eq!(kind, Kind::Refused);
            assert!(why.contains(reason), "{why}");
        };
        refused(Hello { job: "another".into(), ..hello(2, 3) }, "another job");
        refused(hello(2, 4), "WORLD_SIZE=4, rank 0 says WORLD_SIZE=3");
        refused(hello(3, 3), "rank 3 is not one of the ranks");
        refused(hello(0, 3), "rank 0 is not one of the ranks");
        refused(Hello { protocol: 9, ..hello(2, 3) }, "version 9");

        let mut rank_1 = the_one_of_two(&meetings[0], &hello(1, 3));
        let rank_2 = scope.spawn(|| meetings[2].join()?.barrier());
        assert_eq!(receive(&mut rank_1, 4096).unwrap().0, Kind::Welcome);
        send(&mut rank_1, Kind::Give, b"").unwrap();
        assert_eq!(receive(&mut rank_1, 4096).unwrap().0, Kind::Gathered);
        root.join().unwrap().unwrap();
        rank_2.join().unwrap().unwrap();
        drop((silent, endless, garbage));
    });
}

/// Introduces one rank twice: one of the two is refused, the other is returned.
fn the_one_of_two(meeting: &Meeting, hello: &Hello) -> TcpStream {
    let mut both = [knock(meeting), knock(meeting)];
    for stream in &mut both {
        send_json(stream, Kind::Hello, hello).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    }
    let start = Instant::now();
    let refused = loop {
        assert!(start.elapsed() < AMPLE);
        let mut peeked = [0];
        if let Some(refused) = (0..2).find(|&index| both[index].peek(&mut peeked).is_ok()) {
            break refused;
        }
    };
    let (kind, why) = receive(&mut both[refused], 4096).unwrap();
    assert_eq!(kind, Kind::Refused);
    assert_eq!(String::from_utf8(why).unwrap(), "there is a rank 1 already");
    let [first, second] = both;
    let other = if refused == 0 { second } else { first };
    other.set_read_timeout(Some(AMPLE)).unwrap();
    other
}

#[test]
fn what_was_refused_is_told_when_a_rank_is_missing() {
    let meetings = meetings(2, Duration::from_millis(800));
    thread::scope(|scope| {
        let root = scope.spawn(|| meetings[0].join().err().unwrap().to_string());
        let (kind, _) = introduce(&meetings[0], &hello(1, 5));
        assert_eq!(kind, Kind::Refused);
        let error = root.join().unwrap();
        assert!(error.contains("rank 1 did not arrive"), "{error}");
        assert!(error.contains("WORLD_SIZE=5"), "{error}");
    });
}

#[test]
fn a_refused_rank_gets_an_error_not_a_timeout() {
    let mut meetings = meetings(2, AMPLE);
    meetings[1].job = "another".into();
    thread::scope(|scope| {
        let mut short = meetings[0].clone();
        short.timeout = Duration::from_millis(1500);
        let root = scope.spawn(move || short.join().err().unwrap());
        let error = meetings[1].join().err().unwrap();
        assert!(matches!(error, Error::Rendezvous { .. }), "{error}");
        assert!(error.to_string().contains("another job"), "{error}");
        assert!(matches!(root.join().unwrap(), Error::RanksMissing { .. }));
    });
}

#[test]
fn ranks_with_different_ncclss_all_learn_both_versions() {
    let mut meetings = meetings(3, AMPLE);
    meetings[2].peer.nccl = 22809;
    for error in together(&meetings, |_, rendezvous| rendezvous.err().unwrap()) {
        let text = error.to_string();
        assert!(matches!(error, Error::NcclVersionsDiffer { .. }), "{text}");
        assert!(text.contains("rank 0 loaded NCCL 2.32.3 but rank 2 loaded NCCL 2.28.9"), "{text}");
    }
}

/// One rank leaves without a word after the first exchange; what the others wait in, and how soon they know.
fn leave_in_the_middle(leaver: usize) {
    let (sender, left) = channel();
    let sender = std::sync::Mutex::new(sender);
    let results = together(&meetings(4, AMPLE), |meeting, rendezvous| {
        let rendezvous = rendezvous.unwrap();
        let first = rendezvous.barrier();
        if meeting.rank == leaver {
            first.unwrap();
            sender.lock().unwrap().send(Instant::now()).unwrap();
            return None;
        }
        // One of them is not in an exchange but waits for its GPU, looking at the health.
        if meeting.rank == (leaver + 1) % 4 {
            while rendezvous.health().check().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        // The loss may overtake the end of the first barrier, but not that of a second one.
        Some((first.and_then(|()| rendezvous.barrier()).unwrap_err(), Instant::now()))
    });
    let left = left.recv().unwrap();
    for (error, known) in results.into_iter().flatten() {
        let Error::RankLost { rank, why } = &error else { panic!("{error}") };
        assert_eq!(*rank, leaver);
        assert!(why.contains("its connection closed"), "{why}");
        assert!(known - left < Duration::from_secs(2), "{:?}", known - left);
    }
}

#[test]
fn a_rank_that_dies_is_named_to_the_others_within_two_seconds() {
    leave_in_the_middle(2);
}

#[test]
fn if_rank_0_dies_everyone_sees_it() {
    leave_in_the_middle(0);
}

#[test]
fn a_rank_that_fails_says_why() {
    for failing in [0, 1] {
        let errors = together(&meetings(3, AMPLE), |meeting, rendezvous| {
            let rendezvous = rendezvous.unwrap();
            if meeting.rank == failing {
                rendezvous.fail("out of memory");
            }
            rendezvous.finish().unwrap_err().to_string()
        });
        for error in errors {
            assert_eq!(error, format!("rank {failing} is lost: out of memory"));
        }
    }
}

#[test]
fn a_rank_that_ends_early_does_not_leave_the_others_waiting() {
    for early in [0, 2] {
        let results = together(&meetings(3, AMPLE), |meeting, rendezvous| {
            let rendezvous = rendezvous.unwrap();
            if meeting.rank == early { rendezvous.finish() } else { rendezvous.barrier() }
        });
        for error in results.into_iter().map(Result::unwrap_err) {
            let Error::RankLost { rank, why } = &error else { panic!("{error}") };
            assert!(*rank == early && why.contains("already finished"), "{error}");
        }
    }
}

#[test]
fn an_exchange_that_does_not_fit_is_refused() {
    let results = together(&meetings(2, AMPLE), |_, rendezvous| {
        let rendezvous = rendezvous?;
        let error = rendezvous.all_gather(&vec![0; 33 << 20]).unwrap_err();
        assert!(matches!(error, Error::InvalidInput { .. }), "{error}");
        rendezvous.barrier()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn threads_meet_in_memory() {
    let sums = run_threads(5, |rendezvous| -> Result<usize> {
        let mut sum = 0;
        for _ in 0..50 {
            let all = rendezvous.all_gather(&[rendezvous.rank() as u8])?;
            sum += all.iter().map(|part| usize::from(part[0])).sum::<usize>();
        }
        assert_eq!(rendezvous.hosts(), vec![host_name(); 5]);
        rendezvous.finish()?;
        Ok(sum)
    });
    assert_eq!(sums.unwrap(), [500; 5]);
}

/// A rank of the tests: its function runs as a world runs it, without a GPU.
fn rank_of(
    rendezvous: &Rendezvous,
    f: impl Fn(&Rendezvous) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    run_rank(rendezvous, || Ok(rendezvous.clone()), f)
}

#[test]
fn a_panic_in_one_thread_names_the_rank_and_releases_the_others() {
    let error = run_threads(3, |rendezvous| {
        rank_of(rendezvous, |rank| {
            if rank.rank() == 1 {
                panic!("index out of range");
            }
            let error = rank.barrier().unwrap_err();
            assert!(error.to_string().contains("rank 1 is lost: rank 1 panicked"), "{error}");
            Err(error.into())
        })
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 1 panicked: index out of range");
}

#[test]
fn the_error_of_the_rank_that_failed_first_is_the_worlds() {
    let error = run_threads(4, |rendezvous| {
        rank_of(rendezvous, |rank| match rank.rank() {
            3 => Err("no such file".into()),
            _ => Ok(rank.barrier()?),
        })
    });
    assert_eq!(error.unwrap_err().to_string(), "no such file");
}

const RANK_PORT: &str = "DEVCOMM_TEST_RANK_PORT";

/// Rank 1 of `a_killed_process_is_a_lost_rank`, in a process of its own.
fn be_killed(port: std::ffi::OsString) {
    let mut meeting = meetings(2, AMPLE).remove(1);
    meeting.port = port.into_string().unwrap().parse().unwrap();
    let rendezvous = meeting.join().unwrap();
    rendezvous.barrier().unwrap();
    // Killed here; if its parent dies first, this ends as well.
    while rendezvous.health().check().is_ok() {
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_process_is_a_lost_rank() {
    if let Some(port) = std::env::var_os(RANK_PORT) {
        return be_killed(port);
    }
    let meeting = meetings(2, AMPLE).remove(0);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bootstrap::tests::a_killed_process_is_a_lost_rank"])
        .env(RANK_PORT, meeting.port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let rendezvous = meeting.join().unwrap();
    rendezvous.barrier().unwrap();
    child.kill().unwrap();
    let killed = Instant::now();
    let error = rendezvous.barrier().unwrap_err();
    assert!(killed.elapsed() < Duration::from_secs(2));
    assert!(matches!(error, Error::RankLost { rank: 1, .. }), "{error}");
    child.wait().unwrap();
}
