//! Which addresses ranks listen on.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::join::RendezvousConfig;
use crate::sys::process::inherited_listener;

/// How long to retry while the port is in use, and the pause in between.
const BIND_TIMEOUT: Duration = Duration::from_secs(3);
const BIND_RETRY: Duration = Duration::from_millis(2);

/// Listens at the job's address, as rank 0.
pub(super) fn listen(config: &RendezvousConfig) -> io::Result<TcpListener> {
    let inherited = config.listener.map(|descriptor| inherited_listener(descriptor, config.port));
    let listener = match inherited {
        Some(Ok(listener)) => listener,
        // A wrapper process may have closed the socket, or this process is a child of rank 0 that
        // has inherited the variable.
        Some(Err(error)) => {
            tracing::debug!("no socket was inherited: {error}");
            bind(&config.host, config.port)?
        }
        None => bind(&config.host, config.port)?,
    };
    Ok(listener)
}

/// Listens on the port. Retries while it is in use, since a launcher may be testing it, or an
/// ending job may still use it.
fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let start = Instant::now();
    loop {
        match try_bind(host, port) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < BIND_TIMEOUT =>
            {
                std::thread::sleep(BIND_RETRY);
            }
            done => return done,
        }
    }
}

/// Listens at this host's address among those of `host`.
pub(super) fn try_bind(host: &str, port: u16) -> io::Result<TcpListener> {
    // A job on one host listens on the loopback address only. Other names do not imply one host,
    // even if they resolve to a loopback address, as a host's own name does on Debian.
    let literal = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if literal || host == "localhost" {
        return TcpListener::bind((host, port));
    }
    // The address that the other ranks connect to, if it is one of this host's.
    let addresses = (host, port).to_socket_addrs().into_iter().flatten();
    for address in addresses.filter(|address| !address.ip().is_loopback()) {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
            bound => return bound,
        }
    }
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Listens at any port of this address of this host, or of the host of rank 0 if that is this one.
pub(super) fn listen_beside(host: &str, address: IpAddr) -> io::Result<TcpListener> {
    if address.is_loopback() { try_bind(host, 0) } else { TcpListener::bind((address, 0)) }
}
