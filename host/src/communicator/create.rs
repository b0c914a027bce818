//! Creates communicators: from unique ids, for all GPUs of a process, from an `ncclComm_t`, and
//! from other communicators (split, shrink, grow).

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::abort::abort_and_log;
use super::comm::{Communicator, End, Inner};
use super::handle::{Handle, Status};
use super::peers::{self, Peers};
use super::watched::watched;
use super::{CommConfig, Library, UniqueId};
use crate::device::Context;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Issuer;
use crate::error::{Error, NcclError, Result};
use crate::sys::nccl::call::{Call, CommPtr, CommSlot, Out};
use crate::sys::nccl::calls;
use crate::sys::nccl_build::check_driver;
use devcomm_sys::nccl::{RawComm, RawUniqueId};

/// How [`Communicator::shrink`] treats running operations of the old communicator.
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShrinkMode {
    /// There are none: the old communicator is idle. NCCL: `NCCL_SHRINK_DEFAULT`.
    #[default]
    #[doc(alias = "NCCL_SHRINK_DEFAULT")]
    Idle = 0,
    /// They are stopped, as after an error. NCCL: `NCCL_SHRINK_ABORT`.
    #[doc(alias = "NCCL_SHRINK_ABORT")]
    Abort = 1,
}

/// Number of communicators so far.
static CREATED: AtomicU64 = AtomicU64::new(0);

/// A communicator to be created: everything but NCCL's handle.
struct NewComm<'a> {
    library: &'a Library,
    context: &'a Context,
    rank: usize,
    n_ranks: usize,
    peers: Option<Arc<dyn Peers>>,
    blocking: bool,
}

impl NewComm<'_> {
    /// The communicator that NCCL wrote to `out`.
    fn read(self, out: &Out<RawComm>, operation: &'static str, end: End) -> Result<Communicator> {
        let comm = out.communicator().ok_or_else(|| none_created(self.rank, operation))?;
        Ok(self.communicator(CommSlot::new(comm), end))
    }

    fn communicator(self, slot: CommSlot, end: End) -> Communicator {
        let Self { library, context, rank, n_ranks, peers, blocking } = self;
        tracing::debug!(rank, n_ranks, gpu = context.ordinal(), "joined a communicator");
        let (nccl, health) = (Arc::clone(library.nccl()), context.health());
        let handle = Handle::new(nccl, slot, rank, blocking, health);
        let (context, library) = (context.clone(), library.clone());
        let (default_stream, resources) = Default::default();
        let handle = Arc::new(handle);
        if end != End::Foreign {
            context.health().abort_on_loss(Arc::downgrade(&handle) as _);
        }
        let issuer: Arc<dyn Issuer> = Arc::clone(&handle) as _;
        context.add_issuer(Arc::as_ptr(&handle).addr() as u64, &issuer);
        let created = CREATED.fetch_add(1, Ordering::Relaxed);
        let inner = Inner {
            handle,
            end,
            rank,
            n_ranks,
            context,
            library,
            created,
            peers,
            default_stream,
            resources,
        };
        Communicator { inner: Arc::new(inner) }
    }
}

impl Communicator {
    /// Joins the communicator with id `id`. *Collective*: returns when all `n_ranks` ranks have
    /// called it, each on its own thread. With a non-blocking `config` it returns at once, and the
    /// communicator [is ready](Self::is_ready) when all ranks have called it.
    ///
    /// [`Rank::communicator`](crate::Rank::communicator) does this for the ranks of a
    /// [`World`](crate::World).
    ///
    /// NCCL: `ncclCommInitRankConfig`; calls `ncclCommInitRankScalable`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], [`Error::InvalidInput`] for a rank that is not below `n_ranks`,
    /// [`NcclError::Unsupported`] for a field of the configuration that the library does not know.
    #[doc(alias = "ncclCommInitRank")]
    #[doc(alias = "ncclCommInitRankConfig")]
    pub fn init_rank(
        library: &Library,
        context: &Context,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
        config: &CommConfig,
    ) -> Result<Self> {
        Self::init_rank_scalable(library, context, &[*id], rank, n_ranks, config)
    }

