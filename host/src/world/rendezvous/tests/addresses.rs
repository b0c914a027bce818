//! Which addresses the ranks listen on.

use std::collections::HashSet;
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

/// This process's sockets, by inode.
fn sockets() -> HashSet<String> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let link = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_link(entry.unwrap().path()).ok()?.into_os_string().into_string().ok()
    };
    links.filter_map(link).collect()
}

/// The addresses with ports, as in /proc/net/tcp, at which one of these sockets listens.
fn listening(sockets: &HashSet<String>) -> Vec<String> {
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/net/{table}")));
    let rows = tables.iter().flatten().flat_map(|table| table.lines());
    let fields = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    let listens = |row: &Vec<&str>| {
        row.get(3) == Some(&"0A") && sockets.contains(&format!("socket:[{}]", row[9]))
    };
    fields.filter(listens).map(|row| row[1].to_owned()).collect()
}

/// The addresses that meet a condition, once there are any: the table may leave out some while
/// others change.
fn found(sockets: &HashSet<String>, matches: impl Fn(&str) -> bool) -> Vec<String> {
    let start = Instant::now();
    loop {
        let mut found = listening(sockets);
        found.retain(|address| matches(address));
        if !found.is_empty() {
            return found;
        }
        assert!(start.elapsed() < AMPLE);
    }
}

#[test]
fn nobody_outside_reaches_the_ranks_of_a_local_job() {
    const TEST: &str =
        "world::rendezvous::tests::addresses::nobody_outside_reaches_the_ranks_of_a_local_job";
    if let Some(config) = as_rank(TEST) {
        // Also what libraries of the process that started this one have left open.
        let inherited = sockets();
        let world = config.join().unwrap();
        // For the time after a loss.
        let own = found(&sockets().difference(&inherited).cloned().collect(), |_| true);
        assert!(own.iter().all(|address| address.starts_with("0100007F:")), "{own:?}");
        if config.rank == 0 {
            let port = format!(":{:04X}", config.port);
            let root = found(&inherited, |address| address.ends_with(&port));
            assert_eq!(root, [format!("0100007F{port}")]);
        }
        return world.finish().unwrap();
    }
    job(TEST, 3).run().unwrap();
}
