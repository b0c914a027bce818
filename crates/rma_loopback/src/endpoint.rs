//! Endpoints: the socket that `listen` opens, and the handle that ranks exchange.

use std::hash::{BuildHasher, RandomState};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::abi::HANDLE_BYTES;
use crate::connection::Key;
use crate::error::{Error, Result};
use crate::setup::Setup;

/// Identifies the layout of handles and of shared memory: change it when either changes.
const MAGIC: u64 = u64::from_le_bytes(*b"dvcgin01");

/// A rank's identity and address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    /// Half of the kernel's boot id, which differs between hosts.
    host: u64,
    /// Identifies this process, together with `pid`: a random number that forked children inherit.
    process: u64,
    pid: u64,
    endpoint: u64,
}

impl Handle {
    fn new() -> Result<Self> {
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
        static ENDPOINTS: AtomicU64 = AtomicU64::new(0);
        const BOOT: &str = "/proc/sys/kernel/random/boot_id";
        let boot = std::fs::read_to_string(BOOT).map_err(|error| Error::system(BOOT, error))?;
        let digits: String = boot.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        Ok(Self {
            host: u64::from_str_radix(&digits, 16).map_err(|error| Error::system(BOOT, error))?,
            process: *PROCESS,
            pid: std::process::id().into(),
            endpoint: ENDPOINTS.fetch_add(1, Ordering::Relaxed),
        })
    }

    pub(crate) fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        let fields = [MAGIC, self.host, self.process, self.pid, self.endpoint];
        for (to, field) in bytes.as_chunks_mut().0.iter_mut().zip(fields) {
            *to = field.to_le_bytes();
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; HANDLE_BYTES], rank: usize) -> Result<Self> {
        let mut fields = bytes.as_chunks().0.iter().map(|&field| u64::from_le_bytes(field));
        // There are 16 words, more than are read.
        let mut next = || fields.next().unwrap_or_default();
        if next() != MAGIC {
            return Err(Error::Unsupported(format!(
                "the handle of rank {rank} was not made by this plugin: every rank must load the \
                 same library"
            )));
        }
        Ok(Self { host: next(), process: next(), pid: next(), endpoint: next() })
    }

    pub(crate) fn same_process(&self, other: &Self) -> bool {
        (self.process, self.pid) == (other.process, other.pid)
    }

    pub(crate) fn same_host(&self, other: &Self) -> bool {
        self.host == other.host
    }

    pub(crate) fn pid(&self) -> u64 {
        self.pid
    }

    /// Returns the key of the connection whose rank 0 has this handle.
    pub(crate) fn key(&self) -> Key {
        (self.process ^ self.pid.rotate_left(32), self.endpoint)
    }

    /// Returns the name of the rank's abstract socket, which is not a file.
    fn name(&self) -> String {
        format!("devcomm-gin-{:016x}-{}-{}", self.process, self.pid, self.endpoint)
    }

    /// Returns the address where the rank listens.
    fn address(&self) -> Result<SocketAddr> {
        let name = self.name();
        SocketAddr::from_abstract_name(&name).map_err(|error| Error::system(name, error))
    }

    /// Connects without blocking: `AGAIN` if the backlog is full. The socket is non-blocking.
    pub(crate) fn try_connect(&self) -> rustix::io::Result<UnixStream> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = SocketAddrUnix::new_abstract_name(self.name().as_bytes())?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    }

    /// Returns whether the rank no longer listens: it has failed to connect, or ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.try_connect().is_err_and(|error| error == Errno::CONNREFUSED)
    }
}

/// A listening rank. NCCL: `listenComm`.
pub(crate) struct Endpoint {
    pub(crate) setup: Setup,
    pub(crate) handle: Handle,
    pub(crate) listener: UnixListener,
}

impl Endpoint {
    pub(crate) fn open(setup: Setup) -> Result<Self> {
        let handle = Handle::new()?;
        let listener = UnixListener::bind_addr(&handle.address()?)
            .map_err(|error| Error::system("listening for ranks of other processes", error))?;
        Ok(Self { setup, handle, listener })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connecting_does_not_wait_for_a_full_backlog_and_fails_without_a_listener() {
        let handle = Handle::new().unwrap();
        assert!(handle.is_gone());
        let listener = UnixListener::bind_addr(&handle.address().unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let first = handle.try_connect().unwrap();
        assert_eq!(handle.try_connect().unwrap_err(), Errno::AGAIN);
        assert!(!handle.is_gone());
        drop((first, listener));
        assert!(handle.is_gone());
    }

    #[test]
    fn a_handle_survives_the_exchange_and_foreign_bytes_are_refused() {
        let (one, other) = (Handle::new().unwrap(), Handle::new().unwrap());
        let back = Handle::from_bytes(&one.to_bytes(), 0).unwrap();
        assert_eq!(back, one);
        assert!(back.same_process(&other) && back.same_host(&other));
        assert_ne!(one.key(), other.key());
        let error = Handle::from_bytes(&[7; HANDLE_BYTES], 3).unwrap_err();
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
}
