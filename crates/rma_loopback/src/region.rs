//! Registered memory.
//!
//! NCCL registers in the same order on every rank, so a region's number names it on all of them: there is nothing to exchange. The number
//! plus one is also what NCCL holds as the region's handle, and what kernels put into their requests.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use crate::abi::{MR_SIGNAL_NEVER_RESET, Opaque, PTR_CUDA, PTR_HOST};
use crate::error::{Error, Result};
use crate::transfer::{Place, Signal};

/// The number of a region, the same on every rank of a connection.
pub(crate) type RegionId = u64;

/// The region that NCCL means by a handle.
pub(crate) fn id_of(handle: Opaque) -> Result<RegionId> {
    (handle as RegionId)
        .checked_sub(1)
        .ok_or_else(|| Error::Argument("a region's handle is null".to_owned()))
}

#[derive(Clone)]
struct Region {
    base: usize,
    bytes: usize,
    on_host: bool,
    /// What each word is, where only the plugin writes them.
    shadow: Option<Arc<[AtomicU64]>>,
}

/// The regions of a rank, in order of registration.
pub(crate) struct Regions {
    rank: usize,
    /// `None`: deregistered. A number is not used again, or ranks would disagree.
    all: RwLock<Vec<Option<Region>>>,
}

impl Regions {
    pub(crate) fn new(rank: usize) -> Self {
        Self { rank, all: RwLock::new(Vec::new()) }
    }

    /// Adds a region and returns its handle.
    pub(crate) fn add(
        &self,
        base: Opaque,
        bytes: usize,
        memory: i32,
        flags: u64,
    ) -> Result<Opaque> {
        let on_host = match memory {
            PTR_HOST => true,
            PTR_CUDA => false,
            other => {
                return Err(Error::Argument(format!("memory of type {other} is not served")));
            }
        };
        let shadow = (!on_host && flags & MR_SIGNAL_NEVER_RESET != 0)
            .then(|| (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect());
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.push(Some(Region { base: base as usize, bytes, on_host, shadow }));
        Ok(all.len() as Opaque)
    }

    /// Forgets a region. Its memory is not touched: it may be gone.
    pub(crate) fn remove(&self, handle: Opaque) -> Result<()> {
        let id = id_of(handle)?;
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut(id as usize).and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(Error::Argument(format!("region {id} is not registered"))),
        }
    }

    fn find(&self, id: RegionId, offset: u64, bytes: usize) -> Result<(usize, Region)> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let region = all.get(id as usize).and_then(Option::as_ref).ok_or_else(|| {
            Error::Argument(format!("region {id} is not registered on rank {}", self.rank))
        })?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset > region.bytes || bytes > region.bytes - offset {
            return Err(Error::Argument(format!(
                "{bytes} bytes at {offset} reach beyond region {id} of rank {}, which has {}",
                self.rank, region.bytes
            )));
        }
        Ok((offset, region.clone()))
    }

    /// A range of a region.
    pub(crate) fn range(&self, id: RegionId, offset: u64, bytes: usize) -> Result<Place> {
        let (offset, region) = self.find(id, offset, bytes)?;
        Ok(region.place(offset))
    }

    /// The addition of `add` to the word at `offset` of a region.
    pub(crate) fn signal(&self, id: RegionId, offset: u64, add: u64) -> Result<Signal> {
        let (offset, region) = self.find(id, offset, 8)?;
        if !(region.base + offset).is_multiple_of(8) {
            return Err(Error::Argument(format!(
                "a signal at {offset} of region {id} is not a multiple of 8"
            )));
        }
        let place = region.place(offset);
        Ok(Signal { place, add, shadow: region.shadow.map(|shadow| (shadow, offset / 8)) })
    }
}

impl Region {
    fn place(&self, offset: usize) -> Place {
        let address = self.base + offset;
        if self.on_host { Place::Host(address as *mut u8) } else { Place::Device(address as u64) }
    }
}
