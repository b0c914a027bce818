//! Reads of and waits for signals and counters, and flushes.

use crate::prelude::*;
use cuda_std::atomic::Atomic;
use devcomm_types::GinType;

use super::calls::{self, ALL_BITS, COUNTER_BITS, Word};
use super::signal::word;
use super::{CounterId, Gin, GinBackend, Signal, SignalId};

/// A flush to one peer that has begun. NCCL: `ncclGinRequest_t`.
#[doc(alias = "ncclGinRequest_t")]
#[must_use = "a flush is over when it has been waited for"]
pub struct Request<'a, B> {
    request: raw::GinRequest,
    gin: Gin<'a, B>,
}

impl<B: GinBackend> Request<'_, B> {
    #[track_caller]
    fn wait(&self, order: MemoryOrder, deadline: Deadline) -> Outcome {
        let (context, order) = (self.gin.context(), order.acquire_half());
        // SAFETY: the context exists, and the request was made on it.
        unsafe {
            match B::TYPE {
                GinType::EfaGda => calls::flush::<B>(context, order, deadline),
                _ => calls::wait_request::<B>(context, self.request, order, deadline),
            }
        }
    }
}

#[track_callers]
impl<'a, B: GinBackend> Gin<'a, B> {
    /// Returns the value of a signal. NCCL: `ncclGin::readSignal`.
    #[doc(alias = "ncclGinReadSignal")]
    pub fn read_signal(&self, signal: impl Signal, order: MemoryOrder) -> u64 {
        // SAFETY: the host reserved the signal, or the contract of `VaSignal` holds.
        unsafe { calls::read::<B>(self.context(), word(signal), ALL_BITS, order.acquire_half()) }
    }

    /// Waits until a signal has reached `least`, compared modulo 2^64. The threads of `coop` call
    /// this together; the call ends with a barrier of these threads.
    ///
    /// NCCL: `ncclGin::waitSignal`.
    #[doc(alias = "ncclGinWaitSignal")]
    pub fn wait_signal(&self, coop: Coop, signal: impl Signal, least: u64, order: MemoryOrder) {
        let call = CoopCall::new("gin.wait_signal").arg("value", least);
        let outcome = self.wait_by_first(coop, word(signal), least, order, Deadline::NEVER);
        finish(coop, outcome, call);
    }

    /// Does the same as [`wait_signal`](Self::wait_signal), with a timeout. NCCL:
    /// `ncclGin::waitSignal` with `timeoutCycles`, which returns the result to the first thread of
    /// the coop only.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[doc(alias = "ncclGinWaitSignalTimeout")]
    pub fn wait_signal_timeout(
        &self,
        coop: Coop,
        signal: impl Signal,
        least: u64,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        let deadline = Deadline::after(timeout);
        let call = CoopCall::new("gin.wait_signal_timeout").arg("value", least);
        finish_timed(coop, self.wait_by_first(coop, word(signal), least, order, deadline), call)
    }

    /// Returns the value of a counter. NCCL: `ncclGin::readCounter`.
    #[doc(alias = "ncclGinReadCounter")]
    pub fn read_counter(&self, counter: CounterId, order: MemoryOrder) -> u64 {
        let word = Word::Counter(counter.get());
        // SAFETY: the host reserved the counter.
        unsafe { calls::read::<B>(self.context(), word, COUNTER_BITS, order.acquire_half()) }
    }

    /// Waits until a counter has reached `least`, compared modulo 2^56. NCCL:
    /// `ncclGin::waitCounter`.
    #[doc(alias = "ncclGinWaitCounter")]
    pub fn wait_counter(&self, coop: Coop, counter: CounterId, least: u64, order: MemoryOrder) {
        let word = Word::Counter(counter.get());
        let call = CoopCall::new("gin.wait_counter").arg("value", least);
        let outcome = self.wait_by_first(coop, word, least, order, Deadline::NEVER);
        finish(coop, outcome, call);
    }

    /// Does the same as [`wait_counter`](Self::wait_counter), with a timeout. NCCL:
    /// `ncclGin::waitCounter` with `timeoutCycles`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[doc(alias = "ncclGinWaitCounterTimeout")]
    pub fn wait_counter_timeout(
        &self,
        coop: Coop,
        counter: CounterId,
        least: u64,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        let (word, deadline) = (Word::Counter(counter.get()), Deadline::after(timeout));
        let call = CoopCall::new("gin.wait_counter_timeout").arg("value", least);
        finish_timed(coop, self.wait_by_first(coop, word, least, order, deadline), call)
    }

