//! Resource buffers: memory of a device communicator, in every rank.

use crate::prelude::*;
use devcomm_types::nccl::{MultimemHandle, ResourceHandle};

use crate::LsaPtr;

/// A buffer that the host requested together with the device communicator, zeroed by NCCL. Like a
/// window, it has one part per rank.
///
/// NCCL: `ncclDevResourceHandle`, `ncclGetResourceBuffer*Pointer`.
#[doc(alias = "ncclDevResourceHandle")]
#[derive(Clone, Copy)]
pub struct ResourceBuffer<'a> {
    comm: &'a DevComm,
    handle: ResourceHandle,
}

impl DevComm {
    /// Returns the buffer of the host's `handle`.
    ///
    /// The handle is not checked: the buffer's pointers must be used only if the handle belongs to
    /// this device communicator.
    pub fn resource_buffer(&self, handle: ResourceHandle) -> ResourceBuffer<'_> {
        ResourceBuffer { comm: self, handle }
    }
}

impl<'a> ResourceBuffer<'a> {
    pub(crate) fn comm(self) -> &'a DevComm {
        self.comm
    }

    pub(crate) fn handle(self) -> ResourceHandle {
        self.handle
    }
}

#[track_callers]
impl ResourceBuffer<'_> {
    /// Returns the buffer's byte offset in the resource window. NCCL:
    /// `ncclGetResourceBufferOffset`.
    #[doc(alias = "ncclGetResourceBufferOffset")]
    pub fn byte_offset(self) -> usize {
        // SAFETY: NCCL only computes with the handle's value.
        unsafe { raw::ncclGetResourceBufferOffset(self.handle) }
    }

    /// Returns this rank's part. NCCL: `ncclGetResourceBufferLocalPointer`.
    #[doc(alias = "ncclGetResourceBufferLocalPointer")]
    pub fn local<T: Element>(self) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from the device communicator.
        let pointer =
            unsafe { raw::ncclGetResourceBufferLocalPointer(self.comm.as_raw(), self.handle) };
        LsaPtr::new(pointer.cast())
    }

    /// Returns the part of rank `peer` of the LSA team; `peer` is not checked. NCCL:
    /// `ncclGetResourceBufferLsaPointer`.
    #[doc(alias = "ncclGetResourceBufferLsaPointer")]
    pub fn lsa<T: Element>(self, peer: i32) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from the device communicator.
        let pointer =
            unsafe { raw::ncclGetResourceBufferLsaPointer(self.comm.as_raw(), self.handle, peer) };
        LsaPtr::new(pointer.cast())
    }

    /// Returns the part of rank `peer` of `team`, which is also in the LSA team; not checked. NCCL:
    /// `ncclGetResourceBufferPeerPointer`.
    #[doc(alias = "ncclGetResourceBufferPeerPointer")]
    pub fn peer<T: Element>(self, team: Team, peer: i32) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from the device communicator.
        let pointer = unsafe {
            raw::ncclGetResourceBufferPeerPointer(self.comm.as_raw(), self.handle, &team, peer)
        };
        LsaPtr::new(pointer.cast())
    }

    /// Returns the multicast address of the parts of a team, for `multimem` instructions only.
    /// NCCL: `ncclGetResourceBufferMultimemPointer`.
    #[doc(alias = "ncclGetResourceBufferMultimemPointer")]
    pub fn multimem_of<T: Element>(self, multimem: MultimemHandle) -> *mut T {
        // SAFETY: NCCL computes an address from the device communicator.
        unsafe {
            raw::ncclGetResourceBufferMultimemPointer(self.comm.as_raw(), self.handle, &multimem)
        }
        .cast()
    }

    /// Returns the multicast address of the parts of the LSA team, for `multimem` instructions
    /// only. The device communicator must have been created with `lsa_multimem`. NCCL:
    /// `ncclGetResourceBufferLsaMultimemPointer`.
    #[doc(alias = "ncclGetResourceBufferLsaMultimemPointer")]
    pub fn multimem<T: Element>(self) -> *mut T {
        // SAFETY: NCCL computes an address from the device communicator.
        unsafe { raw::ncclGetResourceBufferLsaMultimemPointer(self.comm.as_raw(), self.handle) }
            .cast()
    }
}
