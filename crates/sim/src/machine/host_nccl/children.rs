//! Communicators derived from others: split, shrink, grow.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{Config, RawComm, RawUniqueId, SUCCESS};

use super::call::{CallContext, CallProgress, NcclError, NcclResult, call};
use super::comm::{Lifecycle, RankComm};
use super::config::Settings;
use super::init::{new_id, number_of, rank_of};
use super::rendezvous::{Task, TaskKind};

/// NCCL: `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// NCCL: `NCCL_SHRINK_ABORT`.
const ABORT: c_int = 1;

impl CallContext<'_> {
    /// Returns a communicator that can be split.
    fn parent(&self, comm: RawComm) -> NcclResult<Rc<RankComm>> {
        let rank_comm = self.ready(comm)?;
        match rank_comm.life.get() {
            Lifecycle::Live | Lifecycle::Revoked if !rank_comm.is_suspended.get() => Ok(rank_comm),
            _ => Err(NcclError::usage("the communicator is suspended or finalized")),
        }
    }

    /// Begins the creation of a child of `parent`.
    ///
    /// # Safety
    ///
    /// `out` is valid for a write, `config` is NULL or valid.
    unsafe fn child(
        &self,
        name: &'static str,
        parent: Rc<RankComm>,
        out: *mut RawComm,
        config: *const Config,
        kind: TaskKind,
    ) -> NcclResult<CallProgress> {
        // SAFETY: the caller passes a valid out pointer, and NULL or a valid configuration.
        let settings = unsafe { Settings::read(config, parent.settings.clone()) }?;
        let created = RankComm::new(self.core, parent.gpu, settings);
        // SAFETY: the caller passes a valid out pointer, and NULL or a valid configuration.
        unsafe { self.write_handle(out, &created) };
        self.start(Task::new(name, parent, Some((created, out)), kind))
    }
}

pub(super) unsafe extern "C" fn split(
    comm: RawComm,
    color: c_int,
    key: c_int,
    out: *mut RawComm,
    config: *mut Config,
) -> c_int {
    const NAME: &str = "ncclCommSplit";
    call(NAME, comm, |cx| {
        // SAFETY: the program passes valid pointers, as NCCL requires.
        cx.note(|| format!("color {color} key {key}{}", unsafe { Settings::describe(config) }));
        let (parent, kind) = (cx.parent(comm)?, TaskKind::Split { color, key });
        match color {
            // SAFETY: the program passes valid pointers, as NCCL requires.
            0.. => unsafe { cx.child(NAME, parent, out, config, kind) },
            NO_COLOR => {
                // SAFETY: the program passes valid pointers, as NCCL requires.
                unsafe { out.write(null_mut()) };
                cx.start(Task::new(NAME, parent, None, kind))
            }
            _ => Err(NcclError::argument(format!("color {color}"))),
        }
    })
}

pub(super) unsafe extern "C" fn shrink(
    comm: RawComm,
    excluded: *mut c_int,
    count: c_int,
    out: *mut RawComm,
    config: *mut Config,
    flags: c_int,
) -> c_int {
    const NAME: &str = "ncclCommShrink";
    call(NAME, comm, |cx| {
        // SAFETY: the program passes a list of `count` ranks, as NCCL requires.
        let ranks = (0..usize::try_from(count).unwrap_or(0)).map(|i| unsafe { *excluded.add(i) });
        let ranks: Vec<c_int> = ranks.collect();
        cx.note(|| {
            let first = ranks.first().copied().unwrap_or(-1);
            // SAFETY: the program passes valid pointers, as NCCL requires.
            let config = unsafe { Settings::describe(config) };
            format!("without {count} from {first} flags {flags}{config}")
        });
        let parent = cx.parent(comm)?;
        let (shared, own) = parent.joined()?;
        let ranks = ranks.into_iter().map(|rank| shared.rank(rank, "excluded rank"));
        let mut excluded = ranks.collect::<NcclResult<Vec<_>>>()?;
        excluded.sort_unstable();
        excluded.dedup();
        if excluded.is_empty() || excluded.contains(&own) || !(0..=ABORT).contains(&flags) {
            let text = format!("rank {own} excludes {excluded:?} with flags {flags}");
            return Err(NcclError::argument(text));
        }
        if flags == ABORT {
            parent.cancel();
        }
        let kind = TaskKind::Shrink { excluded };
        // SAFETY: the program passes valid pointers, as NCCL requires.
        unsafe { cx.child(NAME, Rc::clone(&parent), out, config, kind) }
    })
}

