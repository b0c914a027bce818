//! Windows: memory that the ranks of a communicator see at one place each, and its addresses.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawWindow, SUCCESS};
use devcomm_types::Team;
use devcomm_types::nccl::MultimemHandle;

use super::call::{Ask, Begun, Refusal, Refused, UNHANDLED_CUDA_ERROR, call, question};
use super::comm::{Comm, Member};
use super::meeting::{Task, What};
use crate::machine::core::Core;
use crate::memory::{Allocation, Owner, Part, page_size};
use crate::multicast::{UNIT, is_multicast};
use crate::ranks::Symmetric;

/// NCCL: `NCCL_WIN_COLL_SYMMETRIC`.
const COLL_SYMMETRIC: c_int = 1;
/// NCCL: `NCCL_WIN_STRICT_ORDERING`.
const STRICT_ORDERING: c_int = 2;
/// NCCL: `NCCL_WIN_GIN_ONLY`.
const GIN_ONLY: c_int = 4;
/// NCCL: `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: usize = 4096;

/// One rank's end of a window.
pub(super) struct Window {
    comm: Rc<Comm>,
    rank: usize,
    /// Of the rank's own memory.
    address: usize,
    shared: Rc<Symmetric>,
}

/// One rank's part in the registration of a window.
pub(super) struct Registration {
    address: usize,
    bytes: usize,
    flags: c_int,
    out: *mut RawWindow,
    /// Whether the result is to be NULL.
    is_null: bool,
}

impl Window {
    /// Byte `offset` of a rank's part, which has `bytes` bytes from there.
    pub(super) fn at(&self, rank: usize, offset: usize, bytes: usize) -> Refused<usize> {
        let (part, len) = (self.shared.allocation.part(rank), self.shared.allocation.lens()[rank]);
        if offset > len || bytes > len - offset {
            let text =
                format!("{bytes} bytes at {offset} of rank {rank}'s part, which has {len} bytes");
            return Err(Refusal::argument(text));
        }
        Ok(part.wrapping_add(offset).expose_provenance())
    }

    /// Whether memory of the rank's own lies in it.
    pub(super) fn has(&self, address: usize, bytes: usize) -> bool {
        let len = self.shared.allocation.lens()[self.rank];
        let offset = address.wrapping_sub(self.address);
        offset <= len && bytes <= len - offset
    }

    pub(super) fn is_of(&self, member: &Member) -> bool {
        member.place().is_ok_and(|(comm, rank)| Rc::ptr_eq(comm, &self.comm) && rank == self.rank)
    }

    /// The first rank of its LSA team.
    fn first_lsa_rank(&self) -> usize {
        self.rank - self.rank % self.comm.lsa_size()
    }
}

/// All ranks have come: makes the window, if all ranks' memory is good for one.
pub(super) fn complete(core: &Core, tasks: &[(&Task, &Registration)]) -> Refused<()> {
    let Some((first, own)) = tasks.first() else { return Ok(()) };
    let comm = first.member.place()?.0;
    if let Some((other, theirs)) = tasks.iter().find(|(_, theirs)| theirs.flags != own.flags) {
        let (a, b) = (first.member.name(), other.member.name());
        let text = format!("{a} has flags {}, but {b} has {}", own.flags, theirs.flags);
        return Err(Refusal::usage(text));
    }
    let parts = tasks.iter().map(|(_, own)| core.nccl.part(own.address, own.bytes));
    let parts: Option<Vec<Part>> = parts.collect();
    let is_null = tasks.iter().any(|(_, own)| own.is_null);
    let shared = match parts.filter(|_| !is_null) {
        None => None,
        Some(parts) => {
            let (ranks, id) = (&comm.ranks, core.nccl.next_id());
            // The network reaches all parts at any rate.
            let reach = if own.flags & GIN_ONLY == 0 { ranks.lsa_ranks } else { 1 };
            let owner = |rank| Owner::Window { id, rank };
            let window = Allocation::window(&core.memory, &ranks.gpus, reach, &parts, owner);
            let refused =
                |error: crate::Error| Refusal::new(UNHANDLED_CUDA_ERROR, error.to_string());
            Some(Rc::new(ranks.view(window.map_err(refused)?, id)))
        }
    };
    for (rank, (task, Registration { address, out, .. })) in tasks.iter().enumerate() {
        let handle = shared.as_ref().map_or(null_mut(), |shared| shared.handle(rank));
        if let Some(shared) = &shared {
            let (comm, shared) = (Rc::clone(comm), Rc::clone(shared));
            let window = Window { comm, rank, address: *address, shared };
            core.nccl.windows.borrow_mut().insert(handle.addr(), Rc::new(window));
            task.member.has_rma.set(true);
        }
        // SAFETY: the module's: the call or its group waits, or its caller keeps the place.
        unsafe { out.write(handle) };
    }
    Ok(())
}

impl Ask<'_> {
    pub(super) fn window(&self, window: RawWindow) -> Refused<Rc<Window>> {
        let known = self.core.nccl.windows.borrow().get(&window.addr()).cloned();
        known.ok_or_else(|| Refusal::argument("no window, or one whose registration has ended"))
    }
}

