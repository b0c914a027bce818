//! System calls for starting processes, passing sockets to them, and setting the environment; and
//! what the dynamic linker knows.

use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use socket2::SockRef;

use crate::error::{Result, WorldError};

/// Makes Linux kill the child when the thread that starts it dies, so that no ranks outlive a
/// killed launcher.
pub(crate) fn die_with_parent(command: &mut Command) {
    die_with(command, std::process::id());
}

fn die_with(command: &mut Command, parent: u32) {
    // SAFETY: the closure runs between fork and exec and calls two async-signal-safe functions with
    // constant arguments; neither it nor its errors allocate memory.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // If the parent died before the prctl, no signal will be sent.
            if libc::getppid().cast_unsigned() == parent {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        });
    }
}

/// Returns the file of the symbol that the dynamic linker finds first for all parts of the process:
/// that of the program, of a library that it is linked with, or of one that was loaded with
/// `RTLD_GLOBAL`.
pub(crate) fn file_of_global(symbol: &CStr) -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the name is a C string; `dladdr` takes any address, and NULL, and writes the struct,
    // of which zeros are a valid value.
    let found = unsafe {
        let address = libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr());
        if address.is_null() || libc::dladdr(address, found.as_mut_ptr()) == 0 {
            return None;
        }
        found.assume_init()
    };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name lives as long as the library is loaded, and is copied.
    let file = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(OsStr::from_bytes(file.to_bytes()).into())
}

/// Returns whether a signal is in a mask of a process's status, such as `SigCgt`; `process` is its
/// number, or `self`.
fn is_in_mask(process: &str, mask: &str, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(mask)?.strip_prefix(':'));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // The lowest bit is for signal 1.
    mask.unwrap_or_default() >> (signal - 1) & 1 != 0
}

/// Returns whether this process ignores a signal.
pub(crate) fn ignores(signal: i32) -> bool {
    is_in_mask("self", "SigIgn", signal)
}

/// Returns whether this process has a handler for a signal.
pub(crate) fn handles(signal: i32) -> bool {
    is_in_mask("self", "SigCgt", signal)
}

/// Sends a signal to a child that has not been waited for, if the child has a handler for it. The
/// signal would end a child without one. A rank is such a child until its world runs: the world
/// installs a handler of SIGUSR1, which prints what the rank does.
pub(crate) fn send_if_handled(child: &Child, signal: i32) {
    if is_in_mask(&child.id().to_string(), "SigCgt", signal) {
        // SAFETY: `kill` has no requirements; the process id is the child's until it is waited for.
        // An error means that it has ended.
        unsafe { libc::kill(child.id().cast_signed(), signal) };
    }
}

/// Starts a process that inherits this socket, at the same descriptor. Other children do not.
pub(crate) fn spawn_with_listener(
    mut command: Command,
    listener: &TcpListener,
) -> io::Result<Child> {
    let descriptor = listener.as_raw_fd();
    // SAFETY: the closure runs between fork and exec and calls one async-signal-safe function; it
    // allocates nothing. In the child the descriptor is the socket's, which is borrowed until after
    // `spawn`.
    unsafe {
        command.pre_exec(move || {
            // Clears close-on-exec, in this child only.
            if libc::fcntl(descriptor, libc::F_SETFD, 0) == -1 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    command.spawn()
}

/// Returns a duplicate of the socket that the parent process passed at `descriptor`, if it listens
/// on `port`.
pub(crate) fn inherited_listener(descriptor: i32, port: u16) -> io::Result<TcpListener> {
    // The duplicate is not one of the three standard streams.
    // SAFETY: duplicating any descriptor is harmless, and fails for one that is not open.
    let own = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if own == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made just now and has no other owner.
    let listener = TcpListener::from(unsafe { OwnedFd::from_raw_fd(own) });
    if !SockRef::from(&listener).is_listener()? || listener.local_addr()?.port() != port {
        return Err(io::Error::other(format!(
            "descriptor {descriptor} does not listen at port {port}"
        )));
    }
    // This process's children must not inherit it. SAFETY: `descriptor` is open, and is the socket
    // that the parent passed to this process; nothing else uses its flags.
    unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    Ok(listener)
}

/// Sets environment variables.
///
/// # Errors
///
/// [`WorldError::EnvironmentInUse`] unless the calling thread is known to be this process's only
/// one, or there is nothing to set.
pub(crate) fn set_variables(variables: &[(&'static str, OsString)]) -> Result<()> {
    if variables.is_empty() {
        return Ok(());
    }
    // If the threads cannot be counted, there may be more than one.
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count).ok();
    if threads != Some(1) {
        let text = |(name, value): &(&str, OsString)| format!("{name}={}", value.display());
        let variables = variables.iter().map(text).collect();
        return Err(WorldError::EnvironmentInUse { variables, threads }.into());
    }
    for (name, value) in variables {
        // SAFETY: no other thread can read or write the environment meanwhile: this is the only
        // thread, and it starts none.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_child_whose_parent_is_gone_does_not_start() {
        let mut child = Command::new("/bin/true");
        die_with(&mut child, std::process::id());
        assert!(child.status().unwrap().success());
        let mut orphan = Command::new("/bin/true");
        die_with(&mut orphan, u32::MAX);
        assert_eq!(orphan.status().unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn only_a_socket_that_listens_at_the_port_is_taken_over() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let taken = inherited_listener(listener.as_raw_fd(), port).unwrap();
        assert_ne!(taken.as_raw_fd(), listener.as_raw_fd());
        assert!(inherited_listener(listener.as_raw_fd(), port ^ 1).is_err());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(inherited_listener(file.as_raw_fd(), port).is_err());
        assert!(inherited_listener(i32::MAX, port).is_err());
        // The duplicate still listens after the original was closed.
        drop(listener);
        std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
