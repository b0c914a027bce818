//! The LSA barrier, with NCCL's algorithm and memory layout, so that misuse has the effect that it
//! has on a GPU. Only Init loads the epoch and only Destroy stores it.
//!
//! # Safety
//!
//! As in the parent module: [`init`] filled the sessions; a barrier's state lies in the resources
//! of the kernel's device communicator, which outlives the launch.

use std::mem::offset_of;
use std::rc::Rc;

use cuda_std::arch::Order;
use devcomm_types::nccl::{
    CoopAny, DevComm, LsaBarrierHandle, LsaBarrierSession, MultimemHandle, Team,
};
use devcomm_types::{WaitFor, WaitKind};
use nccl_device::raw::host::{CALL_SITE, CoopCall};

use super::coop::{Coop, coop_rank};
use super::{record_communicator, view};
use crate::base::error::{Site, Waiting};
use crate::base::layout::{RESOURCE_UNIT, STRIDE_UNIT};
use crate::gpu::thread::{Thread, Wait};
use crate::gpu::waits::{self, Until};
use crate::memory::multicast::is_multicast;
use crate::race::Releases;

/// NCCL's session object, field by field.
#[repr(C)]
pub(super) struct Session {
    pub(super) coop: CoopAny,
    pub(super) comm: *const DevComm,
    pub(super) team: Team,
    pub(super) handle: LsaBarrierHandle,
    pub(super) index: u32,
    pub(super) multimem: bool,
    pub(super) multimem_handle: MultimemHandle,
    pub(super) epoch: u32,
}

const _: () = {
    assert!(size_of::<Session>() == size_of::<LsaBarrierSession>());
    assert!(align_of::<Session>() == align_of::<LsaBarrierSession>());
    assert!(offset_of!(Session, team) == 32);
    assert!(offset_of!(Session, handle) == 44);
    assert!(offset_of!(Session, index) == 52);
    assert!(offset_of!(Session, multimem_handle) == 64);
    assert!(offset_of!(Session, epoch) == 72);
};

/// Returns the GPUs of a communicator's ranks.
///
/// # Safety
///
/// `comm` is a device communicator.
pub(crate) unsafe fn gpus_of<'a>(comm: *const DevComm) -> &'a Rc<[u32]> {
    // SAFETY: the kernel passes a device communicator that the host created.
    &unsafe { view((*comm).resource_window) }.gpus
}

/// Returns the number of 32-bit words of `n` barriers for a team of `ranks`: first the epoch for
/// multimem of each barrier, then the epoch without multimem of each, then the inbox for multimem
/// of each, and last an inbox per rank of each.
pub(crate) fn barrier_words(n: usize, ranks: usize) -> usize {
    n.saturating_mul(ranks.saturating_add(3))
}

impl Session {
    /// Returns a cooperative call of this session.
    fn call(&self) -> CoopCall {
        CoopCall::new("an LSA barrier").arg("index", self.index.into())
    }

    /// Returns the barriers' state in the resources of team rank `owner`.
    fn state(&self, owner: i32) -> *mut u32 {
        // SAFETY: a session is used while its kernel's device communicator is in scope.
        let comm = unsafe { &*self.comm };
        let peer = comm.lsa_rank + (owner - self.team.rank) * self.team.stride;
        let inlined = &comm.resource_window_inlined;
        let part = peer as usize * inlined.stride_4g as usize * STRIDE_UNIT;
        let offset = self.handle.buffer as usize * RESOURCE_UNIT;
        inlined.lsa_flat_base.cast::<u8>().wrapping_add(part + offset).cast()
    }

    fn epoch_word(&self) -> *mut u32 {
        let n = if self.multimem { 0 } else { self.handle.n_barriers as usize };
        self.state(self.team.rank).wrapping_add(n + self.index as usize)
    }

