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

    /// Returns whether both streams are idle; an error if one of their operations has failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        Ok(self.inbound.stream.is_idle()? && self.staging.stream.is_idle()?)
    }

    /// Records whether a wait for idle streams has ended without success, after a failure.
    pub(crate) fn set_stuck(&self, is_stuck: bool) {
        self.inbound.stream.set_stuck(is_stuck);
        self.staging.stream.set_stuck(is_stuck);
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
    fault: Arc<OnceLock<Error>>,
}

/// A connection in the table of this process.
struct Entry {
    connection: Weak<Connection>,
    /// The connection's first error, which outlives it for the ranks that are still to come.
    fault: Arc<OnceLock<Error>>,
    /// The number of local ranks that have not asked for the connection.
    to_come: usize,
}

static CONNECTIONS: Mutex<Option<HashMap<Key, Entry>>> = Mutex::new(None);

impl Connection {
    /// Returns the connection with this key, which the first of the `locals` ranks of this process
    /// creates; an error if one of them has failed.
    pub(crate) fn of(key: Key, ranks: usize, locals: usize) -> Result<Arc<Self>> {
        let mut connections = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = connections.get_or_insert_default();
        connections.retain(|_, entry| {
            let is_awaited = entry.to_come > 0 && entry.fault.get().is_some();
            is_awaited || entry.connection.strong_count() > 0
        });
        if let Some(entry) = connections.get_mut(&key) {
            entry.to_come = entry.to_come.saturating_sub(1);
            if let Some(fault) = entry.fault.get() {
                return Err(fault.clone());
            }
            if let Some(connection) = entry.connection.upgrade() {
                let others = connection.locals.len();
                if others == ranks {
                    return Ok(connection);
                }
                return Err(connection.fail(Error::Argument(format!(
                    "ranks disagree on the number of ranks: {ranks} or {others}"
                ))));
            }
        }
        let fault = Arc::default();
        let connection = Arc::new(Self {
            locals: (0..ranks).map(|_| OnceLock::new()).collect(),
            joined: Mutex::new(0),
            changed: Condvar::new(),
            fault: Arc::clone(&fault),
        });
        let entry = Entry {
            connection: Arc::downgrade(&connection),
            fault,
            to_come: locals.saturating_sub(1),
        };
        connections.insert(key, entry);
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
