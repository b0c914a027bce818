//! Whether a rank of the job is lost (dead or unreachable), and what is aborted when one is.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::abort::{AbortFlag, AbortFlags};
use super::context::Context;
use super::issuer::Issuer;
use crate::error::{AbortCause, Result, WorldError};
use crate::machine::{Machine, Wakes};
use crate::sys::fork::Process;

/// How long running NCCL calls may take to return after a rank is lost, before they are aborted.
const LOST_RANK_GRACE: Duration = Duration::from_secs(2);

/// Whether a rank is lost. Shared by everything that waits for other ranks.
#[derive(Debug)]
pub(crate) struct Health {
    machine: Machine,
    process: Process,
    /// How long a call may wait for the other ranks.
    deadline: Option<Duration>,
    lost: OnceLock<(usize, String)>,
    /// The communicators of this process.
    communicators: Mutex<Vec<Weak<dyn Issuer>>>,
    /// The abort flags of their device communicators.
    flags: AbortFlags,
}

impl Health {
    pub(crate) fn new(machine: Machine, deadline: Option<Duration>) -> Arc<Self> {
        let (lost, communicators, flags) = Default::default();
        let process = Process::current();
        Arc::new(Self { machine, process, deadline, lost, communicators, flags })
    }

    /// Returns how long a call may wait for the other ranks: exchanges on the host, and calls that
    /// create or end something on all ranks. `None`: forever.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// Returns the machine that this process's ranks run on: GPUs or the simulator.
    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Fails once a rank is lost, naming the first one, and in a forked child.
    pub(crate) fn check(&self) -> Result<()> {
        self.process.require()?;
        match self.lost.get() {
            None => Ok(()),
            Some((rank, why)) => Err(WorldError::RankLost { rank: *rank, why: why.clone() }.into()),
        }
    }

    /// Returns whether a rank is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    pub(crate) fn lost_rank(&self) -> Option<usize> {
        self.lost.get().map(|(rank, _)| *rank)
    }

    /// Records the first lost rank, and ignores later ones. Asks kernels to exit, and aborts the
    /// communicators after [`LOST_RANK_GRACE`].
    pub(crate) fn mark_lost(&self, rank: usize, why: &str) {
        if self.lost.set((rank, why.to_owned())).is_err() {
            return;
        }
        // Kernels first: `ncclCommAbort` waits for them.
        self.flags.raise(AbortCause::RankLost { rank });
        self.machine.notify();
        let known = self.communicators.lock().clone();
        if known.iter().all(|handle| handle.strong_count() == 0) {
            return;
        }
        let machine = self.machine.clone();
        let abort_all = move || {
            machine.sleep(LOST_RANK_GRACE);
            known.iter().filter_map(Weak::upgrade).for_each(<dyn Issuer>::start_abort);
            Ok(())
        };
        if let Err(error) = self.machine.spawn("devcomm-release", abort_all) {
            tracing::warn!("the communicators with a lost rank cannot be aborted: {error}");
        }
    }

    /// Starts to abort the communicators of this process.
    pub(crate) fn start_aborts(&self) {
        let known = self.communicators.lock().clone();
        known.iter().filter_map(Weak::upgrade).for_each(<dyn Issuer>::start_abort);
    }

    /// Registers a communicator to be aborted when a rank is lost.
    pub(crate) fn abort_on_loss(&self, communicator: Weak<dyn Issuer>) {
        let mut known = self.communicators.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(communicator);
    }

    /// Registers a device communicator, whose kernels are asked to exit when a rank is lost.
    pub(crate) fn register_flag(&self, flag: &Arc<AbortFlag>) {
        self.flags.add(flag);
        if let Some(rank) = self.lost_rank() {
            flag.raise(AbortCause::RankLost { rank });
        }
    }
}

impl Context {
    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.world_health().read())
    }

    /// Fails once a rank is lost, naming the first one, and in a forked child.
    pub(crate) fn check_health(&self) -> Result<()> {
        // This does not clone the `Arc`, whose counter the ranks of a process share.
        self.world_health().read().check()
    }

    /// Returns whether a rank is lost.
    pub(crate) fn is_rank_lost(&self) -> bool {
        self.world_health().read().is_lost()
    }

    /// Returns how long a call may wait for the other ranks. `None`: forever.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.world_health().read().deadline()
    }

    /// Polls `done` until it is true or fails, a rank is lost, or `limit` has passed.
    pub(crate) fn poll(
        &self,
        limit: Option<Duration>,
        mut done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        self.machine().poll(Wakes::Anything, limit, || match done()? {
            true => Ok(true),
            false => self.check_health().map(|()| false),
        })
    }
}
