//! Communicators: ranks that share windows, device communicators and collectives.

use std::rc::Rc;

use devcomm_types::Element;

use crate::bootstrap::Rendezvous;
use crate::sys::nccl::Comm;
use crate::sys::nccl::abi::CommProperties;
use crate::{
    Context, DevCommRequirements, DevCommResource, Error, Library, Memory, Result, Stream,
    UniqueId, Window,
};

/// How a reduction combines elements. NCCL: `ncclRedOp_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclRedOp_t")]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The product.
    Prod = 1,
    /// The greatest.
    Max = 2,
    /// The least.
    Min = 3,
    /// The sum divided by the number of ranks.
    Avg = 4,
}

/// What a communicator can do. NCCL: `ncclCommProperties_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclCommProperties_t")]
#[non_exhaustive]
pub struct Properties {
    /// CUDA's ordinal of the device.
    pub cuda_device: i32,
    /// NVML's ordinal of the device.
    pub nvml_device: i32,
    /// Whether device communicators and windows work here. NCCL: `deviceApiSupport`.
    pub device_api: bool,
    /// Whether multicast works here. NCCL: `multimemSupport`.
    pub multimem: bool,
    /// Groups of ranks that reach each other by load and store; 1 means all do. NCCL: `nLsaTeams`.
    pub n_lsa_teams: usize,
    /// NCCL's tag of the network back end for kernels (`ncclGinType_t`), 0 for none.
    pub gin_type: i32,
    /// As `gin_type`, between equal places of the groups.
    pub railed_gin_type: i32,
    /// Whether the host's one-sided operations work. NCCL: `hostRmaSupport`.
    pub host_rma: bool,
}

impl From<CommProperties> for Properties {
    fn from(raw: CommProperties) -> Self {
        Self {
            cuda_device: raw.cuda_dev,
            nvml_device: raw.nvml_dev,
            device_api: raw.device_api_support != 0,
            multimem: raw.multimem_support != 0,
            n_lsa_teams: usize::try_from(raw.n_lsa_teams).unwrap_or(0),
            gin_type: raw.gin_type,
            railed_gin_type: raw.railed_gin_type,
            host_rma: raw.host_rma_support != 0,
        }
    }
}

/// One rank's end of a communicator. Clones are the same one; what is made from it keeps it alive.
///
/// It stays on the thread it was made on, whose current CUDA context is the rank's device. Methods marked *collective* are
/// called by every rank, in the same order. Dropped last, it is finalized and destroyed together with the other ranks';
/// after a lost rank it is aborted, or left to the end of the process if the GPU cannot come to rest.
///
/// NCCL: `ncclComm_t`.
#[doc(alias = "ncclComm_t")]
#[derive(Clone)]
pub struct Communicator {
    inner: Rc<Inner>,
}

struct Inner {
    /// `None` only while dropping.
    comm: Option<Comm>,
    rank: usize,
    n_ranks: usize,
    context: Context,
    library: Library,
    rendezvous: Option<Rendezvous>,
}

impl Communicator {
    /// Joins the communicator that `id` names. *Collective*: returns when all `n_ranks` ranks have called it, each on a
    /// thread of its own.
    ///
    /// [`Rank::communicator`](crate::Rank::communicator) does this for the ranks of a [`World`](crate::World).
    ///
    /// NCCL: `ncclCommInitRank`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], [`Error::InvalidInput`] for a rank that is not below `n_ranks`.
    #[doc(alias = "ncclCommInitRank")]
    pub fn from_unique_id(
        library: &Library,
        context: &Context,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
    ) -> Result<Self> {
        Self::join(library, context, id, rank, n_ranks, None)
    }

    pub(crate) fn join(
        library: &Library,
        context: &Context,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
        rendezvous: Option<Rendezvous>,
    ) -> Result<Self> {
        if rank >= n_ranks {
            return Err(Error::invalid(format!("rank {rank} is not one of {n_ranks} ranks")));
        }
        context.health().check()?;
        context.cuda().bind()?;
        let comm = library.nccl().init_rank(&id.0, rank, n_ranks)?;
        tracing::debug!(rank, n_ranks, gpu = context.ordinal(), "joined the communicator");
        let (context, library) = (context.clone(), library.clone());
        let inner = Inner { comm: Some(comm), rank, n_ranks, context, library, rendezvous };
        Ok(Self { inner: Rc::new(inner) })
    }