    /// As [`init_rank`](Self::init_rank), with several ids, each from a different rank: with very
    /// many ranks, these share the bootstrap work. Every rank passes the same list.
    ///
    /// NCCL: `ncclCommInitRankScalable`.
    ///
    /// # Errors
    ///
    /// As [`init_rank`](Self::init_rank); also [`Error::InvalidInput`] without any id.
    #[doc(alias = "ncclCommInitRankScalable")]
    pub fn init_rank_scalable(
        library: &Library,
        context: &Context,
        ids: &[UniqueId],
        rank: usize,
        n_ranks: usize,
        config: &CommConfig,
    ) -> Result<Self> {
        Self::join(library, context, ids, rank, n_ranks, config, None)
    }

    pub(crate) fn join(
        library: &Library,
        context: &Context,
        ids: &[UniqueId],
        rank: usize,
        n_ranks: usize,
        config: &CommConfig,
        peers: Option<Arc<dyn Peers>>,
    ) -> Result<Self> {
        refuse_inside("ncclCommInitRankScalable")?;
        let c_rank = rank_of(rank, n_ranks)?;
        if ids.is_empty() || ids.len() > n_ranks {
            let n = ids.len();
            return Err(Error::invalid(format!(
                "{n} unique ids for a communicator of {n_ranks} ranks"
            )));
        }
        let ids: Vec<RawUniqueId> = ids.iter().map(|id| id.0).collect();
        let c_n_ranks = number(n_ranks)?;
        let blocking = config.is_blocking();
        let config = config.lower(library.loaded())?;
        let out = Out::new(std::ptr::null_mut());
        let call = calls::init_rank(out.clone(), ids, c_rank, c_n_ranks, config);
        perform(library, context, rank, call)?;
        let new = NewComm { library, context, rank, n_ranks, peers, blocking };
        new.read(&out, "ncclCommInitRankScalable", End::Together)
    }