    /// Sets a signal of this rank, and its shadow, to 0. No peer may update the signal at the same
    /// time. NCCL: `ncclGin::resetSignal`.
    #[doc(alias = "ncclGinResetSignal")]
    pub fn reset_signal(&self, signal: impl Signal) {
        let word = word(signal);
        // SAFETY: the host reserved the signal, or the contract of `VaSignal` holds.
        unsafe {
            calls::reset::<B>(self.context(), word);
            // A signal in a window has no shadow.
            if let Word::Signal(id) = word {
                cuda_std::mem::store(calls::shadow::<B>(self.context(), id), 0);
            }
        }
    }

    /// Sets a counter to 0. No put may increment the counter at the same time. NCCL:
    /// `ncclGin::resetCounter`.
    #[doc(alias = "ncclGinResetCounter")]
    pub fn reset_counter(&self, counter: CounterId) {
        // SAFETY: the host reserved the counter.
        unsafe { calls::reset::<B>(self.context(), Word::Counter(counter.get())) };
    }

    /// Returns the shadow of a signal: the value that this rank expects the signal to reach. It
    /// persists across kernels. NCCL: `ncclGin::getSignalShadowPtr`.
    #[doc(alias = "ncclGinGetSignalShadowPtr")]
    pub fn signal_shadow(&self, signal: SignalId) -> u64 {
        // SAFETY: the host reserved the signal.
        unsafe { cuda_std::mem::load(calls::shadow::<B>(self.context(), signal.get())) }
    }

    /// Adds `delta` to a signal's shadow. One thread of a coop calls this. NCCL:
    /// `ncclGin::increaseSignalShadow`.
    #[doc(alias = "ncclGinIncreaseSignalShadow")]
    pub fn expect(&self, signal: SignalId, delta: u64) {
        // SAFETY: the host reserved the signal.
        unsafe {
            let shadow = calls::shadow::<B>(self.context(), signal.get());
            Atomic::from_ptr(shadow).fetch_add(delta, Order::Relaxed, Scope::Gpu);
        }
    }

    /// Waits until a signal has reached its shadow, which it reads after a barrier of the coop: so
    /// an earlier [`expect`](Self::expect) of one of the threads counts. NCCL:
    /// `ncclGin::waitSignalMeetShadow`.
    #[doc(alias = "ncclGinWaitSignalMeetShadow")]
    pub fn wait_signal_meets_shadow(&self, coop: Coop, signal: SignalId, order: MemoryOrder) {
        coop.sync();
        self.wait_signal(coop, signal, self.signal_shadow(signal), order);
    }

