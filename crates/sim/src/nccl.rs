//! NCCL's device functions, as the simulator defines them: the table behind `nccl_device::raw`.
//!
//! # Safety
//!
//! Each function has the contract of NCCL's, which is the kernel author's: handles come from this simulator, coops and
//! sessions from the functions here. A kernel runs on a coroutine with a current [`Thread`]. Barrier words lie in the
//! resource memory of a device communicator, which the launch keeps alive.

mod coop;
mod lsa_barrier;

use std::ffi::c_void;

use devcomm_types::nccl::DevComm;
use nccl_device::raw::host::{CALL_SITE, NcclDevice};

use crate::memory::{Memory, STRIDE_UNIT};
use crate::thread::Thread;

pub(crate) use lsa_barrier::{InboxWait, RESOURCE_UNIT, barrier_words};

/// What a window handle points to: one rank's view of a window.
pub(crate) struct WindowView {
    /// The part of the first rank of the LSA team.
    pub(crate) flat_base: *mut u8,
    /// Distance between parts in units of 4 GiB.
    pub(crate) stride_4g: u32,
    pub(crate) lsa_rank: i32,
    pub(crate) lsa_size: i32,
    pub(crate) world_rank: i32,
}

/// Pointers to ranks that do not exist start here: no machine maps it.
const NOWHERE: usize = 0xdead << 48;

impl WindowView {
    fn of_lsa(&self, offset: usize, peer: i32) -> *mut c_void {
        if !(0..self.lsa_size).contains(&peer) {
            // Asking is allowed, as on a GPU; touching it is reported.
            let address = NOWHERE | (peer as u16 as usize) << 32 | (offset & 0xffff_ffff);
            return std::ptr::without_provenance_mut(address);
        }
        let part = peer as usize * self.stride_4g as usize * STRIDE_UNIT;
        self.flat_base.wrapping_add(part + offset).cast()
    }
}

/// Says where an address that is not the kernel's lies.
pub(crate) fn describe(memory: &Memory, address: usize) -> String {
    if address & (0xffff << 48) == NOWHERE {
        let peer = (address >> 32) as u16 as i16;
        return format!("in the part of rank {peer}, which is not in the LSA team");
    }
    memory.describe(address)
}

/// Installs the table for this process.
pub(crate) fn install() {
    nccl_device::raw::host::install(&TABLE);
}

static TABLE: NcclDevice = NcclDevice {
    ncclGetLocalPointer: local_pointer,
    ncclGetLsaPointer: lsa_pointer,
    ncclGetPeerPointer: peer_pointer,
    ncclGetLsaMultimemPointer: lsa_multimem_pointer,
    ncclCoopAnyInitThread: coop::thread,
    ncclCoopAnyInitWarp: coop::warp,
    ncclCoopAnyInitLanes: coop::lanes,
    ncclCoopAnyInitWarpSpan: coop::warp_span,
    ncclCoopAnyInitCta: coop::cta,
    ncclCoopThreadRank: coop::thread_rank,
    ncclCoopSize: coop::size,
    ncclCoopSync: coop::sync,
    ncclLsaBarrierSessionInit: lsa_barrier::init,
    ncclLsaBarrierSessionArrive: lsa_barrier::arrive,
    ncclLsaBarrierSessionWait: lsa_barrier::wait,
    ncclLsaBarrierSessionSync: lsa_barrier::sync,
    ncclLsaBarrierSessionDestroy: lsa_barrier::destroy,
};

/// The view behind a handle; a NULL handle ends the kernel.
///
/// # Safety
///
/// `window` is NULL or a handle of this simulator.
#[inline]
unsafe fn view<'a>(window: *mut c_void) -> &'a WindowView {
    // SAFETY: the caller's; views are not changed after they are made.
    match unsafe { window.cast::<WindowView>().as_ref() } {
        Some(view) => view,
        None => {
            let (thread, run) = Thread::current();
            thread.misuse(run, CALL_SITE.get(), "the window is NULL")
        }
    }
}

unsafe extern "C-unwind" fn local_pointer(window: *mut c_void, offset: usize) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    let view = unsafe { view(window) };
    view.of_lsa(offset, view.lsa_rank)
}

unsafe extern "C-unwind" fn lsa_pointer(
    window: *mut c_void,
    offset: usize,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    unsafe { view(window) }.of_lsa(offset, peer)
}

unsafe extern "C-unwind" fn peer_pointer(
    window: *mut c_void,
    offset: usize,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    let view = unsafe { view(window) };
    view.of_lsa(offset, peer - view.world_rank + view.lsa_rank)
}

unsafe extern "C-unwind" fn lsa_multimem_pointer(
    _window: *mut c_void,
    _offset: usize,
    _comm: *const DevComm,
) -> *mut c_void {
    let (thread, run) = Thread::current();
    thread.misuse(run, CALL_SITE.get(), "multimem is not simulated, and not every GPU has it")
}
