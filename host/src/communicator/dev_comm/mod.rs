//! Device communicators: what a kernel needs in order to communicate.

mod agree;
mod check;
mod facilities;
mod lower;
mod refusal;
#[cfg(test)]
mod refusal_tests;
mod requirements;
mod resources;
#[cfg(test)]
mod tests;

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;

use devcomm_types::{ArgInfo, DevComm, IntoArg};

use self::agree::{Report, agree};
use self::facilities::Facilities;
use self::lower::Lowered;
pub use self::refusal::RequirementsRefusal;
pub use self::requirements::DevCommRequirements;
pub use self::resources::{
    Counters, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer, ResourceKey, ResourceRequest,
    Signals, TeamMultimem,
};
use super::Communicator;
use super::group::CallState;
use crate::device::KernelAbortHandle;
use crate::device::abort::AbortFlag;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::error::{AbortCause, DevCommError, Error, Result, StateError, StuckWait};
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

/// A device communicator and the resources behind it.
///
/// Made by [`Communicator::create_dev_comm`]. A launch takes `&DevCommResource` where the kernel
/// has a `DevComm`.
///
/// [`abort`](Self::abort) asks kernels that wait for another rank to exit. So do the abort of the
/// communicator, the loss of a rank, and a deadline
/// ([`Stream::synchronize_within`](crate::Stream::synchronize_within)).
///
/// [`close`](Self::close) frees the resources after waiting for this rank's streams; so does the
/// end of the communicator, and dropping. After a lost rank they are left to the end of the
/// process.
///
/// NCCL: `ncclDevComm`, `ncclDevCommCreate`, `ncclDevCommDestroy`.
#[doc(alias = "ncclDevComm")]
#[doc(alias = "ncclDevCommCreate")]
#[doc(alias = "ncclDevCommDestroy")]
pub struct DevCommResource {
    inner: Rc<Inner>,
}

struct Inner {
    /// Written when it is made, which may be at the end of a group.
    out: Out<DevComm>,
    made: Rc<Cell<CallState>>,
    /// What kernels get, set at the first use: what NCCL wrote, with our abort flag.
    dev_comm: OnceCell<DevComm>,
    flag: Arc<AbortFlag>,
    closed: Cell<bool>,
    lowered: Lowered,
    communicator: Communicator,
}

impl Communicator {
    /// Makes a device communicator. *Collective*, with the same requirements on every rank: they
    /// are compared first, and what one rank cannot have fails on all of them.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) from a library older than
    /// [`DEV_COMM_VERSION`](crate::DEV_COMM_VERSION),
    /// [`DevCommError::Refused`](crate::DevCommError::Refused) and, for a communicator of a
    /// [`World`](crate::World),
    /// [`DevCommError::RequirementsDiffer`](crate::DevCommError::RequirementsDiffer), both on every
    /// rank; [`StateError::Capturing`](crate::StateError::Capturing),
    /// [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`].
    #[doc(alias = "ncclDevCommCreate")]
    pub fn create_dev_comm(&self, requirements: DevCommRequirements) -> Result<DevCommResource> {
        self.context().refuse_capturing("a device communicator is made")?;
        let report = Report::new(
            &requirements,
            &self.properties()?,
            &Facilities::of(self.context().machine()),
        );
        match self.peers() {
            Some(peers) => {
                let all = peers.all_gather(&report.to_bytes()?)?;
                let all =
                    all.iter().enumerate().map(|(rank, bytes)| Report::from_bytes(rank, bytes));
                agree(&all.collect::<Result<Vec<_>>>()?)?;
            }
            None => report.check_local(self.rank())?,
        }
        DevCommResource::new(self, &requirements)
    }
}

impl DevCommResource {
    /// Makes it, with requirements that all ranks agree on.
    pub(crate) fn new(
        communicator: &Communicator,
        requirements: &DevCommRequirements,
    ) -> Result<Self> {
        let rank = communicator.rank();
        let lowered = requirements.lower().map_err(|why| {
            Error::DevComm(DevCommError::Refused { rank, others: 0, why: why.to_string() })
        })?;
        let issuer = communicator.owner().issuer();
        let flag = communicator.context().new_abort_flag(&issuer)?;
        communicator.handle().watch(&flag);
        let inner = Rc::new(Inner {
            out: Out::new(DevComm::zeroed()),
            made: Rc::new(Cell::new(CallState::Deferred)),
            dev_comm: OnceCell::new(),
            flag,
            closed: Cell::new(false),
            lowered,
            communicator: communicator.clone(),
        });
        // Kept until the call is made: NCCL writes there, and only then can it be destroyed.
        communicator.call_collective(&inner.made, Rc::clone(&inner) as _, |comm| {
            calls::create_dev_comm(comm, Arc::clone(inner.lowered.lists()), inner.out.clone())
        })?;
        inner.communicator.adopt(&inner);
        Ok(Self { inner })
    }

