//! Creates communicators: from unique ids, for all GPUs of a process, from an `ncclComm_t`.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::comm::{Communicator, End, Inner};
use super::handle::Handle;
use super::peers::Peers;
use super::watched::watched;
use super::{CommConfig, Library, UniqueId};
use crate::device::Context;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Issuer;
use crate::error::{Error, NcclError, Result};
use crate::sys::nccl::call::{Call, CommSlot, Out};
use crate::sys::nccl::calls;
use crate::sys::nccl_build::check_driver;
use devcomm_sys::nccl::{RawComm, RawUniqueId};

/// The number of communicators that this process has created.
static CREATED: AtomicU64 = AtomicU64::new(0);

/// A communicator to be created: everything but NCCL's handle.
pub(super) struct NewComm<'a> {
    pub(super) library: &'a Library,
    pub(super) context: &'a Context,
    pub(super) rank: usize,
    pub(super) n_ranks: usize,
    pub(super) peers: Option<Arc<dyn Peers>>,
    pub(super) blocking: bool,
}

impl NewComm<'_> {
    /// Returns the communicator that NCCL wrote to `out`.
    pub(super) fn read(
        self,
        out: &Out<RawComm>,
        operation: &'static str,
        end: End,
    ) -> Result<Communicator> {
        let comm = out.communicator().ok_or_else(|| none_created(self.rank, operation))?;
        Ok(self.communicator(CommSlot::new(comm), end))
    }

    /// Returns the communicator with NCCL's handle in `slot`, known to its context and, if this
    /// crate ends it, aborted when a rank is lost.
    pub(super) fn communicator(self, slot: CommSlot, end: End) -> Communicator {
        let Self { library, context, rank, n_ranks, peers, blocking } = self;
        tracing::debug!(rank, n_ranks, gpu = context.ordinal(), "joined a communicator");
        let (nccl, health) = (Arc::clone(library.nccl()), context.health());
        let is_foreign = end == End::Foreign;
        let handle = Handle::new(nccl, slot, rank, blocking, health, is_foreign);
        let (context, library) = (context.clone(), library.clone());
        let (failed_exchanges, windows, objects) = Default::default();
        let (default_stream, resources) = Default::default();
        let handle = Arc::new(handle);
        if matches!(end, End::Together | End::OneByOne) {
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
            failed_exchanges,
            windows,
            objects,
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

    /// Does the same as [`init_rank`](Self::init_rank), with several ids, each from a different
    /// rank: with very many ranks, the ranks that created the ids share the bootstrap work. Every
    /// rank passes the same list.
    ///
    /// NCCL: `ncclCommInitRankScalable`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`init_rank`](Self::init_rank); also [`Error::InvalidInput`] without
    /// any id, and for more ids than ranks.
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

    /// Does the same as [`init_rank_scalable`](Self::init_rank_scalable); the ranks exchange on the
    /// host over `peers`.
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

    /// Returns a communicator that another library created, such as PyTorch. Destroying or dropping
    /// it here does not end it, but waits for operations that a non-blocking one has not enqueued
    /// yet; an abort only stops its operations (`ncclCommRevoke`). Its ranks neither compare their
    /// calls nor notice a lost rank, unless they have a channel: `from_raw_with`, or
    /// `Rank::communicator_from_raw`.
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
        // SAFETY: the caller passes a communicator of NCCL's that outlives this one.
        unsafe { Self::adopt_raw(library, context, raw, |_, _| Ok(None)) }
    }

    /// Does the same as [`from_raw`](Self::from_raw); the ranks exchange over what `peers` returns
    /// for this rank and the number of ranks.
    ///
    /// # Safety
    ///
    /// The contract is that of [`from_raw`](Self::from_raw).
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
        // Only NCCL knows the rank. Whether calls block is not known: the communicator is polled,
        // which is right for both.
        let new = NewComm { library, context, rank: 0, n_ranks: 1, peers: None, blocking: false };
        let foreign = new.communicator(slot, End::Foreign);
        let (rank, n_ranks, device) = foreign.identity()?;
        // NCCL's numbers are not negative.
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
}

/// Makes a call that needs no communicator, with the context current. `rank` is for its errors.
pub(super) fn perform(library: &Library, context: &Context, rank: usize, call: Call) -> Result<()> {
    if library.nccl().machine().is_simulated() != context.machine().is_simulated() {
        return Err(Error::invalid("one of NCCL and the GPU is simulated, the other is not"));
    }
    context.check_health()?;
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

/// Returns the error of a call that succeeds without a communicator.
pub(super) fn none_created(rank: usize, operation: &'static str) -> Error {
    Error::Nccl(NcclError::Failed {
        operation,
        code: 0,
        text: "success, but no communicator".to_owned(),
        last_error: String::new(),
        rank: Some(rank),
        hint: "run again with NCCL_DEBUG=INFO for NCCL's own log",
    })
}

/// Returns `rank` as NCCL's int; an error unless it is below `n_ranks`.
pub(super) fn rank_of(rank: usize, n_ranks: usize) -> Result<c_int> {
    let number = c_int::try_from(rank).ok().filter(|_| rank < n_ranks);
    number.ok_or_else(|| Error::invalid(format!("rank {rank} is not one of {n_ranks} ranks")))
}

/// Returns `value` as NCCL's int.
pub(super) fn number(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::invalid(format!("{value} does not fit NCCL's int")))
}
