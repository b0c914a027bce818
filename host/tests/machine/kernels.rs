//! Kernels of the tests, and functions that launch them.

use cuda_std::prelude::*;
use devcomm_host::{DevCommResource, LaunchConfig, Result, Stream, Window};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder};

/// Simulated GPUs run kernels as functions compiled for the host, so they need no PTX.
pub(crate) use devcomm_host::WITHOUT_PTX as NO_PTX;

/// Elements of the windows that kernels take.
pub(crate) const COUNT: usize = 1000;

/// Stores `count` to the element whose index is the rank.
///
/// # Safety
///
/// The window has at least one element for each rank.
#[kernel]
pub(crate) unsafe fn store_count(comm: DevComm, window: nccl_device::Window<f32>, count: usize) {
    if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
        // SAFETY: the kernel's contract; only one thread of the rank stores.
        unsafe { window.local().store(comm.rank() as usize, count as f32) };
    }
}

/// Adds 1 to the first element, without a device communicator.
///
/// # Safety
///
/// The kernel is launched with one thread.
#[kernel]
pub(crate) unsafe fn add_one(window: nccl_device::Window<f32>) {
    // SAFETY: a window has an element; the kernel's contract: only this thread accesses it.
    unsafe { window.local().store(0, window.local().load(0) + 1.0) };
}

/// Syncs LSA barrier `first + b` in block `b`.
#[kernel]
pub(crate) unsafe fn meet(comm: DevComm, first: u32) {
    let index = BarrierIndex::new(first + thread::block_idx_x());
    comm.lsa_barrier(Coop::cta(), index).sync(MemoryOrder::AcqRel);
}

/// Never ends, and does not check for an abort.
#[kernel]
pub(crate) unsafe fn never_end(_comm: DevComm) {
    loop {
        thread::nanosleep(1000);
    }
}

/// Stores beyond the window's end.
///
/// # Safety
///
/// Only simulated GPUs run it, which refuse the access.
#[kernel]
pub(crate) unsafe fn store_beyond(window: nccl_device::Window<f32>) {
    // SAFETY: by the kernel's contract, a simulated GPU runs it and refuses the access.
    unsafe { window.local().store(window.len(), 0.0) };
}

/// Launches [`store_count`].
pub(crate) fn launch_store_count(
    stream: &Stream,
    config: LaunchConfig,
    (dev, window): (&DevCommResource, &Window<f32>),
) -> Result<()> {
    // SAFETY: the tests' windows have at least one element per rank.
    unsafe { store_count::args(dev, window, COUNT).config(config).launch(stream) }
}

/// Launches [`never_end`].
pub(crate) fn launch_never_end(stream: &Stream, dev: &DevCommResource) -> Result<()> {
    // SAFETY: the kernel accesses no memory.
    unsafe { never_end::args(dev).grid(2).block(32).launch(stream) }
}
