//! A connection: its ranks in this process, and its first error.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crate::driver::Device;
use crate::error::{Error, Result};
use crate::inbound::InboundQueue;
use crate::region::Regions;
use crate::setup::Setup;
use crate::staging::Staging;

/// A rank of this process.
pub(crate) struct LocalRank {
    pub(crate) inbound: InboundQueue,
    pub(crate) staging: Arc<Staging>,
    pub(crate) regions: Regions,
    /// Whether the rank has closed, after which a put to it is an error.
    closed: AtomicBool,
}

impl LocalRank {
    /// Returns a rank on this thread's current device.
    pub(crate) fn new(setup: &Setup, rank: usize) -> Result<Self> {
        let device = Device::current(&setup.driver)?;
        let config = setup.config;
        Ok(Self {
            inbound: InboundQueue::new(&device, config)?,
            staging: Arc::new(Staging::new(&device, config.slots, config.slot_bytes)?),
            regions: Regions::new(rank),
            closed: AtomicBool::new(false),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.staging.stream.device
    }

    /// Marks the rank's side closed.
    pub(crate) fn mark_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Identifies a connection on all its ranks: the endpoint of rank 0, which belongs to one
/// connection only.
pub(crate) type Key = (u64, u64);

/// A connection: its ranks in this process. An error of one of them fails all.
pub(crate) struct Connection {
    locals: Vec<OnceLock<Arc<LocalRank>>>,
    /// Number of local ranks that have joined.
    joined: Mutex<usize>,
    changed: Condvar,
    fault: OnceLock<Error>,
}

static CONNECTIONS: Mutex<Option<HashMap<Key, Weak<Connection>>>> = Mutex::new(None);

impl Connection {
    /// Returns the connection with this key, created by the first rank.
    pub(crate) fn of(key: Key, ranks: usize) -> Result<Arc<Self>> {
        let mut connections = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = connections.get_or_insert_default();
        connections.retain(|_, connection| connection.strong_count() > 0);
        if let Some(connection) = connections.get(&key).and_then(Weak::upgrade) {
            if connection.locals.len() != ranks {
                return Err(Error::Argument(format!(
                    "ranks disagree on the number of ranks: {ranks} or {}",
                    connection.locals.len()
                )));
            }
            return Ok(connection);
        }
        let connection = Arc::new(Self {
            locals: (0..ranks).map(|_| OnceLock::new()).collect(),
            joined: Mutex::new(0),
            changed: Condvar::new(),
            fault: OnceLock::new(),
        });
        connections.insert(key, Arc::downgrade(&connection));
        Ok(connection)
    }

    /// Adds a local rank.
    pub(crate) fn join(&self, rank: usize, local: Arc<LocalRank>) -> Result<()> {
        let slot = self.locals.get(rank);
        if slot.is_none_or(|slot| slot.set(local).is_err()) {
            return Err(Error::Argument(format!("rank {rank} connects twice, or is out of range")));
        }
        *self.joined.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until `ranks` ranks of this process have joined.
    pub(crate) fn wait_for(&self, ranks: usize, deadline: Instant) -> Result<()> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        while *joined < ranks {
            if let Some(fault) = self.fault() {
                return Err(fault.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(format!(
                    "only {joined} of the {ranks} ranks of this process connected in time \
                     (DEVCOMM_GIN_TIMEOUT)"
                )));
            }
            let waited = self.changed.wait_timeout(joined, left);
            joined = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Returns a local rank, if it has joined.
    pub(crate) fn local(&self, rank: usize) -> Option<&Arc<LocalRank>> {
        self.locals.get(rank)?.get()
    }

    /// Returns all local ranks that have joined.
    pub(crate) fn locals(&self) -> impl Iterator<Item = &Arc<LocalRank>> {
        self.locals.iter().filter_map(OnceLock::get)
    }

    /// Returns the first error of any local rank.
    pub(crate) fn fault(&self) -> Option<&Error> {
        self.fault.get()
    }

    /// Records an error, and returns the first one.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.fault.get_or_init(|| error).clone();
        // `wait_for` checks for an error under this lock, so no waiting thread misses the wakeup.
        drop(self.joined.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
        first
    }
}
