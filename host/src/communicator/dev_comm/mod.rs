//! Device communicators: what a kernel needs in order to communicate.

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

use std::sync::{Arc, OnceLock};

use devcomm_types::{ArgInfo, DevComm, IntoArg};

use self::check::check;
use self::facilities::Facilities;
use self::lower::Lowered;
pub use self::refusal::RequirementsRefusal;
pub use self::requirements::DevCommRequirements;
pub use self::resources::{
    Counters, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer, ResourceKey, ResourceRequest,
    Signals, TeamMultimem,
};
use super::Communicator;
use super::deferred::{CallState, SharedState};
use crate::device::abort::AbortFlag;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::device::{CreationTime, KernelAbortHandle, Lifecycle};
use crate::error::{AbortCause, DevCommError, Error, Result, StateError, StuckWait};
use crate::sys::nccl::call::{Addresses, Out};
use crate::sys::nccl::calls;

/// A device communicator and its resources.
///
/// Created by [`Communicator::create_dev_comm`]. A launch takes `&DevCommResource` where the kernel
/// has a `DevComm`.
///
/// [`abort`](Self::abort) makes kernels exit when they wait for another rank. So do the abort of
/// the communicator, the loss of a rank, and a deadline
/// ([`Stream::synchronize_within`](crate::Stream::synchronize_within)).
///
/// The resources are freed by [`close`](Self::close), by the end of the communicator or when
/// dropped, after waiting for this rank's streams. After the loss of a rank, and after an abort has
/// ended kernels while they waited for other ranks, which may still come, they are kept until the
/// communicator ends on all ranks, or else until the process ends.
///
/// NCCL: `ncclDevComm`, `ncclDevCommCreate`, `ncclDevCommDestroy`.
#[doc(alias = "ncclDevComm")]
#[doc(alias = "ncclDevCommCreate")]
#[doc(alias = "ncclDevCommDestroy")]
#[must_use = "dropping it closes it"]
pub struct DevCommResource {
    inner: Arc<Inner>,
}

struct Inner {
    /// NCCL writes it when the call is made, possibly at the end of a group.
    out: Out<DevComm>,
    state: SharedState,
    /// What kernels get: NCCL's struct with this crate's abort flag and `requested`. Set at the
    /// first use.
    dev_comm: OnceLock<Addresses<DevComm>>,
    flag: Arc<AbortFlag>,
    life: Lifecycle,
    /// The numbers of signals and of counters that kernels may use by their index, without those of
    /// barriers and resources.
    requested: [u16; 2],
    lowered: Lowered,
    communicator: Communicator,
    created_at: CreationTime,
}

impl Communicator {
    /// Creates a device communicator. *Collective*, with the same requirements on every rank: they
    /// are compared first, and if one rank cannot meet them, the call fails on all ranks.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) from a library older than
    /// [`DEV_COMM_VERSION`](crate::DEV_COMM_VERSION),
    /// [`DevCommError::Refused`](crate::DevCommError::Refused) and, for a communicator of a
    /// [`World`](crate::World), [`WorldError::CallFailed`](crate::WorldError::CallFailed) if
    /// another rank refuses and [`WorldError::OptionsDiffer`](crate::WorldError::OptionsDiffer);
    /// [`StateError::Capturing`](crate::StateError::Capturing),
    /// [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`].
    #[doc(alias = "ncclDevCommCreate")]
    pub fn create_dev_comm(&self, requirements: DevCommRequirements) -> Result<DevCommResource> {
        self.require_live()?;
        let own = self.prepare(&requirements);
        let lowered = if self.has_peers() {
            let call = self.collective("create_dev_comm").options(requirements.describe());
            call.exchange::<u8, _>(own.map(|lowered| (lowered, Vec::new())))?.0
        } else {
            own?
        };
        DevCommResource::new(self, &requirements, lowered)
    }

    /// Returns the requirements as NCCL takes them; fails unless this rank can meet them.
    fn prepare(&self, requirements: &DevCommRequirements) -> Result<Lowered> {
        self.context().refuse_capturing("a device communicator is created")?;
        let facilities = Facilities::of(self.context().machine());
        let refused = |why: RequirementsRefusal| {
            let (rank, is_hardware, why) = (self.rank(), why.is_hardware(), why.to_string());
            Error::DevComm(DevCommError::Refused { rank, why, is_hardware })
        };
        check(requirements, &self.properties()?, &facilities).map_err(refused)?;
        requirements.lower().map_err(refused)
    }
}

