//! Registers windows, and returns addresses in them.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawWindow, SUCCESS};
use devcomm_types::Team;
use devcomm_types::nccl::MultimemHandle;

use super::call::{
    CallContext, CallProgress, NcclError, NcclResult, UNHANDLED_CUDA_ERROR, call, call_ungrouped,
};
use super::comm::{Comm, RankComm};
use super::rendezvous::{Task, TaskKind};
use crate::base::error::Error;
use crate::base::layout::MULTICAST_UNIT;
use crate::base::mapping::page_size;
use crate::base::owner::Owner;
use crate::gpu::ranks::Symmetric;
use crate::machine::core::Core;
use crate::memory::multicast::is_multicast;
use crate::memory::{Allocation, WindowPart};

/// NCCL: `NCCL_WIN_COLL_SYMMETRIC`.
const COLL_SYMMETRIC: c_int = 1;
/// NCCL: `NCCL_WIN_STRICT_ORDERING`.
const STRICT_ORDERING: c_int = 2;
/// NCCL: `NCCL_WIN_GIN_ONLY`.
const GIN_ONLY: c_int = 4;
/// NCCL: `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: usize = 4096;

/// One rank's window: what an `ncclWindow_t` refers to.
pub(super) struct Window {
    comm: Rc<Comm>,
    rank: usize,
    /// Address of the memory that the rank registered.
    address: usize,
    shared: Rc<Symmetric>,
}

/// One rank's `ncclCommWindowRegister`.
pub(super) struct Registration {
    address: usize,
    bytes: usize,
    flags: c_int,
    out: *mut RawWindow,
    /// Whether an injected fault makes the result NULL.
    is_null: bool,
}

impl Window {
    /// Returns the address of byte `offset` of a rank's part; checks that `bytes` bytes follow.
    pub(super) fn at(&self, rank: usize, offset: usize, bytes: usize) -> NcclResult<usize> {
        let (part, len) = (self.shared.allocation.part(rank), self.shared.allocation.lens()[rank]);
        if offset > len || bytes > len - offset {
            let text =
                format!("{bytes} bytes at {offset} of rank {rank}'s part, which has {len} bytes");
            return Err(NcclError::argument(text));
        }
        Ok(part.wrapping_add(offset).expose_provenance())
    }

    /// Returns whether the rank's memory at `address` is in the window.
    pub(super) fn has(&self, address: usize, bytes: usize) -> bool {
        let len = self.shared.allocation.lens()[self.rank];
        let offset = address.wrapping_sub(self.address);
        offset <= len && bytes <= len - offset
    }

    pub(super) fn is_of(&self, rank_comm: &RankComm) -> bool {
        rank_comm
            .joined()
            .is_ok_and(|(comm, rank)| Rc::ptr_eq(comm, &self.comm) && rank == self.rank)
    }

    /// Returns the owner of the rank's part.
    pub(super) fn owner(&self) -> Owner {
        Owner::Window { id: self.shared.views[self.rank].id, rank: self.rank }
    }

    /// Returns the first rank of its LSA team.
    fn first_lsa_rank(&self) -> usize {
        self.rank - self.rank % self.comm.lsa_size()
    }
}

/// Creates the window once all ranks have called. [`register`] says when the handles are NULL.
pub(super) fn complete(core: &Core, tasks: &[(&Task, &Registration)]) -> NcclResult<()> {
    let Some((first, own)) = tasks.first() else { return Ok(()) };
    let comm = first.rank_comm.joined()?.0;
    if let Some((other, theirs)) = tasks.iter().find(|(_, theirs)| theirs.flags != own.flags) {
        let (a, b) = (first.rank_comm.name(), other.rank_comm.name());
        let text = format!("{a} has flags {}, but {b} has {}", own.flags, theirs.flags);
        return Err(NcclError::usage(text));
    }
    let parts = tasks.iter().map(|(_, own)| core.nccl.window_part(own.address, own.bytes));
    let parts: Option<Vec<WindowPart>> = parts.collect();
    let is_null = tasks.iter().any(|(_, own)| own.is_null);
    let shared = match parts.filter(|_| !is_null) {
        None => None,
        Some(parts) => {
            let (ranks, id) = (&comm.ranks, core.nccl.next_id());
            // The size of teams that map each other's parts. GIN can access all parts.
            let team = if own.flags & GIN_ONLY == 0 { ranks.lsa_ranks } else { 1 };
            let owner = |rank| Owner::Window { id, rank };
            let window = Allocation::window(&core.memory, &ranks.gpus, team, &parts, owner);
            let to_nccl = |error: Error| NcclError::new(UNHANDLED_CUDA_ERROR, error.to_string());
            Some(Rc::new(ranks.view(window.map_err(to_nccl)?, id)))
        }
    };
    for (rank, (task, Registration { address, out, .. })) in tasks.iter().enumerate() {
        let handle = shared.as_ref().map_or(null_mut(), |shared| shared.handle(rank));
        if let Some(shared) = &shared {
            let (comm, shared) = (Rc::clone(comm), Rc::clone(shared));
            let window = Window { comm, rank, address: *address, shared };
            core.nccl.windows.borrow_mut().insert(handle.addr(), Rc::new(window));
            task.rank_comm.has_rma.set(true);
        }
        // SAFETY: the program keeps `out` valid until the call has completed, as NCCL requires.
        unsafe { out.write(handle) };
    }
    Ok(())
}

impl CallContext<'_> {
    pub(super) fn window(&self, window: RawWindow) -> NcclResult<Rc<Window>> {
        let known = self.core.nccl.windows.borrow().get(&window.addr()).cloned();
        known.ok_or_else(|| NcclError::argument("not a window, or one that was deregistered"))
    }

    /// Returns whether the rank has registered these bytes of its memory in a window.
    pub(super) fn is_in_window(&self, comm: &RankComm, address: usize, bytes: usize) -> bool {
        let windows = self.core.nccl.windows.borrow();
        windows.values().any(|own| own.is_of(comm) && own.has(address, bytes))
    }
}

