//! Creates communicators from other ones: split, shrink, grow.

use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::abort::abort_and_log;
use super::comm::{Communicator, End};
use super::create::{NewComm, none_created, number, perform, rank_of};
use super::handle::Status;
use super::peers::{Peers, Terms};
use super::{CommConfig, Library, UniqueId};
use crate::device::Context;
use crate::device::in_group::refuse_inside;
use crate::error::{Error, Result};
use crate::sys::nccl::call::{Call, CommPtr, CommSlot, Out};
use crate::sys::nccl::calls;
use devcomm_sys::nccl::{RawComm, RawUniqueId};

/// How [`Communicator::shrink`] treats running operations of the old communicator.
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShrinkMode {
    /// There are none: the old communicator is idle. NCCL: `NCCL_SHRINK_DEFAULT`.
    #[default]
    #[doc(alias = "NCCL_SHRINK_DEFAULT")]
    Idle = 0,
    /// Operations are stopped, as after an error. NCCL: `NCCL_SHRINK_ABORT`.
    #[doc(alias = "NCCL_SHRINK_ABORT")]
    Abort = 1,
}

/// The arguments of a rank to [`Communicator::split`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SplitArguments {
    /// Negative for no color.
    color: i32,
    key: i32,
    /// A hash of the configuration, the same for all ranks of a color.
    config: u64,
}

