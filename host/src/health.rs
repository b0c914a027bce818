//! Whether the job is still whole, and what happens when it is not.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::abort::{AbortCause, Alarm, Alarms};
use crate::communicator::end::abort_aside;
use crate::communicator::handle::Handle;
use crate::{Error, Result};

/// After a loss, calls that NCCL is in have this long to return by themselves.
const LOSS_PATIENCE: Duration = Duration::from_secs(2);

/// Whether every rank is still there. Shared by everything that might otherwise wait for a dead one.
#[derive(Debug, Default)]
pub(crate) struct Health {
    lost: OnceLock<(usize, String)>,
    /// The communicators of this process.
    communicators: Mutex<Vec<Weak<Handle>>>,
    /// Their device communicators.
    alarms: Alarms,
}

impl Health {
    /// Fails once a rank is lost, naming the first one.
    pub(crate) fn check(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some((rank, why)) => Err(Error::RankLost { rank: *rank, why: why.clone() }),
        }
    }

    /// Whether a rank is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    pub(crate) fn lost_rank(&self) -> Option<usize> {
        self.lost.get().map(|(rank, _)| *rank)
    }

    /// Records a lost rank; only the first one counts. Kernels that wait for it leave, and
    /// whoever is in a call of NCCL that waits for it is released.
    pub(crate) fn lose(&self, rank: usize, why: &str) {
        if self.lost.set((rank, why.to_owned())).is_err() {
            return;
        }
        // Kernels first: NCCL waits for them when it aborts.
        self.alarms.raise(AbortCause::RankLost { rank });
        let known = std::mem::take(&mut *self.communicators());
        if known.iter().all(|handle| handle.strong_count() == 0) {
            return;
        }
        let release = move || {
            std::thread::sleep(LOSS_PATIENCE);
            known.iter().filter_map(Weak::upgrade).for_each(|handle| abort_aside(&handle));
        };
        let spawned = std::thread::Builder::new().name("devcomm-release".to_owned()).spawn(release);
        if let Err(error) = spawned {
            tracing::warn!("a thread to abort with cannot be started: {error}");
        }
    }

    /// Has a communicator aborted when a rank is lost.
    pub(crate) fn guard(&self, handle: &Arc<Handle>) {
        let mut known = self.communicators();
        known.retain(|handle| handle.strong_count() > 0);
        known.push(Arc::downgrade(handle));
    }

    /// Has the kernels of a device communicator leave when a rank is lost.
    pub(crate) fn watch(&self, alarm: &Arc<Alarm>) {
        self.alarms.add(alarm);
        if let Some(rank) = self.lost_rank() {
            alarm.raise(AbortCause::RankLost { rank });
        }
    }

    fn communicators(&self) -> MutexGuard<'_, Vec<Weak<Handle>>> {
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
