//! Device communicators: what a kernel needs in order to communicate.

mod agree;
mod check;
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

use devcomm_types::{DevComm, IntoArg};

pub(crate) use self::agree::{Report, agree};
pub(crate) use self::lower::Lowered;
pub use self::refusal::RequirementsRefusal;
pub use self::requirements::DevCommRequirements;
pub use self::resources::{
    Counters, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer, ResourceKey, ResourceRequest,
    Signals, TeamMultimem,
};
use crate::communicator::Resource;
use crate::group::{Made, refuse_inside};
use crate::sys::nccl::abi::API_MAGIC;
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;
use crate::{Communicator, Error, Result};

/// A device communicator and the resources behind it.
///
/// Made by [`Communicator::create_dev_comm`]. A launch takes `&DevCommResource` where the kernel has a `DevComm`.
///
/// [`close`](Self::close) frees the resources after waiting for this rank's streams; so does the end of the communicator, and
/// dropping. After a lost rank they are left to the end of the process.
///
/// NCCL: `ncclDevComm`, `ncclDevCommCreate`, `ncclDevCommDestroy`.
#[doc(alias = "ncclDevComm")]
#[doc(alias = "ncclDevCommCreate")]
#[doc(alias = "ncclDevCommDestroy")]
pub struct DevCommResource {
    inner: Rc<Inner>,
}

struct Inner {
    /// Written when it is made: at the end of a group, perhaps.
    out: Out<DevComm>,
    made: Rc<Cell<Made>>,
    /// What was written, from the first look on.
    dev_comm: OnceCell<DevComm>,
    closed: Cell<bool>,
    lowered: Arc<Lowered>,
    communicator: Communicator,
}

impl DevCommResource {
    /// Makes it, with requirements that all ranks agree on.
    pub(crate) fn new(
        communicator: &Communicator,
        requirements: &DevCommRequirements,
    ) -> Result<Self> {
        let rank = communicator.rank();
        let lowered = requirements.lower().map_err(|why| Error::refused(rank, &why))?;
        let inner = Rc::new(Inner {
            out: Out::new(DevComm::zeroed()),
            made: Rc::new(Cell::new(Made::Waiting)),
            dev_comm: OnceCell::new(),
            closed: Cell::new(false),
            lowered: Arc::new(lowered),
            communicator: communicator.clone(),
        });
        // Kept until the call is made: NCCL writes there, and only then can it be destroyed.
        communicator.talk(&inner.made, Rc::clone(&inner) as _, |comm| {
            calls::create_dev_comm(comm, Arc::clone(&inner.lowered), inner.out.clone())
        })?;
        let adopted: Rc<dyn Resource> = Rc::clone(&inner) as _;
        inner.communicator.adopt(Rc::downgrade(&adopted));
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
    /// [`Error::InvalidInput`] for the key of other requirements, where it would open another resource; as
    /// [`dev_comm`](Self::dev_comm).
    pub fn resource<R: ResourceRequest>(&self, key: ResourceKey<R>) -> Result<R::Handle> {
        self.inner.dev_comm()?;
        self.inner.lowered.get(key).ok_or_else(|| {
            let asked: resources::Resource = key.request().into();
            Error::invalid(format!(
                "this device communicator was not made with the requirements that the key of {asked} is from"
            ))
        })
    }

    /// The struct that kernels get, by value.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`]; [`Error::InGroup`] before the group in which it is made has ended.
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
        self.inner.dev_comm().is_ok()
    }

    /// Frees the resources, after waiting for this rank's streams. Once more it does nothing.
    ///
    /// NCCL: `ncclDevCommDestroy`.
    ///
    /// # Errors
    ///
    /// What waiting for the streams gives, [`Error::Capturing`], [`Error::InGroup`], [`Error::Nccl`].
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
            Made::Yes if !self.closed.get() && self.communicator.is_valid() => {}
            Made::Waiting => {
                return Err(Error::InGroup {
                    what: "the use of a device communicator that the group makes",
                });
            }
            _ => return Err(Error::Closed { what: "the device communicator", rank }),
        }
        if self.dev_comm.get().is_none() && !self.communicator.is_ready()? {
            return Err(Error::InProgress { operation: "the use of a device communicator", rank });
        }
        Ok(self.dev_comm.get_or_init(|| self.out.get()))
    }
}

impl Resource for Inner {
    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let Ok(&dev_comm) = self.dev_comm() else {
            // It is not there, or has gone with the communicator.
            self.closed.set(true);
            return Ok(());
        };
        let context = self.communicator.context();
        context.refuse_capturing("a device communicator is closed")?;
        context.come_to_rest()?;
        self.closed.set(true);
        let _ = context.cuda().bind();
        self.communicator.release(|comm| calls::destroy_dev_comm(comm, Out::new(dev_comm)))
    }
}

impl IntoArg<DevComm> for &DevCommResource {
    fn into_arg(self) -> DevComm {
        self.inner.dev_comm().copied().unwrap_or(DevComm::zeroed())
    }

    fn dev_comm(&self) -> Option<&DevComm> {
        self.inner.dev_comm().ok()
    }

    fn closed(&self) -> Option<&'static str> {
        self.inner.dev_comm().is_err().then_some("the device communicator")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let context = self.communicator.context();
        let lost = context.health().is_lost();
        if self.closed.get() || lost || !context.is_settled("a device communicator") {
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

/// Whether NCCL filled this struct in.
pub(crate) fn is_filled(dev_comm: &DevComm) -> bool {
    dev_comm.magic == API_MAGIC
}
