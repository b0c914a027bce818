//! NCCL's device API: the simulator's function table behind `nccl_device::raw`.
//!
//! # Safety
//!
//! Each function has NCCL's contract, which the kernel's author upholds: handles come from this
//! simulator, coops and sessions from the functions here, pointers to structs are valid. Each GPU
//! thread is a coroutine with a current [`Thread`]; only one runs at a time. Barrier state lies in
//! the resource memory of a device communicator, which the launch keeps alive.

mod checks;
mod coop;
mod divergence;
mod gin;
mod lsa_barrier;
mod pointers;
mod reduce_copy;
mod table;
mod teams;

use std::ffi::c_void;
use std::rc::Rc;

use nccl_device::raw::host::CALL_SITE;

use crate::base::error::Site;
use crate::base::layout::STRIDE_UNIT;
use crate::gpu::thread::Thread;
use crate::memory::multicast;

pub(crate) use divergence::CallDivergence;
pub use gin::Unflushed;
pub(crate) use gin::network::{Network, QueueKey};
pub(crate) use gin::{BarrierSet, GinComm, GinRank};
pub(crate) use lsa_barrier::{InboxWait, arrived, barrier_words, gpus_of};
pub(crate) use table::install;

/// What a window handle points to: one rank's view of a window.
pub(crate) struct WindowView {
    /// Address of the part (the registered memory) of the LSA team's first rank.
    pub(crate) flat_base: *mut u8,
    /// Distance between parts in units of 4 GiB.
    pub(crate) stride_4g: u32,
    pub(crate) lsa_rank: i32,
    pub(crate) lsa_size: i32,
    /// Rank in the communicator.
    pub(crate) world_rank: i32,
    /// The GPU of each rank of the communicator.
    pub(crate) gpus: Rc<[u32]>,
    /// The window's offset in multicast groups, in units of 4 KiB.
    pub(crate) mc_offset_4k: u32,
    /// Number of the window, for error messages.
    pub(crate) id: u32,
    /// Address of the part of world rank 0, for GIN.
    pub(crate) world_base: *mut u8,
    /// Length of each rank's part in bytes.
    pub(crate) lens: Rc<[usize]>,
}

/// Base of pointers to ranks outside the LSA team: a non-canonical address.
const UNREACHABLE: usize = 0xdead << 48;

/// Returns the address of byte `offset` of LSA rank `peer`'s part; parts are `stride_4g` * 4 GiB
/// apart.
fn lsa_address(
    flat_base: *mut u8,
    stride_4g: u32,
    lsa_size: i32,
    offset: usize,
    peer: i32,
) -> *mut c_void {
    if !(0..lsa_size).contains(&peer) {
        // Computing the address is allowed, as on a GPU; accessing it fails the kernel.
        let address = UNREACHABLE | (peer as u16 as usize) << 32 | (offset & 0xffff_ffff);
        return std::ptr::without_provenance_mut(address);
    }
    let part = peer as usize * stride_4g as usize * STRIDE_UNIT;
    flat_base.wrapping_add(part).wrapping_add(offset).cast()
}

impl WindowView {
    fn lsa_address(&self, offset: usize, peer: i32) -> *mut c_void {
        if peer != self.lsa_rank {
            Thread::current().block().grid.uses_peers.set(true);
        }
        lsa_address(self.flat_base, self.stride_4g, self.lsa_size, offset, peer)
    }

    /// Returns the address of byte `offset` of world rank `rank`'s part, if `bytes` bytes follow.
    fn world_address(&self, offset: usize, bytes: usize, rank: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        let part = rank * self.stride_4g as usize * STRIDE_UNIT;
        (end <= self.lens[rank]).then(|| self.world_base.wrapping_add(part + offset))
    }
}

/// Describes an address that the kernel may not access.
pub(crate) fn describe(thread: &Thread, address: usize) -> String {
    if address & (0xffff << 48) == UNREACHABLE {
        let peer = (address >> 32) as u16 as i16;
        return format!("in the part of rank {peer}, which is not in the LSA team");
    }
    if multicast::is_multicast(address) {
        return "at a multicast address, which is for multimem instructions only".to_owned();
    }
    thread.gpus().memory.describe(address, thread.arguments())
}

/// Returns the calling thread and its call site.
fn caller<'a>() -> (&'a Thread, Site) {
    let thread = Thread::current();
    (thread, CALL_SITE.get())
}

/// Records the first communicator that the kernel uses: error messages name its ranks.
#[inline]
fn record_communicator(thread: &Thread, gpus: &Rc<[u32]>) {
    thread.block().grid.communicator.get_or_init(|| Rc::clone(gpus));
}

/// Returns the view behind a window handle; fails the kernel if the handle is NULL.
///
/// # Safety
///
/// `window` is NULL or a handle of this simulator.
#[inline]
unsafe fn view<'a>(window: *mut c_void) -> &'a WindowView {
    // SAFETY: the caller's contract; views are immutable.
    match unsafe { window.cast::<WindowView>().as_ref() } {
        Some(view) => {
            record_communicator(Thread::current(), &view.gpus);
            view
        }
        None => {
            let (thread, at) = caller();
            thread.misuse(at, "the window is NULL")
        }
    }
}