impl Communicator {
    /// Splits the communicator: the ranks with the same `color` form a new one, ordered by `key`,
    /// then by rank. A rank whose `color` is `None` gets `None`. *Collective*.
    ///
    /// NCCL: `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a negative color, and for ranks of one color with different
    /// configurations; [`WorldError::CallFailed`](crate::WorldError::CallFailed) if another rank
    /// has an error, [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<i32>, key: i32, config: &CommConfig) -> Result<Option<Self>> {
        const NO_COLOR: c_int = -1;
        refuse_inside("ncclCommSplit")?;
        self.refuse_ended()?;
        let own = match color {
            Some(..0) => Err(Error::invalid("a negative color; pass None for no new communicator")),
            _ => config.lower(self.library().loaded()),
        };
        let color = color.unwrap_or(NO_COLOR);
        let (lowered, peers) = self.split_peers(own, color, key, config)?;
        let call = |comm, out| calls::split(comm, color, key, out, lowered);
        match self.derive(&[Status::Live, Status::Revoked], peers, config, call)? {
            None if color != NO_COLOR => Err(none_created(self.rank(), "ncclCommSplit")),
            child => Ok(child),
        }
    }

    /// Returns what this rank has prepared, and the host exchange between the ranks of the new
    /// communicator if there is one.
    fn split_peers<T>(
        &self,
        own: Result<T>,
        color: i32,
        key: i32,
        config: &CommConfig,
    ) -> Result<(T, Option<Arc<dyn Peers>>)> {
        let Some(peers) = self.peers() else { return Ok((own?, None)) };
        let mut hash = DefaultHasher::new();
        config.describe().hash(&mut hash);
        let own = own.map(|own| (own, SplitArguments { color, key, config: hash.finish() }));
        let (own, choices) = self.collective("split").agree(own)?;
        for (rank, choice) in choices.iter().enumerate().filter(|(_, choice)| choice.color >= 0) {
            let first = choices.iter().position(|other| other.color == choice.color);
            if let Some(first) = first.filter(|first| choices[*first].config != choice.config) {
                // All ranks find the same pair, whatever their own color.
                return Err(Error::invalid(format!(
                    "split: ranks {first} and {rank} have color {} and different configurations",
                    choice.color
                )));
            }
        }
        let chosen = choices.iter().enumerate().filter(|(_, choice)| choice.color == color);
        let mut members: Vec<_> = chosen.map(|(rank, choice)| (choice.key, rank)).collect();
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        Ok((own, if color < 0 { None } else { Some(peers.subset(&members)?) }))
    }

    /// Creates a communicator without the ranks in `exclude`, which do not call this. *Collective*
    /// for the others, with the same list in any order: ranks that pass other lists, or a list
    /// without a rank that does not call this, wait for each other until the deadline.
    ///
    /// NCCL: `ncclCommShrink`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `exclude` is empty, or has this rank, an unknown rank or a rank
    /// twice; [`WorldError::OptionsDiffer`](crate::WorldError::OptionsDiffer) for another mode or
    /// configuration in another rank; otherwise as [`split`](Self::split).
    #[doc(alias = "ncclCommShrink")]
    pub fn shrink(&self, exclude: &[usize], mode: ShrinkMode, config: &CommConfig) -> Result<Self> {
        refuse_inside("ncclCommShrink")?;
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
        self.refuse_ended()?;
        let members: Vec<usize> = (0..n_ranks).filter(|&rank| !excluded[rank]).collect();
        let peers = self.peers().map(|peers| peers.subset(&members)).transpose()?;
        let lowered = config.lower(self.library().loaded());
        let lowered = match &peers {
            Some(peers) if members.len() > 1 => {
                let mut options = vec![("mode".to_owned(), format!("{mode:?}"))];
                options.extend(config.describe());
                let failure = lowered.as_ref().err();
                let terms = Terms { call: "shrink", options: &options, failure };
                let all = peers.all_gather(terms, &[], &|| self.refuse_aborted());
                let lowered = lowered?;
                all.map(|_| lowered)?
            }
            _ => lowered?,
        };
        let exclude = exclude.iter().map(|&rank| number(rank)).collect::<Result<_>>()?;
        let call = |comm, out| calls::shrink(comm, exclude, out, lowered, mode as c_int);
        let child = self.derive(&[Status::Live, Status::Revoked], peers, config, call)?;
        child.ok_or_else(|| none_created(self.rank(), "ncclCommShrink"))
    }

    /// Returns the id with which new ranks join by [`join_grown`](Self::join_grown). One rank calls
    /// this, sends the id to the new ranks, and passes it to [`grow`](Self::grow). An id is valid
    /// for one `grow`.
    ///
    /// NCCL: `ncclCommGetUniqueId`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported),
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
    /// [`Error::InvalidInput`] unless `n_ranks` is above the present number and one rank passes an
    /// id; [`WorldError::OptionsDiffer`](crate::WorldError::OptionsDiffer) for another number of
    /// ranks or configuration in another rank; otherwise as [`split`](Self::split).
    #[doc(alias = "ncclCommGrow")]
    pub fn grow(&self, n_ranks: usize, id: Option<&UniqueId>, config: &CommConfig) -> Result<Self> {
        const SAME_RANK: c_int = -1;
        refuse_inside("ncclCommGrow")?;
        self.require_live()?;
        let now = self.n_ranks();
        let own = || {
            if n_ranks <= now {
                return Err(Error::invalid(format!("{now} ranks cannot grow to {n_ranks}")));
            }
            Ok((config.lower(self.library().loaded())?, number(n_ranks)?))
        };
        let own = own();
        let (lowered, c_n_ranks) = if self.has_peers() {
            let call = self.collective("grow").option("n_ranks", n_ranks);
            let own = own.map(|own| (own, u8::from(id.is_some())));
            let (own, has_id) = call.options(config.describe()).agree(own)?;
            match has_id.iter().filter(|has| **has == 1).count() {
                1 => own,
                n => return Err(Error::invalid(format!("{n} ranks pass an id to grow, not one"))),
            }
        } else {
            own?
        };
        let id = id.map(|id| id.0);
        let call = |comm, out| calls::grow(Some(comm), c_n_ranks, id, SAME_RANK, out, lowered);
        // The new ranks do not take part in the host exchange.
        let peers = None;
        let grown = self.derive(&[Status::Live], peers, config, call)?;
        grown.ok_or_else(|| none_created(self.rank(), "ncclCommGrow"))
    }

    /// Joins a communicator that [grows](Self::grow), as one of its new ranks.
    ///
    /// NCCL: `ncclCommGrow`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`init_rank`](Self::init_rank).
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

    /// Makes a call that may create a communicator from this one, and waits until the new one is
    /// ready. If that fails, aborts the new one.
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
        // After an error of a blocking one the call may still run, on a thread of its own: NCCL
        // then initializes what it has written to `out`, which must not be aborted.
        let may_run = made.is_err() && self.inner.handle.is_blocking();
        let Some(comm) = out.communicator().filter(|_| !may_run) else {
            if made.is_err() && !self.inner.handle.is_blocking() {
                // NCCL may still write to `out`.
                std::mem::forget(out);
            }
            return made.map(|()| None);
        };
        let (library, context) = (self.library(), self.context());
        // A child inherits the parent's setting if `config` does not set it. Where `config` does,
        // a blocking child may count as non-blocking: it is polled, and always ready.
        let blocking = config.is_blocking() && self.inner.handle.is_blocking();
        // Only NCCL knows the new rank.
        let new = NewComm { library, context, rank: 0, n_ranks: 1, peers: None, blocking };
        let unready = Unready(new.communicator(CommSlot::new(comm), End::Unready));
        let ready = made.and_then(|()| unready.0.wait_until_ready(operation));
        let (rank, n_ranks, _) = ready.and_then(|()| unready.0.identity())?;
        unready.disarm();
        // NCCL's numbers are not negative.
        let (rank, n_ranks) = (rank.unsigned_abs() as usize, n_ranks.unsigned_abs() as usize);
        let new = NewComm { library, context, rank, n_ranks, peers, blocking };
        Ok(Some(new.communicator(CommSlot::new(comm), End::Together)))
    }
}

/// A temporary handle of a communicator that has no owner yet: dropping it aborts the communicator.
struct Unready(Communicator);

impl Unready {
    /// Leaves the communicator to another handle: an abort of a destroyed one does nothing.
    fn disarm(self) {
        self.0.handle().set_status(Status::Destroyed);
    }
}

impl Drop for Unready {
    fn drop(&mut self) {
        abort_and_log(self.0.handle());
    }
}