    /// Returns the word in which `owner` counts arrivals by multimem.
    fn multimem_inbox(&self, owner: i32) -> *mut u32 {
        let n = self.handle.n_barriers as usize;
        self.state(owner).wrapping_add(2 * n + self.index as usize)
    }

    /// Checks that the team lies within the LSA team.
    fn check_team(&self, thread: &Thread, at: Site) {
        // SAFETY: the session has the device communicator with which the kernel opened it.
        let comm = unsafe { &*self.comm };
        let Team { n_ranks, rank, stride } = self.team;
        let in_lsa = |peer| (0..comm.lsa_size).contains(&self.team.to_lsa(comm.lsa_rank, peer));
        if !(0..n_ranks).contains(&rank) || !in_lsa(0) || !in_lsa(n_ranks - 1) {
            let what = format!(
                "an LSA barrier of a team that is not in the LSA team: rank {rank} of {n_ranks} \
                ranks with stride {stride}"
            );
            thread.misuse(at, what);
        }
    }

    /// Checks that the multicast handle is the team's.
    fn check_multimem(&self, thread: &Thread, at: Site) {
        // SAFETY: the session has the device communicator with which the kernel opened it.
        let (rank, communicator) = unsafe { ((*self.comm).rank, gpus_of(self.comm)) };
        let first = self.team.to_world(rank, 0) as usize;
        let (n, stride) = (self.team.n_ranks as usize, self.team.stride as usize);
        let base = self.multimem_handle.base.addr();
        let found =
            is_multicast(base).then(|| thread.gpus().memory.multicast.group(base)).flatten();
        let is_team = found.is_some_and(|group| {
            Rc::ptr_eq(&group.gpus, communicator) && group.is(first, n, stride)
        });
        if !is_team {
            let what = if base == 0 {
                "an LSA barrier over multimem, but the multimem handle is NULL"
            } else {
                "an LSA barrier over multimem, but the multimem handle is not the team's"
            };
            thread.misuse(at, what);
        }
    }

    /// Returns the word in which `peer` signals its arrival to `owner`.
    fn inbox(&self, owner: i32, peer: i32) -> *mut u32 {
        let n = self.handle.n_barriers as usize;
        let inboxes = 3 * n + self.index as usize * self.team.n_ranks as usize;
        self.state(owner).wrapping_add(inboxes + peer as usize)
    }

    /// Returns the peers that thread `rank` of a coop of `size` threads handles.
    fn peers(&self, rank: u32, size: u32) -> impl Iterator<Item = i32> + use<> {
        let (me, others) = (self.team.rank, self.team.n_ranks - 1);
        (rank as i32..others).step_by(size.max(1) as usize).map(move |i| i + i32::from(me <= i))
    }

    pub(super) fn arrive(&self, thread: &Thread, coop: Coop, order: i32, at: Site) {
        coop.sync(thread, Some(self.call()), at);
        if self.multimem {
            if coop_rank(coop, thread, at) == 0 {
                for owner in 0..self.team.n_ranks {
                    let inbox = self.multimem_inbox(owner);
                    // SAFETY: the word is an inbox that Init checked; one thread runs at a time.
                    unsafe { inbox.write_volatile(inbox.read_volatile().wrapping_add(1)) };
                    release(thread, inbox, order);
                }
                thread.gpus().progress();
            }
            return;
        }
        for peer in self.peers(coop_rank(coop, thread, at), coop.size(thread)) {
            let inbox = self.inbox(peer, self.team.rank);
            // SAFETY: the word is an inbox that Init checked; one thread runs at a time.
            unsafe { inbox.write_volatile(self.epoch.wrapping_add(1)) };
            release(thread, inbox, order);
            thread.gpus().progress();
        }
    }

