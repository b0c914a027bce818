//! Which addresses the ranks listen on.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use super::super::host_name;
use super::super::listen::{listen_beside, try_bind};
use super::processes::{as_rank, job};
use super::*;

fn address(listener: std::io::Result<TcpListener>) -> IpAddr {
    listener.unwrap().local_addr().unwrap().ip()
}

/// An address of this host from which it reaches others. Nothing is sent.
fn outer() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[test]
fn a_job_of_one_host_listens_on_the_loopback_address_only() {
    for host in ["127.0.0.1", "127.0.0.2", "localhost"] {
        assert!(address(try_bind(host, 0)).is_loopback(), "{host}");
        assert!(address(listen_beside(host, Ipv4Addr::LOCALHOST.into())).is_loopback(), "{host}");
    }
}

#[test]
fn a_job_of_several_hosts_listens_on_the_address_that_it_uses() {
    if let Some(outer) = outer() {
        assert_eq!(address(try_bind(&outer.to_string(), 0)), outer);
        assert_eq!(address(listen_beside("rank-0.invalid", outer)), outer);
    }
    // This host has no such address, as when it is behind another one.
    assert!(address(try_bind("192.0.2.1", 0)).is_unspecified());
    // A host's own name may be one of the loopback address, which other hosts cannot reach.
    assert!(!address(try_bind(&host_name(), 0)).is_loopback());
}

/// The sockets with which this process listens, and their addresses as in /proc/net/tcp, which may
/// leave out some while others change.
fn listening() -> HashMap<String, String> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let link = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_link(entry.unwrap().path()).ok()?.into_os_string().into_string().ok()
    };
    let own: HashSet<String> = links.filter_map(link).collect();
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/net/{table}")));
    let rows = tables.iter().flatten().flat_map(|table| table.lines());
    let fields = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    let listens = |row: &Vec<&str>| {
        row.get(3) == Some(&"0A") && own.contains(&format!("socket:[{}]", row[9]))
    };
    let address = |row: &str| row.split(':').next().unwrap_or_default().to_owned();
    fields.filter(listens).map(|row| (row[9].to_owned(), address(row[1]))).collect()
}

#[test]
fn nobody_outside_reaches_the_ranks_of_a_local_job() {
    const TEST: &str =
        "world::rendezvous::tests::addresses::nobody_outside_reaches_the_ranks_of_a_local_job";
    if let Some(config) = as_rank(TEST) {
        let world = config.join().unwrap();
        // The inherited socket of rank 0, and that for the time after a loss.
        let expected = if config.rank == 0 { 2 } else { 1 };
        let start = Instant::now();
        loop {
            let listens = listening();
            assert!(listens.values().all(|address| address == "0100007F"), "{listens:?}");
            if listens.len() == expected {
                break;
            }
            assert!(start.elapsed() < AMPLE, "{listens:?}");
        }
        return world.finish().unwrap();
    }
    job(TEST, 3).run().unwrap();
}
