//! GIN barriers: barriers between ranks over the network.
//!
//! They use NCCL's algorithm, written in Rust because NCCL's C function cannot fail: the waits here
//! end when the host aborts and can have a timeout. A barrier has one signal per rank. Each rank
//! increments its signal in every peer, and waits until each peer's signal in its own memory has
//! reached the signal's shadow: the count of arrivals that this rank expects.

use crate::prelude::*;
use devcomm_types::GinType;
use devcomm_types::nccl::GinBarrierHandle;

use super::arrival::{Arrive, Arrived};
use super::{Arrival, BarrierIndex};
use crate::gin::calls::{self, Release, Word};
use crate::gin::{Gin, GinBackend, SignalId};
#[cfg(not(target_arch = "nvptx64"))]
use crate::raw::host::GinBarrierUse;
#[cfg(not(target_arch = "nvptx64"))]
use crate::wait::is_unwinding;

/// The earlier puts and gets that are complete after a GIN barrier. NCCL: `ncclGinFenceLevel`.
#[doc(alias = "ncclGinFenceLevel")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FenceLevel {
    /// No fence of puts or gets: the barrier only waits for the ranks.
    None = 0,
    /// The puts of the team's ranks to this rank, on the contexts that the barrier covers: their
    /// data is in this rank's memory. This rank's own puts have then arrived if the target has
    /// passed the barrier too.
    Put = 1,
    /// This rank's gets.
    Get = 2,
    /// The puts and gets of the two levels above.
    PutGet = 3,
}

impl FenceLevel {
    pub(super) const fn covers_puts(self) -> bool {
        self as i32 & Self::Put as i32 != 0
    }

    const fn covers_gets(self) -> bool {
        self as i32 & Self::Get as i32 != 0
    }
}

/// A set of GIN barriers that the host reserved.
///
/// NCCL: `ncclGinBarrierHandle` with its team.
#[doc(alias = "ncclGinBarrierHandle")]
#[derive(Clone, Copy)]
pub struct GinBarriers<'a, B> {
    gin: Gin<'a, B>,
    team: Team,
    handle: GinBarrierHandle,
    all_contexts: bool,
}

impl<'a, B: GinBackend> Gin<'a, B> {
    /// Returns barrier `index` of all ranks, for the threads of `coop`: [`GinBarriers::barrier`] of
    /// [`world_barriers`](Self::world_barriers).
    #[track_caller]
    pub fn world_barrier(&self, coop: Coop, index: BarrierIndex) -> GinBarrier<'a, B> {
        self.world_barriers().barrier(coop, index)
    }

    /// Returns barrier `index` of the rail team, for the threads of `coop`:
    /// [`GinBarriers::barrier`] of [`rail_barriers`](Self::rail_barriers).
    #[track_caller]
    pub fn rail_barrier(&self, coop: Coop, index: BarrierIndex) -> GinBarrier<'a, B> {
        self.rail_barriers().barrier(coop, index)
    }

    /// Returns the barriers of all ranks, which the host reserved with `world_gin_barriers`. NCCL:
    /// `ncclDevComm.worldGinBarrier`.
    #[doc(alias = "worldGinBarrier")]
    pub fn world_barriers(&self) -> GinBarriers<'a, B> {
        let comm = self.comm();
        let (team, handle) = (comm.world_team(), comm.as_raw().world_gin_barrier);
        GinBarriers { gin: *self, team, handle, all_contexts: false }
    }

    /// Returns the barriers of the rail team, which the host reserved with `rail_gin_barriers`.
    /// NCCL: `ncclDevComm.railGinBarrier`.
    #[doc(alias = "railGinBarrier")]
    pub fn rail_barriers(&self) -> GinBarriers<'a, B> {
        let comm = self.comm();
        let (team, handle) = (comm.rail_team(), comm.as_raw().rail_gin_barrier);
        GinBarriers { gin: *self, team, handle, all_contexts: false }
    }
}

