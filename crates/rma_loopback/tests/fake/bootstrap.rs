//! The bootstrap of ranks in several processes: the test runs a server, to which ranks connect.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use devcomm_rma_loopback::abi::HANDLE_BYTES;

/// Each rank's contribution to an all-gather.
pub type HandleBytes = [u8; HANDLE_BYTES];

/// Serves all-gathers until a rank disconnects.
pub fn serve(listener: &UnixListener, ranks: usize) {
    let mut sockets = (0..ranks).map(|_| None).collect::<Vec<_>>();
    for _ in 0..ranks {
        let (mut socket, _) = listener.accept().unwrap();
        let mut rank = [0];
        socket.read_exact(&mut rank).unwrap();
        sockets[usize::from(rank[0])] = Some(socket);
    }
    let mut sockets: Vec<UnixStream> = sockets.into_iter().flatten().collect();
    loop {
        let mut all = Vec::new();
        for socket in &mut sockets {
            let mut own: HandleBytes = [0; HANDLE_BYTES];
            if socket.read_exact(&mut own).is_err() {
                return;
            }
            all.extend(own);
        }
        for socket in &mut sockets {
            let _ = socket.write_all(&all);
        }
    }
}

/// A rank's connection to the bootstrap server.
pub struct Client {
    socket: RefCell<UnixStream>,
    ranks: usize,
}

// SAFETY: one thread at a time uses a client.
unsafe impl Sync for Client {}

impl Client {
    pub fn connect(server: &Path, rank: usize, ranks: usize) -> Self {
        let mut socket = UnixStream::connect(server).unwrap();
        socket.write_all(&[rank as u8]).unwrap();
        Self { socket: RefCell::new(socket), ranks }
    }

    /// Performs an all-gather of `own`; calls `meanwhile` until all ranks have contributed.
    pub fn all_gather(&self, own: HandleBytes, mut meanwhile: impl FnMut()) -> Vec<HandleBytes> {
        let mut socket = self.socket.borrow_mut();
        socket.write_all(&own).unwrap();
        let mut first = [0];
        socket.set_nonblocking(true).unwrap();
        loop {
            match socket.read(&mut first) {
                Ok(1) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => meanwhile(),
                other => panic!("the bootstrap server is gone: {other:?}"),
            }
            std::thread::yield_now();
        }
        socket.set_nonblocking(false).unwrap();
        let mut rest = vec![0; HANDLE_BYTES * self.ranks - 1];
        socket.read_exact(&mut rest).unwrap();
        rest.insert(0, first[0]);
        rest.as_chunks().0.to_vec()
    }

    /// Waits for all ranks.
    pub fn barrier(&self, meanwhile: impl FnMut()) {
        self.all_gather([0; HANDLE_BYTES], meanwhile);
    }
}
