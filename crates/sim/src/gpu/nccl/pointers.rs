//! Addresses in windows and resource buffers, and multicast addresses. CFT is not simulated.
//!
//! As on a GPU, only window handles are checked here; accesses are checked when they happen. The
//! address of a rank outside the LSA team is non-canonical.

use std::ffi::c_void;

use devcomm_types::nccl::{DevComm, MultimemHandle, ResourceHandle, Team};

use super::{caller, lsa_address, view};
use crate::base::layout::{MULTICAST_UNIT, RESOURCE_UNIT};

pub(super) unsafe extern "C-unwind" fn local(window: *mut c_void, offset: usize) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    let view = unsafe { view(window) };
    view.lsa_address(offset, view.lsa_rank)
}

pub(super) unsafe extern "C-unwind" fn lsa(
    window: *mut c_void,
    offset: usize,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    unsafe { view(window) }.lsa_address(offset, peer)
}

pub(super) unsafe extern "C-unwind" fn peer(
    window: *mut c_void,
    offset: usize,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given.
    let view = unsafe { view(window) };
    view.lsa_address(offset, peer.wrapping_sub(view.world_rank).wrapping_add(view.lsa_rank))
}

pub(super) unsafe extern "C-unwind" fn peer_of_team(
    window: *mut c_void,
    offset: usize,
    team: *const Team,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given, and a team.
    let (view, team) = unsafe { (view(window), *team) };
    view.lsa_address(offset, team.to_lsa(view.lsa_rank, peer))
}

/// Returns the multicast address of byte `offset` of memory bound at `mc_offset_4k`; fails the
/// kernel if the handle is NULL.
fn multicast_address(handle: MultimemHandle, mc_offset_4k: u32, offset: usize) -> *mut c_void {
    let (thread, at) = caller();
    thread.block().grid.uses_peers.set(true);
    if handle.base.is_null() {
        thread.misuse(
            at,
            "a multicast address of a NULL handle: the device communicator has no multicast for \
            the team (DevCommRequirements::lsa_multimem)",
        );
    }
    handle.base.wrapping_byte_add(mc_offset_4k as usize * MULTICAST_UNIT).wrapping_byte_add(offset)
}

pub(super) unsafe extern "C-unwind" fn multimem(
    window: *mut c_void,
    offset: usize,
    handle: *const MultimemHandle,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given, and a handle.
    let (view, handle) = unsafe { (view(window), *handle) };
    multicast_address(handle, view.mc_offset_4k, offset)
}

pub(super) unsafe extern "C-unwind" fn lsa_multimem(
    window: *mut c_void,
    offset: usize,
    comm: *const DevComm,
) -> *mut c_void {
    // SAFETY: the kernel passes a window that it was given, and a device communicator.
    let (view, handle) = unsafe { (view(window), (*comm).lsa_multimem) };
    multicast_address(handle, view.mc_offset_4k, offset)
}

/// Returns the byte offset of a resource in the resource window.
fn offset_of(handle: ResourceHandle) -> usize {
    handle as usize * RESOURCE_UNIT
}

pub(super) unsafe extern "C-unwind" fn resource_offset(handle: ResourceHandle) -> usize {
    offset_of(handle)
}

pub(super) unsafe extern "C-unwind" fn resource_lsa(
    comm: *const DevComm,
    handle: ResourceHandle,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a device communicator.
    let comm = unsafe { &*comm };
    let window = &comm.resource_window_inlined;
    let base = window.lsa_flat_base.cast();
    lsa_address(base, window.stride_4g, comm.lsa_size, offset_of(handle), peer)
}

pub(super) unsafe extern "C-unwind" fn resource_local(
    comm: *const DevComm,
    handle: ResourceHandle,
) -> *mut c_void {
    // SAFETY: the kernel passes a device communicator.
    unsafe { resource_lsa(comm, handle, (*comm).lsa_rank) }
}

pub(super) unsafe extern "C-unwind" fn resource_peer(
    comm: *const DevComm,
    handle: ResourceHandle,
    team: *const Team,
    peer: i32,
) -> *mut c_void {
    // SAFETY: the kernel passes a device communicator and a team.
    unsafe { resource_lsa(comm, handle, (*team).to_lsa((*comm).lsa_rank, peer)) }
}

pub(super) unsafe extern "C-unwind" fn resource_multimem(
    comm: *const DevComm,
    handle: ResourceHandle,
    multimem: *const MultimemHandle,
) -> *mut c_void {
    // SAFETY: the kernel passes a device communicator and a handle.
    let (mc_offset_4k, multimem) =
        unsafe { ((*comm).resource_window_inlined.mc_offset_4k, *multimem) };
    multicast_address(multimem, mc_offset_4k, offset_of(handle))
}

pub(super) unsafe extern "C-unwind" fn resource_lsa_multimem(
    comm: *const DevComm,
    handle: ResourceHandle,
) -> *mut c_void {
    // SAFETY: the kernel passes a device communicator.
    unsafe { resource_multimem(comm, handle, &raw const (*comm).lsa_multimem) }
}

/// Fails the kernel: CFT is not simulated.
fn no_cft() -> ! {
    let (thread, at) = caller();
    thread.misuse(at, "CFT is not simulated: no device communicator here has logical endpoints")
}

/// Declares functions with these parameter types, which fail the kernel.
macro_rules! without_cft {
    ($( $name:ident($($type:ty),*); )*) => { $(
        pub(super) unsafe extern "C-unwind" fn $name($(_: $type),*) {
            no_cft()
        }
    )* };
}

without_cft! {
    cft_le_info(*mut c_void, usize, i32, *const Team, *const DevComm, *mut u32, *mut usize);
    peer_le_info(*mut c_void, usize, i32, *const DevComm, *mut u32, *mut usize);
    multimem_le_info(*mut c_void, usize, *const DevComm, *mut u32, *mut usize);
    resource_le_info(*const DevComm, ResourceHandle, i32, *mut u32, *mut usize);
    resource_multimem_le_info(*const DevComm, ResourceHandle, *mut u32, *mut usize);
}