impl<'a, B: GinBackend> GinBarriers<'a, B> {
    /// Returns the barriers of `handle`, which the host requested for `team`.
    ///
    /// # Safety
    ///
    /// The host got the handle for this device communicator and a team of these ranks, which GIN
    /// connects to each other.
    pub unsafe fn new(gin: Gin<'a, B>, team: Team, handle: GinBarrierHandle) -> Self {
        Self { gin, team, handle, all_contexts: false }
    }

    /// Returns the same barriers, with fences that cover all contexts of the device communicator
    /// instead of `gin` only. NCCL: `ncclGinAllContexts`.
    #[doc(alias = "ncclGinBarrierSessionInitAllContexts")]
    #[must_use]
    pub fn over_all_contexts(self) -> Self {
        Self { all_contexts: true, ..self }
    }

    /// Returns barrier `index`, for the threads of `coop`. The handle has no count: on a GPU this
    /// traps only if the device communicator has no such signals, not if another set has them.
    ///
    /// NCCL: `ncclGinBarrierSession`'s constructor.
    #[doc(alias = "ncclGinBarrierSessionInit")]
    #[track_caller]
    pub fn barrier(self, coop: Coop, index: BarrierIndex) -> GinBarrier<'a, B> {
        #[cfg(not(target_arch = "nvptx64"))]
        self.tell_simulator(coop, index.get(), true);
        let ranks = self.team.n_ranks as u32;
        let first = u64::from(self.handle.signal0) + u64::from(index.get()) * u64::from(ranks);
        let reserved = self.gin.comm().as_raw().gin_signal_count;
        assert!(
            first + u64::from(ranks) <= reserved.into(),
            "the barrier's signals are not reserved"
        );
        let first = first as u32;
        GinBarrier { set: self, coop, index: index.get(), first }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl<B> GinBarriers<'_, B> {
    /// Tells the simulator that a session on barrier `index` is opened, or closed if not `open`.
    #[track_caller]
    fn tell_simulator(&self, coop: Coop, index: u32, open: bool) {
        let context = (!self.all_contexts).then_some(self.gin.index);
        let (handle, team, first) = (self.handle, self.team, coop.thread_rank() == 0);
        let session = GinBarrierUse { open, handle, team, index, context, first };
        (crate::raw::host::checks().gin_barrier)(self.gin.comm.as_raw(), &session);
    }
}

/// Tells the simulator that the session ends, since two sessions at a time on one barrier are an
/// error.
#[cfg(not(target_arch = "nvptx64"))]
impl<B> Drop for GinBarrier<'_, B> {
    fn drop(&mut self) {
        if !is_unwinding() {
            self.set.tell_simulator(self.coop, self.index, false);
        }
    }
}

/// A barrier over the network, used by one coop of each rank: [`Gin::world_barrier`],
/// [`Gin::rail_barrier`], [`GinBarriers::barrier`]. Its state is in NCCL's signals and shadows, so
/// nothing has to be closed.
///
/// NCCL: `ncclGinBarrierSession`.
#[doc(alias = "ncclGinBarrierSession")]
pub struct GinBarrier<'a, B> {
    set: GinBarriers<'a, B>,
    coop: Coop,
    index: u32,
    /// The signal that team rank 0 increments; those of the other ranks follow.
    first: u32,
}

