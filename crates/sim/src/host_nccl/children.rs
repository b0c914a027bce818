//! Communicators made of others: split, shrink, grow.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{Config, RawComm, RawUniqueId, SUCCESS};

use super::call::{Ask, Begun, Refusal, Refused, call};
use super::comm::{Life, Member};
use super::config::Settings;
use super::init::{new_id, number_of, rank_of};
use super::meeting::{Task, What};

/// NCCL: `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// NCCL: `NCCL_SHRINK_ABORT`.
const ABORT: c_int = 1;

impl Ask<'_> {
    /// A communicator that can be divided.
    fn parent(&self, comm: RawComm) -> Refused<Rc<Member>> {
        let member = self.ready(comm)?;
        match member.life.get() {
            Life::Live | Life::Revoked if !member.is_suspended.get() => Ok(member),
            _ => Err(Refusal::usage("the communicator is suspended or finalized")),
        }
    }

    /// Begins to make a child of `parent`.
    ///
    /// # Safety
    ///
    /// `out` and `config` are NCCL's.
    unsafe fn child(
        &self,
        name: &'static str,
        parent: Rc<Member>,
        out: *mut RawComm,
        config: *const Config,
        what: What,
    ) -> Refused<Begun> {
        // SAFETY: the caller's.
        let settings = unsafe { Settings::read(config, parent.settings.clone()) }?;
        let made = Member::new(self.core, parent.gpu, settings);
        // SAFETY: as above.
        unsafe { self.give(out, &made) };
        self.start(Task::new(name, parent, Some((made, out)), what))
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
    call(NAME, comm, |ask| {
        // SAFETY: the module's, here and below.
        ask.note(|| format!("color {color} key {key}{}", unsafe { Settings::describe(config) }));
        let (parent, what) = (ask.parent(comm)?, What::Split { color, key });
        match color {
            // SAFETY: as above.
            0.. => unsafe { ask.child(NAME, parent, out, config, what) },
            NO_COLOR => {
                // SAFETY: as above.
                unsafe { out.write(null_mut()) };
                ask.start(Task::new(NAME, parent, None, what))
            }
            _ => Err(Refusal::argument(format!("color {color}"))),
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
    call(NAME, comm, |ask| {
        // SAFETY: the module's: there are as many ranks as it says.
        let ranks = (0..usize::try_from(count).unwrap_or(0)).map(|i| unsafe { *excluded.add(i) });
        let ranks: Vec<c_int> = ranks.collect();
        ask.note(|| {
            let first = ranks.first().copied().unwrap_or(-1);
            // SAFETY: the module's.
            let config = unsafe { Settings::describe(config) };
            format!("without {count} from {first} flags {flags}{config}")
        });
        let parent = ask.parent(comm)?;
        let (group, own) = parent.place()?;
        let ranks = ranks.into_iter().map(|rank| group.rank(rank, "excluded rank"));
        let mut excluded = ranks.collect::<Refused<Vec<_>>>()?;
        excluded.sort_unstable();
        excluded.dedup();
        if excluded.is_empty() || excluded.contains(&own) || !(0..=ABORT).contains(&flags) {
            let text = format!("rank {own} excludes {excluded:?} with flags {flags}");
            return Err(Refusal::argument(text));
        }
        if flags == ABORT {
            parent.cut();
        }
        let what = What::Shrink { excluded };
        // SAFETY: the module's.
        unsafe { ask.child(NAME, Rc::clone(&parent), out, config, what) }
    })
}

/// With it new ranks grow a communicator, once.
pub(super) unsafe extern "C" fn get_unique_id(comm: RawComm, id: *mut RawUniqueId) -> c_int {
    call("ncclCommGetUniqueId", comm, |ask| {
        let member = ask.live(comm)?;
        let (group, _) = member.place()?;
        let growth = Rc::clone(group.growth.borrow_mut().get_or_insert_default());
        let mut joins = ask.core.nccl.joins.borrow_mut();
        if joins.values().flatten().any(|join| Rc::ptr_eq(join, &growth)) {
            return Err(Refusal::usage("a unique id to grow the communicator is there already"));
        }
        let (number, new) = new_id();
        joins.insert(number, Some(growth));
        // SAFETY: the module's.
        unsafe { id.write(new) };
        Ok(Begun::Done(SUCCESS))
    })
}

/// Ranks that are there have a communicator and no rank number, new ones a rank number and an id.
pub(super) unsafe extern "C" fn grow(
    comm: RawComm,
    n_ranks: c_int,
    id: *const RawUniqueId,
    rank: c_int,
    out: *mut RawComm,
    config: *mut Config,
) -> c_int {
    const NAME: &str = "ncclCommGrow";
    call(NAME, comm, |ask| {
        // SAFETY: the module's, here and below.
        let id = unsafe { id.as_ref() };
        ask.note(|| {
            let with_id = if id.is_some() { " with id" } else { "" };
            let new = if comm.is_null() { " new" } else { "" };
            // SAFETY: as above.
            let config = unsafe { Settings::describe(config) };
            format!("to {n_ranks} rank {rank}{with_id}{new}{config}")
        });
        let growth_of = |id: &RawUniqueId| {
            let growth = ask.core.nccl.joins.borrow().get(&number_of(id)?).cloned();
            let unknown = || Refusal::argument("a unique id by which nothing grows");
            growth.flatten().ok_or_else(unknown)
        };
        if comm.is_null() {
            let id = id.ok_or_else(|| Refusal::argument("a new rank without a unique id"))?;
            let ((rank, n_ranks), growth) = (rank_of(rank, n_ranks)?, growth_of(id)?);
            // SAFETY: as above.
            let settings = unsafe { Settings::read(config, Settings::default()) }?;
            let member = Member::new(ask.core, ask.gpu()?, settings);
            // SAFETY: as above.
            unsafe { ask.give(out, &member) };
            let made = Some((Rc::clone(&member), out));
            return ask.start(Task::new(NAME, member, made, What::Grow { growth, rank, n_ranks }));
        }
        let parent = ask.live(comm)?;
        let (group, own) = parent.place()?;
        let growth = Rc::clone(group.growth.borrow_mut().get_or_insert_default());
        if let Some(id) = id
            && !Rc::ptr_eq(&growth_of(id)?, &growth)
        {
            return Err(Refusal::argument("a unique id of another communicator"));
        }
        let grown = usize::try_from(n_ranks).unwrap_or(0);
        if rank != -1 || grown <= group.n_ranks() {
            let n = group.n_ranks();
            let text = format!("rank {rank} grows {n} ranks to {n_ranks}");
            return Err(Refusal::argument(text));
        }
        let what = What::Grow { growth, rank: own, n_ranks: grown };
        // SAFETY: as above.
        unsafe { ask.child(NAME, Rc::clone(&parent), out, config, what) }
    })
}
