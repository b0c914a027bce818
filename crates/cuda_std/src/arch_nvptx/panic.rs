//! The panic handler on a GPU: the thread traps, and the launch ends with an error on the host.

use core::arch::nvptx;
use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    #[cfg(debug_assertions)]
    report(info);
    #[cfg(not(debug_assertions))]
    let _ = info;
    // SAFETY: ends the thread.
    unsafe { nvptx::trap() }
}

/// Prints the panic's location, and its message if it is a plain string: formatting would link
/// `core::fmt` into every kernel, which takes ptxas minutes and more stack than a thread has.
#[cfg(debug_assertions)]
fn report(info: &PanicInfo) {
    use crate::thread::{block_idx, thread_idx};

    /// The argument buffer of `vprintf`: each argument is aligned to its size.
    #[repr(C)]
    struct Values {
        block: [u32; 3],
        thread: [u32; 3],
        file: *const u8,
        line: u32,
        column: u32,
        message: *const u8,
    }

    /// The maximum number of message bytes to print, including the terminating 0.
    const SHOWN: usize = 128;

    let mut text = [0u8; SHOWN];
    let message = info.message().as_str().unwrap_or("see the source for the message");
    for (to, from) in text[..SHOWN - 1].iter_mut().zip(message.bytes()) {
        *to = from;
    }
    let (file, line, column) = match info.location() {
        Some(at) => (at.file_as_c_str(), at.line(), at.column()),
        None => (c"?", 0, 0),
    };
    let (block, thread) = (block_idx(), thread_idx());
    let values = Values {
        block: [block.x, block.y, block.z],
        thread: [thread.x, thread.y, thread.z],
        file: file.as_ptr().cast(),
        line,
        column,
        message: text.as_ptr(),
    };
    let format = c"block [%u,%u,%u] thread [%u,%u,%u] panicked at %s:%u:%u: %s\n";
    // SAFETY: the format's specifiers match the values, and every string ends in 0.
    unsafe { nvptx::vprintf(format.as_ptr().cast(), (&raw const values).cast()) };
}
