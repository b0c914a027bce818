//! Tests of the rendezvous, over TCP connections of this host and between processes.

mod absence;
mod addresses;
mod crowds;
mod endings;
mod exchange;
mod fuzz;
mod interrupts;
mod kills;
mod launchers;
mod loss;
mod meeting;
mod processes;
mod relays;
mod side_channel;
mod strangers;
mod subsets;
mod survivors;
mod tokens;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use socket2::{Domain, Socket, Type};

use super::Rendezvous;
use super::config::RendezvousConfig;
use super::relay::Ends;
use super::wire::{HEAD, Hello, Kind, Member, PROTOCOL, Peer, header, json, read_header};
use crate::error::Result;

/// Returns what `job` returns for each number below `count`, in any order; `concurrent` run at a
/// time.
fn run_each<R: Send>(count: usize, concurrent: usize, job: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..concurrent {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let result = job(number);
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    results.into_inner().unwrap()
}

/// NCCL's version code of the ranks: 2.32.3.
const NCCL: u32 = 23203;

/// Returns the number in an environment variable, or `usual`.
fn number_of(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |number| number.parse().unwrap())
}

/// Longer than any test takes, even on a loaded machine.
const AMPLE: Duration = Duration::from_secs(60);

/// Returns a free port below the ephemeral range, from which the system assigns ports to others.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Concurrent runs of these tests start at different ports.
    let first = std::process::id().wrapping_mul(97) as u16;
    loop {
        let offset = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
        let address = SocketAddr::from(([127, 0, 0, 1], 10_000 + offset));
        // Bound only to test the port, without listening: ranks that connect now are refused.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        if socket.bind(&address.into()).is_ok() {
            return address.port();
        }
    }
}

/// Returns the configurations of `n` ranks, with a new port.
fn configs(n: usize, timeout: Duration) -> Vec<RendezvousConfig> {
    let port = free_port();
    let config = |rank| RendezvousConfig {
        host: "127.0.0.1".into(),
        port,
        job: "test".into(),
        rank,
        n_ranks: n,
        timeout,
        deadline: None,
        peer: Peer { host: format!("host{rank}"), nccl: NCCL },
        token: None,
        listener: None,
    };
    (0..n).map(config).collect()
}

/// Joins with every configuration, each in its thread, and runs `f`.
fn together<T: Send>(
    configs: &[RendezvousConfig],
    f: impl Fn(&RendezvousConfig, Result<Rendezvous>) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let f = &f;
        let start = |config| scope.spawn(move || f(config, RendezvousConfig::join(config)));
        let threads: Vec<_> = configs.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Connects to rank 0 without joining; retries until rank 0 listens.
fn connect(config: &RendezvousConfig) -> TcpStream {
    connect_from(1, config)
}

/// Does the same as [`connect`], from the address 127.0.0.`last` of this host.
fn connect_from(last: u8, config: &RendezvousConfig) -> TcpStream {
    let from = SocketAddr::from(([127, 0, 0, last], 0));
    let to = SocketAddr::from(([127, 0, 0, 1], config.port));
    let start = Instant::now();
    loop {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&from.into()).unwrap();
        match socket.connect(&to.into()) {
            Ok(()) => return socket.into(),
            Err(error) => assert!(start.elapsed() < AMPLE, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn send(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    // One write per frame.
    to.write_all(&[&header(kind, payload.len())?, payload].concat())
}

fn send_json(to: &mut impl Write, kind: Kind, value: &impl Serialize) -> io::Result<()> {
    send(to, kind, &json(value))
}

fn receive(from: &mut impl Read, limit: usize) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head)?;
    let (kind, length) = read_header(head, limit)?;
    let mut payload = Vec::new();
    from.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, payload))
}

fn send_hello(config: &RendezvousConfig, hello: &Hello) -> (Kind, String) {
    let mut stream = connect(config);
    send_json(&mut stream, Kind::Hello, hello).unwrap();
    let (kind, payload) = next_message(&mut stream);
    (kind, String::from_utf8(payload).unwrap())
}

pub(super) fn hello(rank: usize, n_ranks: usize) -> Hello {
    let peer = Peer { host: "elsewhere".into(), nccl: NCCL };
    let end = SocketAddr::from(([127, 0, 0, 1], 1));
    let ends = Ends { rank: end, root: end };
    Hello {
        protocol: PROTOCOL,
        job: "test".into(),
        rank,
        n_ranks,
        peer,
        port: 1,
        ends,
        nonce: None,
    }
}

/// Returns the next message of rank 0 other than `Waiting` and `Alive`.
fn next_message(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    loop {
        match receive(stream, 4096).unwrap() {
            (Kind::Waiting | Kind::Alive, _) => {}
            message => return message,
        }
    }
}