    /// This rank, below [`n_ranks`](Self::n_ranks).
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        self.inner.n_ranks
    }

    /// The ordinal of this rank's GPU among the visible ones.
    #[must_use]
    pub fn device(&self) -> usize {
        self.inner.context.ordinal()
    }

    /// This rank's GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The NCCL in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// What NCCL itself says about (rank, number of ranks, CUDA device).
    ///
    /// NCCL: `ncclCommUserRank`, `ncclCommCount`, `ncclCommCuDevice`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`].
    #[doc(alias = "ncclCommUserRank")]
    #[doc(alias = "ncclCommCount")]
    #[doc(alias = "ncclCommCuDevice")]
    pub fn identity(&self) -> Result<(i32, i32, i32)> {
        self.library().nccl().identity(self.comm()?)
    }

    /// What the communicator can do. NCCL: `ncclCommQueryProperties`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] from an older library, [`Error::Nccl`].
    #[doc(alias = "ncclCommQueryProperties")]
    pub fn properties(&self) -> Result<Properties> {
        self.bind()?;
        self.library().nccl().properties(self.comm()?).map(Properties::from)
    }

    /// Fails if an operation of this communicator failed in the background. NCCL: `ncclCommGetAsyncError`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`].
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn async_error(&self) -> Result<()> {
        self.library().nccl().async_error(self.comm()?)
    }

    /// Allocates a symmetric window of `len` elements, zeroed, and registers it with every rank. *Collective*; the ranks may
    /// ask for different lengths, and then keep to what the owner of each copy has.
    ///
    /// NCCL: `ncclMemAlloc`, `ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`.
    ///
    /// # Errors
    ///
    /// [`Error::NoWindow`] where the ranks have no symmetric memory, [`Error::InvalidInput`] for a length of 0,
    /// [`Error::RankLost`], [`Error::Nccl`].
    #[doc(alias = "ncclCommWindowRegister")]
    pub fn window<T: Element>(&self, len: usize) -> Result<Window<T>> {
        Window::new(self, self.mem_alloc(len)?)
    }

    /// Allocates `len` elements of device memory, zeroed, known to this rank only. Not collective.
    ///
    /// NCCL: `ncclMemAlloc`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a length of 0, [`Error::RankLost`], [`Error::Nccl`].
    #[doc(alias = "ncclMemAlloc")]
    pub fn mem_alloc<T: Element>(&self, len: usize) -> Result<Memory<T>> {
        self.bind()?;
        Memory::new(self.library(), self.context(), len)
    }

    /// Makes a device communicator. *Collective*, with the same requirements on every rank.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] from a library older than [`DEV_COMM_VERSION`](crate::DEV_COMM_VERSION), [`Error::NoDeviceApi`],
    /// [`Error::NoMultimem`], [`Error::RankLost`], [`Error::Nccl`].
    #[doc(alias = "ncclDevCommCreate")]
    pub fn create_dev_comm(&self, requirements: DevCommRequirements) -> Result<DevCommResource> {
        let raw = requirements.to_raw()?;
        let properties = self.properties()?;
        let rank = self.rank();
        if !properties.device_api {
            return Err(Error::NoDeviceApi { rank });
        }
        if requirements.wants_multimem() {
            let nvls = std::env::var("NCCL_NVLS_ENABLE").ok();
            multimem_allowed(rank, properties.multimem, nvls.as_deref())?;
        }
        DevCommResource::new(self, &raw)
    }

    /// Enqueues an all-reduce of the first `count` elements: every rank's `recv` gets the combination of all ranks' `send`.
    /// They may be the same memory. *Collective*. Returns at once; `stream` tells when it is done, and both stay allocated
    /// until then, for dropping them waits for this rank's streams.
    ///
    /// A [`Window`] derefs to the [`Memory`] that this takes.
    ///
    /// NCCL: `ncclAllReduce`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] when `count` is more than either memory has, or memory or stream are not of
    /// this communicator's [`Context`],
    /// [`Error::RankLost`], [`Error::Nccl`].
    #[doc(alias = "ncclAllReduce")]
    pub fn all_reduce<T: Element>(
        &self,
        send: &Memory<T>,
        recv: &Memory<T>,
        count: usize,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        send.fits(count)?;
        recv.fits(count)?;
        // Memory waits for the streams of its own context before it is freed.
        let own = |context: &Context| context.is(self.context());
        if !(own(send.context()) && own(recv.context()) && own(stream.context())) {
            return Err(Error::invalid(format!(
                "all_reduce on rank {}: memory or stream was made by another context than the communicator",
                self.rank()
            )));
        }
        self.bind()?;
        let (send, recv) = (send.device_address(), recv.device_address());
        let stream = stream.handle().raw();
        // SAFETY: both hold `count` elements on this device, checked above; Memory waits for all of
        // this rank's streams before it frees anything.
        unsafe {
            let comm = self.comm()?;
            let nccl = self.library().nccl();
            nccl.enqueue_all_reduce(comm, send, recv, count, T::DATA_TYPE, op, stream)
        }
    }

    /// Waits until every rank is here; the GPUs are not waited for. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`]; [`Error::InvalidInput`] if the communicator was not made by a [`World`](crate::World).
    pub fn barrier(&self) -> Result<()> {
        match &self.inner.rendezvous {
            Some(rendezvous) => rendezvous.barrier(),
            None => Err(Error::invalid("a communicator made without a world has no barrier")),
        }
    }

    /// Fails unless every rank reaches every other by load and store.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralLsaTeams`] names the ranks and hosts of each group; otherwise as [`properties`](Self::properties).
    pub fn require_single_lsa_team(&self) -> Result<()> {
        let teams = self.properties()?.n_lsa_teams;
        let hosts = self.inner.rendezvous.as_ref().map_or(&[][..], Rendezvous::hosts);
        match describe_lsa_teams(self.n_ranks(), teams, hosts) {
            None => Ok(()),
            Some(teams) => Err(Error::SeveralLsaTeams { teams }),
        }
    }

    pub(crate) fn comm(&self) -> Result<&Comm> {
        self.inner.comm.as_ref().ok_or_else(|| Error::invalid("the communicator was closed"))
    }

    /// Makes this rank's context current, which NCCL needs, unless a lost rank makes the call pointless.
    fn bind(&self) -> Result<()> {
        self.context().health().check()?;
        self.context().cuda().bind()
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.n_ranks())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(comm) = self.comm.take() else { return };
        // A GPU that does not come to rest would block the abort as well.
        if !self.context.is_settled("the communicator") {
            return;
        }
        let _ = self.context.cuda().bind();
        let nccl = self.library.nccl();
        // To finalize is to wait for the other ranks, one of which is gone.
        let lost = self.context.health().is_lost();
        let closed = if lost { nccl.abort(comm) } else { nccl.destroy(comm) };
        if let Err(error) = closed {
            tracing::warn!("{error}");
        }
    }
}