#[track_callers]
impl<B: GinBackend> GinBarrier<'_, B> {
    /// Signals this coop's arrival to the peers. [`Arrival::wait`] waits for theirs; dropping the
    /// arrival waits too. `fence` says which puts and gets are complete after the wait.
    ///
    /// NCCL's `ncclGinBarrierSession` has no split arrive and wait.
    pub fn arrive(&mut self, order: MemoryOrder, fence: FenceLevel) -> Arrival<'_, Self> {
        if let Err(outcome) = self.signal_peers(order, fence, Deadline::NEVER) {
            finish(self.coop, outcome, self.call(fence));
        }
        Arrival::new(self, Arrived { order, fence })
    }

    /// Waits until the same coop of every rank of the team has arrived; `fence` says which puts and
    /// gets are complete then.
    ///
    /// NCCL: `ncclGinBarrierSession::sync`.
    #[doc(alias = "ncclGinBarrierSessionSync")]
    pub fn sync(&mut self, order: MemoryOrder, fence: FenceLevel) {
        let outcome = self.arrive_and_wait(order, fence, Deadline::NEVER);
        finish(self.coop, outcome, self.call(fence));
    }

    /// Does the same as [`sync`](Self::sync), with a timeout. After a timeout the barrier counts as
    /// passed, without its guarantees. With weak signals, a fence for puts first waits for the
    /// puts; if that wait times out, this rank has not arrived, the peers keep waiting, and no rank
    /// may use the barrier again: its counts differ between the ranks from then on.
    ///
    /// NCCL: `ncclGinBarrierSession::sync` with `timeoutCycles`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn sync_timeout(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        let outcome = self.arrive_and_wait(order, fence, Deadline::after(timeout));
        finish_timed(self.coop, outcome, self.call(fence))
    }

    pub(super) fn arrive_and_wait(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        deadline: Deadline,
    ) -> Outcome {
        match self.signal_peers(order, fence, deadline) {
            Ok(()) => self.wait_for_peers(order, fence, deadline),
            Err(outcome) => outcome,
        }
    }

    /// Signals every peer, or none if the wait for the fence's puts did not complete.
    pub(super) fn signal_peers(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        deadline: Deadline,
    ) -> Result<(), Outcome> {
        let Self { set: GinBarriers { gin, team, .. }, coop, .. } = *self;
        coop.sync_in(self.call(fence));
        // EFA_GDA has no strong signals. A weak one does not imply that earlier puts have arrived.
        // So they are flushed, as in NCCL: one that is complete here is queued at the peer's PCIe,
        // ahead of any later signal.
        let strong = gin.is_strong_by_default() && !matches!(B::TYPE, GinType::EfaGda);
        if fence.covers_puts() && !strong {
            let outcome = self.flush(order, deadline);
            // If the flush failed in any thread, puts may be in flight: then no thread of the coop
            // signals a peer.
            if coop.any_in(self.call(fence), outcome != Outcome::Done) {
                return Err(outcome);
            }
        }
        // In simulated runs a barrier without a fence completes no puts, as with such back ends.
        let strong = strong && (cfg!(target_arch = "nvptx64") || fence.covers_puts());
        let release = if order.releases() { Release::AT_SYSTEM } else { Release::NONE };
        for i in coop.strided(self.signals(fence)) {
            let (gin, peer) = self.context_and_peer(i as i32, self.peers(fence));
            // SAFETY: `barrier` checked that the barrier's signals are reserved.
            let signal = unsafe { SignalId::from_raw(self.first + team.rank as u32) };
            let action = if strong { signal.inc().strong() } else { signal.inc().weak() };
            gin.signal_alone(gin.world_rank(team, peer), action, release);
        }
        Ok(())
    }

    /// Waits for the signals of this thread's share of the peers, and for its share of the gets if
    /// the fence covers them.
    pub(super) fn wait_for_peers(
        &mut self,
        order: MemoryOrder,
        fence: FenceLevel,
        deadline: Deadline,
    ) -> Outcome {
        let Self { set: GinBarriers { team, .. }, coop, .. } = *self;
        let mut result = Outcome::Done;
        for i in coop.strided(self.signals(fence)) {
            let (gin, peer) = self.context_and_peer(i as i32, self.peers(fence));
            // The shadow also grows after a timeout: the next synchronisation expects this arrival.
            let expected = self.expect(&gin, peer);
            if result == Outcome::Done {
                let word = Word::Signal(self.first + peer as u32);
                let (context, order) = (gin.context(), order.acquire_half());
                let what = |seen| WaitFor {
                    kind: WaitKind::GinBarrier,
                    index: self.index,
                    context: gin.context_index(),
                    peer: gin.world_rank(team, peer),
                    wanted: expected,
                    seen,
                };
                // SAFETY: `barrier` checked that the signals are reserved.
                result = unsafe {
                    calls::wait::<B>(context, word, expected, BITS, order, deadline, what)
                };
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if result == Outcome::Done && fence.covers_puts() {
            let context = (!self.set.all_contexts).then_some(self.set.gin.index);
            (crate::raw::host::checks().puts_fenced)(self.set.gin.comm.as_raw(), context);
        }
        if result == Outcome::Done && fence.covers_gets() {
            return self.flush(order, deadline);
        }
        result
    }

    /// Returns a synchronisation of this barrier, for the simulator's reports.
    fn call(&self, fence: FenceLevel) -> CoopCall {
        let call = CoopCall::new("barrier.sync").arg("GIN barrier", self.index.into());
        call.arg("fence", fence as u64)
    }

    /// Returns the number of ranks to signal. With a fence for puts a rank also signals itself,
    /// since it may have put to itself.
    fn peers(&self, fence: FenceLevel) -> i32 {
        let ranks = self.set.team.n_ranks;
        if fence.covers_puts() { ranks } else { ranks - 1 }
    }

    /// Returns the number of signals that the coop sends, and waits for.
    fn signals(&self, fence: FenceLevel) -> u32 {
        (self.contexts() * self.peers(fence)) as u32
    }

    /// Increments the shadow of a peer's signal. Returns the new value, for which to wait.
    fn expect(&self, gin: &Gin<'_, B>, peer: i32) -> u64 {
        // SAFETY: `barrier` checked that the signal is reserved, so it has a shadow, which only the
        // barrier's threads access. NCCL uses its low 32 bits.
        unsafe {
            let shadow = calls::shadow::<B>(gin.context(), self.first + peer as u32).cast::<u32>();
            let expected = mem::load(shadow).wrapping_add(1);
            mem::store(shadow, expected);
            expected.into()
        }
    }

    /// Waits until the operations that this rank has posted to this thread's share of the peers, on
    /// the contexts that the barrier covers, are complete.
    fn flush(&self, order: MemoryOrder, deadline: Deadline) -> Outcome {
        let mut context = 0;
        loop {
            let outcome = self.on_context(context).flush_share(self.coop, order, deadline);
            context += 1;
            if outcome != Outcome::Done || context == self.contexts() {
                return outcome;
            }
        }
    }

    fn contexts(&self) -> i32 {
        if self.set.all_contexts { self.set.gin.comm().n_gin_contexts() as i32 } else { 1 }
    }

    /// Returns the `i`-th of the contexts that the barrier covers.
    fn on_context(&self, i: i32) -> Gin<'_, B> {
        if self.set.all_contexts { self.set.gin.with_index(i as u32) } else { self.set.gin }
    }

    /// Returns the `i`-th pair of a context and a peer. In each context the peers begin with the
    /// next rank; this rank, if it is one of them, is the last.
    fn context_and_peer(&self, i: i32, peers: i32) -> (Gin<'_, B>, i32) {
        let team = self.set.team;
        let context = if self.set.all_contexts { i / peers } else { 0 };
        let peer = 1 + team.rank + (i - context * peers);
        (self.on_context(context), if peer < team.n_ranks { peer } else { peer - team.n_ranks })
    }
}

impl<B: GinBackend> Arrive for GinBarrier<'_, B> {
    fn complete(
        &mut self,
        arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        let outcome = self.wait_for_peers(order, arrived.fence, deadline);
        finish_by(deadline, self.coop, outcome, self.call(arrived.fence))
    }
}

/// The number of low bits of a signal that are compared: NCCL counts arrivals modulo 2^32.
const BITS: i32 = 32;