    /// Does the same as [`wait_signal_meets_shadow`](Self::wait_signal_meets_shadow), with a
    /// timeout, which NCCL lacks.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn wait_signal_meets_shadow_timeout(
        &self,
        coop: Coop,
        signal: SignalId,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        coop.sync();
        self.wait_signal_timeout(coop, signal, self.signal_shadow(signal), order, timeout)
    }

    /// Waits until a signal is at least `least_delta` above its shadow, read as
    /// [`wait_signal_meets_shadow`](Self::wait_signal_meets_shadow) does, then sets the shadow to
    /// the signal's value. Returns the shadow's earlier value and its increase, in every thread of
    /// the coop.
    ///
    /// NCCL: `ncclGin::waitSignalFollowShadow`.
    #[doc(alias = "ncclGinWaitSignalFollowShadow")]
    pub fn wait_signal_follow_shadow(
        &self,
        coop: Coop,
        signal: SignalId,
        least_delta: u64,
        order: MemoryOrder,
    ) -> (u64, u64) {
        coop.sync();
        let before = self.signal_shadow(signal);
        self.wait_signal(coop, signal, before.wrapping_add(least_delta), order);
        self.follow_shadow(coop, signal, before, order)
    }

    /// Does the same as [`wait_signal_follow_shadow`](Self::wait_signal_follow_shadow), with a
    /// timeout, which NCCL lacks. A timeout leaves the shadow unchanged.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn wait_signal_follow_shadow_timeout(
        &self,
        coop: Coop,
        signal: SignalId,
        least_delta: u64,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(u64, u64), TimedOut> {
        coop.sync();
        let before = self.signal_shadow(signal);
        self.wait_signal_timeout(coop, signal, before.wrapping_add(least_delta), order, timeout)?;
        Ok(self.follow_shadow(coop, signal, before, order))
    }

    /// Sets the shadow to the signal's value. The coop's other threads read the value there.
    fn follow_shadow(
        &self,
        coop: Coop,
        signal: SignalId,
        before: u64,
        order: MemoryOrder,
    ) -> (u64, u64) {
        if coop.thread_rank() == 0 {
            // The read has the wait's order, since the signal may have increased after the wait.
            let now = self.read_signal(signal, order);
            // SAFETY: the host reserved the signal.
            unsafe { cuda_std::mem::store(calls::shadow::<B>(self.context(), signal.get()), now) };
        }
        coop.sync();
        let after = self.signal_shadow(signal);
        // No thread may change the shadow before all have read it.
        coop.sync();
        (before, after.wrapping_sub(before))
    }

    /// Waits until all operations that this rank has posted on this context are complete locally:
    /// sources of puts can be written, and targets of gets can be read. A put's data need not have
    /// arrived. The threads of `coop` divide the peers among themselves.
    ///
    /// NCCL: `ncclGin::flush`.
    #[doc(alias = "ncclGinFlush")]
    pub fn flush(&self, coop: Coop, order: MemoryOrder) {
        coop.sync_in(CoopCall::new("gin.flush"));
        let outcome = self.flush_share(coop, order, Deadline::NEVER);
        finish(coop, outcome, CoopCall::new("gin.flush"));
    }

    /// Does the same as [`flush`](Self::flush), with a timeout. NCCL: `ncclGin::flush` with
    /// `timeoutCycles`, which over some back ends does not make gets visible; this function does,
    /// except over EFA_GDA.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[doc(alias = "ncclGinFlushTimeout")]
    pub fn flush_timeout(
        &self,
        coop: Coop,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        coop.sync_in(CoopCall::new("gin.flush"));
        let outcome = self.flush_share(coop, order, Deadline::after(timeout));
        finish_timed(coop, outcome, CoopCall::new("gin.flush_timeout"))
    }

    /// Begins a flush, by the calling thread, of the operations that this rank has posted to rank
    /// `peer` of `team`. It covers another thread's operations after a barrier with that thread.
    /// EFA_GDA has no such flush: there the wait flushes the operations to all peers.
    ///
    /// NCCL: `ncclGin::flushAsync`.
    #[doc(alias = "ncclGinFlushAsync")]
    pub fn flush_async(&self, team: Team, peer: i32) -> Request<'a, B> {
        let peer = self.connected(team, peer);
        let request = match B::TYPE {
            GinType::EfaGda => raw::GinRequest([0; 2]),
            // SAFETY: the context exists.
            _ => unsafe { calls::flush_async::<B>(self.context(), peer) },
        };
        Request { request, gin: *self }
    }

    /// Waits, in the calling thread, until a flush that began on this context is complete.
    /// NCCL: `ncclGin::wait`.
    #[doc(alias = "ncclGinWait")]
    pub fn wait_request(&self, request: Request<'a, B>, order: MemoryOrder) {
        let outcome = request.wait(order, Deadline::NEVER);
        finish(Coop::thread(), outcome, CoopCall::new("gin.wait_request"));
    }

    /// Does the same as [`wait_request`](Self::wait_request), with a timeout; the request can be
    /// waited for again. NCCL: `ncclGin::wait` with `timeoutCycles`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`].
    #[doc(alias = "ncclGinWaitTimeout")]
    pub fn wait_request_timeout(
        &self,
        request: &Request<'a, B>,
        order: MemoryOrder,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        let outcome = request.wait(order, Deadline::after(timeout));
        finish_timed(Coop::thread(), outcome, CoopCall::new("gin.wait_request"))
    }

    /// Flushes the operations to this thread's share of the peers.
    pub(crate) fn flush_share(
        &self,
        coop: Coop,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Outcome {
        if let GinType::EfaGda = B::TYPE {
            return match coop.thread_rank() {
                // SAFETY: the context exists.
                0 => unsafe { calls::flush::<B>(self.context(), order.acquire_half(), deadline) },
                _ => Outcome::Done,
            };
        }
        let world = self.comm.world_team();
        let stride = self.comm.gin_stride();
        let mut peer = self.comm.rank() % stride + coop.thread_rank() as i32 * stride;
        while peer < world.n_ranks {
            let request = self.flush_async(world, peer);
            let outcome = request.wait(order, deadline);
            if outcome != Outcome::Done {
                return outcome;
            }
            peer += coop.size() as i32 * stride;
        }
        Outcome::Done
    }

    /// Waits in the coop's first thread; the other threads do not wait here.
    fn wait_by_first(
        &self,
        coop: Coop,
        word: Word,
        least: u64,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Outcome {
        if coop.thread_rank() > 0 {
            return Outcome::Done;
        }
        let (context, order) = (self.context(), order.acquire_half());
        let (kind, index, bits) = match word {
            Word::Signal(id) => (WaitKind::Signal, id, ALL_BITS),
            Word::VaSignal { offset, .. } => (WaitKind::VaSignal, (offset / 8) as u32, ALL_BITS),
            Word::Counter(id) => (WaitKind::Counter, id, COUNTER_BITS),
        };
        let what =
            |seen| WaitFor { kind, index, context: self.index, peer: -1, wanted: least, seen };
        // SAFETY: the host reserved the signal or counter, or the contract of `VaSignal` holds.
        unsafe { calls::wait::<B>(context, word, least, bits, order, deadline, what) }
    }
}
