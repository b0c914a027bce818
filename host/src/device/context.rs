//! A rank's GPU: its context, its limits, and whether its streams are idle.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use devcomm_types::{DevComm, TensorMap, TensorMapDesc};
use parking_lot::{Mutex, RwLock};

use super::abort::{AbortFlag, AbortFlags};
use super::drops::Postponed;
use super::enqueues::Enqueues;
use super::health::Health;
use super::holds::Holds;
use super::idle::{Failure, Stuck};
use super::issuer::Issuer;
use super::kernels::Modules;
use super::launch::DeviceLimits;
use super::order::Orders;
use super::recorder::Recorder;
use super::stream::{LastHandle, StreamInner};
#[cfg(doc)]
use crate::error::StateError;
use crate::error::{DriverError, Error, NcclError, Result, WorldError};
use crate::machine::Machine;
use crate::sys::cuda::abort_block::SharedBlock;
use crate::sys::cuda::{self, DeviceAttribute, PrimaryContext};

/// How long after an NCCL error the rendezvous may report the lost rank that caused it.
const LOST_RANK_DELAY: Duration = Duration::from_millis(200);

/// A GPU as one rank uses it: the device's primary context.
///
/// Everything made from it (streams, memory, modules, communicators) keeps it alive.
///
/// # Threads
///
/// The context and what is made from it can move to other threads and be used by several at a time:
/// each call makes the CUDA context current on its thread. Calls of NCCL on one communicator are
/// made one after the other. Collective calls must come in one order on all ranks, which the
/// program must ensure if several threads make them. What waits for the rank's streams, such as a
/// copy without a stream or the end of a window, waits for the work of all threads. While a thread
/// captures a stream, other threads of the rank can neither enqueue work nor wait for it: their
/// calls fail with [`StateError::Capturing`].
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

pub(crate) struct ContextInner {
    pub(crate) cuda: PrimaryContext,
    pub(crate) limits: DeviceLimits,
    machine: Machine,
    /// The health of the rank's world; the survivors of a loss have a new world.
    health: RwLock<Arc<Health>>,
    recorder: Arc<Recorder>,
    /// The number of its rank, in a world.
    rank: Mutex<Option<usize>>,
    ordinal: usize,
    /// The streams that may have work.
    streams: Mutex<Vec<Arc<StreamInner>>>,
    stuck: Stuck,
    failure: Failure,
    /// Set when a destructor's wait has failed: later destructors do not wait.
    drop_wait_failed: AtomicBool,
    enqueues: Enqueues,
    /// The default stream, while a handle of it exists.
    default_stream: Mutex<Weak<LastHandle>>,
    /// The abort flags of this context's device communicators.
    flags: AbortFlags,
    /// Abort blocks of closed device communicators, for reuse.
    abort_blocks: Mutex<Vec<SharedBlock>>,
    /// Whether kernels of a program that was built without PTX were to be loaded.
    misses_ptx: AtomicBool,
    /// The kernels that its streams can launch.
    kernels: RwLock<Arc<[Arc<Modules>]>>,
    /// What was dropped, while the rank's function runs.
    postponed: Mutex<Option<Postponed>>,
    orders: Orders,
    holds: Holds,
    /// The communicators of this context, by number.
    issuers: Mutex<Vec<(u64, Weak<dyn Issuer>)>>,
}

