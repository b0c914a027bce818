//! The operations that a kernel posts: puts, puts of one value, gets, signals.

use super::calls::{self, Release, RemoteAction, SymAddr};
use super::signal::SignalAction;
use super::{CounterId, Gin, GinBackend};
use crate::prelude::*;
use crate::window::SymPtr;

/// `cuda::thread_scope_thread`, which tells NCCL that nothing has released the writes yet.
const THREAD: i32 = 10;

/// Returns a scope's value in `cuda::thread_scope`.
const fn thread_scope(scope: Scope) -> i32 {
    match scope {
        Scope::Sys => 0,
        Scope::Gpu => 1,
        Scope::Cta => 2,
    }
}

impl Release {
    /// NCCL releases the posting thread's writes at GPU scope: its default, after which a network
    /// card reads them.
    const AT_GPU: Self = Self { given: THREAD, required: thread_scope(Scope::Gpu) };

    /// NCCL releases the posting thread's writes at system scope.
    pub(crate) const AT_SYSTEM: Self = Self { given: THREAD, required: thread_scope(Scope::Sys) };

    /// NCCL releases nothing: the order needs no release.
    pub(crate) const NONE: Self =
        Self { given: thread_scope(Scope::Sys), required: thread_scope(Scope::Sys) };

    /// Tells NCCL that the kernel has already released the writes at `scope`.
    const fn by_kernel(self, scope: Scope) -> Self {
        Self { given: thread_scope(scope), ..self }
    }

    /// Tells NCCL to release the writes at `scope`.
    const fn at(self, scope: Scope) -> Self {
        Self { required: thread_scope(scope), ..self }
    }
}

/// A value that [`Gin::put_value`] sends: 1, 2, 4 or 8 bytes.
pub trait Value: Element {
    #[doc(hidden)]
    fn bits(self) -> u64;
}

macro_rules! values {
    ($($type:ty, $value:ident => $bits:expr;)*) => { $(
        impl Value for $type {
            fn bits(self) -> u64 {
                let $value = self;
                $bits
            }
        }
    )* };
}

values! {
    u8, v => v.into();
    i8, v => v.cast_unsigned().into();
    half::f16, v => v.to_bits().into();
    half::bf16, v => v.to_bits().into();
    u32, v => v.into();
    i32, v => v.cast_unsigned().into();
    f32, v => v.to_bits().into();
    u64, v => v;
    i64, v => v.cast_unsigned();
    f64, v => v.to_bits();
}

