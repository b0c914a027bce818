//! The GIN barrier, with NCCL's algorithm: each rank signals its peers, increments its shadows and
//! waits until the peers' signals have reached them.

use devcomm_types::WaitKind;
use devcomm_types::nccl::{CoopAny, DevComm, Gin, GinBarrierHandle, GinBarrierSession, Team};

use super::{Call, GinComm, Handle};
use crate::base::error::Site;
use crate::gpu::nccl::caller;
use crate::gpu::nccl::lsa_barrier::releases;
use crate::gpu::thread::Thread;
use crate::race::Releases;

const NAME: &str = "a GIN barrier";

/// Bits of NCCL's fence level.
pub(super) const FENCE_PUT: i32 = 1;
const FENCE_GET: i32 = 2;

/// The simulator's representation of a session.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Session {
    coop: CoopAny,
    pub(super) handle: Handle,
    team: Team,
    index: u32,
    /// First signal of the barrier.
    signal: u32,
    /// Whether the barrier orders the operations of all contexts.
    all_contexts: bool,
}

const _: () = assert!(size_of::<Session>() <= size_of::<GinBarrierSession>());

/// Returns the first signal of barrier `index` of a set.
///
/// # Errors
///
/// Fails if the device communicator has no such barrier for this team.
pub(in crate::gpu::nccl) fn first_signal(
    gin: &GinComm,
    team: Team,
    barriers: GinBarrierHandle,
    index: u32,
) -> Result<u32, String> {
    let ranks = team.n_ranks;
    let Some(set) = gin.barriers.iter().find(|set| set.signal0 == barriers.signal0) else {
        return Err("a GIN barrier whose handle is not of this device communicator".to_owned());
    };
    let n = set.ranks.unwrap_or(ranks as u32);
    if i64::from(ranks) != i64::from(n) {
        return Err(format!("a GIN barrier of a team of {ranks} ranks, made for {n}"));
    }
    let count = set.signals / n.max(1);
    if index >= count {
        return Err(format!("GIN barrier {index}: the device communicator was made with {count}"));
    }
    Ok(barriers.signal0 + index * n)
}

impl Session {
    /// Opens a session on barrier `index` of a set of the device communicator.
    pub(super) fn new(
        call: &Call,
        coop: CoopAny,
        team: Team,
        barriers: GinBarrierHandle,
        index: u32,
        all_contexts: bool,
    ) -> Self {
        let signal = match first_signal(call.gin, team, barriers, index) {
            Ok(signal) => signal,
            Err(what) => call.misuse(what),
        };
        let new = Self { coop, handle: call.handle, team, index, signal, all_contexts };
        new.set_open(call, true);
        new
    }

    /// Records that the session is opened or closed, if the thread is the first of the coop.
    pub(super) fn set_open(&self, call: &Call, open: bool) {
        // SAFETY: the coop is the one with which the session was opened.
        let (_, rank) = unsafe { call.coop(&raw const self.coop) };
        if rank == 0 {
            let Handle { rank, context, .. } = self.handle;
            let context = (!self.all_contexts).then_some(context);
            let barrier = (self.index, self.signal);
            call.gin.session(call.thread, call.at, (rank, context), barrier, open);
        }
    }

