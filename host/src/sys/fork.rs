//! Processes that fork.
//!
//! A forked child has its parent's memory and descriptors, but of its threads only the one that
//! forked. So it cannot use what was made before: its calls would wait forever. And the sockets of
//! its parent must not stay open in it: peers would not notice the parent's end before the child's.
//! Children by `posix_spawn`, or which call `exec`, have no such descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use crate::error::{Result, StateError};

/// How often the process has been forked from one that had called [`Process::current`]. It changes
/// only in a new child, while that has one thread: its accesses need no ordering.
static FORKS: AtomicU32 = AtomicU32::new(0);
static SOCKETS: Slots = Slots::new();

/// The identity of a process, which differs from that of a child that it forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: `in_child` is called in forked children, on their only thread; it calls
            // async-signal-safe functions only, takes no lock and allocates nothing.
            let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if result != 0 {
                let error = io::Error::from_raw_os_error(result);
                tracing::warn!("a forked process may keep connections open: {error}");
            }
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns whether the caller runs in this process, not in a forked child.
    pub(crate) fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails in a child of the process.
    pub(crate) fn require(self) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(StateError::Forked.into()) }
    }
}

/// While it exists, forked children do not keep a socket open. It is dropped before the socket.
#[derive(Debug)]
pub(crate) struct CloseInChildren(&'static AtomicI32);

impl CloseInChildren {
    pub(crate) fn new(socket: &impl AsFd) -> Self {
        // Registers `in_child`.
        Process::current();
        Self(SOCKETS.claim(socket.as_fd().as_raw_fd()))
    }
}

impl Drop for CloseInChildren {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// The value of a slot without a descriptor.
const FREE: i32 = -1;
/// Slots in one part of the list.
const LEN: usize = 64;

/// Descriptors, in a list that only grows, which a child can read without a lock. A slot that is
/// not [`FREE`] has an owner, the only one that changes it. It guards no other memory.
struct Slots {
    descriptors: [AtomicI32; LEN],
    next: OnceLock<Box<Self>>,
}

impl Slots {
    const fn new() -> Self {
        Self { descriptors: [const { AtomicI32::new(FREE) }; LEN], next: OnceLock::new() }
    }

    /// Returns a slot, which now has this descriptor.
    fn claim(&'static self, descriptor: i32) -> &'static AtomicI32 {
        let claims = |slot: &&AtomicI32| {
            slot.compare_exchange(FREE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        match self.descriptors.iter().find(claims) {
            Some(slot) => slot,
            None => self.next.get_or_init(|| Box::new(Self::new())).claim(descriptor),
        }
    }
}

/// Replaces the registered sockets by `/dev/null`, so that their descriptors are not reused. The
/// system calls this in a forked child.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let mut slots = Some(&SOCKETS);
    while let Some(Slots { descriptors, next }) = slots {
        for slot in descriptors {
            let descriptor = slot.load(Ordering::Acquire);
            if descriptor != FREE {
                // SAFETY: the descriptor is that of a socket, since its guard is dropped before it
                // is closed; its owner in this process has `/dev/null` instead from now on, where
                // calls for sockets fail. The only thread of the process runs this.
                unsafe {
                    // Closed first, so that a process with as many descriptors as it may have can
                    // open another one.
                    libc::close(descriptor);
                    let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_CLOEXEC);
                    if nothing != descriptor {
                        libc::dup3(nothing, descriptor, libc::O_CLOEXEC);
                        libc::close(nothing);
                    }
                }
            }
        }
        slots = next.get().map(Box::as_ref);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;

    /// Forks a child, which exits with what `f` returns. Returns its process id.
    fn fork(f: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child only calls `f`, and exits without destructors.
        match unsafe { libc::fork() } {
            // SAFETY: the child ends here, without destructors.
            0 => unsafe { libc::_exit(f()) },
            child => child,
        }
    }

    fn exit_code(child: i32) -> i32 {
        let mut status = 0;
        // SAFETY: a child of this process that was not waited for.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "{status}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn a_forked_child_has_no_sockets_of_its_parent_and_knows_that_it_is_one() {
        let process = Process::current();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        // These are more than fit in one part of the list.
        let connect = |_| {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (socket, listener.accept().unwrap().0)
        };
        let (sockets, mut peers): (Vec<_>, Vec<_>) = (0..2 * LEN + 3).map(connect).unzip();
        let guards: Vec<_> = sockets.iter().map(CloseInChildren::new).collect();
        let (mut held, hold) = std::io::pipe().unwrap();
        let child = fork(|| {
            // SAFETY: the parent's end, which this process does not use again.
            unsafe { libc::close(hold.as_raw_fd()) };
            // The child lives until the parent has seen the ends of the connections.
            let _ = held.read(&mut [0]);
            i32::from(process.require().is_err() && Process::current() != process)
        });
        assert!(process.require().is_ok());
        drop(guards);
        drop(sockets);
        for peer in &mut peers {
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        }
        drop(hold);
        assert_eq!(exit_code(child), 1);
    }
}
