//! The ranks of one connection that live in this process, and how they meet.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crate::driver::Device;
use crate::error::{Error, Result};
use crate::lane::Lane;
use crate::region::Regions;
use crate::setup::Setup;
use crate::staging::Staging;

/// A rank of this process.
pub(crate) struct Member {
    pub(crate) lane: Lane,
    pub(crate) staging: Arc<Staging>,
    pub(crate) regions: Regions,
    left: AtomicBool,
}

impl Member {
    /// The rank that is on this thread's current device.
    pub(crate) fn new(setup: &Setup, rank: usize) -> Result<Self> {
        let device = Device::current(&setup.driver)?;
        let config = setup.config;
        Ok(Self {
            lane: Lane::new(&device, config)?,
            staging: Arc::new(Staging::new(&device, config.slots, config.slot_bytes)?),
            regions: Regions::new(rank),
            left: AtomicBool::new(false),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.staging.channel.device
    }

    /// The rank has closed its side.
    pub(crate) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }
}

/// The same for all ranks of a connection: the endpoint of rank 0, which is of one connection only.
pub(crate) type Key = (u64, u64);

/// The ranks of a connection. What fails for one of this process has failed for all of them.
pub(crate) struct Group {
    members: Vec<OnceLock<Arc<Member>>>,
    /// How many members came.
    joined: Mutex<usize>,
    another: Condvar,
    fault: OnceLock<Error>,
}

static GROUPS: Mutex<Option<HashMap<Key, Weak<Group>>>> = Mutex::new(None);

impl Group {
    /// The group of this key, made by whoever comes first.
    pub(crate) fn of(key: Key, ranks: usize) -> Result<Arc<Self>> {
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        let groups = groups.get_or_insert_default();
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(&key).and_then(Weak::upgrade) {
            if group.members.len() != ranks {
                return Err(Error::Argument(format!(
                    "ranks disagree: {ranks} of them, or {}",
                    group.members.len()
                )));
            }
            return Ok(group);
        }
        let group = Arc::new(Self {
            members: (0..ranks).map(|_| OnceLock::new()).collect(),
            joined: Mutex::new(0),
            another: Condvar::new(),
            fault: OnceLock::new(),
        });
        groups.insert(key, Arc::downgrade(&group));
        Ok(group)
    }

    /// Makes a rank known to the others of this process.
    pub(crate) fn join(&self, rank: usize, member: Arc<Member>) -> Result<()> {
        let slot = self.members.get(rank);
        if slot.is_none_or(|slot| slot.set(member).is_err()) {
            return Err(Error::Argument(format!("rank {rank} connects twice, or is out of range")));
        }
        *self.joined.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.another.notify_all();
        Ok(())
    }

    /// Waits until `ranks` of this process have come.
    pub(crate) fn wait_for(&self, ranks: usize, deadline: Instant) -> Result<()> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        while *joined < ranks {
            if let Some(fault) = self.fault() {
                return Err(fault.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(format!(
                    "{joined} of the {ranks} ranks of this process came to connect in time \
                     (DEVCOMM_GIN_TIMEOUT)"
                )));
            }
            let waited = self.another.wait_timeout(joined, left);
            joined = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// A rank of this process that came.
    pub(crate) fn member(&self, rank: usize) -> Option<&Arc<Member>> {
        self.members.get(rank)?.get()
    }

    /// All ranks of this process that came.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter_map(OnceLock::get)
    }

    /// The first thing that failed, for any rank of this process.
    pub(crate) fn fault(&self) -> Option<&Error> {
        self.fault.get()
    }

    /// Records a failure, and returns the first.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.fault.get_or_init(|| error).clone();
        // Whoever has not seen it waits already when this lock is free, and is woken.
        drop(self.joined.lock().unwrap_or_else(PoisonError::into_inner));
        self.another.notify_all();
        first
    }
}
