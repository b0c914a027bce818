//! The registers of a block, which its warpgroups share (`setmaxnreg`).

use crate::base::error::{Site, Waiting};
use crate::gpu::barrier::WARPGROUP;
use crate::gpu::thread::{Block, Thread, Wait};

/// The number of registers of a multiprocessor.
const REGISTERS: u32 = 64 << 10;
/// The unit in which registers are given to threads.
const UNIT: u32 = 8;
/// The largest number of registers of a thread.
const MOST: u32 = 255;

/// Returns the registers of each thread at the launch, which the kernel's largest block allows.
fn at_launch(block: &Block) -> u32 {
    (REGISTERS / block.grid.launch.max_threads.next_multiple_of(32)).min(MOST) / UNIT * UNIT
}

/// Returns the number of the thread's registers.
fn own(thread: &Thread) -> u32 {
    match thread.registers.get() {
        0 => at_launch(thread.block()),
        count => count,
    }
}

/// Changes the number of the thread's registers: gives some back, or waits for more of the block.
pub(crate) fn set(thread: &Thread, count: u32, raise: bool, at: Site) {
    let (block, own) = (thread.block(), own(thread));
    if raise && count < own {
        thread.misuse(at, format!("registers are raised to {count}, from {own}"));
    }
    if !raise && count > own {
        thread.misuse(at, format!("registers are lowered to {count}, from {own}"));
    }
    let more = count.saturating_sub(own);
    while block.spare_registers.get() < more {
        thread.suspend(Wait::Registers { count, at });
        if thread.unwinding.get() {
            return;
        }
    }
    block.spare_registers.set(block.spare_registers.get() - more + own.saturating_sub(count));
    thread.registers.set(count);
    let waits = |thread: &&Thread| matches!(thread.wait.get(), Wait::Registers { .. });
    block.threads().filter(waits).for_each(Thread::wake);
}

/// Returns what the thread waits for.
pub(crate) fn waiting(thread: &Thread, count: u32) -> Waiting {
    let block = thread.block();
    let more = WARPGROUP.min(block.size) * count.saturating_sub(own(thread));
    Waiting::Registers { count, more, spare: block.spare_registers.get() }
}
