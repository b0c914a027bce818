//! Processes that are not ranks, at the sockets of ranks.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::process::Uid;
use rustix::thread::set_thread_uid;

use crate::fake::bootstrap::HandleBytes;

/// The length of the message that a rank sends when it connects.
const HANDSHAKE_BYTES: usize = 40;

/// Returns the words of a rank's handle that are in the name of its socket, which every user of the
/// host can read: a random number of its process, the process id, and the number of the socket. The
/// two words before them are the magic number and the host.
fn words(handle: &HandleBytes) -> [u64; 3] {
    [2, 3, 4].map(|word| u64::from_le_bytes(handle.as_chunks().0[word]))
}

fn address(handle: &HandleBytes) -> SocketAddr {
    let [random, pid, endpoint] = words(handle);
    let name = format!("devcomm-gin-{random:016x}-{pid}-{endpoint}");
    SocketAddr::from_abstract_name(name).unwrap()
}

/// Returns the handshake of rank 2 with rank 0, which has this handle: the key of rank 0 in two
/// words, the rank, the slots of the shared memory, and the bytes of a slot. A rank sends the
/// descriptor of the shared memory with it.
fn handshake(handle: &HandleBytes) -> [u8; HANDSHAKE_BYTES] {
    let [random, pid, endpoint] = words(handle);
    let mut bytes = [0; HANDSHAKE_BYTES];
    let (key, rank, slots, slot_bytes) = ([random ^ pid.rotate_left(32), endpoint], 2, 2, 4096);
    let words = [key[0], key[1], rank, slots, slot_bytes];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

/// Runs `f` as another user; returns `None` if this process may not change its user.
fn as_another<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
    // The system call changes the user of one thread.
    let thread = || set_thread_uid(Uid::from_raw(65534)).ok().map(|()| f());
    std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
}

/// Listens in place of the rank.
pub fn listen_as_another(handle: &HandleBytes) -> Option<UnixListener> {
    as_another(|| UnixListener::bind_addr(&address(handle)).unwrap())
}

/// Connects to rank 0 as strangers do, before it connects to the other ranks.
pub fn visit(handle: &HandleBytes) -> Vec<UnixStream> {
    let connect = || UnixStream::connect_addr(&address(handle)).unwrap();
    // The first is not a handshake, the second comes without a
    // descriptor of shared memory, and the third is empty.
    let messages = [&b"GET / HTTP/1.1\r\n\r\n"[..], &handshake(handle), &[]];
    let visit = |message: &[u8]| {
        let mut stranger = connect();
        stranger.write_all(message).unwrap();
        stranger.shutdown(Shutdown::Write).unwrap();
        stranger
    };
    // Another user is refused, too.
    messages.into_iter().map(visit).chain(as_another(connect)).collect()
}

/// Waits until the strangers' connections are closed.
pub fn require_refused(strangers: Vec<UnixStream>) {
    for mut stranger in strangers {
        // An error also shows the end: the rank has not read the message.
        assert!(stranger.read(&mut [0]).map_or(true, |read| read == 0));
    }
}
