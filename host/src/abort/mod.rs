//! Ending kernels that are stuck.
//!
//! A kernel that waits for a rank that never comes keeps its GPU busy. So every wait of `nccl_device` looks at a flag now and
//! then, which the host raises: each device communicator has one, in memory that the GPU reaches. A kernel whose wait sees
//! it notes what it waited for, and leaves. Nothing can be done with that device communicator afterwards but to close it,
//! for its barriers may stand anywhere.
//!
//! The memory goes back to the rank's context when the device communicator is closed, which is when the streams are at rest,
//! and is used again. It is freed with the context: freeing such memory may wait for every GPU.

mod stuck;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

pub use self::stuck::StuckWait;
pub(crate) use self::stuck::report;
use crate::communicator::handle::Handle;
use crate::launch::LaunchRefusal;
use crate::machine::Machine;
use crate::sys::cuda::abort_block::SharedBlock;
use crate::{Context, Error, Result};

/// Who ended the kernels of a device communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AbortCause {
    /// The program, by [`DevCommResource::abort`](crate::DevCommResource::abort) or from another thread.
    Request,
    /// A wait with a deadline: [`Stream::synchronize_within`](crate::Stream::synchronize_within).
    Deadline {
        /// How long it had waited.
        waited: Duration,
    },
    /// The end of the communicator, by [`Communicator::abort`](crate::Communicator::abort) or because NCCL reported an error.
    CommunicatorAborted,
    /// The loss of another rank.
    RankLost {
        /// The rank.
        rank: usize,
    },
}

impl fmt::Display for AbortCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request => f.write_str("the program asked for it"),
            Self::Deadline { waited } => {
                write!(f, "they had not ended after {:.1} s", waited.as_secs_f64())
            }
            Self::CommunicatorAborted => f.write_str("their communicator was aborted"),
            Self::RankLost { rank } => write!(f, "rank {rank} is lost"),
        }
    }
}

/// One device communicator's flag, as all who raise it and all who wait for its kernels share it.
pub(crate) struct Alarm {
    machine: Machine,
    rank: usize,
    /// The device communicator's communicator.
    communicator: Weak<Handle>,
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

impl Alarm {
    /// For a device communicator of that communicator, which kernels on this context's GPU will use.
    pub(crate) fn new(context: &Context, communicator: &Arc<Handle>) -> Result<Arc<Self>> {
        let (machine, block) = (context.machine().clone(), context.take_abort_block()?);
        let (device_flag, cause) = (block.device_flag(), OnceLock::new());
        let state = Mutex::new(State::Open(block));
        let (rank, communicator) = (communicator.rank(), Arc::downgrade(communicator));
        Ok(Arc::new(Self { machine, rank, communicator, device_flag, cause, state }))
    }

    /// The communicator, if it is in use: whoever waits for the kernels asks it whether the network has failed.
    pub(crate) fn communicator(&self) -> Option<Arc<Handle>> {
        self.communicator.upgrade().filter(|handle| handle.is_live())
    }

    /// The GPU's address of the flag.
    pub(crate) fn device_flag(&self) -> u64 {
        self.device_flag
    }

    /// Has the kernels leave. The first cause is the one that is told.
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

    /// What the kernels waited for that have left so far.
    pub(crate) fn stuck(&self) -> Vec<StuckWait> {
        match &*self.state() {
            State::Open(block) => stuck::waits(&block.records()),
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

    /// The device communicator is gone, and the streams are at rest.
    pub(crate) fn close(&self, context: &Context) {
        if let Some(block) = self.detach() {
            context.give_abort_block(block);
        }
    }

    /// Nobody touches the block through this any more.
    fn detach(&self) -> Option<SharedBlock> {
        let mut state = self.state();
        let stuck = match &*state {
            State::Open(block) => stuck::waits(&block.records()),
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
pub(crate) fn error(alarms: &[Arc<Alarm>]) -> Option<Error> {
    let ended = || alarms.iter().filter_map(|alarm| Some((alarm, alarm.cause()?)));
    let (first, cause) = ended().next()?;
    let stuck = ended().flat_map(|(alarm, _)| alarm.stuck()).collect();
    Some(Error::KernelAborted { rank: first.rank, cause, stuck })
}

/// Alarms of several device communicators, in the order in which they were made.
#[derive(Default)]
pub(crate) struct Alarms(Mutex<Vec<Weak<Alarm>>>);

impl Alarms {
    pub(crate) fn add(&self, alarm: &Arc<Alarm>) {
        let mut known = self.known();
        known.retain(|alarm| alarm.strong_count() > 0);
        known.push(Arc::downgrade(alarm));
    }

    pub(crate) fn raise(&self, cause: AbortCause) {
        let known: Vec<_> = self.known().iter().filter_map(Weak::upgrade).collect();
        known.iter().for_each(|alarm| alarm.raise(cause));
    }

    /// The one with its flag there. Memory is used again, and then is the latest one's.
    pub(crate) fn find(&self, device_flag: u64) -> Option<Arc<Alarm>> {
        let known = self.known();
        known.iter().rev().filter_map(Weak::upgrade).find(|alarm| alarm.device_flag == device_flag)
    }

    /// The context with their blocks is about to go, and may take along the memory of those that were not closed.
    pub(crate) fn detach(&self) {
        for alarm in self.known().iter().filter_map(Weak::upgrade) {
            let _left = alarm.detach();
        }
    }

    fn known(&self) -> MutexGuard<'_, Vec<Weak<Alarm>>> {
        self.0.lock()
    }
}

impl fmt::Debug for Alarms {
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
    alarm: Arc<Alarm>,
}

impl KernelAbortHandle {
    pub(crate) fn new(alarm: &Arc<Alarm>) -> Self {
        Self { alarm: Arc::clone(alarm) }
    }

    /// As [`DevCommResource::abort`](crate::DevCommResource::abort).
    pub fn abort(&self) {
        self.alarm.raise(AbortCause::Request);
    }
}

impl fmt::Debug for KernelAbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelAbortHandle(rank {}, {:?})", self.alarm.rank, self.alarm.cause())
    }
}