    /// Synchronises with the other ranks.
    pub(super) fn sync(&mut self, thread: &Thread, at: Site, order: i32, fence: i32) {
        let released = if releases(order) { Releases::ToSystem } else { Releases::Nothing };
        let call = Call::with(self.handle, thread, at).releasing(released);
        let order = call.order(order);
        // SAFETY: the coop is the one with which the session was opened.
        let (coop, rank) = unsafe { call.coop(&raw const self.coop) };
        let (size, ranks) = (coop.size(thread), self.team.n_ranks as u32);
        call.sync(coop, NAME);
        // NCCL flushes first only with back ends that have no strong signals: PROXY has them. With
        // a fence of puts, a rank also signals itself, since it may have put to itself.
        let signals = if fence & FENCE_PUT != 0 { ranks } else { ranks - 1 };
        let contexts = if self.all_contexts { call.gin.contexts } else { 1 };
        // The pairs of a context and a peer that this thread handles.
        let share = || (rank..contexts * signals).step_by(size.max(1) as usize);
        let pair = |i: u32| {
            let (context, step) = (i / signals, i % signals);
            let peer = (1 + self.team.rank as u32 + step) % ranks;
            let call = if self.all_contexts { call.on_context(context) } else { call };
            (call, peer)
        };
        for (call, peer) in share().map(pair) {
            let world = call.peer(self.team, peer as i32);
            // Other back ends have no strong signals, and fence only if they are asked to.
            call.increment(self.signal + self.team.rank as u32, world, fence & FENCE_PUT != 0);
        }
        for (call, peer) in share().map(pair) {
            let world = call.peer(self.team, peer as i32);
            let signal = self.signal + peer;
            let shadow = call.shadow(signal).cast::<u32>();
            // SAFETY: the pointer is to the low half of the device communicator's shadow, as in
            // NCCL; only one thread runs at a time.
            let wanted = unsafe {
                let wanted = shadow.read_volatile().wrapping_add(1);
                shadow.write_volatile(wanted);
                wanted
            };
            let what = call.wait_for_peer(WaitKind::GinBarrier, self.index, wanted.into(), world);
            call.wait_barrier(signal, wanted, order, what);
        }
        if fence & FENCE_PUT != 0 {
            let Handle { rank, context, .. } = self.handle;
            let context = (!self.all_contexts).then_some(context);
            call.gin.network.fenced(call.gin.id, rank, context);
        }
        if fence & FENCE_GET != 0 {
            if self.all_contexts {
                for i in (rank..contexts * ranks).step_by(size.max(1) as usize) {
                    let peer = call.peer(self.team, (i % ranks) as i32);
                    call.on_context(i / ranks).flush_peer(peer, order);
                }
            } else {
                // SAFETY: the coop is the one with which the session was opened.
                unsafe { call.flush(&raw const self.coop, order, true, None) };
            }
        }
        call.sync(coop, NAME);
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn init(
    session: *mut GinBarrierSession,
    coop: *const CoopAny,
    net: *const Gin,
    team: *const Team,
    handle: *const GinBarrierHandle,
    index: u32,
) {
    // SAFETY: the kernel passes a handle, a coop, a team, and memory for a session, which is at
    // least as large as `Session`.
    unsafe {
        let call = Call::on(net);
        let new = Session::new(&call, *coop, *team, *handle, index, false);
        session.cast::<Session>().write(new);
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn init_all_contexts(
    session: *mut GinBarrierSession,
    coop: *const CoopAny,
    comm: *const DevComm,
    team: *const Team,
    handle: *const GinBarrierHandle,
    index: u32,
) {
    let (thread, at) = caller();
    // SAFETY: the kernel passes a device communicator, a coop, a team, and memory for a session,
    // which is at least as large as `Session`.
    unsafe {
        let call = Call::with(Handle::new(comm, 0, thread, at), thread, at);
        let new = Session::new(&call, *coop, *team, *handle, index, true);
        session.cast::<Session>().write(new);
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn sync(
    session: *mut GinBarrierSession,
    _coop: *const CoopAny,
    order: i32,
    fence: i32,
) {
    let (thread, at) = caller();
    // SAFETY: the kernel opened the session.
    unsafe { (*session.cast::<Session>()).sync(thread, at, order, fence) };
}

/// Records the end of the session; in NCCL it does nothing.
pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn destroy(session: *mut GinBarrierSession) {
    let (thread, at) = caller();
    // SAFETY: the kernel opened the session.
    let session = unsafe { &*session.cast::<Session>() };
    session.set_open(&Call::with(session.handle, thread, at), false);
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn size() -> usize {
    size_of::<GinBarrierSession>()
}
