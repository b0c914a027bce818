//! Queries about the fabric's logical endpoints (NCCL's CFT): which ranks have them, and at which
//! offset in an endpoint an element is.
//!
//! NCCL's operations on endpoints (`ncclCft`) are not in this crate.

use crate::prelude::*;
use devcomm_types::CftTeamMode;

use crate::ResourceBuffer;

/// A location in the memory of a logical endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CftPlace {
    /// The endpoint. NCCL: `ncclCftLeId`.
    pub endpoint: u32,
    /// Byte offset in the endpoint's memory.
    pub byte_offset: usize,
}

impl CftPlace {
    /// Returns the result of one of NCCL's queries, which writes it to two pointers.
    #[track_caller]
    fn of(query: impl FnOnce(*mut u32, *mut usize)) -> Self {
        let (mut endpoint, mut byte_offset) = (0, 0);
        query(&mut endpoint, &mut byte_offset);
        Self { endpoint, byte_offset }
    }
}

impl DevComm {
    /// Returns the ranks that have logical endpoints, or the subset that `mode` names; an empty
    /// team if the fabric has no endpoints. NCCL: `ncclTeamCft`.
    #[doc(alias = "ncclTeamCft")]
    #[must_use]
    pub fn cft_team(&self, mode: CftTeamMode) -> Team {
        self.as_raw().cft_team(mode)
    }

    /// Returns the ranks that one multicast endpoint reaches. NCCL: `ncclTeamCftMultimem`.
    #[doc(alias = "ncclTeamCftMultimem")]
    #[must_use]
    pub fn cft_multimem_team(&self) -> Team {
        self.as_raw().cft_multimem_team()
    }
}

#[track_callers]
impl<T: Element> Window<T> {
    /// Returns the location of element `index` in the endpoint of rank `peer` of `team`, which is a
    /// [`DevComm::cft_team`]. NCCL: `ncclGetCftLeInfo`.
    #[doc(alias = "ncclGetCftLeInfo")]
    #[must_use]
    pub fn cft_place(self, comm: &DevComm, team: Team, peer: i32, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: the host registered the window; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetCftLeInfo(window, offset, peer, &team, comm.as_raw(), endpoint, le_offset);
        })
    }

    /// Returns the location of element `index` in the endpoint of world rank `peer`. NCCL:
    /// `ncclGetPeerLeInfo`.
    #[doc(alias = "ncclGetPeerLeInfo")]
    #[must_use]
    pub fn cft_place_of_rank(self, comm: &DevComm, peer: i32, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: the host created the descriptor; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetPeerLeInfo(window, offset, peer, comm.as_raw(), endpoint, le_offset);
        })
    }

    /// Returns the location of element `index` in the multicast endpoint. NCCL:
    /// `ncclGetMultimemLeInfo`.
    #[doc(alias = "ncclGetMultimemLeInfo")]
    #[must_use]
    pub fn cft_multimem_place(self, comm: &DevComm, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: the host created the descriptor; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetMultimemLeInfo(window, offset, comm.as_raw(), endpoint, le_offset);
        })
    }
}

#[track_callers]
impl ResourceBuffer<'_> {
    /// Returns the buffer's location in the endpoint of rank `peer` of [`CftTeamMode::Flat`]'s
    /// team. NCCL: `ncclGetResourceBufferCftLeInfo`.
    #[doc(alias = "ncclGetResourceBufferCftLeInfo")]
    #[must_use]
    pub fn cft_place(self, peer: i32) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: the device communicator is valid; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetResourceBufferCftLeInfo(comm, handle, peer, endpoint, le_offset);
        })
    }

    /// Returns the buffer's location in the endpoint of world rank `peer`. NCCL:
    /// `ncclGetResourceBufferPeerLeInfo`.
    #[doc(alias = "ncclGetResourceBufferPeerLeInfo")]
    #[must_use]
    pub fn cft_place_of_rank(self, peer: i32) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: the host created the descriptor; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetResourceBufferPeerLeInfo(comm, handle, peer, endpoint, le_offset);
        })
    }

    /// Returns the buffer's location in the multicast endpoint. NCCL:
    /// `ncclGetResourceBufferMultimemLeInfo`.
    #[doc(alias = "ncclGetResourceBufferMultimemLeInfo")]
    #[must_use]
    pub fn cft_multimem_place(self) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: the host created the descriptor; both pointers are to live variables.
        CftPlace::of(|endpoint, le_offset| unsafe {
            raw::ncclGetResourceBufferMultimemLeInfo(comm, handle, endpoint, le_offset);
        })
    }
}
