//! Finding processes that relay the connection between a rank and rank 0. A rank's
//! [`Hello`](super::wire::Hello), which its proof covers, has the two ends of the connection as the
//! rank sees them.

use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};

use serde::{Deserialize, Serialize};

/// Why a connection is refused.
pub(super) const RELAYED: &str = "another process of this host relays the connection of a rank: a \
    tunnel or a proxy, or somebody who listens in rank 0's place";

/// The two ends of a connection, as one of them sees them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ends {
    pub rank: SocketAddr,
    pub root: SocketAddr,
}

impl Ends {
    /// Returns the addresses as the rank sees them.
    pub(super) fn of_rank(stream: &TcpStream) -> io::Result<Self> {
        let (rank, root) = (stream.local_addr()?, stream.peer_addr()?);
        Ok(Self { rank: canonical(rank), root: canonical(root) })
    }

    /// Returns the addresses as rank 0 sees them.
    pub(super) fn of_root(stream: &TcpStream) -> io::Result<Self> {
        let (rank, root) = (stream.peer_addr()?, stream.local_addr()?);
        Ok(Self { rank: canonical(rank), root: canonical(root) })
    }

    /// Returns whether a process of rank 0's host relays the connection: rank 0 sees it between
    /// these ends, and the rank between `others`. Between hosts addresses may be translated; within
    /// one they are not.
    pub(super) fn are_relayed(&self, others: &Self) -> bool {
        self != others && (self.is_within_host() || others.is_within_host() || is_own(self.rank))
    }

    fn is_within_host(&self) -> bool {
        let (rank, root) = (self.rank.ip(), self.root.ip());
        rank == root || rank.is_loopback() || root.is_loopback()
    }
}

/// Returns the address with IPv4 as IPv4, and without flow label and scope, which only one end
/// knows.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Returns whether this host has the address. Nothing is sent.
fn is_own(address: SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_within_a_host_has_the_same_ends_on_both_sides() {
        let ends = |rank: &str, root: &str| Ends {
            rank: canonical(rank.parse().unwrap()),
            root: canonical(root.parse().unwrap()),
        };
        let seen = ends("127.0.0.1:5", "127.0.0.1:7");
        assert!(!seen.are_relayed(&seen));
        assert!(!seen.are_relayed(&ends("[::ffff:127.0.0.1]:5", "[::ffff:127.0.0.1]:7")));
        let relayed = [
            (seen, ends("127.0.0.1:6", "127.0.0.1:7")),
            (ends("[::1]:6", "[::1]:7"), seen),
            // The rank connected to an address of its own host.
            (ends("192.0.2.9:5", "192.0.2.8:7"), ends("192.0.2.1:5", "192.0.2.1:7")),
            // Rank 0 sees a connection of its own host.
            (ends("192.0.2.1:6", "192.0.2.1:7"), ends("192.0.2.2:5", "192.0.2.1:7")),
            (ends("127.0.0.2:6", "192.0.2.1:7"), ends("192.0.2.2:5", "192.0.2.1:7")),
        ];
        assert!(relayed.iter().all(|(root, rank)| root.are_relayed(rank)));
        // Addresses are translated, as those of containers that are on other hosts.
        let translated = ends("192.0.2.9:5", "192.0.2.8:7");
        assert!(!translated.are_relayed(&ends("192.0.2.1:9", "192.0.2.2:7")));
    }
}
