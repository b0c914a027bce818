//! Kernels, and how the tests launch them.

use cuda_std::prelude::*;
use devcomm_host::{DevCommResource, KernelSet, LaunchConfig, Result, Stream, Window};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};

/// A simulated GPU runs kernels by their bodies.
pub(crate) const NO_PTX: KernelSet = KernelSet::new((&[], Some("simulated GPUs need none")));

/// Elements of the windows that kernels take.
pub(crate) const COUNT: usize = 1000;

/// Stores `count` to the element of the rank's number.
///
/// # Safety
///
/// The window has as many elements as there are ranks.
#[kernel]
pub(crate) unsafe fn note(comm: DevComm, window: nccl_device::Window<f32>, count: usize) {
    if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
        // SAFETY: the kernel's contract; one thread of the rank stores.
        unsafe { window.local().store(comm.rank() as usize, count as f32) };
    }
}

/// Each block waits for the team's other ranks, at the barrier of its number from `first` on.
#[kernel]
pub(crate) unsafe fn meet(comm: DevComm, first: u32) {
    let index = BarrierIndex::new(first + thread::block_idx_x());
    comm.lsa_barrier(Coop::cta(), index).sync(MemoryOrder::AcqRel);
}

/// Never ends, and sees no abort.
#[kernel]
pub(crate) unsafe fn never_end(_comm: DevComm) {
    loop {
        thread::nanosleep(1000);
    }
}

/// Launches [`note`].
pub(crate) fn launch_note(
    stream: &Stream,
    config: LaunchConfig,
    (dev, window): (&DevCommResource, &Window<f32>),
) -> Result<()> {
    // SAFETY: the tests' windows have an element a rank and more.
    unsafe { note::args(dev, window, COUNT).config(config).launch(stream) }
}

/// Launches [`never_end`].
pub(crate) fn launch_never_end(stream: &Stream, dev: &DevCommResource) -> Result<()> {
    // SAFETY: it touches nothing.
    unsafe { never_end::args(dev).grid(2).block(32).launch(stream) }
}