/// NULL on all ranks unless all bring memory of `ncclMemAlloc`.
pub(super) unsafe extern "C" fn register(
    comm: RawComm,
    address: *mut c_void,
    bytes: usize,
    out: *mut RawWindow,
    flags: c_int,
) -> c_int {
    const NAME: &str = "ncclCommWindowRegister";
    call(NAME, comm, |ask| {
        ask.note(|| format!("{bytes} flags {flags}"));
        let member = ask.live(comm)?;
        let known = COLL_SYMMETRIC | STRICT_ORDERING | GIN_ONLY;
        let excluded = flags & COLL_SYMMETRIC != 0 && flags & GIN_ONLY != 0;
        if flags & !known != 0 || excluded {
            return Err(Refusal::argument(format!("flags {flags}")));
        }
        let alignment = ALIGNMENT.max(page_size());
        if bytes == 0 || !address.addr().is_multiple_of(alignment) {
            let text = format!("{bytes} bytes at {address:p}, no multiple of {alignment}");
            return Err(Refusal::argument(text));
        }
        ask.reached(&member, address.addr(), bytes)?;
        // SAFETY: the module's.
        unsafe { out.write(null_mut()) };
        let (address, is_null) = (address.addr(), ask.gives_null());
        let what = What::Window(Registration { address, bytes, flags, out, is_null });
        ask.start(Task::new(NAME, member, None, what))
    })
}

/// The other ranks keep theirs.
pub(super) unsafe extern "C" fn deregister(comm: RawComm, window: RawWindow) -> c_int {
    call("ncclCommWindowDeregister", comm, |ask| {
        let member = ask.member(comm)?;
        if window.is_null() {
            return Ok(Begun::Done(SUCCESS));
        }
        if !ask.window(window)?.is_of(&member) {
            return Err(Refusal::argument("a window of another communicator"));
        }
        ask.core.retire(ask.core.nccl.windows.borrow_mut().remove(&window.addr()));
        Ok(Begun::Done(SUCCESS))
    })
}

pub(super) unsafe extern "C" fn user_pointer(
    comm: RawComm,
    window: RawWindow,
    out: *mut *mut c_void,
) -> c_int {
    question("ncclWinGetUserPtr", comm, |ask| {
        ask.member(comm)?;
        let address = ask.window(window)?.address;
        // SAFETY: the module's, here and below.
        unsafe { out.write(std::ptr::with_exposed_provenance_mut(address)) };
        Ok(())
    })
}

/// Answers with an address in a window.
fn address(
    name: &'static str,
    window: RawWindow,
    out: *mut *mut c_void,
    of: impl FnOnce(&Ask<'_>, &Window) -> Refused<usize>,
) -> c_int {
    question(name, null_mut(), |ask| {
        let address = of(ask, &*ask.window(window)?)?;
        // SAFETY: as above.
        unsafe { out.write(std::ptr::with_exposed_provenance_mut(address)) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn lsa_pointer(
    window: RawWindow,
    offset: usize,
    lsa_rank: c_int,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetLsaDevicePointer", window, out, |_, window| {
        let size = window.comm.lsa_size();
        let peer = usize::try_from(lsa_rank).ok().filter(|rank| *rank < size);
        let text = || Refusal::argument(format!("LSA rank {lsa_rank} of {size}"));
        window.at(window.first_lsa_rank() + peer.ok_or_else(text)?, offset, 0)
    })
}

/// NULL for a rank that load and store do not reach.
pub(super) unsafe extern "C" fn peer_pointer(
    window: RawWindow,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetPeerDevicePointer", window, out, |_, window| {
        let (peer, first) = (window.comm.rank(peer, "peer")?, window.first_lsa_rank());
        let is_reached = (first..first + window.comm.lsa_size()).contains(&peer);
        if is_reached { window.at(peer, offset, 0) } else { Ok(0) }
    })
}

/// NULL where there is no multicast.
pub(super) unsafe extern "C" fn lsa_multimem_pointer(
    window: RawWindow,
    offset: usize,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetLsaMultimemDevicePointer", window, out, |ask, window| {
        window.at(window.rank, offset, 0)?;
        if !ask.core.simulation.multimem {
            return Ok(0);
        }
        let base = window.comm.lsa_multicast()?.handle(window.rank).base.addr();
        Ok(base + window.shared.allocation.place() as usize * UNIT + offset)
    })
}

pub(super) unsafe extern "C" fn multimem_pointer(
    window: RawWindow,
    offset: usize,
    multimem: MultimemHandle,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetMultimemDevicePointer", window, out, |ask, window| {
        window.at(window.rank, offset, 0)?;
        let base = multimem.base.addr();
        let group = is_multicast(base).then(|| ask.core.memory.multicast.group(base)).flatten();
        if !group.is_some_and(|group| Rc::ptr_eq(&group.gpus, &window.comm.ranks.gpus)) {
            return Err(Refusal::argument("no multicast handle of the window's communicator"));
        }
        Ok(base + window.shared.allocation.place() as usize * UNIT + offset)
    })
}

/// There are no logical endpoints.
fn no_endpoint(name: &'static str, window: RawWindow) -> c_int {
    question(name, null_mut(), |ask| {
        ask.window(window)?;
        Err(Refusal::usage("simulated GPUs have no CFT"))
    })
}

pub(super) unsafe extern "C" fn multimem_endpoint(
    window: RawWindow,
    _offset: usize,
    _id: *mut u32,
    _at: *mut usize,
) -> c_int {
    no_endpoint("ncclGetMultimemDeviceLeInfo", window)
}

pub(super) unsafe extern "C" fn cft_endpoint(
    window: RawWindow,
    _offset: usize,
    _peer: c_int,
    _team: Team,
    _id: *mut u32,
    _at: *mut usize,
) -> c_int {
    no_endpoint("ncclGetCftDeviceLeInfo", window)
}

pub(super) unsafe extern "C" fn peer_endpoint(
    window: RawWindow,
    _offset: usize,
    _peer: c_int,
    _id: *mut u32,
    _at: *mut usize,
) -> c_int {
    no_endpoint("ncclGetPeerDeviceLeInfo", window)
}