    pub(super) fn wait(&mut self, thread: &Thread, coop: Coop, order: i32, at: Site) {
        if self.multimem {
            if coop_rank(coop, thread, at) == 0 {
                let target = self.epoch.wrapping_add(self.team.n_ranks as u32);
                let inbox = self.multimem_inbox(self.team.rank);
                let until = Until::Arrived { inbox, target };
                let what = WaitFor {
                    kind: WaitKind::LsaBarrier,
                    index: self.index,
                    context: 0,
                    peer: -1,
                    wanted: target.into(),
                    seen: 0,
                };
                waits::until(thread, until, acquire_half(order), what, None, at);
                // The other threads' epochs are not used: the first one alone signals and closes.
                self.epoch = target;
            }
            return coop.sync(thread, Some(self.call()), at);
        }
        let target = self.epoch.wrapping_add(1);
        for peer in self.peers(coop_rank(coop, thread, at), coop.size(thread)) {
            let wait = InboxWait {
                word: self.inbox(self.team.rank, peer),
                inboxes: self.inbox(self.team.rank, 0),
                target,
                team: self.team,
                comm: self.comm,
                index: self.index,
                at,
            };
            if !wait.is_over() {
                thread.suspend(Wait::Inbox(wait));
            }
            let (memory, mut clock) = (&thread.gpus().memory, thread.race.borrow_mut());
            memory.races.read_from(
                memory.as_ref(),
                &mut clock,
                wait.word.addr(),
                acquire_half(order),
            );
        }
        self.epoch = target;
        coop.sync(thread, Some(self.call()), at);
    }
}

impl Session {
    /// Checks the session and loads the stored epoch.
    pub(super) fn open(mut self, thread: &Thread, at: Site) -> Self {
        let (n, index) = (self.handle.n_barriers, self.index);
        if i64::from(index) >= i64::from(n) {
            let what = format!("LSA barrier {index}: the device communicator was made with {n}");
            thread.misuse(at, what);
        }
        self.check_team(thread, at);
        if self.multimem {
            self.check_multimem(thread, at);
        }
        let word = self.epoch_word();
        let thread_rank = coop_rank(Coop::of(&self.coop, thread, at), thread, at);
        if thread_rank == 0 {
            thread.gpus().session_opened(thread, word.addr(), ("LSA barrier", index), at);
        }
        // SAFETY: the word is the epoch of a barrier that exists, as checked above.
        self.epoch = unsafe { word.read_volatile() };
        self
    }

    /// Stores the epoch for the next session.
    pub(super) fn close(&self, thread: &Thread, coop: Coop, at: Site) {
        if coop_rank(coop, thread, at) == 0 {
            let word = self.epoch_word();
            // SAFETY: the word is the epoch of a barrier that Init checked.
            unsafe { word.write_volatile(self.epoch) };
            let barrier = ("LSA barrier", self.index);
            thread.gpus().session_closed(thread, word.addr(), barrier, at);
        }
        coop.sync(thread, Some(self.call()), at);
    }
}

/// Makes a thread's store to an inbox a release of what the thread knows, if its order is one.
fn release(thread: &Thread, inbox: *const u32, order: i32) {
    if releases(order) {
        let (memory, mut clock) = (&thread.gpus().memory, thread.race.borrow_mut());
        let [known, _] = memory.races.post(&mut clock, Releases::ToSystem);
        memory.races.release_to(memory.as_ref(), inbox.addr(), thread.id().rank, known);
    }
}

/// Returns the order of a wait's reads: the acquire half of a C++ memory order.
pub(super) fn acquire_half(order: i32) -> Order {
    match order {
        1 | 2 | 4 | 5 => Order::Acquire, // consume, acquire or stronger
        _ => Order::Relaxed,
    }
}

/// Returns whether a C++ memory order is release or stronger: release, acq_rel or seq_cst.
pub(super) fn releases(order: i32) -> bool {
    matches!(order, 3..=5)
}

/// Returns whether the inbox of a barrier has reached `target`, by NCCL's wrap-around comparison.
pub(crate) fn arrived(inbox: *const u32, target: u32) -> bool {
    // SAFETY: Init checked that the word is an inbox, in memory that lives as long as the launch.
    unsafe { inbox.read_volatile() }.wrapping_sub(target) <= u32::MAX >> 1
}

