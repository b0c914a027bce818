//! The panic handler on a GPU: the thread traps, and the launch ends with an error on the host.
//!
//! Kernels that are compiled with messages (`cuda_builder`'s `panic_messages` or `debug`) print one
//! first. In others rustc makes each panic a trap, and nothing calls the handler.

use core::arch::nvptx;
use core::panic::PanicInfo;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    #[cfg(any(debug_assertions, devcomm_panic_messages))]
    report(info);
    #[cfg(not(any(debug_assertions, devcomm_panic_messages)))]
    let _ = info;
    // SAFETY: the instruction ends the thread.
    unsafe { nvptx::trap() }
}

/// This rank's number, which the host writes into the PTX before it loads it: the name and the form
/// of this static are known there (`devcomm-host`, `device/kernels/rank.rs`). Read as volatile, or
/// it would be a constant.
#[cfg(any(debug_assertions, devcomm_panic_messages))]
#[unsafe(no_mangle)]
static mut DEVCOMM_RANK: i32 = -1;

/// Prints the panic's rank, block, thread and location, and its message if it is a plain string:
/// formatting would link `core::fmt` into every kernel, which takes ptxas minutes and more stack
/// than a thread has.
#[cfg(any(debug_assertions, devcomm_panic_messages))]
fn report(info: &PanicInfo) {
    use crate::thread::{block_idx, thread_idx};

    /// The argument buffer of `vprintf`: each argument is aligned to its size.
    #[repr(C)]
    struct Values {
        rank: i32,
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
    // SAFETY: only the host writes it, before the module is loaded.
    let rank = unsafe { (&raw const DEVCOMM_RANK).read_volatile() };
    let values = Values {
        rank,
        block: [block.x, block.y, block.z],
        thread: [thread.x, thread.y, thread.z],
        file: file.as_ptr().cast(),
        line,
        column,
        message: text.as_ptr(),
    };
    let format = c"rank %d block [%u,%u,%u] thread [%u,%u,%u] panicked at %s:%u:%u: %s\n";
    // SAFETY: the format's specifiers match the values, and every string ends in 0.
    unsafe { nvptx::vprintf(format.as_ptr().cast(), (&raw const values).cast()) };
}
