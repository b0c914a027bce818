//! What is asked of NCCL and answered at once: memory, addresses in windows, teams.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use devcomm_types::nccl::{MultimemHandle, Team};

use super::Nccl;
use super::call::CommPtr;
use crate::error::{Error, Result};
use devcomm_sys::nccl::RawWindow;

/// Device memory from `ncclMemAlloc`.
pub(crate) struct Allocation {
    address: *mut c_void,
}

impl Allocation {
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }
}

/// A logical endpoint and the offset of an address in it.
pub(crate) struct RawEndpoint {
    pub id: u32,
    pub offset: usize,
}

impl Nccl {
    /// Allocates on the current context's device.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let mut address = null_mut();
        // SAFETY: `address` is a live pointer.
        let code = unsafe { self.mem_alloc(&raw mut address, bytes)? };
        self.check("ncclMemAlloc", code, None)?;
        if address.is_null() {
            return Err(Error::invalid(format!("ncclMemAlloc gave no memory for {bytes} bytes")));
        }
        Ok(Allocation { address })
    }

    /// Frees memory.
    ///
    /// # Safety
    ///
    /// Nothing on this GPU or on a peer uses the memory any more, and no window is registered over
    /// it.
    pub(crate) unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: the address came from ncclMemAlloc, and the allocation is taken by value; the
        // caller vouches for the users.
        let code = unsafe { self.mem_free(allocation.address)? };
        self.check("ncclMemFree", code, None)
    }

    /// The address of `offset` bytes into the copy of the window that LSA rank `rank` has.
    ///
    /// # Safety
    ///
    /// The window is registered, here and in the functions below.
    pub(crate) unsafe fn lsa_pointer(
        &self,
        window: u64,
        offset: usize,
        rank: c_int,
    ) -> Result<u64> {
        let window = window as RawWindow;
        // SAFETY: the caller vouches for the window; `out` is live, here and below.
        let ask = |out| unsafe { self.get_lsa_device_pointer(window, offset, rank, out) };
        self.address("ncclGetLsaDevicePointer", ask)
    }

    /// The same by world rank; 0 for a rank that is not reached by load and store.
    pub(crate) unsafe fn peer_pointer(
        &self,
        window: u64,
        offset: usize,
        rank: c_int,
    ) -> Result<u64> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask = |out| unsafe { self.get_peer_device_pointer(window, offset, rank, out) };
        self.address("ncclGetPeerDevicePointer", ask)
    }

    /// The multicast address over the LSA team; 0 where there is none.
    pub(crate) unsafe fn lsa_multimem_pointer(&self, window: u64, offset: usize) -> Result<u64> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask = |out| unsafe { self.get_lsa_multimem_device_pointer(window, offset, out) };
        self.address("ncclGetLsaMultimemDevicePointer", ask)
    }

    /// The multicast address over the team of a handle, which is not NULL.
    pub(crate) unsafe fn multimem_pointer(
        &self,
        window: u64,
        offset: usize,
        handle: MultimemHandle,
    ) -> Result<u64> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask = |out| unsafe { self.get_multimem_device_pointer(window, offset, handle, out) };
        self.address("ncclGetMultimemDevicePointer", ask)
    }

    /// The address that the window was registered with.
    pub(crate) unsafe fn user_pointer(&self, comm: CommPtr, window: u64) -> Result<u64> {
        // SAFETY: as above; the communicator is live.
        let ask = |out| unsafe { self.win_get_user_ptr(comm.0, window as RawWindow, out) };
        self.address("ncclWinGetUserPtr", ask)
    }

    /// The logical endpoint of member `peer` of a CFT team.
    pub(crate) unsafe fn cft_endpoint(
        &self,
        window: u64,
        offset: usize,
        peer: c_int,
        team: Team,
    ) -> Result<RawEndpoint> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask =
            |id, at| unsafe { self.get_cft_device_le_info(window, offset, peer, team, id, at) };
        self.endpoint("ncclGetCftDeviceLeInfo", ask)
    }

    /// The logical endpoint of a world rank.
    pub(crate) unsafe fn peer_endpoint(
        &self,
        window: u64,
        offset: usize,
        peer: c_int,
    ) -> Result<RawEndpoint> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask = |id, at| unsafe { self.get_peer_device_le_info(window, offset, peer, id, at) };
        self.endpoint("ncclGetPeerDeviceLeInfo", ask)
    }

    /// The logical endpoint of the multicast group.
    pub(crate) unsafe fn multimem_endpoint(
        &self,
        window: u64,
        offset: usize,
    ) -> Result<RawEndpoint> {
        let window = window as RawWindow;
        // SAFETY: as above.
        let ask = |id, at| unsafe { self.get_multimem_device_le_info(window, offset, id, at) };
        self.endpoint("ncclGetMultimemDeviceLeInfo", ask)
    }

    fn address(
        &self,
        operation: &'static str,
        ask: impl FnOnce(*mut *mut c_void) -> Result<c_int>,
    ) -> Result<u64> {
        let mut out = null_mut();
        self.check(operation, ask(&raw mut out)?, None)?;
        Ok(out as u64)
    }

    fn endpoint(
        &self,
        operation: &'static str,
        ask: impl FnOnce(*mut u32, *mut usize) -> Result<c_int>,
    ) -> Result<RawEndpoint> {
        let mut out = RawEndpoint { id: 0, offset: 0 };
        self.check(operation, ask(&raw mut out.id, &raw mut out.offset)?, None)?;
        Ok(out)
    }
}

/// A team of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TeamKind {
    World,
    Lsa,
    Rail,
    /// With NCCL's mode.
    Cft(c_int),
    CftMultimem,
}

impl Nccl {
    /// # Safety
    ///
    /// The communicator is live and used by nobody else meanwhile.
    pub(crate) unsafe fn team(&self, comm: CommPtr, kind: TeamKind) -> Result<Team> {
        // SAFETY: the caller vouches for the communicator.
        unsafe {
            match kind {
                TeamKind::World => self.team_world(comm.0),
                TeamKind::Lsa => self.team_lsa(comm.0),
                TeamKind::Rail => self.team_rail(comm.0),
                TeamKind::Cft(mode) => self.team_cft(comm.0, mode),
                TeamKind::CftMultimem => self.team_cft_multimem(comm.0),
            }
        }
    }

    /// The (world, LSA) rank of a member of a team.
    ///
    /// # Safety
    ///
    /// As [`team`](Self::team).
    pub(crate) unsafe fn translate(
        &self,
        comm: CommPtr,
        team: Team,
        member: c_int,
    ) -> Result<(c_int, c_int)> {
        // SAFETY: as above.
        unsafe {
            let world = self.team_rank_to_world(comm.0, team, member)?;
            Ok((world, self.team_rank_to_lsa(comm.0, team, member)?))
        }
    }
}