/// A thread's wait until a peer has stored at least `target` in the inbox at `word`.
#[derive(Clone, Copy)]
pub(crate) struct InboxWait {
    word: *const u32,
    /// The inboxes of all peers, by rank in the team.
    inboxes: *const u32,
    target: u32,
    team: Team,
    comm: *const DevComm,
    index: u32,
    pub(crate) at: Site,
}

impl InboxWait {
    /// Returns whether the peer has arrived.
    pub(crate) fn is_over(&self) -> bool {
        arrived(self.word, self.target)
    }

    /// Returns what the thread waits for, for error messages.
    pub(crate) fn waiting(&self) -> Waiting {
        // SAFETY: the thread waits with this device communicator in scope.
        let (rank, gpus) = unsafe { ((*self.comm).rank, gpus_of(self.comm)) };
        let missing = (0..self.team.n_ranks)
            .filter(|peer| *peer != self.team.rank)
            .filter(|peer| !arrived(self.inboxes.wrapping_add(*peer as usize), self.target))
            .map(|peer| gpus[self.team.to_world(rank, peer) as usize] as usize)
            .collect();
        Waiting::Peers { index: self.index, missing }
    }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C-unwind" fn init(
    session: *mut LsaBarrierSession,
    coop: *const CoopAny,
    comm: *const DevComm,
    team: *const Team,
    handle: *const LsaBarrierHandle,
    index: u32,
    multimem: bool,
    multimem_handle: *const MultimemHandle,
) {
    let (thread, at) = (Thread::current(), CALL_SITE.get());
    // SAFETY: the kernel passes valid objects, as NCCL requires; the session may be uninitialised
    // and is only written.
    let new = unsafe {
        record_communicator(thread, gpus_of(comm));
        Session {
            coop: *coop,
            comm,
            team: *team,
            handle: *handle,
            index,
            multimem,
            multimem_handle: *multimem_handle,
            epoch: 0,
        }
    };
    let new = new.open(thread, at);
    // SAFETY: the kernel passes a session object, with the size and alignment of `Session`.
    unsafe { session.cast::<Session>().write(new) };
}

/// Returns the session of a cooperative call.
///
/// # Safety
///
/// `session` was filled by [`init`] on this thread, and nothing else uses it.
unsafe fn opened<'a>(session: *mut LsaBarrierSession) -> (&'a mut Session, Coop, Site) {
    let (thread, at) = (Thread::current(), CALL_SITE.get());
    // SAFETY: the kernel passes a session that it opened and that no other thread uses.
    let session = unsafe { &mut *session.cast::<Session>() };
    let coop = Coop::of(&session.coop, thread, at);
    (session, coop, at)
}

/// Declares the functions of a session. They ignore the coop, which the session already has.
macro_rules! on_session {
    ($( $name:ident: $($step:ident),*; )*) => { $(
        pub(super) unsafe extern "C-unwind" fn $name(
            session: *mut LsaBarrierSession,
            _coop: *const CoopAny,
            order: i32,
        ) {
            let thread = Thread::current();
            // SAFETY: the kernel opened the session.
            let (session, coop, at) = unsafe { opened(session) };
            $( session.$step(thread, coop, order, at); )*
        }
    )* };
}

on_session! {
    arrive: arrive;
    wait: wait;
    sync: arrive, wait;
}

pub(super) unsafe extern "C-unwind" fn destroy(session: *mut LsaBarrierSession) {
    let thread = Thread::current();
    // SAFETY: the kernel opened the session.
    let (session, coop, at) = unsafe { opened(session) };
    session.close(thread, coop, at);
}

pub(super) unsafe extern "C-unwind" fn size() -> usize {
    size_of::<LsaBarrierSession>()
}
