//! The operating system's part of starting processes.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the system kill the child when the thread that starts it dies, so that a launcher killed
/// outright leaves no ranks behind.
pub(crate) fn die_with_parent(command: &mut Command) {
    // SAFETY: the closure runs between fork and exec and calls one async-signal-safe function with
    // constant arguments; it allocates nothing.
    unsafe {
        command.pre_exec(|| {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
}