impl DevCommResource {
    /// Creates a device communicator; the ranks have compared the requirements already.
    fn new(
        communicator: &Communicator,
        requirements: &DevCommRequirements,
        lowered: Lowered,
    ) -> Result<Self> {
        let issuer = communicator.owner().issuer();
        let flag = communicator.context().new_abort_flag(&issuer)?;
        communicator.handle().register_flag(&flag);
        let inner = Arc::new(Inner {
            out: Out::new(DevComm::zeroed()),
            state: SharedState::new(),
            dev_comm: OnceLock::new(),
            flag,
            life: Lifecycle::default(),
            // The field of kernels has 16 bits: of more, they use the first 65,535.
            requested: [requirements.gin_signals, requirements.gin_counters]
                .map(|count| count.try_into().unwrap_or(u16::MAX)),
            lowered,
            communicator: communicator.clone(),
            created_at: communicator.context().creation_time(),
        });
        // A deferred call keeps `inner` alive until NCCL has written to `inner.out`.
        communicator.call_collective(&inner.state, Arc::clone(&inner) as _, |comm| {
            calls::create_dev_comm(comm, Arc::clone(inner.lowered.lists()), inner.out.clone())
        })?;
        inner.communicator.adopt(&inner);
        Ok(Self { inner })
    }

    /// Returns the handle of the resource for which [`add`](DevCommRequirements::add) returned
    /// `key`.
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
    /// [`Error::InvalidInput`] for a key of other requirements, unless both have the same resource
    /// at the key's index; the errors of [`dev_comm`](Self::dev_comm).
    pub fn resource<R: ResourceRequest>(&self, key: ResourceKey<R>) -> Result<R::Handle> {
        self.inner.dev_comm()?;
        self.inner.lowered.get(key).ok_or_else(|| {
            let asked: resources::Resource = key.request().into();
            Error::invalid(format!(
                "the key of {asked} is not from the requirements of this device communicator"
            ))
        })
    }

    /// Returns the struct that kernels get by value.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`](crate::StateError::Closed);
    /// [`StateError::InGroup`](crate::StateError::InGroup) before the group that creates it has
    /// ended.
    pub fn dev_comm(&self) -> Result<&DevComm> {
        self.inner.dev_comm()
    }

    /// Returns the communicator it belongs to.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.inner.communicator
    }

    /// Returns whether kernels can be launched with this device communicator.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.dev_comm().is_ok() && self.inner.flag.cause().is_none()
    }

    /// Makes its kernels exit when they wait for another rank. A wait for their stream then fails
    /// with [`LaunchError::KernelAborted`](crate::LaunchError::KernelAborted), which names
    /// what they waited for. Further launches with the device communicator are refused, since its
    /// barriers are in an unknown state. Other device communicators are not affected. Idempotent.
    ///
    /// Kernels check for an abort in the waits of `nccl_device`; one that computes, or polls memory
    /// in a loop of its own, continues.
    pub fn abort(&self) {
        self.inner.flag.raise(AbortCause::Request);
    }

    /// Returns a handle with which another thread can [`abort`](Self::abort), while this one waits
    /// for a stream.
    #[must_use]
    pub fn abort_handle(&self) -> KernelAbortHandle {
        KernelAbortHandle::new(&self.inner.flag)
    }

    /// Returns what the kernels that an abort ended waited for: one thread per block, in block
    /// order. In grids of more than 1024 blocks, some blocks are missing. Empty if no kernel
    /// waited.
    #[must_use]
    pub fn stuck(&self) -> Vec<StuckWait> {
        self.inner.flag.stuck()
    }

    /// Frees the resources, after waiting for this rank's streams or, if a graph of another library
    /// may use them, with that graph. Graphs of this crate are refused once they are freed.
    /// Idempotent.
    ///
    /// NCCL: `ncclDevCommDestroy`.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams, [`StateError::Capturing`](crate::StateError::Capturing),
    /// [`StateError::InGroup`](crate::StateError::InGroup), [`Error::Nccl`].
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of a device communicator")?;
        self.inner.close_or_hold()
    }
}

impl Inner {
    fn dev_comm(&self) -> Result<&DevComm> {
        self.require_open(self.communicator.rank())?;
        let dev_comm = self.created()?;
        self.communicator.require_live()?;
        Ok(dev_comm)
    }

