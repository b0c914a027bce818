//! Calls of NCCL that are made at once: allocations, addresses in windows, teams.

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

// SAFETY: an address of device memory, which belongs to no thread.
unsafe impl Send for Allocation {}
// SAFETY: an address of device memory, which a shared value does not access.
unsafe impl Sync for Allocation {}

impl Allocation {
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }
}

/// A CFT logical endpoint, and the offset in it, in bytes, of the byte that a query was about.
pub(crate) struct RawEndpoint {
    pub id: u32,
    pub offset: usize,
}

impl Nccl {
    /// Allocates memory on the device of the current CUDA context.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let mut address = null_mut();
        // SAFETY: `address` is a live pointer.
        let code = unsafe { self.mem_alloc(&raw mut address, bytes)? };
        self.check("ncclMemAlloc", code, None)?;
        if address.is_null() {
            return Err(Error::invalid(format!("ncclMemAlloc returned NULL for {bytes} bytes")));
        }
        Ok(Allocation { address })
    }

    /// Frees memory.
    ///
    /// # Safety
    ///
    /// Neither this GPU nor a peer uses the memory any more, and it is not registered in a window.
    pub(crate) unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: the address came from ncclMemAlloc and is freed once, since `allocation` is taken
        // by value; the rest is the caller's contract.
        let code = unsafe { self.mem_free(allocation.address)? };
        self.check("ncclMemFree", code, None)
    }

    /// Returns the address that the window was registered with.
    ///
    /// # Safety
    ///
    /// The window is registered and its communicator live.
    pub(crate) unsafe fn user_pointer(&self, comm: CommPtr, window: u64) -> Result<u64> {
        // SAFETY: the caller's contract; `out` is live.
        let query = |out| unsafe { self.win_get_user_ptr(comm.0, window as RawWindow, out) };
        self.address("ncclWinGetUserPtr", query)
    }

    /// Makes a query whose result is an address.
    fn address(
        &self,
        operation: &'static str,
        query: impl FnOnce(*mut *mut c_void) -> Result<c_int>,
    ) -> Result<u64> {
        let mut out = null_mut();
        self.check(operation, query(&raw mut out)?, None)?;
        Ok(out as u64)
    }

    /// Makes a query whose result is an endpoint.
    fn endpoint(
        &self,
        operation: &'static str,
        query: impl FnOnce(*mut u32, *mut usize) -> Result<c_int>,
    ) -> Result<RawEndpoint> {
        let mut out = RawEndpoint { id: 0, offset: 0 };
        self.check(operation, query(&raw mut out.id, &raw mut out.offset)?, None)?;
        Ok(out)
    }
}

/// Declares queries about the byte at `offset` in a window. The arguments are those of the NCCL
/// function between `offset` and its results; `$kind` is [`Nccl::address`] or [`Nccl::endpoint`].
macro_rules! window_queries {
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty
            = $symbol:literal, $function:ident, $kind:ident |$($out:ident),*|;
    )*) => {
        impl Nccl {
            $(
                $(#[doc = $doc])*
                ///
                /// # Safety
                ///
                /// The window is registered.
                pub(crate) unsafe fn $name(
                    &self,
                    window: u64,
                    offset: usize,
                    $($arg: $type),*
                ) -> Result<$answer> {
                    let window = window as RawWindow;
                    // SAFETY: the caller's contract; the pointers to the results are live.
                    self.$kind($symbol, |$($out),*| unsafe {
                        self.$function(window, offset, $($arg,)* $($out),*)
                    })
                }
            )*
        }
    };
}

window_queries! {
    /// Returns the address in the window's memory of LSA rank `rank`.
    fn lsa_pointer(rank: c_int) -> u64
        = "ncclGetLsaDevicePointer", get_lsa_device_pointer, address |out|;

    /// Returns the address in the window's memory of world rank `rank`; 0 if it is not in the LSA
    /// team.
    fn peer_pointer(rank: c_int) -> u64
        = "ncclGetPeerDevicePointer", get_peer_device_pointer, address |out|;

    /// Returns the multicast address over the LSA team; 0 without multicast.
    fn lsa_multimem_pointer() -> u64
        = "ncclGetLsaMultimemDevicePointer", get_lsa_multimem_device_pointer, address |out|;

    /// Returns the multicast address over the team of `handle`, which must not be NULL.
    fn multimem_pointer(handle: MultimemHandle) -> u64
        = "ncclGetMultimemDevicePointer", get_multimem_device_pointer, address |out|;

    /// Returns the logical endpoint of rank `peer` of a CFT team.
    fn cft_endpoint(peer: c_int, team: Team) -> RawEndpoint
        = "ncclGetCftDeviceLeInfo", get_cft_device_le_info, endpoint |id, at|;

    /// Returns the logical endpoint of a world rank.
    fn peer_endpoint(peer: c_int) -> RawEndpoint
        = "ncclGetPeerDeviceLeInfo", get_peer_device_le_info, endpoint |id, at|;

    /// Returns the logical endpoint of the multicast group.
    fn multimem_endpoint() -> RawEndpoint
        = "ncclGetMultimemDeviceLeInfo", get_multimem_device_le_info, endpoint |id, at|;
}

/// A team of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TeamKind {
    World,
    Lsa,
    Rail,
    /// A CFT team, with NCCL's `ncclCftTeamMode` as a number.
    Cft(c_int),
    CftMultimem,
}

impl Nccl {
    /// Returns a team of the communicator, with this rank's number in it.
    ///
    /// # Safety
    ///
    /// The communicator is live and has no other user meanwhile.
    pub(crate) unsafe fn team(&self, comm: CommPtr, kind: TeamKind) -> Result<Team> {
        // SAFETY: the caller passes a communicator that is live.
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

    /// Returns the world rank and the LSA rank of the team's rank `team_rank`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`team`](Self::team).
    pub(crate) unsafe fn translate(
        &self,
        comm: CommPtr,
        team: Team,
        team_rank: c_int,
    ) -> Result<(c_int, c_int)> {
        // SAFETY: the caller passes a communicator that is live.
        unsafe {
            let world = self.team_rank_to_world(comm.0, team, team_rank)?;
            Ok((world, self.team_rank_to_lsa(comm.0, team, team_rank)?))
        }
    }
}