    /// The resource that the requirements' [`add`](DevCommRequirements::add) gave this key for.
    ///
    /// ```no_run
    /// # use devcomm_host::{Communicator, DevCommRequirements, Error, LsaBarriers, Team};
    /// # fn f(comm: &Communicator, team: Team) -> Result<(), Error> {
    /// let mut requirements = DevCommRequirements::new();
    /// let key = requirements.add(LsaBarriers { team, count: 8 });
    /// let dev = comm.create_dev_comm(requirements)?;
    /// let barriers: devcomm_types::nccl::LsaBarrierHandle = dev.resource(key)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for the key of other requirements, where it would open another
    /// resource; as [`dev_comm`](Self::dev_comm).
    pub fn resource<R: ResourceRequest>(&self, key: ResourceKey<R>) -> Result<R::Handle> {
        self.inner.dev_comm()?;
        self.inner.lowered.get(key).ok_or_else(|| {
            let asked: resources::Resource = key.request().into();
            Error::invalid(format!(
                "this device communicator was not made with the requirements that the key of \
                 {asked} is from"
            ))
        })
    }

    /// The struct that kernels get, by value.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`](crate::StateError::Closed);
    /// [`StateError::InGroup`](crate::StateError::InGroup) before the group in which it is made has
    /// ended.
    pub fn dev_comm(&self) -> Result<&DevComm> {
        self.inner.dev_comm()
    }

    /// The communicator it belongs to.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.inner.communicator
    }

    /// Whether kernels can be launched with it.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.dev_comm().is_ok() && self.inner.flag.cause().is_none()
    }

    /// Asks the kernels that use it, and wait for another rank, to exit. A wait for their stream
    /// fails with [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted) with what they
    /// waited for, and launches with the device communicator are refused from now on: its barriers
    /// are in an unknown state. Other device communicators are not affected. Idempotent.
    ///
    /// A kernel sees it in the waits of `nccl_device`; one that polls memory by other means, or
    /// computes, continues.
    pub fn abort(&self) {
        self.inner.flag.raise(AbortCause::Request);
    }

    /// What another thread can [`abort`](Self::abort) with, while this one waits for a stream.
    #[must_use]
    pub fn abort_handle(&self) -> KernelAbortHandle {
        KernelAbortHandle::new(&self.inner.flag)
    }

    /// What the kernels that an abort ended waited for: a thread of each block, by block; of grids
    /// of more than 1024 blocks not each one. Empty if none did.
    #[must_use]
    pub fn stuck(&self) -> Vec<StuckWait> {
        self.inner.flag.stuck()
    }

    /// Frees the resources, after waiting for this rank's streams. Idempotent.
    ///
    /// NCCL: `ncclDevCommDestroy`.
    ///
    /// # Errors
    ///
    /// What waiting for the streams gives, [`StateError::Capturing`](crate::StateError::Capturing),
    /// [`StateError::InGroup`](crate::StateError::InGroup), [`Error::Nccl`].
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of a device communicator")?;
        self.inner.close()
    }
}

impl Inner {
    fn dev_comm(&self) -> Result<&DevComm> {
        let rank = self.communicator.rank();
        self.communicator.refuse_suspended()?;
        match self.made.get() {
            CallState::Made if !self.closed.get() && self.communicator.is_valid() => {}
            CallState::Deferred => {
                return Err(StateError::InGroup {
                    what: "the use of a device communicator that the group makes",
                }
                .into());
            }
            _ => {
                return Err(StateError::Closed { what: "the device communicator", rank }.into());
            }
        }
        if self.dev_comm.get().is_none() && !self.communicator.is_ready()? {
            return Err(StateError::InProgress {
                operation: "the use of a device communicator",
                rank,
            }
            .into());
        }
        Ok(self.dev_comm.get_or_init(|| {
            let abort_flag = self.flag.device_flag() as *mut u32;
            DevComm { abort_flag, ..self.out.get() }
        }))
    }
}

impl Resource for Inner {
    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let context = self.communicator.context();
        if self.dev_comm().is_err() {
            // It was not made, or has ended with the communicator.
            if !self.closed.replace(true) && context.is_idle_now() {
                context.close_abort_flag(&self.flag);
            }
            return Ok(());
        }
        context.refuse_capturing("a device communicator is closed")?;
        context.drain()?;
        self.closed.set(true);
        let _ = context.cuda().bind();
        // As NCCL made it, not as kernels get it.
        let made = Out::new(self.out.get());
        let released = self.communicator.release(|comm| calls::destroy_dev_comm(comm, made));
        context.close_abort_flag(&self.flag);
        released
    }
}

impl IntoArg<DevComm> for &DevCommResource {
    fn into_arg(self) -> DevComm {
        self.inner.dev_comm().copied().unwrap_or(DevComm::zeroed())
    }

    fn info(&self) -> ArgInfo<'_> {
        let dev_comm = self.inner.dev_comm().ok();
        ArgInfo {
            dev_comm,
            closed: dev_comm.is_none().then_some("the device communicator"),
            communicator: Some(self.inner.communicator.id()),
            ..ArgInfo::default()
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let context = self.communicator.context();
        let lost = context.health().is_lost();
        if self.closed.get() || lost || !context.can_free("a device communicator") {
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for DevCommResource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DevCommResource").field(&self.inner.dev_comm()).finish()
    }
}
