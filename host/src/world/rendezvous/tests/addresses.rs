//! Tests of the addresses on which ranks listen.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use super::super::host_name;
use super::super::listen::{Listeners, listen_at, listen_at_any_port, resolve};
use super::processes::{as_rank, job};
use super::*;

fn addresses(listeners: std::io::Result<Listeners>) -> Vec<IpAddr> {
    let ip = |listener: &TcpListener| listener.local_addr().unwrap().ip();
    listeners.unwrap().as_slice().iter().map(ip).collect()
}

/// Returns an address of this host from which it reaches others. Nothing is sent.
fn outer() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[test]
fn a_job_of_one_host_listens_on_the_loopback_address_only() {
    for host in ["127.0.0.1", "127.0.0.2", "localhost"] {
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        for found in [listen_at(host, 0), listen_at_any_port(host, local)].map(addresses) {
            assert!(found.iter().all(IpAddr::is_loopback), "{host}: {found:?}");
        }
    }
}

#[test]
fn a_job_of_several_hosts_listens_on_the_address_that_it_uses() {
    if let Some(outer) = outer() {
        assert_eq!(addresses(listen_at(&outer.to_string(), 0)), [outer]);
        let local = SocketAddr::new(outer, 1);
        assert_eq!(addresses(listen_at_any_port("rank-0.invalid", local)), [outer]);
    }
    // This host has no such address, as when rank 0 is behind a gateway: it listens on all.
    assert!(addresses(listen_at("192.0.2.1", 0))[0].is_unspecified());
    // A host's own name may resolve to a loopback address, which other hosts cannot reach.
    assert!(!addresses(listen_at(&host_name(), 0)).iter().all(IpAddr::is_loopback));
}

#[test]
fn all_addresses_of_a_name_that_are_this_hosts_are_listened_at_with_one_port() {
    let own: Vec<IpAddr> = resolve("localhost", 1).unwrap().iter().map(SocketAddr::ip).collect();
    let listeners = listen_at("localhost", 0).unwrap();
    let port = listeners.port().unwrap();
    for listener in listeners.as_slice() {
        assert_eq!(listener.local_addr().unwrap().port(), port);
    }
    // A host without IPv6 does not have its addresses.
    let has = |ip: &&IpAddr| TcpListener::bind((**ip, 0)).is_ok();
    let own: Vec<IpAddr> = own.iter().filter(has).copied().collect();
    assert_eq!(addresses(listeners.at_any_port()), own);
    assert_eq!(addresses(Ok(listeners)), own);
    // Two addresses, on one of which the port is taken.
    let two = [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| SocketAddr::from((ip, 0)));
    let taken = TcpListener::bind(two[1]).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Listeners::bind_all(&two, port).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    drop(taken);
    assert_eq!(Listeners::bind_all(&two, port).unwrap().as_slice().len(), 2);
}

#[test]
fn a_host_without_an_address_is_refused_at_once() {
    let mut configs = configs(2, AMPLE);
    configs.iter_mut().for_each(|config| config.host = "no-such-host.invalid".into());
    let start = Instant::now();
    for error in together(&configs, |_, world| world.err().unwrap().to_string()) {
        assert!(error.contains("MASTER_ADDR") && error.contains("has no address"), "{error}");
    }
    assert!(start.elapsed() < AMPLE / 2, "{:?}", start.elapsed());
}

/// Returns this process's sockets, by inode.
fn sockets() -> HashSet<String> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let link = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_link(entry.unwrap().path()).ok()?.into_os_string().into_string().ok()
    };
    links.filter_map(link).collect()
}

/// Returns the addresses with ports, as in /proc/net/tcp, at which one of these sockets listens.
fn listening(sockets: &HashSet<String>) -> Vec<String> {
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/net/{table}")));
    let rows = tables.iter().flatten().flat_map(|table| table.lines());
    let fields = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    let listens = |row: &Vec<&str>| {
        row.get(3) == Some(&"0A") && sockets.contains(&format!("socket:[{}]", row[9]))
    };
    fields.filter(listens).map(|row| row[1].to_owned()).collect()
}

/// Returns the addresses that meet a condition, once there are any: the table may leave out some
/// while others change.
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
fn processes_outside_a_local_job_cannot_reach_its_ranks() {
    const TEST: &str =
        "world::rendezvous::tests::addresses::processes_outside_a_local_job_cannot_reach_its_ranks";
    if let Some(config) = as_rank(TEST) {
        // The launcher's listener for rank 0, and sockets that libraries of the parent process left
        // open.
        let inherited = sockets();
        let opened = || sockets().difference(&inherited).cloned().collect::<HashSet<_>>();
        let world = config.join().unwrap();
        // Each rank has a listener, to which the other ranks would connect if rank 0 were lost.
        let own = found(&opened(), |_| true);
        assert!(own.iter().all(|address| address.starts_with("0100007F:")), "{own:?}");
        // Nothing is read there, nor answered.
        let port = u16::from_str_radix(own[0].split_once(':').unwrap().1, 16).unwrap();
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        world.barrier().unwrap();
        stranger.set_nonblocking(true).unwrap();
        let unanswered = stranger.read(&mut [0]).unwrap_err();
        assert_eq!(unanswered.kind(), io::ErrorKind::WouldBlock);
        if config.rank == 0 {
            let port = format!(":{:04X}", config.port);
            let root = found(&inherited, |address| address.ends_with(&port));
            assert_eq!(root, [format!("0100007F{port}")]);
        }
        world.finish().unwrap();
        drop(world);
        // They are closed when the world's thread has ended.
        let start = Instant::now();
        while !listening(&opened()).is_empty() {
            assert!(start.elapsed() < AMPLE);
            thread::yield_now();
        }
        return;
    }
    job(TEST, 3).run().unwrap();
}