impl<'a, B: GinBackend> Gin<'a, B> {
    /// Returns a put: `count` elements from `source` in this rank to `target` in rank `peer` of
    /// `team`. [`Put::post`] sends it.
    ///
    /// NCCL: `ncclGin::put`.
    ///
    /// # Safety
    ///
    /// The elements lie in the windows. The peer is connected: any rank with FULL connections, one
    /// of the rail team with RAIL. After `post`, nothing writes the source until the put's counter
    /// or a flush shows that it has been read, and nothing accesses the target until a signal or a
    /// barrier with a fence shows that it has been written.
    #[doc(alias = "ncclGinPut")]
    pub unsafe fn put<T: Element>(
        &self,
        team: Team,
        peer: i32,
        target: SymPtr<T>,
        source: SymPtr<T>,
        count: usize,
    ) -> Put<'a, B> {
        Put {
            gin: *self,
            peer: self.world_rank(team, peer),
            target: sym_addr(target),
            source: sym_addr(source),
            bytes: count * size_of::<T>(),
            action: None,
            counter: None,
            release: Release::AT_GPU,
        }
    }

    /// Returns a put of one value, without a source in memory. [`PutValue::post`] sends it.
    ///
    /// NCCL: `ncclGin::putValue`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`put`](Self::put), for the target and the peer.
    #[doc(alias = "ncclGinPutValue")]
    pub unsafe fn put_value<T: Value>(
        &self,
        team: Team,
        peer: i32,
        target: SymPtr<T>,
        value: T,
    ) -> PutValue<'a, B> {
        PutValue {
            gin: *self,
            peer: self.world_rank(team, peer),
            target: sym_addr(target),
            bits: value.bits(),
            size: size_of::<T>(),
            action: None,
            release: Release::AT_GPU,
        }
    }

    /// Returns a get: `count` elements from `source` in rank `peer` of `team` to `target` in this
    /// rank. [`Get::post`] sends it; the target can be read after a flush.
    ///
    /// NCCL: `ncclGin::get`.
    ///
    /// # Safety
    ///
    /// The elements lie in the windows, and the peer is connected. From `post` until a flush,
    /// nothing accesses the target and nothing writes the source.
    #[doc(alias = "ncclGinGet")]
    pub unsafe fn get<T: Element>(
        &self,
        team: Team,
        peer: i32,
        source: SymPtr<T>,
        target: SymPtr<T>,
        count: usize,
    ) -> Get<'a, B> {
        Get {
            gin: *self,
            peer: self.world_rank(team, peer),
            source: sym_addr(source),
            target: sym_addr(target),
            bytes: count * size_of::<T>(),
        }
    }

    /// Updates a signal of rank `peer` of `team`, without data. A strong signal is visible only
    /// after the data of all earlier puts to the peer on this context.
    ///
    /// The threads of `coop` call this together. The signal releases their earlier writes to the
    /// thread that acquires the signal.
    ///
    /// NCCL: `ncclGin::signal`.
    #[doc(alias = "ncclGinSignal")]
    #[track_caller]
    pub fn signal(&self, coop: Coop, team: Team, peer: i32, action: SignalAction) {
        coop.sync_in(CoopCall::new("gin.signal").arg("peer", peer as u64));
        if coop.thread_rank() == 0 {
            self.signal_alone(self.connected(team, peer), action, Release::AT_SYSTEM);
        }
    }

    /// Does the same as [`signal`](Self::signal), called by one thread. `release` tells NCCL which
    /// fence the earlier writes still need.
    #[track_caller]
    pub(crate) fn signal_alone(&self, world_rank: i32, action: SignalAction, release: Release) {
        let action = action.lower(self.is_strong_by_default());
        // SAFETY: the host reserved the signal, or the contract of `VaSignal` holds.
        unsafe { calls::signal::<B>(self.context(), world_rank, action, release) };
    }

    pub(crate) fn is_strong_by_default(&self) -> bool {
        self.comm.as_raw().gin_strong_legacy_signals
    }
}

/// Returns the action on a signal, if there is one, as parameters of NCCL's functions.
#[track_caller]
fn lower(action: Option<SignalAction>, strong_by_default: bool) -> RemoteAction {
    // This is not a closure, in which a trap would not name the caller's line.
    match action {
        Some(action) => action.lower(strong_by_default),
        None => RemoteAction::NONE,
    }
}

/// Returns the window and byte offset of an element.
fn sym_addr<T: Element>(element: SymPtr<T>) -> SymAddr {
    (element.window().as_raw(), element.byte_offset())
}

/// A put that is not posted yet, from [`Gin::put`].
#[must_use = "a put is sent by `post`"]
pub struct Put<'a, B> {
    gin: Gin<'a, B>,
    peer: i32,
    target: SymAddr,
    source: SymAddr,
    bytes: usize,
    action: Option<SignalAction>,
    counter: Option<CounterId>,
    release: Release,
}