impl Context {
    /// Returns the visible GPU with this ordinal. Calls that wait for other ranks have the deadline
    /// of `DEVCOMM_OPERATION_TIMEOUT`, by default 10 minutes and on simulated GPUs none.
    ///
    /// # Errors
    ///
    /// [`DriverError::NoDriver`], [`DriverError::NoGpu`], [`DriverError::TooFewGpus`], or the
    /// driver's error; [`WorldError::Environment`] for an invalid variable.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::on(&Machine::current()?, ordinal)
    }

    /// Does the same as [`new`](Self::new). Calls of its communicators that wait for other ranks
    /// fail with [`StateError::NotReturned`] after `deadline`; with `None` they wait forever.
    ///
    /// # Errors
    ///
    /// The errors are those of [`new`](Self::new).
    pub fn with_deadline(ordinal: usize, deadline: Option<Duration>) -> Result<Self> {
        Self::outside_world(&Machine::current()?, ordinal, deadline)
    }

    /// Returns the GPU of `machine` with this ordinal.
    pub(crate) fn on(machine: &Machine, ordinal: usize) -> Result<Self> {
        Self::outside_world(machine, ordinal, machine.deadline()?)
    }

    /// Returns a context outside of a world.
    fn outside_world(
        machine: &Machine,
        ordinal: usize,
        deadline: Option<Duration>,
    ) -> Result<Self> {
        let recorder = Recorder::new();
        recorder.rename(format!("GPU {ordinal}"));
        Self::of_rank(ordinal, Health::new(machine.clone(), deadline), recorder)
    }

    /// Returns the context of a rank.
    pub(crate) fn of_rank(
        ordinal: usize,
        health: Arc<Health>,
        recorder: Arc<Recorder>,
    ) -> Result<Self> {
        let cuda = PrimaryContext::retain(health.machine(), ordinal)?;
        let limits = limits_of(&cuda)?;
        let (rank, streams, stuck, failure, drop_wait_failed, misses_ptx) = Default::default();
        let (enqueues, default_stream) = Default::default();
        let (flags, abort_blocks, postponed) = Default::default();
        let (orders, holds, issuers) = Default::default();
        let kernels = RwLock::new(Arc::default());
        let inner = ContextInner {
            cuda,
            limits,
            machine: health.machine().clone(),
            health: RwLock::new(health),
            recorder,
            rank,
            ordinal,
            streams,
            stuck,
            failure,
            drop_wait_failed,
            enqueues,
            default_stream,
            flags,
            abort_blocks,
            misses_ptx,
            kernels,
            postponed,
            orders,
            holds,
            issuers,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the device's ordinal among the visible GPUs.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// Returns whether the GPU is simulated. Times measured there tell nothing about GPUs.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.inner.machine.is_simulated()
    }

    /// Returns the device's name, such as `NVIDIA H200`.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn device_name(&self) -> Result<String> {
        self.inner.cuda.device_name()
    }

    /// Returns the limits that launches on this device are checked against.
    #[must_use]
    pub fn limits(&self) -> &DeviceLimits {
        &self.inner.limits
    }

    /// Returns free and total memory in bytes.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.inner.cuda.memory_info()
    }

    pub(super) fn note_missing_ptx(&self) {
        self.inner.misses_ptx.store(true, Ordering::Relaxed);
    }

    /// Returns whether kernels of a program that was built without PTX were to be loaded.
    #[cfg(feature = "simulator")]
    pub(crate) fn misses_ptx(&self) -> bool {
        self.inner.misses_ptx.load(Ordering::Relaxed)
    }

    /// Registers a stream, for which the freeing of memory then waits.
    pub(super) fn register_stream(&self, stream: &Arc<StreamInner>) {
        self.inner.streams.lock().push(Arc::clone(stream));
    }

    /// Forgets a stream that is idle, or that nothing waits for any more.
    pub(super) fn remove_stream(&self, stream: &Arc<StreamInner>) {
        self.inner.streams.lock().retain(|other| !Arc::ptr_eq(other, stream));
        self.forget_stream(stream);
        stream.end();
    }

    /// Returns the tensor map with which TMA copies a matrix, for kernels that take a
    /// `GridConstant<TensorMap>`.
    ///
    /// The matrix itself is not read, and must be allocated when the kernel runs. CUDA:
    /// `cuTensorMapEncodeTiled`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for numbers that [`TensorMapDesc`] does not allow; the driver's
    /// error on a GPU without TMA.
    pub fn tensor_map(&self, tiling: &TensorMapDesc) -> Result<TensorMap> {
        let TensorMapDesc { address, rows, columns, tile_rows, .. } = *tiling;
        let unit = tiling.chunk();
        if address == 0 || !address.is_multiple_of(16) {
            return Err(Error::invalid(format!(
                "a tensor map's matrix must be aligned to 16 bytes: it is at {address:#x}"
            )));
        }
        if rows == 0 || columns == 0 || !columns.is_multiple_of(unit) {
            return Err(Error::invalid(format!(
                "a tensor map's matrix needs rows with a multiple of {unit} elements: it is {rows} \
                 x {columns}"
            )));
        }
        if !(1..=256).contains(&tile_rows) {
            return Err(Error::invalid(format!("a tile has 1 to 256 rows, not {tile_rows}")));
        }
        self.cuda().tensor_map(tiling)
    }

    /// Returns whether both are clones of one `Context`. Contexts created separately for one GPU do
    /// not track each other's streams.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn cuda(&self) -> &PrimaryContext {
        &self.inner.cuda
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    pub(super) fn world_health(&self) -> &RwLock<Arc<Health>> {
        &self.inner.health
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.inner.machine
    }

    /// Goes on after a loss: from now on the health is that of the survivors' world. Waits until
    /// the streams are idle, and forgets what was aborted in them.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`] if the GPU stays busy.
    pub(crate) fn enter_world(&self, health: &Arc<Health>, rank: usize) -> Result<()> {
        *self.inner.health.write() = Arc::clone(health);
        self.set_rank(rank);
        self.drain_aborted()?;
        let all = u64::MAX;
        self.streams().iter().for_each(|stream| stream.forget_operations(all));
        Ok(())
    }

    /// Returns the number of its rank; `None` outside of a world.
    pub(super) fn rank(&self) -> Option<usize> {
        *self.inner.rank.lock()
    }

    /// Makes it the context of the rank with this number.
    pub(crate) fn set_rank(&self, rank: usize) {
        *self.inner.rank.lock() = Some(rank);
    }

    pub(super) fn stuck(&self) -> &Stuck {
        &self.inner.stuck
    }

    pub(super) fn failure(&self) -> &Failure {
        &self.inner.failure
    }

    pub(super) fn postponed(&self) -> &Mutex<Option<Postponed>> {
        &self.inner.postponed
    }

    pub(super) fn drop_wait_failed(&self) -> &AtomicBool {
        &self.inner.drop_wait_failed
    }

    pub(super) fn kernels(&self) -> &RwLock<Arc<[Arc<Modules>]>> {
        &self.inner.kernels
    }

    pub(super) fn orders(&self) -> &Orders {
        &self.inner.orders
    }

    pub(super) fn holds(&self) -> &Holds {
        &self.inner.holds
    }

    /// Registers a communicator under the number by which arguments of kernels name it.
    pub(crate) fn add_issuer(&self, number: u64, issuer: &Arc<dyn Issuer>) {
        let mut issuers = self.inner.issuers.lock();
        issuers.retain(|(_, issuer)| issuer.strong_count() > 0);
        issuers.push((number, Arc::downgrade(issuer)));
    }

    pub(super) fn issuer(&self, number: u64) -> Option<Arc<dyn Issuer>> {
        let issuers = self.inner.issuers.lock();
        issuers.iter().find(|(known, _)| *known == number).and_then(|(_, issuer)| issuer.upgrade())
    }

    pub(super) fn known_default_stream(&self) -> &Mutex<Weak<LastHandle>> {
        &self.inner.default_stream
    }

    pub(super) fn enqueues(&self) -> &Enqueues {
        &self.inner.enqueues
    }

    /// Returns the abort flag of a device communicator of this context.
    pub(crate) fn flag_of(&self, dev_comm: &DevComm) -> Option<Arc<AbortFlag>> {
        self.inner.flags.find(dev_comm.abort_flag.addr() as u64)
    }

    /// Returns the abort flags of kernels that may still run.
    pub(crate) fn running(&self) -> Vec<Arc<AbortFlag>> {
        self.streams().iter().flat_map(|stream| stream.running()).collect()
    }

    /// Fails when an operation in any stream of this context has failed, or the network that the
    /// streams' kernels use.
    pub(crate) fn check_async_errors(&self) -> Result<()> {
        self.streams().iter().try_for_each(|stream| stream.check_async_errors())
    }

    /// Returns the cause in place of an NCCL error, if it is known: the driver's error when a
    /// kernel has failed, or [`WorldError::RankLost`] if a rank is found to be lost soon after.
    pub(crate) fn prefer_cause(&self, error: Error) -> Error {
        if !matches!(error, Error::Nccl(NcclError::Failed { .. })) {
            return error;
        }
        if let Some(failed) = self.streams().iter().find_map(|stream| stream.failure()) {
            return failed;
        }
        match self.poll(Some(LOST_RANK_DELAY), || Ok(false)) {
            Err(lost @ Error::World(WorldError::RankLost { .. })) => lost,
            _ => error,
        }
    }

    /// Returns the abort flag of a new device communicator of `communicator`.
    pub(crate) fn new_abort_flag(&self, communicator: &Arc<dyn Issuer>) -> Result<Arc<AbortFlag>> {
        let free = self.inner.abort_blocks.lock().pop();
        let block = match free {
            Some(mut block) => {
                block.clear();
                block
            }
            None => self.cuda().alloc_abort_block()?,
        };
        let flag = AbortFlag::new(self.machine().clone(), block, communicator);
        self.inner.flags.add(&flag);
        Ok(flag)
    }

    /// Takes back the block of a closed device communicator. The streams are idle.
    pub(crate) fn close_abort_flag(&self, flag: &AbortFlag) {
        self.inner.abort_blocks.lock().extend(flag.detach());
    }

    pub(super) fn streams(&self) -> Vec<Arc<StreamInner>> {
        self.inner.streams.lock().clone()
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        self.flags.detach();
        let failed = self.failure.has_happened() || self.stuck.waited().is_some();
        if failed || self.health.read().is_lost() || self.cuda.is_forked() {
            return;
        }
        let _ = self.cuda.bind();
        for modules in self.kernels.get_mut().iter() {
            // SAFETY: all streams were dropped after their work was done; the context is current.
            unsafe { modules.unload() };
        }
        for block in std::mem::take(self.abort_blocks.get_mut()) {
            // SAFETY: a block is put here after its last kernel has ended; the context is current.
            if let Err(error) = unsafe { block.free() } {
                tracing::warn!("{error}");
            }
        }
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
        max_threads_per_multiprocessor: get(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        registers_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK)?,
        shared_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
        shared_per_block_optin: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

/// Returns how many GPUs the driver shows to this process.
///
/// # Errors
///
/// [`DriverError::NoDriver`], [`DriverError::TooOld`] or [`DriverError::NoGpu`].
pub fn visible_gpus() -> Result<usize> {
    gpus_of(&Machine::current()?)
}

/// Returns how many GPUs a machine has.
pub(crate) fn gpus_of(machine: &Machine) -> Result<usize> {
    let _entered = machine.enter_if_outside();
    match cuda::device_count(machine)? {
        0 => Err(DriverError::NoGpu.into()),
        count => Ok(count),
    }
}
