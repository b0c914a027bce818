//! Aborting kernels that would otherwise wait forever for another rank.
//!
//! Each device communicator has an abort flag in pinned memory, which the host sets and the GPU
//! reads. Every wait of `nccl_device` polls the flag from time to time. A wait that finds it set
//! records what it waited for, and the kernel exits; a wait after which the thread goes on records
//! only that it was ended. That device communicator can then only be closed, because its barriers
//! are in an unknown state.
//!
//! The flag and the records are one block of memory. When the device communicator is closed, with
//! idle streams, the block goes back to the rank's context for reuse. Blocks are freed only with
//! the context, because `cuMemFreeHost` may wait for every GPU.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::issuer::Issuer;
use crate::error::{AbortCause, Error, LaunchError, LaunchRefusal, StuckWait, waits};
use crate::machine::Machine;
use crate::sys::cuda::abort_block::SharedBlock;

/// The abort flag of one device communicator, shared by all that raise it or wait for its kernels.
pub(crate) struct AbortFlag {
    machine: Machine,
    rank: usize,
    /// The communicator that the device communicator belongs to.
    communicator: Weak<dyn Issuer>,
    /// The device address of the flag.
    device_flag: u64,
    cause: OnceLock<AbortCause>,
    state: Mutex<State>,
}

enum State {
    Open(SharedBlock),
    /// The waits that the block had recorded when it was taken away, and whether an abort has ended
    /// waits without a record.
    Closed(Vec<StuckWait>, bool),
}

impl AbortFlag {
    /// Returns the flag of a new device communicator of `communicator`, in `block`.
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

    /// Returns the communicator, if it is live. A wait for the kernels polls it for network errors.
    pub(crate) fn communicator(&self) -> Option<Arc<dyn Issuer>> {
        self.communicator.upgrade().filter(|communicator| communicator.is_live())
    }

    /// Returns the device address of the flag.
    pub(crate) fn device_flag(&self) -> u64 {
        self.device_flag
    }

    /// Asks the kernels to exit. Errors report the first cause.
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

    /// Returns the waits that kernels have recorded so far.
    pub(crate) fn stuck(&self) -> Vec<StuckWait> {
        match &*self.state() {
            State::Open(block) => waits(&block.records()),
            State::Closed(waits, _) => waits.clone(),
        }
    }

    /// Returns whether an abort has ended kernels while they waited for other ranks. They may have
    /// signalled their own arrival, so that other ranks still access this rank's memory.
    fn has_ended_waits(&self) -> bool {
        let has_continued = match &*self.state() {
            State::Open(block) => block.has_continued(),
            State::Closed(_, has_continued) => *has_continued,
        };
        self.cause().is_some() && (has_continued || !self.stuck().is_empty())
    }

    /// Returns why kernels cannot be launched with the device communicator, if it was aborted or
    /// closed.
    pub(crate) fn refusal(&self) -> Option<LaunchRefusal> {
        if let Some(cause) = self.cause() {
            return Some(LaunchRefusal::Aborted { rank: self.rank, cause });
        }
        let closed = matches!(*self.state(), State::Closed(..));
        closed.then_some(LaunchRefusal::Closed { what: "the device communicator" })
    }

    /// Takes the block, if it was not taken yet, and keeps the waits that it has recorded.
    pub(super) fn detach(&self) -> Option<SharedBlock> {
        let mut state = self.state();
        let closed = match &*state {
            State::Open(block) => State::Closed(waits(&block.records()), block.has_continued()),
            State::Closed(..) => return None,
        };
        match std::mem::replace(&mut *state, closed) {
            State::Open(block) => Some(block),
            State::Closed(..) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Returns the error of a wait for kernels of these device communicators, if any of them was
/// aborted, with the `objects` that had operations in progress.
pub(crate) fn error(flags: &[Arc<AbortFlag>], objects: Vec<String>) -> Option<Error> {
    let aborted = || flags.iter().filter_map(|flag| Some((flag, flag.cause()?)));
    let (first, cause) = aborted().next()?;
    let stuck = aborted().flat_map(|(flag, _)| flag.stuck()).collect();
    Some(LaunchError::KernelAborted { rank: first.rank, cause, stuck, objects }.into())
}

/// The abort flags of several device communicators, in the order of their creation.
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

    /// Returns whether an abort has ended a wait of a kernel.
    pub(crate) fn have_ended_waits(&self) -> bool {
        let known: Vec<_> = self.known().iter().filter_map(Weak::upgrade).collect();
        known.iter().any(|flag| flag.has_ended_waits())
    }

    /// Returns the flag at this device address. Blocks are reused: the latest flag is the one in
    /// use.
    pub(crate) fn find(&self, device_flag: u64) -> Option<Arc<AbortFlag>> {
        let known = self.known();
        known.iter().rev().filter_map(Weak::upgrade).find(|flag| flag.device_flag == device_flag)
    }

    /// Takes the blocks of memory away from the flags that are still open, before their context is
    /// destroyed: that may free the memory.
    pub(crate) fn detach(&self) {
        for flag in self.known().iter().filter_map(Weak::upgrade) {
            let _leaked = flag.detach();
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

/// Aborts the kernels of one device communicator from any thread.
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
/// stream.synchronize() // KernelAborted if the kernels run for 60 s
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

    /// Does the same as [`DevCommResource::abort`](crate::DevCommResource::abort).
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
    fn abort_handles_are_for_any_thread() {
        fn assert_send_and_sync<T: Clone + Send + Sync + 'static>() {}
        assert_send_and_sync::<KernelAbortHandle>();
    }
}