/// Multicast needs hardware support and not to be switched off.
fn multimem_allowed(rank: usize, supported: bool, nvls_enable: Option<&str>) -> Result<()> {
    if nvls_enable.is_some_and(|value| value.trim() == "0") {
        return Err(Error::NoMultimem { rank, why: "NCCL_NVLS_ENABLE is 0" });
    }
    if !supported {
        let why = "ncclCommQueryProperties says multimemSupport is false";
        return Err(Error::NoMultimem { rank, why });
    }
    Ok(())
}

/// The ranks and hosts of each group that shares memory, or `None` if there is one group. NCCL's groups are of one size
/// and take consecutive ranks.
fn describe_lsa_teams(n_ranks: usize, n_teams: usize, hosts: &[String]) -> Option<Vec<String>> {
    if n_teams <= 1 {
        return None;
    }
    let size = (n_ranks / n_teams).max(1);
    let ranks: Vec<usize> = (0..n_ranks).collect();
    let describe = |team: &[usize]| {
        let mut names: Vec<&str> =
            team.iter().filter_map(|&rank| hosts.get(rank).map(String::as_str)).collect();
        names.dedup();
        let place =
            if names.is_empty() { String::new() } else { format!(" on {}", names.join(", ")) };
        format!("{}{place}", crate::error::ranks(team))
    };
    Some(ranks.chunks(size).map(describe).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cannot_share_memory_are_named_with_their_hosts() {
        let hosts: Vec<String> = ["a", "a", "b", "b"].map(str::to_owned).into();
        assert_eq!(describe_lsa_teams(4, 1, &hosts), None);
        let teams = describe_lsa_teams(4, 2, &hosts).unwrap();
        assert_eq!(teams, ["ranks 0, 1 on a", "ranks 2, 3 on b"]);
        let error =
            Error::SeveralLsaTeams { teams: describe_lsa_teams(2, 2, &hosts[1..3]).unwrap() };
        assert!(error.to_string().ends_with("rank 0 on a; rank 1 on b"), "{error}");
    }

    #[test]
    fn multicast_is_refused_when_it_is_switched_off_or_missing() {
        assert!(multimem_allowed(0, true, None).is_ok());
        assert!(multimem_allowed(0, true, Some("1")).is_ok());
        assert!(multimem_allowed(0, false, None).is_err());
        let off = multimem_allowed(2, true, Some("0")).unwrap_err().to_string();
        assert!(off.contains("rank 2") && off.contains("NCCL_NVLS_ENABLE"), "{off}");
    }
}
