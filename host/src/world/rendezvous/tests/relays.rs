//! Tests with a process in rank 0's place that relays the connections of a job with a token.

use std::net::Shutdown;

use super::super::seal::CODE;
use super::tokens::{DENIED, TOKEN, with_token};
use super::*;

/// Copies what arrives until the connection ends. Returns it.
fn copy(mut from: TcpStream, mut to: TcpStream) -> Vec<u8> {
    let (mut all, mut chunk) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = from.read(&mut chunk) {
        all.extend_from_slice(&chunk[..read]);
        if to.write_all(&chunk[..read]).is_err() {
            break;
        }
    }
    // An error means that the other end has closed the connection.
    let _ = to.shutdown(Shutdown::Write);
    all
}

/// Relays a connection to rank 0, unchanged. Returns what the rank and rank 0 have said.
fn relay(rank: TcpStream, root: &RendezvousConfig) -> [Vec<u8>; 2] {
    let root = connect(root);
    let back = (root.try_clone().unwrap(), rank.try_clone().unwrap());
    thread::scope(|scope| {
        let of_rank = scope.spawn(|| copy(rank, root));
        let of_root = copy(back.0, back.1);
        [of_rank.join().unwrap(), of_root]
    })
}

#[test]
fn a_relay_hears_nothing_and_the_rank_joins_without_it() {
    let configs = with_token(2, AMPLE);
    // The rank comes before rank 0, and finds another process in its place.
    let listener = TcpListener::bind(("127.0.0.1", configs[0].port)).unwrap();
    thread::scope(|scope| {
        let rank = scope.spawn(|| configs[1].join()?.barrier());
        let relayed = listener.accept().unwrap().0;
        drop(listener);
        let root = scope.spawn(|| configs[0].join()?.barrier());
        let both = relay(relayed, &configs[0]);
        // Both have proved that they have the token, and have not sent it.
        let has_token = |said: &Vec<u8>| said.windows(TOKEN.len()).any(|part| part == TOKEN);
        assert!(both.iter().all(|said| !said.is_empty() && !has_token(said)));
        let [_, said] = both;
        let (kind, length) = read_header(*said.first_chunk().unwrap(), 4096).unwrap();
        assert_eq!(kind, Kind::Challenge);
        let rest = &said[HEAD + length..];
        assert_eq!((rest[0], rest.len()), (Kind::Relayed as u8, HEAD + CODE));
        rank.join().unwrap().unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_that_is_always_relayed_is_told() {
    let configs = with_token(2, Duration::from_secs(2));
    let listener = TcpListener::bind(("127.0.0.2", configs[0].port)).unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join().err().unwrap().to_string());
        let host = "127.0.0.2".to_owned();
        let relayed = RendezvousConfig { host, timeout: DENIED, ..configs[1].clone() };
        let rank = scope.spawn(move || relayed.join().err().unwrap().to_string());
        while !rank.is_finished() {
            match listener.accept() {
                Ok((connection, _)) => {
                    connection.set_nonblocking(false).unwrap();
                    relay(connection, &configs[0]);
                }
                Err(_) => thread::yield_now(),
            }
        }
        for error in [rank.join().unwrap(), root.join().unwrap()] {
            assert!(error.contains("another process of this host relays"), "{error}");
        }
    });
}
