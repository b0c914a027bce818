//! Addresses in a window, for the host: of this rank, of peers, multicast, and CFT endpoints.

use devcomm_types::Element;
use devcomm_types::nccl::{MultimemHandle, Team};

use super::Window;
use crate::error::{Error, Result};
use crate::sys::nccl::query::RawEndpoint;

/// A CFT endpoint and an offset in it. NCCL: `ncclCftLeId` and the offset of the `ncclGet*LeInfo`
/// functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalEndpoint {
    /// The endpoint.
    pub id: u32,
    /// The offset in bytes.
    pub offset: usize,
}

impl LogicalEndpoint {
    /// Returns the endpoint `bytes` further.
    fn at(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes as usize, ..self }
    }
}

impl From<RawEndpoint> for LogicalEndpoint {
    fn from(raw: RawEndpoint) -> Self {
        Self { id: raw.id, offset: raw.offset }
    }
}

impl<T: Element> Window<T> {
    /// Returns NCCL's address of this rank's memory. NCCL: `ncclWinGetUserPtr`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`device_window`](Self::device_window);
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported), [`Error::Nccl`].
    #[doc(alias = "ncclWinGetUserPtr")]
    pub fn user_pointer(&self) -> Result<u64> {
        let handle = self.inner.handle()?;
        self.inner.communicator.with_comm(|nccl, comm| {
            // SAFETY: communicator and window are live.
            unsafe { nccl.user_pointer(comm, handle) }
        })
    }

    /// Returns the address, on this GPU, of element `index` of LSA rank `lsa_rank`. NCCL:
    /// `ncclGetLsaDevicePointer`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an index beyond that rank's window or a rank that is not in the
    /// LSA team; the errors of [`user_pointer`](Self::user_pointer).
    #[doc(alias = "ncclGetLsaDevicePointer")]
    pub fn lsa_pointer(&self, lsa_rank: usize, index: usize) -> Result<u64> {
        let (handle, team) = (self.inner.handle()?, self.inner.communicator.team_lsa()?);
        let n = team.n_ranks;
        let rank = i32::try_from(lsa_rank).ok().filter(|rank| *rank < n).ok_or_else(|| {
            Error::invalid(format!("LSA rank {lsa_rank} is not one of the {n} of this team"))
        })?;
        let world_rank = self.inner.communicator.rank_to_world(team, lsa_rank)?;
        let offset = self.offset_on(world_rank, index)?;
        let start = self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.lsa_pointer(handle, 0, rank) }
        })?;
        Ok(start + offset)
    }

    /// Returns the address, on this GPU, of element `index` of rank `peer`; `None` if this rank
    /// cannot access it by load and store. NCCL: `ncclGetPeerDevicePointer`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an index beyond that rank's window or an unknown rank; the
    /// errors of [`user_pointer`](Self::user_pointer).
    #[doc(alias = "ncclGetPeerDevicePointer")]
    pub fn peer_pointer(&self, peer: usize, index: usize) -> Result<Option<u64>> {
        let (handle, offset) = (self.inner.handle()?, self.offset_on(peer, index)?);
        let peer = self.inner.communicator.peer(peer)?;
        let start = self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.peer_pointer(handle, 0, peer) }.map(non_null)
        })?;
        Ok(start.map(|start| start + offset))
    }

    /// Returns the multicast address of element `index` over the LSA team; `None` without
    /// multicast. NCCL: `ncclGetLsaMultimemDevicePointer`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`peer_pointer`](Self::peer_pointer).
    #[doc(alias = "ncclGetLsaMultimemDevicePointer")]
    pub fn lsa_multimem_pointer(&self, index: usize) -> Result<Option<u64>> {
        let (handle, offset) = (self.inner.handle()?, self.offset(index)?);
        self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.lsa_multimem_pointer(handle, offset) }.map(non_null)
        })
    }

    /// Returns the multicast address of element `index` over the team of the multimem handle
    /// `team`, which is from a device communicator. NCCL: `ncclGetMultimemDevicePointer`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an empty handle; the errors of
    /// [`peer_pointer`](Self::peer_pointer).
    #[doc(alias = "ncclGetMultimemDevicePointer")]
    pub fn multimem_pointer(&self, team: MultimemHandle, index: usize) -> Result<Option<u64>> {
        if team.base.is_null() {
            return Err(Error::invalid("the multimem handle is empty"));
        }
        let (handle, offset) = (self.inner.handle()?, self.offset(index)?);
        self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.multimem_pointer(handle, offset, team) }.map(non_null)
        })
    }

    /// Returns the CFT endpoint and offset of element `index` of rank `rank` of a CFT team. NCCL:
    /// `ncclGetCftDeviceLeInfo`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`peer_pointer`](Self::peer_pointer).
    #[doc(alias = "ncclGetCftDeviceLeInfo")]
    pub fn cft_endpoint(&self, team: Team, rank: usize, index: usize) -> Result<LogicalEndpoint> {
        let handle = self.inner.handle()?;
        let number = i32::try_from(rank).ok().filter(|rank| *rank < team.n_ranks);
        let number = number.ok_or_else(|| Error::invalid("the rank is not in the CFT team"))?;
        let world_rank = self.inner.communicator.rank_to_world(team, rank)?;
        let offset = self.offset_on(world_rank, index)?;
        let start = self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.cft_endpoint(handle, 0, number, team) }.map(LogicalEndpoint::from)
        })?;
        Ok(start.at(offset))
    }

    /// Returns the CFT endpoint and offset of element `index` of rank `peer`. NCCL:
    /// `ncclGetPeerDeviceLeInfo`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`peer_pointer`](Self::peer_pointer).
    #[doc(alias = "ncclGetPeerDeviceLeInfo")]
    pub fn peer_endpoint(&self, peer: usize, index: usize) -> Result<LogicalEndpoint> {
        let (handle, offset) = (self.inner.handle()?, self.offset_on(peer, index)?);
        let peer = self.inner.communicator.peer(peer)?;
        let start = self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.peer_endpoint(handle, 0, peer) }.map(LogicalEndpoint::from)
        })?;
        Ok(start.at(offset))
    }

    /// Returns the CFT endpoint and offset of element `index` for all ranks of the multicast group.
    /// NCCL: `ncclGetMultimemDeviceLeInfo`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`peer_pointer`](Self::peer_pointer).
    #[doc(alias = "ncclGetMultimemDeviceLeInfo")]
    pub fn multimem_endpoint(&self, index: usize) -> Result<LogicalEndpoint> {
        let (handle, offset) = (self.inner.handle()?, self.offset(index)?);
        self.inner.communicator.with_comm(|nccl, _| {
            // SAFETY: the window is live.
            unsafe { nccl.multimem_endpoint(handle, offset) }.map(Into::into)
        })
    }

    /// Returns the offset of element `index` in bytes.
    fn offset(&self, index: usize) -> Result<usize> {
        if index >= self.len {
            let len = self.len;
            return Err(Error::invalid(format!("element {index} of a window of length {len}")));
        }
        Ok(index * size_of::<T>())
    }

    /// Returns the offset of element `index` in rank `rank`'s memory, in bytes. If that rank's
    /// length is not known, this rank's is the limit. NCCL is asked for the address of that
    /// memory's start, because it limits offsets by this rank's size.
    fn offset_on(&self, rank: usize, index: usize) -> Result<u64> {
        let len = self.len_of(rank).unwrap_or(self.len);
        if index >= len {
            return Err(Error::invalid(format!(
                "element {index} of a window of length {len} on rank {rank}"
            )));
        }
        Ok((index * size_of::<T>()) as u64)
    }
}

fn non_null(address: u64) -> Option<u64> {
    (address != 0).then_some(address)
}
