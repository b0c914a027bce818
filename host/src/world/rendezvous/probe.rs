//! Finding ranks that have ended: their hosts refuse connections.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use socket2::{Domain, Socket, Type};

use super::connection::poll;
use super::listen::resolve;

/// The answers of the addresses of one host.
#[derive(Default)]
struct Answers {
    /// The number of addresses that accepted a connection, or did not answer.
    open: usize,
    /// Whether one of the others refused.
    is_refused: bool,
}

impl Answers {
    fn failed(&mut self, error: &io::Error) {
        self.open -= 1;
        self.is_refused |= error.kind() == ErrorKind::ConnectionRefused;
    }
}

/// Returns the indices of the `addresses` (hosts and ports) that refuse connections. All are tried
/// at the same time, for at most `limit`; an address that does not answer does not refuse.
pub(super) fn refusing<'a>(
    addresses: impl Iterator<Item = &'a (String, u16)>,
    limit: Duration,
) -> Vec<usize> {
    let mut answers: Vec<Answers> = Vec::new();
    let mut pending: Vec<(usize, Socket)> = Vec::new();
    for (index, (host, port)) in addresses.enumerate() {
        // A name without an address refuses nothing.
        let resolved = resolve(host, *port).unwrap_or_default();
        answers.push(Answers { open: resolved.len(), is_refused: false });
        for address in resolved {
            match start(address) {
                Ok(socket) => pending.push((index, socket)),
                Err(error) => answers[index].failed(&error),
            }
        }
    }
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if pending.is_empty() || left.is_zero() {
            break;
        }
        let fds = pending.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT));
        let mut ready = poll(&mut fds.collect::<Vec<_>>(), Some(left)).into_iter();
        pending.retain(|(index, socket)| {
            let answered = ready.next() == Some(true);
            if answered && let Some(error) = failure(socket) {
                answers[*index].failed(&error);
            }
            !answered
        });
    }
    let refused = |(index, answers): (usize, &Answers)| {
        (answers.open == 0 && answers.is_refused).then_some(index)
    };
    answers.iter().enumerate().filter_map(refused).collect()
}

/// Starts to connect.
fn start(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket),
    }
}

/// Returns why the socket is not connected.
fn failure(socket: &Socket) -> Option<io::Error> {
    if let Ok(Some(error)) = socket.take_error() {
        return Some(error);
    }
    // On a free port of this host, the system may connect a socket to itself.
    let own = socket.local_addr().and_then(|own| Ok((own, socket.peer_addr()?)));
    let is_itself = own.is_ok_and(|(own, peer)| own.as_socket() == peer.as_socket());
    is_itself.then(|| ErrorKind::ConnectionRefused.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn hosts_that_do_not_answer_take_as_long_as_one() {
        // Its queue is full, so that it answers no more.
        let silent = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        silent.listen(0).unwrap();
        let at = silent.local_addr().unwrap().as_socket().unwrap();
        let _queue: Vec<Socket> = (0..8).map(|_| start(at).unwrap()).collect();
        let open = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let closed = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let ports = [&open, &closed].map(|listener| listener.local_addr().unwrap().port());
        drop(closed);
        let mut addresses = vec![("127.0.0.1".to_owned(), at.port()); 100];
        addresses.extend(ports.map(|port| ("127.0.0.1".to_owned(), port)));
        addresses.push(("no-such-host.invalid".to_owned(), 1));
        let start = Instant::now();
        assert_eq!(refusing(addresses.iter(), Duration::from_millis(300)), [101]);
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(300), "all have answered in {took:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}