    /// Creates one communicator per context, rank `i` on the `i`th, for use by this thread.
    /// Operations that wait for one another belong in one [`group`](crate::group());
    /// [`MultiGpu`](crate::MultiGpu) opens it.
    ///
    /// NCCL: `ncclCommInitAll`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] without any context or if two are of the same GPU; [`Error::Nccl`].
    #[doc(alias = "ncclCommInitAll")]
    pub fn init_all(library: &Library, contexts: &[Context]) -> Result<Vec<Self>> {
        refuse_inside("ncclCommInitAll")?;
        let Some(first) = contexts.first() else {
            return Err(Error::invalid("communicators of an empty list of GPUs"));
        };
        let devices = contexts.iter().map(|context| number(context.ordinal()));
        let devices: Vec<c_int> = devices.collect::<Result<_>>()?;
        let mut sorted = devices.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid(format!("GPU {} is listed twice", pair[0])));
        }
        let outs: Vec<Out<RawComm>> =
            contexts.iter().map(|_| Out::new(std::ptr::null_mut())).collect();
        perform(library, first, 0, calls::init_all(outs.clone(), devices))?;
        let n_ranks = contexts.len();
        let read = |(rank, context)| {
            let new = NewComm { library, context, rank, n_ranks, peers: None, blocking: true };
            new.read(&outs[rank], "ncclCommInitAll", End::OneByOne)
        };
        contexts.iter().enumerate().map(read).collect()
    }

    /// A communicator that another library created, such as PyTorch. Destroying or dropping it here
    /// does not end it. Its ranks neither compare their calls nor notice a lost rank, unless they
    /// have a channel: `from_raw_with`, or `Rank::communicator_from_raw`.
    ///
    /// NCCL: `ncclCommUserRank`, `ncclCommCount`, `ncclCommCuDevice`, `ncclCommGetAsyncError`.
    ///
    /// # Safety
    ///
    /// `raw` is a live `ncclComm_t` of the same NCCL library, on the context's GPU; nothing else
    /// uses it during calls made here, and it outlives this communicator and what is created from
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for NULL or a communicator of another GPU, [`Error::Nccl`].
    pub unsafe fn from_raw(library: &Library, context: &Context, raw: *mut c_void) -> Result<Self> {
        // SAFETY: the caller's.
        unsafe { Self::adopt_raw(library, context, raw, |_, _| Ok(None)) }
    }

    /// As [`from_raw`](Self::from_raw); the ranks exchange over `peers` of this rank and the number
    /// of ranks.
    ///
    /// # Safety
    ///
    /// As [`from_raw`](Self::from_raw).
    pub(crate) unsafe fn adopt_raw(
        library: &Library,
        context: &Context,
        raw: *mut c_void,
        peers: impl FnOnce(usize, usize) -> Result<Option<Arc<dyn Peers>>>,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::invalid("the communicator is NULL"));
        }
        let slot = CommSlot::from_raw(raw);
        let new = NewComm { library, context, rank: 0, n_ranks: 1, peers: None, blocking: false };
        let foreign = new.communicator(slot, End::Foreign);
        let (rank, n_ranks, device) = foreign.identity()?;
        let (rank, n_ranks) = (rank.unsigned_abs() as usize, n_ranks.unsigned_abs() as usize);
        if usize::try_from(device) != Ok(context.ordinal()) {
            return Err(Error::invalid(format!(
                "the communicator is on GPU {device}, the context on GPU {}",
                context.ordinal()
            )));
        }
        let peers = peers(rank, n_ranks)?;
        let new = NewComm { library, context, rank, n_ranks, peers, blocking: false };
        Ok(new.communicator(CommSlot::from_raw(raw), End::Foreign))
    }

    /// Splits the communicator: the ranks with the same `color` form a new one, ordered by `key`,
    /// then by rank. A rank whose `color` is `None` gets `None`. *Collective*.
    ///
    /// NCCL: `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a negative color,
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<i32>, key: i32, config: &CommConfig) -> Result<Option<Self>> {
        const NO_COLOR: c_int = -1;
        if color.is_some_and(|color| color < 0) {
            return Err(Error::invalid("a negative color; pass None for no new communicator"));
        }
        let color = color.unwrap_or(NO_COLOR);
        let lowered = config.lower(self.library().loaded())?;
        let peers = self.split_peers(color, key)?;
        let call = |comm, out| calls::split(comm, color, key, out, lowered);
        match self.derive(&[Status::Live, Status::Revoked], peers, config, call)? {
            None if color != NO_COLOR => Err(none_created(self.rank(), "ncclCommSplit")),
            child => Ok(child),
        }
    }

    /// The host exchange between the ranks of the new communicator, if there is one.
    fn split_peers(&self, color: i32, key: i32) -> Result<Option<Arc<dyn Peers>>> {
        let Some(peers) = self.peers() else { return Ok(None) };
        let mut members = Vec::new();
        let choices = peers::all_gather(peers, "split", &[color, key], &|| self.refuse_aborted())?;
        for (rank, choice) in choices.iter().enumerate() {
            match choice[..] {
                [other, key] if other == color => members.push((key, rank)),
                [_, _] => {}
                _ => return Err(Error::invalid(format!("rank {rank} sent no color and key"))),
            }
        }
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        if color < 0 { Ok(None) } else { peers.subset(&members).map(Some) }
    }

    /// Creates a communicator without the ranks in `exclude`, which do not call this. *Collective*
    /// for the others.
    ///
    /// NCCL: `ncclCommShrink`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `exclude` is empty, or has this rank, an unknown rank or a rank
    /// twice; otherwise as [`split`](Self::split).
    #[doc(alias = "ncclCommShrink")]
    pub fn shrink(&self, exclude: &[usize], mode: ShrinkMode, config: &CommConfig) -> Result<Self> {
        let n_ranks = self.n_ranks();
        let mut excluded = vec![false; n_ranks];
        for &rank in exclude {
            rank_of(rank, n_ranks)?;
            if rank == self.rank() {
                return Err(Error::invalid(format!("rank {rank} excludes itself")));
            }
            if std::mem::replace(&mut excluded[rank], true) {
                return Err(Error::invalid(format!("rank {rank} is excluded twice")));
            }
        }
        if exclude.is_empty() {
            return Err(Error::invalid("a communicator shrinks by at least one rank"));
        }
        let lowered = config.lower(self.library().loaded())?;
        let members: Vec<usize> = (0..n_ranks).filter(|&rank| !excluded[rank]).collect();
        let peers = self.peers().map(|peers| peers.subset(&members)).transpose()?;
        let exclude = exclude.iter().map(|&rank| number(rank)).collect::<Result<_>>()?;
        let call = |comm, out| calls::shrink(comm, exclude, out, lowered, mode as c_int);
        let child = self.derive(&[Status::Live, Status::Revoked], peers, config, call)?;
        child.ok_or_else(|| none_created(self.rank(), "ncclCommShrink"))
    }

    /// The id with which new ranks join by [`join_grown`](Self::join_grown). One rank calls this,
    /// sends the id to the new ranks, and passes it to [`grow`](Self::grow). An id is valid for one
    /// `grow`.
    ///
    /// NCCL: `ncclCommGetUniqueId`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`],
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`].
    #[doc(alias = "ncclCommGetUniqueId")]
    pub fn unique_id(&self) -> Result<UniqueId> {
        self.bind()?;
        self.query(Out::new(RawUniqueId([0; 128])), calls::unique_id).map(UniqueId)
    }

    /// Creates a communicator of these ranks and new ones, `n_ranks` in all. *Collective*, together
    /// with the new ranks' [`join_grown`](Self::join_grown). The rank that created the id passes
    /// it, the others pass `None`. Old ranks keep their numbers; the old communicator is unchanged.
    ///
    /// NCCL: `ncclCommGrow`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] unless `n_ranks` is above the present number; otherwise as
    /// [`split`](Self::split).
    #[doc(alias = "ncclCommGrow")]
    pub fn grow(&self, n_ranks: usize, id: Option<&UniqueId>, config: &CommConfig) -> Result<Self> {
        const SAME_RANK: c_int = -1;
        if n_ranks <= self.n_ranks() {
            let now = self.n_ranks();
            return Err(Error::invalid(format!("{now} ranks cannot grow to {n_ranks}")));
        }
        let lowered = config.lower(self.library().loaded())?;
        let (id, c_n_ranks) = (id.map(|id| id.0), number(n_ranks)?);
        let call = |comm, out| calls::grow(Some(comm), c_n_ranks, id, SAME_RANK, out, lowered);
        let grown = self.derive(&[Status::Live], None, config, call)?;
        grown.ok_or_else(|| none_created(self.rank(), "ncclCommGrow"))
    }

    /// Joins a communicator that [grows](Self::grow), as one of its new ranks.
    ///
    /// NCCL: `ncclCommGrow`.
    ///
    /// # Errors
    ///
    /// As [`init_rank`](Self::init_rank).
    #[doc(alias = "ncclCommGrow")]
    pub fn join_grown(
        library: &Library,
        context: &Context,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
        config: &CommConfig,
    ) -> Result<Self> {
        refuse_inside("ncclCommGrow")?;
        let c_rank = rank_of(rank, n_ranks)?;
        let lowered = config.lower(library.loaded())?;
        let out = Out::new(std::ptr::null_mut());
        let c_n_ranks = number(n_ranks)?;
        let call = calls::grow(None, c_n_ranks, Some(id.0), c_rank, out.clone(), lowered);
        perform(library, context, rank, call)?;
        let blocking = config.is_blocking();
        let new = NewComm { library, context, rank, n_ranks, peers: None, blocking };
        let grown = new.read(&out, "ncclCommGrow", End::Together)?;
        grown.wait_until_ready("ncclCommGrow")?;
        Ok(grown)
    }

    /// Makes a call that creates a communicator from this one, if it creates one, and waits until
    /// the new one is ready. If that fails, aborts it.
    fn derive(
        &self,
        allowed: &[Status],
        peers: Option<Arc<dyn Peers>>,
        config: &CommConfig,
        call: impl FnOnce(CommPtr, Out<RawComm>) -> Call,
    ) -> Result<Option<Self>> {
        let out = Out::new(std::ptr::null_mut());
        let entered = self.inner.handle.enter(allowed)?;
        let call = call(entered.comm(), out.clone());
        let operation = call.operation;
        entered.require_ready(operation)?;
        let made = self.perform_watched(&entered, call);
        drop(entered);
        let made = made.and_then(|()| self.wait_until_ready(operation));
        let Some(comm) = out.communicator() else {
            if made.is_err() && !self.inner.handle.is_blocking() {
                // NCCL may still write to it.
                std::mem::forget(out);
            }
            return made.map(|()| None);
        };
        let (library, context) = (self.library(), self.context());
        // A child inherits the parent's setting if `config` does not set it.
        let blocking = config.is_blocking() && self.inner.handle.is_blocking();
        // Only NCCL knows the new rank.
        let new = NewComm { library, context, rank: 0, n_ranks: 1, peers: None, blocking };
        let unready = Unready(new.communicator(CommSlot::new(comm), End::Foreign));
        let ready = made.and_then(|()| unready.0.wait_until_ready(operation));
        let (rank, n_ranks, _) = ready.and_then(|()| unready.0.identity())?;
        unready.keep();
        let (rank, n_ranks) = (rank.unsigned_abs() as usize, n_ranks.unsigned_abs() as usize);
        let new = NewComm { library, context, rank, n_ranks, peers, blocking };
        Ok(Some(new.communicator(CommSlot::new(comm), End::Together)))
    }
}

/// A temporary handle of a communicator that nobody owns yet: dropping it aborts the communicator.
struct Unready(Communicator);

impl Unready {
    /// Leaves the communicator to another handle.
    fn keep(self) {
        self.0.handle().set_status(Status::Destroyed);
    }
}

impl Drop for Unready {
    fn drop(&mut self) {
        abort_and_log(self.0.handle());
    }
}

/// Makes a call that needs no communicator, with the context current.
fn perform(library: &Library, context: &Context, rank: usize, call: Call) -> Result<()> {
    if library.nccl().machine().is_simulated() != context.machine().is_simulated() {
        return Err(Error::invalid("one of NCCL and the GPU is simulated, the other is not"));
    }
    context.health().check()?;
    check_driver(context.machine(), library.path())?;
    context.cuda().bind()?;
    let (nccl, operation) = (Arc::clone(library.nccl()), call.operation);
    let work = move || {
        // SAFETY: the call owns what it writes to and has no communicator yet.
        let code = unsafe { call.make(&nccl)? };
        nccl.check(operation, code, Some(rank))
    };
    // There is no communicator yet to abort.
    watched(context, operation, work, || ())
}

/// The error of a call that succeeds without a communicator.
fn none_created(rank: usize, operation: &'static str) -> Error {
    Error::Nccl(NcclError::Failed {
        operation,
        code: 0,
        text: "success, but no communicator".to_owned(),
        last_error: String::new(),
        rank: Some(rank),
        hint: "run again with NCCL_DEBUG=INFO for NCCL's own log",
    })
}

/// `rank` as NCCL's int; an error unless it is below `n_ranks`.
pub(super) fn rank_of(rank: usize, n_ranks: usize) -> Result<c_int> {
    let number = c_int::try_from(rank).ok().filter(|_| rank < n_ranks);
    number.ok_or_else(|| Error::invalid(format!("rank {rank} is not one of {n_ranks} ranks")))
}

fn number(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::invalid(format!("{value} does not fit NCCL's int")))
}
