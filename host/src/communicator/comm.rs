//! The communicator: its identity, its properties, its state.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytemuck::Pod;
use devcomm_sys::nccl::CommProperties;
use devcomm_types::GinType;
use parking_lot::Mutex;

use super::handle::{Handle, Status};
use super::peers::Peers;
use super::{Library, Properties};
use crate::device::issuer::{Issuer, Owner, Resource};
use crate::device::recorder::Operation;
use crate::device::{Context, Stream};
use crate::error::Result;
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

/// One rank's handle of a communicator, shared by its clones and kept alive by what is created from
/// it: windows, registered buffers, operators, device communicators, graphs.
///
/// Any thread may use it: calls are made one after the other, so one waits while another waits for
/// the other ranks. Every rank must call the methods marked *collective*, in the same order,
/// whichever thread does.
/// [`destroy`](Self::destroy), or dropping the last clone, closes what is created from it and then
/// ends the communicator together with the other ranks, or aborts it if a rank is lost. A drop in
/// the function of a [`Rank`](crate::Rank) takes effect when the function has ended: if it fails,
/// the other ranks get its error, and do not wait.
///
/// NCCL: `ncclComm_t`.
#[doc(alias = "ncclComm_t")]
#[derive(Clone)]
pub struct Communicator {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) handle: Arc<Handle>,
    pub(super) end: End,
    pub(super) rank: usize,
    pub(super) n_ranks: usize,
    pub(super) context: Context,
    pub(super) library: Library,
    /// The number of communicators that this process had created before. The ranks of two
    /// communicators have created them in the same order.
    pub(super) created: u64,
    /// The exchange with the other ranks on the host; only communicators of a `World` have one.
    pub(super) peers: Option<Arc<dyn Peers>>,
    /// The number of this rank's exchanges that have failed.
    pub(super) failed_exchanges: AtomicU64,
    /// The number of windows that were registered, the same on all ranks.
    pub(super) windows: AtomicU64,
    /// The number of objects of each kind that were [named](Communicator::name), the same on all
    /// ranks.
    pub(super) objects: Mutex<HashMap<&'static str, u64>>,
    /// The context's default stream, once an operation was enqueued to it by `None`: dropping the
    /// last handle of a stream waits for its work.
    pub(super) default_stream: OnceLock<Stream>,
    /// The objects that are closed before the communicator ends, oldest first.
    pub(super) resources: Mutex<Vec<Tracked>>,
}

/// An object that is closed before its communicator ends.
pub(super) enum Tracked {
    /// Owned by its handle, which keeps the communicator.
    Weak(Weak<dyn Resource>),
    /// Owned by the communicator.
    Owned(Arc<dyn Resource>),
}

impl Tracked {
    /// Returns the object, if it exists.
    fn object(&self) -> Option<Arc<dyn Resource>> {
        match self {
            Self::Weak(object) => object.upgrade(),
            Self::Owned(object) => Some(Arc::clone(object)),
        }
    }

    /// Returns the object, if it is open.
    pub(super) fn open(&self) -> Option<Arc<dyn Resource>> {
        self.object().filter(|object| object.is_open())
    }
}

/// The party that ends a communicator, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Another library, which created it.
    Foreign,
    /// This crate, by an abort, unless another handle gets it: the call that creates it may not
    /// have ended.
    Unready,
    /// This crate, collectively with the other ranks.
    Together,
    /// This crate, without waiting for the other ranks, which are on the same thread.
    OneByOne,
}

/// Memory that NCCL holds for a communicator. NCCL: `ncclCommMemStat_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclCommMemStat_t")]
pub enum MemoryStat {
    /// Bytes that suspending the communicator releases. NCCL: `ncclStatGpuMemSuspend`.
    Suspendable = 0,
    /// 1 while the communicator is suspended. NCCL: `ncclStatGpuMemSuspended`.
    Suspended = 1,
    /// Bytes that a suspended communicator keeps. NCCL: `ncclStatGpuMemPersist`.
    Persistent = 2,
    /// All bytes. NCCL: `ncclStatGpuMemTotal`.
    Total = 3,
}