impl<B: GinBackend> Put<'_, B> {
    /// Updates a signal of the peer after the data has arrived. The signal does not release other
    /// writes of the threads, unless [`release_at`](Self::release_at) asks for it.
    pub fn signal(self, action: SignalAction) -> Self {
        Self { action: Some(action), ..self }
    }

    /// Increments a counter of this rank after the source has been read. It says nothing of earlier
    /// puts.
    ///
    /// NCCL: `ncclGin_CounterInc`.
    #[doc(alias = "ncclGin_CounterInc")]
    pub fn counter(self, counter: CounterId) -> Self {
        Self { counter: Some(counter), ..self }
    }

    /// Tells NCCL that the writes to the source have already been released at `scope`, so that it
    /// can omit its own fence. NCCL: `givenRelease`.
    ///
    /// # Safety
    ///
    /// The writes to the source have been released at `scope`.
    pub unsafe fn released_to(self, scope: Scope) -> Self {
        Self { release: self.release.by_kernel(scope), ..self }
    }

    /// Releases the earlier writes of the threads at `scope` before the put is sent. With
    /// [`Scope::Sys`], a thread that acquires the put's [`signal`](Self::signal) sees all of them,
    /// as after [`Gin::signal`]. Default: [`Scope::Gpu`], with which the signal says only that the
    /// put's data has arrived. NCCL: `requiredRelease`.
    pub fn release_at(self, scope: Scope) -> Self {
        Self { release: self.release.at(scope), ..self }
    }

    /// Sends the put. The threads of `coop` call this together; the put includes their earlier
    /// writes to the source.
    #[track_caller]
    pub fn post(self, coop: Coop) {
        let call = CoopCall::new("put.post").arg("peer", self.peer as u64);
        let call = call.arg("target's window", self.target.0.addr() as u64);
        let call = call.arg("target's byte", self.target.1 as u64);
        let call = call.arg("source's byte", self.source.1 as u64);
        coop.sync_in(call.arg("bytes", self.bytes as u64));
        if coop.thread_rank() == 0 {
            let action = lower(self.action, self.gin.is_strong_by_default());
            let counter = self.counter.map(CounterId::get);
            let context = self.gin.context();
            let Self { peer, target, source, bytes, release, .. } = self;
            // SAFETY: the contract of `Gin::put`.
            unsafe {
                calls::put::<B>(context, peer, target, source, bytes, action, counter, release)
            };
        }
    }
}

/// A put of one value that is not posted yet, from [`Gin::put_value`].
#[must_use = "a value is sent by `post`"]
pub struct PutValue<'a, B> {
    gin: Gin<'a, B>,
    peer: i32,
    target: SymAddr,
    bits: u64,
    size: usize,
    action: Option<SignalAction>,
    release: Release,
}

impl<B: GinBackend> PutValue<'_, B> {
    /// Updates a signal of the peer after the value has arrived.
    pub fn signal(self, action: SignalAction) -> Self {
        Self { action: Some(action), ..self }
    }

    /// Releases the earlier writes of the threads, as [`Put::release_at`] does.
    pub fn release_at(self, scope: Scope) -> Self {
        Self { release: self.release.at(scope), ..self }
    }

    /// Sends the value. The threads of `coop` call this together, with the same value.
    #[track_caller]
    pub fn post(self, coop: Coop) {
        let call = CoopCall::new("put_value.post").arg("peer", self.peer as u64);
        let call = call.arg("target's window", self.target.0.addr() as u64);
        let call = call.arg("target's byte", self.target.1 as u64);
        coop.sync_in(call.arg("bytes", self.size as u64).arg("value", self.bits));
        if coop.thread_rank() == 0 {
            let action = lower(self.action, self.gin.is_strong_by_default());
            let context = self.gin.context();
            let Self { peer, target, bits, size, release, .. } = self;
            // SAFETY: the contract of `Gin::put_value`.
            unsafe { calls::put_value::<B>(context, peer, target, bits, size, action, release) };
        }
    }
}

/// A get that is not posted yet, from [`Gin::get`].
#[must_use = "a get is sent by `post`"]
pub struct Get<'a, B> {
    gin: Gin<'a, B>,
    peer: i32,
    source: SymAddr,
    target: SymAddr,
    bytes: usize,
}

impl<B: GinBackend> Get<'_, B> {
    /// Sends the get. The threads of `coop` call this together.
    #[track_caller]
    pub fn post(self, coop: Coop) {
        let call = CoopCall::new("get.post").arg("peer", self.peer as u64);
        let call = call.arg("source's window", self.source.0.addr() as u64);
        let call = call.arg("source's byte", self.source.1 as u64);
        let call = call.arg("target's byte", self.target.1 as u64);
        coop.sync_in(call.arg("bytes", self.bytes as u64));
        if coop.thread_rank() == 0 {
            let Self { gin, peer, source, target, bytes } = self;
            // SAFETY: the contract of `Gin::get`.
            unsafe { calls::get::<B>(gin.context(), peer, source, target, bytes) };
        }
    }
}