/// Creates a unique id with which new ranks join, valid for one grow.
pub(super) unsafe extern "C" fn get_unique_id(comm: RawComm, id: *mut RawUniqueId) -> c_int {
    call("ncclCommGetUniqueId", comm, |cx| {
        let rank_comm = cx.live(comm)?;
        let (shared, _) = rank_comm.joined()?;
        let growth = Rc::clone(shared.growth.borrow_mut().get_or_insert_default());
        let mut joins = cx.core.nccl.joins.borrow_mut();
        if joins.values().flatten().any(|join| Rc::ptr_eq(join, &growth)) {
            return Err(NcclError::usage("the communicator already has a unique id for a grow"));
        }
        let (number, new) = new_id();
        joins.insert(number, Some(growth));
        // SAFETY: the program passes valid pointers, as NCCL requires.
        unsafe { id.write(new) };
        Ok(CallProgress::Done(SUCCESS))
    })
}

/// Adds ranks. Existing ranks pass a communicator and rank -1; new ranks pass a number and an id.
pub(super) unsafe extern "C" fn grow(
    comm: RawComm,
    n_ranks: c_int,
    id: *const RawUniqueId,
    rank: c_int,
    out: *mut RawComm,
    config: *mut Config,
) -> c_int {
    const NAME: &str = "ncclCommGrow";
    call(NAME, comm, |cx| {
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let id = unsafe { id.as_ref() };
        cx.note(|| {
            let with_id = if id.is_some() { " with id" } else { "" };
            let new = if comm.is_null() { " new" } else { "" };
            // SAFETY: the program passes valid pointers, as NCCL requires.
            let config = unsafe { Settings::describe(config) };
            format!("to {n_ranks} rank {rank}{with_id}{new}{config}")
        });
        let growth_of = |id: &RawUniqueId| {
            let growth = cx.core.nccl.joins.borrow().get(&number_of(id)?).cloned();
            let unknown = || NcclError::argument("not the unique id of a growing communicator");
            growth.flatten().ok_or_else(unknown)
        };
        if comm.is_null() {
            let id = id.ok_or_else(|| NcclError::argument("a new rank without a unique id"))?;
            let ((rank, n_ranks), growth) = (rank_of(rank, n_ranks)?, growth_of(id)?);
            // SAFETY: the program passes valid pointers, as NCCL requires.
            let settings = unsafe { Settings::read(config, Settings::default()) }?;
            let rank_comm = RankComm::new(cx.core, cx.gpu()?, settings);
            // SAFETY: the program passes valid pointers, as NCCL requires.
            unsafe { cx.write_handle(out, &rank_comm) };
            let created = Some((Rc::clone(&rank_comm), out));
            return cx.start(Task::new(
                NAME,
                rank_comm,
                created,
                TaskKind::Grow { growth, rank, n_ranks },
            ));
        }
        let parent = cx.live(comm)?;
        let (shared, own) = parent.joined()?;
        let growth = Rc::clone(shared.growth.borrow_mut().get_or_insert_default());
        if let Some(id) = id
            && !Rc::ptr_eq(&growth_of(id)?, &growth)
        {
            return Err(NcclError::argument("a unique id of another communicator"));
        }
        let grown = usize::try_from(n_ranks).unwrap_or(0);
        if rank != -1 || grown <= shared.n_ranks() {
            let n = shared.n_ranks();
            let text = format!("rank {rank}, to grow {n} ranks to {n_ranks}");
            return Err(NcclError::argument(text));
        }
        let kind = TaskKind::Grow { growth, rank: own, n_ranks: grown };
        // SAFETY: the program passes valid pointers, as NCCL requires.
        unsafe { cx.child(NAME, Rc::clone(&parent), out, config, kind) }
    })
}