    /// Does the same as [`dev_comm`](Self::dev_comm), also while another thread closes it.
    fn created(&self) -> Result<&DevComm> {
        let rank = self.communicator.rank();
        match self.state.get() {
            CallState::Made if self.communicator.is_valid() => {}
            CallState::Deferred => {
                return Err(StateError::InGroup {
                    what: "the use of a device communicator that the group creates",
                }
                .into());
            }
            _ => {
                return Err(StateError::Closed { what: self.name(), rank }.into());
            }
        }
        // It is complete, also for a non-blocking communicator: the call was waited for.
        let Addresses(dev_comm) = self.dev_comm.get_or_init(|| {
            let abort_flag = self.flag.device_flag() as *mut u32;
            let [requested_signals, requested_counters] = self.requested;
            let dev_comm = self.out.get();
            Addresses(DevComm { abort_flag, requested_signals, requested_counters, ..dev_comm })
        });
        Ok(dev_comm)
    }
}

impl Inner {
    /// Returns the same device communicator, to be dropped later than `self`. It ends with its
    /// communicator, too: NCCL's end of that may wait for it.
    fn moved(&self, life: Lifecycle) -> Arc<Self> {
        let moved = Arc::new(Self {
            out: self.out.clone(),
            state: self.state.clone(),
            dev_comm: self.dev_comm.clone(),
            flag: Arc::clone(&self.flag),
            life,
            requested: self.requested,
            lowered: self.lowered.clone(),
            communicator: self.communicator.clone(),
            created_at: self.created_at,
        });
        self.communicator.adopt(&moved);
        moved
    }
}

impl Resource for Inner {
    fn name(&self) -> &'static str {
        "the device communicator"
    }

    fn is_open(&self) -> bool {
        self.life.is_open()
    }

    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let context = self.communicator.context();
        let Some(ending) = self.life.begin_end(context)? else { return Ok(()) };
        match self.created() {
            Ok(_) => {}
            // The group of another thread creates it.
            Err(deferred) if self.state.get() == CallState::Deferred => return Err(deferred),
            Err(_) => {
                // It was never created, or has ended with its communicator.
                ending.done();
                if context.is_idle_now() {
                    context.close_abort_flag(&self.flag);
                }
                return Ok(());
            }
        }
        context.refuse_capturing("a device communicator is closed")?;
        context.drain()?;
        if self.communicator.handle().may_peers_access_forever() {
            // Kernels of peers may use its barriers. The abort flag is this rank's own.
            let raw = Out::new(self.out.get());
            let destroy = move |comm| calls::destroy_dev_comm(comm, raw);
            self.communicator.handle().keep_until_end(None, destroy);
            ending.done();
            context.close_abort_flag(&self.flag);
            return Ok(());
        }
        context.bind_to_free();
        // NCCL's struct, without this crate's abort flag.
        let raw = Out::new(self.out.get());
        let released = self.communicator.release(|comm| calls::destroy_dev_comm(comm, raw));
        ending.done();
        context.close_abort_flag(&self.flag);
        released
    }

    fn close_or_hold(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let context = self.communicator.context();
        let Some(ending) = self.life.begin_end(context)? else { return Ok(()) };
        let mut is_held = false;
        if self.created().is_ok() {
            context.refuse_capturing("a device communicator is closed")?;
            // A graph of this crate finds it closed when it is launched.
            let moved = || self.moved(Lifecycle::default());
            is_held = context.hold_for_others(self.created_at, moved);
        }
        if is_held {
            ending.done();
            return Ok(());
        }
        drop(ending);
        self.close()
    }
}

// SAFETY: NCCL wrote the value, or `info` says `closed`, which a launch refuses; a drop waits for
// the streams before NCCL frees its resources.
unsafe impl IntoArg<DevComm> for &DevCommResource {
    fn into_arg(self) -> DevComm {
        // Another thread that closes it waits for launches that have found it open. Of one that was
        // not open, `info` says so.
        let made = self.inner.created().ok().filter(|_| !self.inner.life.has_ended());
        made.copied().unwrap_or(DevComm::zeroed())
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
        self.life.set_unused();
        let context = self.communicator.context();
        if !self.life.is_open() || context.is_rank_lost() {
            return;
        }
        let moved = || self.moved(self.life.take());
        if !context.can_free_or_hold("a device communicator", self.created_at, moved) {
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
