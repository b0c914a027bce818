//! A rank's GPU: its context, what it can do, and whether the job around it is still whole.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::launch::DeviceLimits;
use crate::stream::{Event, Stream, StreamInner};
use crate::sys::cuda::{self, DeviceAttribute, PrimaryContext};
use crate::{Error, Result};

/// How long destructors wait for the GPU before they leave things to the end of the process.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// Whether every rank is still there. Shared by everything that might otherwise wait for a dead one.
#[derive(Debug, Default)]
pub(crate) struct Health {
    lost: OnceLock<(usize, String)>,
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

    /// Records a lost rank; only the first one counts.
    pub(crate) fn lose(&self, rank: usize, why: &str) {
        let _ = self.lost.set((rank, why.to_owned()));
    }
}

/// A GPU as one rank uses it: the device's primary context, bound to the rank's thread.
///
/// Everything made from it (streams, memory, modules, communicators) keeps it alive. None of them can leave the thread:
/// NCCL allows one thread at a time a communicator, and a CUDA context is current to a thread.
#[derive(Clone)]
pub struct Context {
    inner: Rc<ContextInner>,
}

pub(crate) struct ContextInner {
    pub(crate) cuda: PrimaryContext,
    pub(crate) limits: DeviceLimits,
    pub(crate) health: Arc<Health>,
    ordinal: usize,
    streams: RefCell<Vec<Weak<StreamInner>>>,
    /// Set when work on the GPU will not end, or has failed for good: nothing may wait for it again.
    stuck: Cell<bool>,
    /// Set when a destructor has waited in vain: the next ones do not wait again.
    impatient: Cell<bool>,
}

impl Context {
    /// The GPU of that ordinal among the visible ones.
    ///
    /// # Errors
    ///
    /// [`Error::NoDriver`], [`Error::NoGpu`], [`Error::TooFewGpus`], or the driver's error.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_health(ordinal, Arc::default())
    }

    pub(crate) fn with_health(ordinal: usize, health: Arc<Health>) -> Result<Self> {
        let cuda = PrimaryContext::retain(ordinal)?;
        let limits = limits_of(&cuda)?;
        let streams = RefCell::default();
        let (stuck, impatient) = Default::default();
        let inner = ContextInner { cuda, limits, health, ordinal, streams, stuck, impatient };
        Ok(Self { inner: Rc::new(inner) })
    }

    /// The device's ordinal among the visible ones.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// The device's name, such as `NVIDIA H200`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn device_name(&self) -> Result<String> {
        self.inner.cuda.device_name()
    }

    /// What a launch on this device is measured against.
    #[must_use]
    pub fn limits(&self) -> &DeviceLimits {
        &self.inner.limits
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.inner.cuda.memory_info()
    }

    /// A new stream. It runs beside every other stream, the default stream included.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream(&self) -> Result<Stream> {
        let stream = Stream::new(self)?;
        let mut streams = self.inner.streams.borrow_mut();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream.downgrade());
        Ok(stream)
    }

    /// A new event for timing.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn event(&self) -> Result<Event> {
        Event::new(self)
    }

    /// Whether both are clones of one. Two contexts of one GPU do not know each other's streams.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn cuda(&self) -> &PrimaryContext {
        &self.inner.cuda
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.inner.health
    }

    /// Notes that the GPU will not come to rest any more.
    pub(crate) fn mark_stuck(&self) {
        self.inner.stuck.set(true);
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.inner.stuck.get()
    }

    /// Waits until all streams of this context are idle.
    ///
    /// # Errors
    ///
    /// A rank is lost while work is left, or the GPU failed or missed a deadline before.
    pub(crate) fn settle(&self) -> Result<()> {
        self.settle_within(None)
    }

    fn settle_within(&self, limit: Option<Duration>) -> Result<()> {
        if self.is_stuck() {
            return Err(Error::DeadlinePassed { waited: Duration::ZERO });
        }
        let start = Instant::now();
        let streams: Vec<_> =
            self.inner.streams.borrow().iter().filter_map(Weak::upgrade).collect();
        streams.iter().try_for_each(|stream| {
            stream.wait(limit.map(|limit| limit.saturating_sub(start.elapsed())))
        })
    }

    /// Whether what the GPU may use can be freed: every stream is idle. Asked by destructors; when it says no, the
    /// memory is left to the end of the process, for freeing it would wait or pull it from under a kernel.
    pub(crate) fn is_settled(&self, what: &str) -> bool {
        match self.settle_within(Some(self.patience())) {
            Ok(()) => true,
            Err(error) => {
                self.inner.impatient.set(true);
                tracing::warn!("{what} is left allocated: {error}");
                false
            }
        }
    }

    /// How long a destructor waits. A function that returns early because of an error drops what it made while its
    /// kernel may wait for ranks that wait for this one: the error must get out all the same.
    pub(crate) fn patience(&self) -> Duration {
        let hurry = self.inner.impatient.get() || std::thread::panicking();
        if hurry { Duration::ZERO } else { DROP_PATIENCE }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context(GPU {})", self.inner.ordinal)
    }
}

fn limits_of(cuda: &PrimaryContext) -> Result<DeviceLimits> {
    use DeviceAttribute as A;
    let get = |attribute| cuda.attribute(attribute);
    Ok(DeviceLimits {
        compute_capability: (
            get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_grid: [
            get(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
            get(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
            get(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
        ],
        max_block: [
            get(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?,
            get(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?,
            get(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?,
        ],
        max_threads_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        registers_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK)?,
        shared_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
        shared_per_block_optin: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

/// How many GPUs the driver shows to this process.
///
/// # Errors
///
/// [`Error::NoDriver`], [`Error::DriverTooOld`] or [`Error::NoGpu`].
pub fn visible_gpus() -> Result<usize> {
    match cuda::device_count()? {
        0 => Err(Error::NoGpu),
        count => Ok(count),
    }
}