impl Communicator {
    /// Returns this rank's number, below [`n_ranks`](Self::n_ranks).
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Returns whether both are clones of the same communicator.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.handle(), other.handle())
    }

    /// Returns a number that clones share and no other communicator has.
    pub(crate) fn id(&self) -> u64 {
        Arc::as_ptr(self.handle()).addr() as u64
    }

    /// Returns a number that is larger for communicators that were created later.
    pub(super) fn created(&self) -> u64 {
        self.inner.created
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        self.inner.n_ranks
    }

    /// Returns the ordinal of this rank's GPU among the visible ones.
    #[must_use]
    pub fn device(&self) -> usize {
        self.inner.context.ordinal()
    }

    /// Returns the context of this rank's GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Returns the NCCL in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// Returns NCCL's handle (`ncclComm_t`), for use with other libraries; NULL once it has ended.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.inner.handle.address()
    }

    /// Returns whether the communicator has been neither destroyed nor aborted.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.handle.status() < Status::Destroyed
    }

    /// Returns the rank, number of ranks and CUDA device, as NCCL reports them.
    ///
    /// NCCL: `ncclCommUserRank`, `ncclCommCount`, `ncclCommCuDevice`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`Error::Nccl`](crate::Error::Nccl).
    #[doc(alias = "ncclCommUserRank")]
    #[doc(alias = "ncclCommCount")]
    #[doc(alias = "ncclCommCuDevice")]
    pub fn identity(&self) -> Result<(i32, i32, i32)> {
        Ok((
            self.query(Out::new(0), calls::comm_rank)?,
            self.query(Out::new(0), calls::comm_count)?,
            self.query(Out::new(0), calls::comm_device)?,
        ))
    }

    /// Returns what the communicator supports. NCCL: `ncclCommQueryProperties`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) from an older library,
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`Error::Nccl`](crate::Error::Nccl).
    #[doc(alias = "ncclCommQueryProperties")]
    pub fn properties(&self) -> Result<Properties> {
        self.bind()?;
        self.query(Out::new(CommProperties::new()), calls::properties).map(Properties::from)
    }

    /// Returns the first network back end with which a kernel reaches every rank; [`GinType::None`]
    /// where there is none. NCCL: `ginType` of `ncclCommProperties_t`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`properties`](Self::properties).
    pub fn gin_type(&self) -> Result<GinType> {
        Ok(self.properties()?.gin_type)
    }

    /// Returns the first network back end with which a kernel reaches the ranks of its rail team;
    /// [`GinType::None`] where there is none. NCCL: `railedGinType` of `ncclCommProperties_t`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`properties`](Self::properties).
    pub fn railed_gin_type(&self) -> Result<GinType> {
        Ok(self.properties()?.railed_gin_type)
    }

    /// Returns one statistic of the memory that NCCL holds for this communicator on this GPU:
    /// bytes, or for [`MemoryStat::Suspended`] 0 or 1.
    ///
    /// NCCL: `ncclCommMemStats`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`Error::Nccl`](crate::Error::Nccl).
    #[doc(alias = "ncclCommMemStats")]
    pub fn memory_stat(&self, stat: MemoryStat) -> Result<u64> {
        self.bind()?;
        let entered = self.inner.handle.enter(&[Status::Live, Status::Suspended])?;
        let out = Out::new(0);
        entered.perform(calls::mem_stat(entered.comm(), stat as i32, out.clone()))?;
        Ok(out.get())
    }

    /// Fails if an asynchronous operation of this communicator failed. NCCL:
    /// `ncclCommGetAsyncError`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`Error::Nccl`](crate::Error::Nccl).
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn async_error(&self) -> Result<()> {
        self.inner.handle.poll().map(drop)
    }

    /// Returns whether a non-blocking communicator has completed its last operation. True for a
    /// blocking one.
    ///
    /// NCCL: `ncclCommGetAsyncError`, which returns `ncclInProgress` until then.
    ///
    /// # Errors
    ///
    /// The errors are those of [`async_error`](Self::async_error).
    pub fn is_ready(&self) -> Result<bool> {
        self.inner.handle.poll()
    }

    /// Waits until a non-blocking communicator has completed its last operation.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) after `limit`;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); the errors of
    /// [`async_error`](Self::async_error).
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let _wait = self.context().recorder().begin(Operation::Ready);
        self.context().poll(Some(limit), || self.is_ready())
    }

    /// Waits until every rank has called this method, but not for GPU work. *Collective*.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost);
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded);
    /// [`WorldError::CallsDiffer`](crate::WorldError::CallsDiffer) if the ranks make different
    /// calls; [`Error::InvalidInput`](crate::Error::InvalidInput) if the communicator was not
    /// created by a [`World`](crate::World).
    pub fn barrier(&self) -> Result<()> {
        self.exchange::<u8>("barrier", &[]).map(drop)
    }

    /// Sends `values`, in host memory, to every rank and returns what each rank sent, in rank
    /// order. The number of values may differ between ranks, their type may not. Does not use the
    /// GPUs. *Collective*.
    ///
    /// # Errors
    ///
    /// The errors are those of [`barrier`](Self::barrier);
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) if this rank's values do not fit into
    /// its part of 64 MiB, which the ranks share equally, for which the others get
    /// [`WorldError::CallFailed`](crate::WorldError::CallFailed), or if the bytes of a rank are not
    /// a multiple of the size of `T`.
    pub fn host_all_gather<T: Pod>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        self.exchange("all_gather", values)
    }
}

impl Owner for Inner {
    fn issuer(&self) -> Arc<dyn Issuer> {
        Arc::clone(&self.handle) as _
    }

    fn adopt(&self, resource: Weak<dyn Resource>) {
        self.add(Tracked::Weak(resource));
    }
}

impl Inner {
    pub(super) fn add(&self, tracked: Tracked) {
        let mut resources = self.resources.lock();
        // Kept until the lock is released: the drop of the last reference may wait for the GPU.
        let objects: Vec<_> = resources.iter().map(Tracked::object).collect();
        let mut is_open = objects.iter().map(|object| object.as_ref().is_some_and(|o| o.is_open()));
        let closed: Vec<_> =
            resources.extract_if(.., |_| !is_open.next().unwrap_or_default()).collect();
        resources.push(tracked);
        drop(resources);
        drop((closed, objects));
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.n_ranks())
    }
}
