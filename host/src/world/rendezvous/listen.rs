//! The addresses on which ranks listen.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, Type};

use super::config::RendezvousConfig;
use crate::sys::fork::CloseInChildren;
use crate::sys::process::inherited_listener;

/// How long to retry while the port is in use, and the pause in between.
const BIND_TIMEOUT: Duration = Duration::from_secs(3);
const BIND_RETRY: Duration = Duration::from_millis(2);
/// The number of free ports of one address that are tried at the other addresses.
const FREE_PORTS: usize = 64;
/// The number of connections that may wait to be accepted, unless the system allows fewer
/// (`net.core.somaxconn`): all ranks may connect before rank 0 accepts one. The standard library's
/// listeners have 128.
const BACKLOG: i32 = 4096;

/// Sockets that listen at one port of several addresses of this host.
#[derive(Debug)]
pub(super) struct Listeners {
    _not_in_children: Vec<CloseInChildren>,
    sockets: Vec<TcpListener>,
}

impl Listeners {
    pub(super) fn new(sockets: Vec<TcpListener>) -> Self {
        for socket in &sockets {
            // They listen already; if this fails, they go on with the shorter queue.
            let _ = SockRef::from(socket).listen(BACKLOG);
        }
        let _not_in_children = sockets.iter().map(CloseInChildren::new).collect();
        Self { _not_in_children, sockets }
    }

    pub(super) fn port(&self) -> io::Result<u16> {
        let first = self.sockets.first().ok_or(ErrorKind::AddrNotAvailable)?;
        Ok(first.local_addr()?.port())
    }

    /// Listens at any port of the same addresses.
    pub(super) fn at_any_port(&self) -> io::Result<Self> {
        let addresses: io::Result<Vec<_>> =
            self.sockets.iter().map(TcpListener::local_addr).collect();
        Self::bind_all(&addresses?, 0)
    }

    pub(super) fn as_slice(&self) -> &[TcpListener] {
        &self.sockets
    }

    /// Listens at this port of all of `addresses` that are this host's: at a port that is left out
    /// another process may listen, and take the ranks that try it first. Port 0 is any free one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::AddrNotAvailable`] if none is this host's.
    pub(super) fn bind_all(addresses: &[SocketAddr], port: u16) -> io::Result<Self> {
        let mut tries = 0;
        loop {
            let bound = Self::try_bind_all(addresses, port);
            let in_use = |error: &io::Error| error.kind() == ErrorKind::AddrInUse;
            if port != 0 || tries == FREE_PORTS || !bound.as_ref().is_err_and(in_use) {
                return bound;
            }
            tries += 1;
        }
    }

    fn try_bind_all(addresses: &[SocketAddr], mut port: u16) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for address in addresses {
            let mut address = *address;
            address.set_port(port);
            match bind(address) {
                Ok(listener) => {
                    port = listener.local_addr()?.port();
                    listeners.push(listener);
                }
                Err(error) if is_elsewhere(&error) => {}
                Err(error) => return Err(error),
            }
        }
        match listeners.is_empty() {
            true => Err(ErrorKind::AddrNotAvailable.into()),
            false => Ok(Self::new(listeners)),
        }
    }
}

/// Returns whether binding failed since this host does not have the address: it has another one, no
/// IPv6, or the address is one of a link and does not say which.
fn is_elsewhere(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable
        || [libc::EAFNOSUPPORT, libc::EINVAL].map(Some).contains(&error.raw_os_error())
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip() != Ipv6Addr::UNSPECIFIED {
        return TcpListener::bind(address);
    }
    // All addresses, those of IPv4 too, whatever the system's default is.
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Returns the addresses of a host, each once.
///
/// # Errors
///
/// If it has none.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut all = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    match all.is_empty() {
        true => Err(io::Error::new(ErrorKind::NotFound, "the host name has no address")),
        false => Ok(all),
    }
}

/// Listens at the job's address, as rank 0.
pub(super) fn listen(config: &RendezvousConfig) -> io::Result<Listeners> {
    let inherited = config.listener.map(|descriptor| inherited_listener(descriptor, config.port));
    match inherited {
        Some(Ok(listener)) => return Ok(Listeners::new(vec![listener])),
        // A wrapper process may have closed the socket, or this process is a child of rank 0 that
        // has inherited the variable.
        Some(Err(error)) => tracing::debug!("no socket was inherited: {error}"),
        None => {}
    }
    let start = Instant::now();
    loop {
        // A launcher may be testing the port, or an ending job may still use it.
        match listen_at(&config.host, config.port) {
            Err(error)
                if error.kind() == ErrorKind::AddrInUse && start.elapsed() < BIND_TIMEOUT =>
            {
                std::thread::sleep(BIND_RETRY);
            }
            done => return done,
        }
    }
}

/// Listens at all addresses of `host` that are this host's; at all of this host if there are none.
pub(super) fn listen_at(host: &str, port: u16) -> io::Result<Listeners> {
    let addresses = resolve(host, port)?;
    // A job on one host listens on the loopback address only. Other names do not imply one host,
    // even if they resolve to a loopback address, as a host's own name does on Debian.
    let literal = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let is_one_host = literal || host == "localhost";
    if is_one_host || !addresses.iter().all(|address| address.ip().is_loopback()) {
        match Listeners::bind_all(&addresses, port) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable && !is_one_host => {}
            bound => return bound,
        }
    }
    let any = |address: IpAddr| Listeners::bind_all(&[SocketAddr::new(address, 0)], port);
    match any(Ipv6Addr::UNSPECIFIED.into()) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            any(Ipv4Addr::UNSPECIFIED.into())
        }
        bound => bound,
    }
}

/// Listens at any port of this host's `address`; if that is a loopback one, of rank 0's `host`,
/// which is this host.
pub(super) fn listen_at_any_port(host: &str, address: SocketAddr) -> io::Result<Listeners> {
    match address.ip().is_loopback() {
        true => listen_at(host, 0),
        false => Listeners::bind_all(&[address], 0),
    }
}
