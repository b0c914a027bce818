//! Registered memory regions.
//!
//! NCCL registers in the same order on every rank, so a region's number identifies it on all ranks
//! without communication. The number plus one is the handle that NCCL and kernels use.

use std::ffi::c_int;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use crate::abi::{MR_SIGNAL_NEVER_RESET, Opaque, PTR_CUDA, PTR_HOST};
use crate::driver::{Address, Device};
use crate::error::{Error, Result};
use crate::peer_mapping::PeerMapping;
use crate::remote::RemoteSignal;
use crate::staging::Staging;
use crate::transfer::{Buffer, Signal, Source};

/// The number of a region, the same on every rank of a connection.
pub(crate) type RegionId = u64;

/// Returns the number of the region with this handle.
pub(crate) fn id_of(handle: Opaque) -> Result<RegionId> {
    (handle as RegionId)
        .checked_sub(1)
        .ok_or_else(|| Error::Argument("a region's handle is null".to_owned()))
}

/// A registered region.
pub(crate) struct Region {
    base: usize,
    bytes: usize,
    on_host: bool,
    /// A copy of each word's value, if only the plugin writes the words; NCCL has zeroed them.
    shadow: Option<Arc<[AtomicU64]>>,
    peer_mapping: Option<PeerMapping>,
}

impl Region {
    /// Returns a region on `owner` or in host memory, for access from the devices `others`.
    pub(crate) fn new(
        base: Opaque,
        bytes: usize,
        memory: c_int,
        flags: u64,
        owner: &Device,
        others: &[c_int],
    ) -> Result<Self> {
        let on_host = match memory {
            PTR_HOST => true,
            PTR_CUDA => false,
            other => {
                return Err(Error::Argument(format!("memory of type {other} is not supported")));
            }
        };
        let never_reset = !on_host && flags & MR_SIGNAL_NEVER_RESET != 0;
        let shadow =
            never_reset.then(|| (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect());
        // Signals are written by their own device's stream and never copied to another device.
        let is_copied = !on_host && !never_reset;
        let peer_mapping =
            is_copied.then(|| PeerMapping::of(owner, base as Address, bytes, others)).flatten();
        Ok(Self { base: base as usize, bytes, on_host, shadow, peer_mapping })
    }

    fn buffer(&self, offset: usize) -> Buffer {
        let address = self.base + offset;
        if self.on_host { Buffer::Host(address as *mut u8) } else { Buffer::Device(address as u64) }
    }

    /// Returns whether other devices access it by a mapping that the plugin made.
    pub(crate) fn is_mapped_here(&self) -> bool {
        self.peer_mapping.as_ref().is_some_and(PeerMapping::is_own_mapping)
    }
}

/// The regions of a rank, in order of registration.
pub(crate) struct Regions {
    rank: usize,
    /// `None` is a deregistered region. Numbers are not reused, so that ranks agree.
    all: RwLock<Vec<Option<Region>>>,
}

impl Regions {
    pub(crate) fn new(rank: usize) -> Self {
        Self { rank, all: RwLock::new(Vec::new()) }
    }

    /// Adds a region and returns its handle.
    pub(crate) fn add(&self, region: Region) -> Opaque {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.push(Some(region));
        all.len() as Opaque
    }

    /// Removes a region. Its memory is not touched: it may already be freed.
    pub(crate) fn remove(&self, handle: Opaque) -> Result<Region> {
        let id = id_of(handle)?;
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let region = all.get_mut(id as usize).and_then(Option::take);
        region.ok_or_else(|| Error::Argument(format!("region {id} is not registered")))
    }

    /// Removes all regions.
    pub(crate) fn clear(&self) -> Vec<Region> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.iter_mut().filter_map(Option::take).collect()
    }

    /// Calls `body` with region `id` and the offset, if `bytes` bytes there are in the region.
    fn with<T>(
        &self,
        id: RegionId,
        offset: u64,
        bytes: usize,
        body: impl FnOnce(&Region, usize) -> Result<T>,
    ) -> Result<T> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let region = all.get(id as usize).and_then(Option::as_ref).ok_or_else(|| {
            Error::Argument(format!("region {id} is not registered on rank {}", self.rank))
        })?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset > region.bytes || bytes > region.bytes - offset {
            return Err(Error::Argument(format!(
                "{bytes} bytes at {offset} exceed region {id} of rank {}, which has {}",
                self.rank, region.bytes
            )));
        }
        body(region, offset)
    }

    /// Returns a range of a region.
    pub(crate) fn range(&self, id: RegionId, offset: u64, bytes: usize) -> Result<Buffer> {
        self.with(id, offset, bytes, |region, offset| Ok(region.buffer(offset)))
    }

    /// Returns a range of a region as the source of a copy to device `target`. `staging` belongs to
    /// the region's rank.
    pub(crate) fn source(
        &self,
        id: RegionId,
        offset: u64,
        bytes: usize,
        staging: &Arc<Staging>,
        target: c_int,
    ) -> Result<Source> {
        self.with(id, offset, bytes, |region, offset| {
            let mapped = if target == staging.stream.device.number {
                Some((region.base + offset) as Address)
            } else {
                region
                    .peer_mapping
                    .as_ref()
                    .and_then(|peer_mapping| peer_mapping.address(target, offset))
            };
            Ok(Source::of(region.buffer(offset), mapped, staging))
        })
    }

    /// Returns a signal to a word of a region, if requested.
    pub(crate) fn signal_of(&self, signal: Option<RemoteSignal>) -> Result<Option<Signal>> {
        let Some(RemoteSignal { region: id, offset, add }) = signal else { return Ok(None) };
        self.with(id, offset, 8, |region, offset| {
            if !(region.base + offset).is_multiple_of(8) {
                return Err(Error::Argument(format!(
                    "a signal at offset {offset} of region {id} is not aligned to 8 bytes"
                )));
            }
            let shadow = region.shadow.as_ref().map(|shadow| (Arc::clone(shadow), offset / 8));
            Ok(Some(Signal { buffer: region.buffer(offset), add, shadow }))
        })
    }
}
