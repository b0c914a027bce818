//! The fabric's logical endpoints (CFT): which ranks have them, and which address in them is an
//! element's.
//!
//! These are queries. NCCL's operations on endpoints (`ncclCft`) are not part of this crate.

use core::mem::size_of;

use devcomm_types::{CftTeamMode, Element, Team};

use crate::{DevComm, ResourceBuffer, Window, raw};

/// A place in the memory behind a logical endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CftPlace {
    /// The endpoint. NCCL: `ncclCftLeId`.
    pub endpoint: u32,
    /// Bytes from its beginning.
    pub byte_offset: usize,
}

impl CftPlace {
    /// The place that one of NCCL's queries writes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn of(query: impl FnOnce(*mut u32, *mut usize)) -> Self {
        let (mut endpoint, mut byte_offset) = (0, 0);
        query(&mut endpoint, &mut byte_offset);
        Self { endpoint, byte_offset }
    }
}

impl DevComm {
    /// The ranks that have logical endpoints, or some of them; a team of nobody where there is no
    /// such fabric. NCCL: `ncclTeamCft`.
    #[doc(alias = "ncclTeamCft")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn cft_team(&self, mode: CftTeamMode) -> Team {
        self.as_raw().cft_team(mode)
    }

    /// The ranks that one multicast endpoint reaches. NCCL: `ncclTeamCftMultimem`.
    #[doc(alias = "ncclTeamCftMultimem")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn cft_multimem_team(&self) -> Team {
        self.as_raw().cft_multimem_team()
    }
}

impl<T: Element> Window<T> {
    /// Where the endpoint of member `peer` of `team`, one of [`DevComm::cft_team`]'s, has element
    /// `index`. NCCL: `ncclGetCftLeInfo`.
    #[doc(alias = "ncclGetCftLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_place(self, comm: &DevComm, team: Team, peer: i32, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: arithmetic on the descriptor of a window that the host registered; both results
        // are live variables.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetCftLeInfo(window, offset, peer, &team, comm.as_raw(), endpoint, place);
        })
    }

    /// Where the endpoint of world rank `peer` has element `index`. NCCL: `ncclGetPeerLeInfo`.
    #[doc(alias = "ncclGetPeerLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_place_of_rank(self, comm: &DevComm, peer: i32, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: as in `cft_place`.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetPeerLeInfo(window, offset, peer, comm.as_raw(), endpoint, place);
        })
    }

    /// Where the multicast endpoint has element `index` of all its ranks. NCCL:
    /// `ncclGetMultimemLeInfo`.
    #[doc(alias = "ncclGetMultimemLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_multimem_place(self, comm: &DevComm, index: usize) -> CftPlace {
        let (window, offset) = (self.as_raw(), index * size_of::<T>());
        // SAFETY: as in `cft_place`.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetMultimemLeInfo(window, offset, comm.as_raw(), endpoint, place);
        })
    }
}

impl ResourceBuffer<'_> {
    /// Where the endpoint of rank `peer` of the flat [`DevComm::cft_team`] has the buffer. NCCL:
    /// `ncclGetResourceBufferCftLeInfo`.
    #[doc(alias = "ncclGetResourceBufferCftLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_place(self, peer: i32) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: arithmetic on a device communicator; both results are live variables.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetResourceBufferCftLeInfo(comm, handle, peer, endpoint, place);
        })
    }

    /// Where the endpoint of world rank `peer` has the buffer. NCCL:
    /// `ncclGetResourceBufferPeerLeInfo`.
    #[doc(alias = "ncclGetResourceBufferPeerLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_place_of_rank(self, peer: i32) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: as in `cft_place`.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetResourceBufferPeerLeInfo(comm, handle, peer, endpoint, place);
        })
    }

    /// Where the multicast endpoint has the buffer of all its ranks. NCCL:
    /// `ncclGetResourceBufferMultimemLeInfo`.
    #[doc(alias = "ncclGetResourceBufferMultimemLeInfo")]
    #[must_use]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn cft_multimem_place(self) -> CftPlace {
        let (comm, handle) = (self.comm().as_raw(), self.handle());
        // SAFETY: as in `cft_place`.
        CftPlace::of(|endpoint, place| unsafe {
            raw::ncclGetResourceBufferMultimemLeInfo(comm, handle, endpoint, place);
        })
    }
}
