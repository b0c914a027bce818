//! Aborting kernels that wait for a rank that never comes.
//!
//! A kernel that waits for a rank that never comes keeps its GPU busy. So every wait of
//! `nccl_device` looks at a flag now and then, which the host raises: each device communicator has
//! one, in memory that the GPU reaches. A kernel whose wait sees it notes what it waited for, and
//! exits. Nothing can be done with that device communicator afterwards but to close it, for its
//! barriers are in an unknown state.
//!
//! The memory goes back to the rank's context when the device communicator is closed, which is when
//! the streams are idle, and is used again. It is freed with the context: freeing such memory
//! may wait for every GPU.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::issuer::Issuer;
use crate::error::{AbortCause, Error, LaunchError, LaunchRefusal, StuckWait, waits};
use crate::machine::Machine;
use crate::sys::cuda::abort_block::SharedBlock;

/// One device communicator's flag, as all who raise it and all who wait for its kernels share it.
pub(crate) struct AbortFlag {
    machine: Machine,
    rank: usize,
    /// The device communicator's communicator.
    communicator: Weak<dyn Issuer>,
    /// Where kernels find the flag.
    device_flag: u64,
    cause: OnceLock<AbortCause>,
    state: Mutex<State>,
}

enum State {
    Open(SharedBlock),
    /// What the block held at the end.
    Closed(Vec<StuckWait>),
}

impl AbortFlag {
    /// For a device communicator of that communicator, in a block that kernels on its GPU see.
    pub(super) fn new(
        machine: Machine,
        block: SharedBlock,
        communicator: &Arc<dyn Issuer>,
    ) -> Arc<Self> {
        let (device_flag, cause) = (block.device_flag(), OnceLock::new());
        let state = Mutex::new(State::Open(block));
        let (rank, communicator) = (communicator.rank(), Arc::downgrade(communicator));
        Arc::new(Self { machine, rank, communicator, device_flag, cause, state })
    }

    /// The communicator, if it is in use: a wait for the kernels asks it whether the network
    /// has failed.
    pub(crate) fn communicator(&self) -> Option<Arc<dyn Issuer>> {
        self.communicator.upgrade().filter(|communicator| communicator.is_live())
    }

    /// The GPU's address of the flag.
    pub(crate) fn device_flag(&self) -> u64 {
        self.device_flag
    }

    /// Asks the kernels to exit. The first cause is the one that is reported.
    pub(crate) fn raise(&self, cause: AbortCause) {
        let _ = self.cause.set(cause);
        if let State::Open(block) = &*self.state() {
            block.raise();
        }
        self.machine.notify();
    }

    pub(crate) fn cause(&self) -> Option<AbortCause> {
        self.cause.get().copied()
    }

    /// What the kernels that have exited so far waited for.
    pub(crate) fn stuck(&self) -> Vec<StuckWait> {
        match &*self.state() {
            State::Open(block) => waits(&block.records()),
            State::Closed(waits) => waits.clone(),
        }
    }

    /// Why no kernel can be launched with the device communicator.
    pub(crate) fn refusal(&self) -> Option<LaunchRefusal> {
        if let Some(cause) = self.cause() {
            return Some(LaunchRefusal::Aborted { rank: self.rank, cause });
        }
        let closed = matches!(*self.state(), State::Closed(_));
        closed.then_some(LaunchRefusal::Closed { what: "the device communicator" })
    }

    /// Takes the block away: it is not touched through this any more.
    pub(super) fn detach(&self) -> Option<SharedBlock> {
        let mut state = self.state();
        let stuck = match &*state {
            State::Open(block) => waits(&block.records()),
            State::Closed(_) => return None,
        };
        match std::mem::replace(&mut *state, State::Closed(stuck)) {
            State::Open(block) => Some(block),
            State::Closed(_) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The error of who waits for kernels of these device communicators, if they were ended.
pub(crate) fn error(flags: &[Arc<AbortFlag>]) -> Option<Error> {
    let ended = || flags.iter().filter_map(|flag| Some((flag, flag.cause()?)));
    let (first, cause) = ended().next()?;
    let stuck = ended().flat_map(|(flag, _)| flag.stuck()).collect();
    Some(Error::Launch(LaunchError::KernelAborted { rank: first.rank, cause, stuck }))
}

/// Those of several device communicators, in the order in which they were made.
#[derive(Default)]
pub(crate) struct AbortFlags(Mutex<Vec<Weak<AbortFlag>>>);

impl AbortFlags {
    pub(crate) fn add(&self, flag: &Arc<AbortFlag>) {
        let mut known = self.known();
        known.retain(|flag| flag.strong_count() > 0);
        known.push(Arc::downgrade(flag));
    }

    pub(crate) fn raise(&self, cause: AbortCause) {
        let known: Vec<_> = self.known().iter().filter_map(Weak::upgrade).collect();
        known.iter().for_each(|flag| flag.raise(cause));
    }

    /// The one with its flag there. Memory is used again, and then is the latest one's.
    pub(crate) fn find(&self, device_flag: u64) -> Option<Arc<AbortFlag>> {
        let known = self.known();
        known.iter().rev().filter_map(Weak::upgrade).find(|flag| flag.device_flag == device_flag)
    }

    /// The context with their blocks is about to go, and may take along the memory of those that
    /// were not closed.
    pub(crate) fn detach(&self) {
        for flag in self.known().iter().filter_map(Weak::upgrade) {
            let _left = flag.detach();
        }
    }

    fn known(&self) -> MutexGuard<'_, Vec<Weak<AbortFlag>>> {
        self.0.lock()
    }
}

impl fmt::Debug for AbortFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.known().iter().map(Weak::as_ptr)).finish()
    }
}

/// Ends the kernels of one device communicator from any thread.
///
/// ```no_run
/// # use std::time::Duration;
/// # use devcomm_host::{DevCommResource, Result, Stream};
/// # fn work(dev: &DevCommResource, stream: &Stream) -> Result<()> {
/// let watchdog = dev.abort_handle();
/// std::thread::spawn(move || {
///     std::thread::sleep(Duration::from_secs(60));
///     watchdog.abort();
/// });
/// stream.synchronize() // KernelAborted if the watchdog was faster
/// # }
/// ```
#[derive(Clone)]
pub struct KernelAbortHandle {
    flag: Arc<AbortFlag>,
}

impl KernelAbortHandle {
    pub(crate) fn new(flag: &Arc<AbortFlag>) -> Self {
        Self { flag: Arc::clone(flag) }
    }

    /// As [`DevCommResource::abort`](crate::DevCommResource::abort).
    pub fn abort(&self) {
        self.flag.raise(AbortCause::Request);
    }
}

impl fmt::Debug for KernelAbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelAbortHandle(rank {}, {:?})", self.flag.rank, self.flag.cause())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_aborts_is_for_any_thread() {
        fn is_for_any_thread<T: Clone + Send + Sync + 'static>() {}
        is_for_any_thread::<KernelAbortHandle>();
    }
}