/// Writes NULL on all ranks if a rank's memory is not from `ncclMemAlloc`.
pub(super) unsafe extern "C" fn register(
    comm: RawComm,
    address: *mut c_void,
    bytes: usize,
    out: *mut RawWindow,
    flags: c_int,
) -> c_int {
    const NAME: &str = "ncclCommWindowRegister";
    call(NAME, comm, |cx| {
        cx.note(|| format!("{bytes} flags {flags}"));
        let rank_comm = cx.live(comm)?;
        let known = COLL_SYMMETRIC | STRICT_ORDERING | GIN_ONLY;
        let excluded = flags & COLL_SYMMETRIC != 0 && flags & GIN_ONLY != 0;
        if flags & !known != 0 || excluded {
            return Err(NcclError::argument(format!("flags {flags}")));
        }
        let alignment = ALIGNMENT.max(page_size());
        if bytes == 0 || !address.addr().is_multiple_of(alignment) {
            let text =
                format!("{bytes} bytes at {address:p}, which is not a multiple of {alignment}");
            return Err(NcclError::argument(text));
        }
        cx.check_access(&rank_comm, address.addr(), bytes)?;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { out.write(null_mut()) };
        let (address, is_null) = (address.addr(), cx.injects_null());
        let kind = TaskKind::Window(Registration { address, bytes, flags, out, is_null });
        cx.start(Task::new(NAME, rank_comm, None, kind))
    })
}

/// Deregisters the window on the calling rank only.
pub(super) unsafe extern "C" fn deregister(comm: RawComm, window: RawWindow) -> c_int {
    const NAME: &str = "ncclCommWindowDeregister";
    call(NAME, comm, |cx| {
        let rank_comm = cx.rank_comm(comm)?;
        if window.is_null() {
            return Ok(CallProgress::Done(SUCCESS));
        }
        let own = cx.window(window)?;
        if !own.is_of(&rank_comm) {
            return Err(NcclError::argument("a window of another communicator"));
        }
        let gpu = own.comm.ranks.gpus[own.rank] as usize;
        let what = || own.owner().to_string();
        cx.core.check_unused(NAME, what, gpu, |word| word == window.addr())?;
        own.shared.allocation.close(own.rank);
        cx.core.defer_drop(cx.core.nccl.windows.borrow_mut().remove(&window.addr()));
        Ok(CallProgress::Done(SUCCESS))
    })
}

pub(super) unsafe extern "C" fn user_pointer(
    comm: RawComm,
    window: RawWindow,
    out: *mut *mut c_void,
) -> c_int {
    call_ungrouped("ncclWinGetUserPtr", comm, |cx| {
        cx.rank_comm(comm)?;
        let address = cx.window(window)?.address;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { out.write(std::ptr::with_exposed_provenance_mut(address)) };
        Ok(())
    })
}

/// Writes the address that `address_in` returns.
fn address(
    name: &'static str,
    window: RawWindow,
    out: *mut *mut c_void,
    address_in: impl FnOnce(&CallContext<'_>, &Window) -> NcclResult<usize>,
) -> c_int {
    call_ungrouped(name, null_mut(), |cx| {
        let address = address_in(cx, &*cx.window(window)?)?;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
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
        let text = || NcclError::argument(format!("LSA rank {lsa_rank} of {size}"));
        window.at(window.first_lsa_rank() + peer.ok_or_else(text)?, offset, 0)
    })
}

/// Writes NULL for a rank outside the LSA team.
pub(super) unsafe extern "C" fn peer_pointer(
    window: RawWindow,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetPeerDevicePointer", window, out, |_, window| {
        let (peer, first) = (window.comm.rank(peer, "peer")?, window.first_lsa_rank());
        let is_lsa = (first..first + window.comm.lsa_size()).contains(&peer);
        if is_lsa { window.at(peer, offset, 0) } else { Ok(0) }
    })
}

/// Writes NULL if the simulation has no multicast.
pub(super) unsafe extern "C" fn lsa_multimem_pointer(
    window: RawWindow,
    offset: usize,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetLsaMultimemDevicePointer", window, out, |cx, window| {
        window.at(window.rank, offset, 0)?;
        if !cx.core.simulation().multimem {
            return Ok(0);
        }
        let base = window.comm.lsa_multicast()?.handle(window.rank).base.addr();
        Ok(base + window.shared.allocation.mc_offset_4k() as usize * MULTICAST_UNIT + offset)
    })
}

pub(super) unsafe extern "C" fn multimem_pointer(
    window: RawWindow,
    offset: usize,
    multimem: MultimemHandle,
    out: *mut *mut c_void,
) -> c_int {
    address("ncclGetMultimemDevicePointer", window, out, |cx, window| {
        window.at(window.rank, offset, 0)?;
        let base = multimem.base.addr();
        let group = is_multicast(base).then(|| cx.core.memory.multicast.group(base)).flatten();
        if !group.is_some_and(|group| Rc::ptr_eq(&group.gpus, &window.comm.ranks.gpus)) {
            return Err(NcclError::argument("not a multicast handle of the window's communicator"));
        }
        Ok(base + window.shared.allocation.mc_offset_4k() as usize * MULTICAST_UNIT + offset)
    })
}

/// Fails: CFT is not simulated.
fn no_endpoint(name: &'static str, window: RawWindow) -> c_int {
    call_ungrouped(name, null_mut(), |cx| {
        cx.window(window)?;
        Err(NcclError::usage("simulated GPUs have no CFT"))
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
