//! Calls to NCCL's GIN functions.
//!
//! NCCL's functions are always inlined, and many are large: a put of one back end is a thousand
//! lines of PTX. So only one function per large operation, which is never inlined, contains NCCL's
//! code, and kernels call that function. Its parameters are scalars, so that none is passed through
//! memory. NCCL's functions for PROXY are small and are inlined: a called function would read the
//! kernel's parameters, such as the device communicator, through generic addresses, but the kernel
//! has them in constant memory. One thread calls an operation: the caller has synchronized its coop
//! and selected the thread.

use crate::prelude::*;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;

use devcomm_types::GinType;

use super::GinBackend;
use crate::wait::{LONG_SLICE, SHORT_SLICE, poll_slices};

/// A GIN context of a device communicator.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) comm: &'a DevComm,
    pub(crate) index: u32,
    /// NCCL's number of the [`ResourceSharing`](super::ResourceSharing).
    pub(crate) sharing: u8,
}

/// How a put, or a signal without data, updates a signal of the peer, as parameters of NCCL's
/// functions.
#[derive(Clone, Copy)]
pub(crate) struct RemoteAction {
    /// 0: none, 1: an element of a window, 2: an indexed signal.
    pub(crate) kind: i32,
    pub(crate) window: *mut c_void,
    /// Byte offset or id: NCCL takes both, in two parameters, and uses the one of the kind.
    pub(crate) offset_or_id: usize,
    pub(crate) strong: bool,
    /// 0: increment, 1: add.
    pub(crate) op: i32,
    pub(crate) value: u64,
}

impl RemoteAction {
    pub(crate) const NONE: Self =
        Self { kind: 0, window: null_mut(), offset_or_id: 0, strong: false, op: 0, value: 0 };
}

/// The scope at which the writes before a put have already been released, and the scope that the
/// put needs. Both are values of `cuda::thread_scope`.
#[derive(Clone, Copy)]
pub(crate) struct Release {
    pub(crate) given: i32,
    pub(crate) required: i32,
}

/// The counter id that means no counter.
const NO_COUNTER: u32 = u32::MAX;

impl Context<'_> {
    /// Constructs NCCL's GIN object for the context; each call makes a new one.
    #[track_caller]
    fn net<B: GinBackend>(self) -> MaybeUninit<raw::Gin> {
        let mut net = MaybeUninit::uninit();
        // SAFETY: the function initializes the object. The constructor of `Gin` checked that the
        // context exists and that `B` is its back end.
        unsafe {
            raw::ncclGin_C_initWithResourceSharingMode(
                net.as_mut_ptr(),
                B::MASK,
                self.comm.as_raw(),
                self.index as i32,
                self.sharing,
            );
        }
        net
    }

    /// Describes a wait for operations of this context.
    fn describe_wait(self, kind: WaitKind) -> WaitFor {
        WaitFor { context: self.index, ..WaitFor::of(kind) }
    }
}

/// A window and a byte offset in it.
pub(crate) type SymAddr = (*mut c_void, usize);

/// Defines an operation. `$name` takes a context and `$arg`s, and passes them as scalars to
/// `$inner`, which is never inlined, or for PROXY to its body. `$call` is the body, an expression
/// in NCCL's object `$net`, the calling thread as a coop `$coop`, and the device communicator
/// `$comm`.
///
/// `$name` has the safety contract of NCCL's function: the elements lie in windows, and the ids are
/// reserved.
macro_rules! operation {
    (
        $(#[$doc:meta])*
        fn $name:ident, $inner:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?
        as ($($part:ident: $plain:ty = $value:expr),* $(,)?)
        |$net:ident, $coop:ident, $comm:ident| $call:expr
    ) => {
        $(#[$doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments)]
        pub(crate) unsafe fn $name<B: GinBackend>(
            context: Context<'_>,
            $($arg: $type),*
        ) $(-> $result)? {
            #[track_caller]
            #[allow(clippy::too_many_arguments)]
            unsafe fn body<B: GinBackend>(
                context: Context<'_>,
                $($part: $plain),*
            ) $(-> $result)? {
                let mut net = context.net::<B>();
                let ($net, $coop) = (net.as_mut_ptr(), &Coop::thread().as_raw());
                let $comm = context.comm;
                // SAFETY: the caller's context and signals are of its device communicator.
                unsafe { $call }
            }
            #[inline(never)]
            #[track_caller]
            #[allow(clippy::too_many_arguments)]
            unsafe fn $inner<B: GinBackend>(
                comm: &DevComm,
                index: u32,
                sharing: u8,
                $($part: $plain),*
            ) $(-> $result)? {
                // SAFETY: the caller's context and signals are of its device communicator.
                unsafe { body::<B>(Context { comm, index, sharing }, $($part),*) }
            }
            // SAFETY: the caller's context and signals are of its device communicator.
            unsafe {
                match B::TYPE {
                    GinType::Proxy => body::<B>(context, $($value),*),
                    _ => $inner::<B>(context.comm, context.index, context.sharing, $($value),*),
                }
            }
        }
    };
}

operation! {
    /// Puts `bytes` bytes from `source` of this rank to `target` of world rank `peer`, performs the
    /// remote action, and increments the counter. In all operations `false` and null mean that no
    /// descriptor is in shared memory, the last zeros that options and memory type are the default.
    fn put, gin_put(
        peer: i32, target: SymAddr, source: SymAddr, bytes: usize, action: RemoteAction,
        counter: Option<u32>, release: Release
    ) as (
        peer: i32 = peer, target: SymAddr = target, source: SymAddr = source, bytes: usize = bytes,
        kind: i32 = action.kind, window: *mut c_void = action.window,
        offset_or_id: usize = action.offset_or_id, strong: bool = action.strong,
        op: i32 = action.op, value: u64 = action.value,
        counter: u32 = counter.unwrap_or(NO_COUNTER), release: Release = release,
    )
    |net, coop, comm| raw::ncclGinPut_v3(
        net, &comm.world_team(), peer, target.0, target.1, source.0, source.1, bytes, kind, window,
        offset_or_id, offset_or_id as u32, strong, op, value, counter != NO_COUNTER, counter, coop,
        false, null_mut(), release.given, release.required, 0, 0,
    )
}

operation! {
    /// Puts the low `size` bytes of `bits`.
    fn put_value, gin_put_value(
        peer: i32, target: SymAddr, bits: u64, size: usize, action: RemoteAction, release: Release
    ) as (
        peer: i32 = peer, target: SymAddr = target, bits: u64 = bits, size: usize = size,
        kind: i32 = action.kind, window: *mut c_void = action.window,
        offset_or_id: usize = action.offset_or_id, strong: bool = action.strong,
        op: i32 = action.op, value: u64 = action.value, release: Release = release,
    )
    |net, coop, comm| raw::ncclGinPutValue_v3(
        net, &comm.world_team(), peer, target.0, target.1, bits, size, kind, window, offset_or_id,
        offset_or_id as u32, strong, op, value, coop, false, null_mut(), release.given,
        release.required, 0,
    )
}

operation! {
    /// Updates a signal of a peer, without data.
    fn signal, gin_signal(peer: i32, action: RemoteAction, release: Release)
    as (
        peer: i32 = peer, kind: i32 = action.kind, window: *mut c_void = action.window,
        offset_or_id: usize = action.offset_or_id, strong: bool = action.strong,
        op: i32 = action.op, value: u64 = action.value, release: Release = release,
    )
    |net, coop, comm| raw::ncclGinSignal_v3(
        net, &comm.world_team(), peer, kind, window, offset_or_id, offset_or_id as u32, strong, op,
        value, coop, false, null_mut(), release.given, release.required, 0,
    )
}

operation! {
    /// Gets `bytes` bytes from `source` of world rank `peer` to `target` of this rank.
    fn get, gin_get(peer: i32, source: SymAddr, target: SymAddr, bytes: usize)
    as (peer: i32 = peer, source: SymAddr = source, target: SymAddr = target, bytes: usize = bytes)
    |net, coop, comm| raw::ncclGinGet_v2(
        net, &comm.world_team(), peer, source.0, source.1, target.0, target.1, bytes, coop, false,
        null_mut(), 0, 0,
    )
}

operation! {
    /// Sets a word to 0; nothing else may access the word at the same time.
    fn reset, gin_reset(word: Word)
    as (
        kind: i32 = word.parts().0, window: *mut c_void = word.parts().1,
        offset_or_id: usize = word.parts().2,
    )
    |net, _coop, _comm| match kind {
        0 => raw::ncclGinResetCounter(net, offset_or_id as u32),
        1 => raw::ncclGinResetSignalVA(net, window, offset_or_id),
        _ => raw::ncclGinResetSignal(net, offset_or_id as u32),
    }
}

operation! {
    /// Waits at most `cycles` for a request. Returns whether it is complete.
    fn request_is_done, gin_wait(request: raw::GinRequest, order: MemoryOrder, cycles: u64) -> bool
    as (
        low: u64 = request.0[0], high: u64 = request.0[1], order: i32 = order as i32,
        cycles: u64 = cycles,
    )
    |net, coop, _comm| {
        let mut request = raw::GinRequest([low, high]);
        let wait = raw::ncclGinWaitTimeout;
        wait(net, &mut request, coop, false, null_mut(), order, cycles) != NCCL_TIMEOUT
    }
}

operation! {
    /// Waits at most `cycles` for all operations that this rank has posted on the context. Returns
    /// whether they are complete.
    fn is_flushed, gin_flush(order: MemoryOrder, cycles: u64) -> bool
    as (order: i32 = order as i32, cycles: u64 = cycles)
    |net, coop, _comm| {
        raw::ncclGinFlushTimeout(net, coop, order, false, null_mut(), cycles) != NCCL_TIMEOUT
    }
}

/// A signal or counter: a 64-bit word that peers or the network update and threads wait for.
#[derive(Clone, Copy)]
pub enum Word {
    Signal(u32),
    VaSignal { window: *mut c_void, offset: usize },
    Counter(u32),
}

impl Word {
    /// Returns the word's kind, window, and offset or id, for `reset`.
    fn parts(self) -> (i32, *mut c_void, usize) {
        match self {
            Self::Counter(id) => (0, null_mut(), id as usize),
            Self::VaSignal { window, offset } => (1, window, offset),
            Self::Signal(id) => (2, null_mut(), id as usize),
        }
    }
}

/// Reads the low `bits` of a word.
#[track_caller]
unsafe fn read_word(net: *mut raw::Gin, word: Word, bits: i32, order: MemoryOrder) -> u64 {
    // SAFETY: the caller passes a signal or counter that the device communicator has.
    unsafe {
        match word {
            Word::Signal(id) => raw::ncclGinReadSignal(net, id, bits, order as i32),
            Word::VaSignal { window, offset } => {
                raw::ncclGinReadSignalVA(net, window, offset, bits, order as i32)
            }
            Word::Counter(id) => raw::ncclGinReadCounter(net, id, bits, order as i32),
        }
    }
}

/// The number of low bits of a signal that are read or compared.
pub(crate) const ALL_BITS: i32 = 64;

/// The number of low bits of a counter that are read or compared. NCCL: `ncclGinWaitCounter`.
pub(crate) const COUNTER_BITS: i32 = 56;

/// Returns the value of a word.
#[track_caller]
pub(crate) unsafe fn read<B: GinBackend>(
    context: Context<'_>,
    word: Word,
    bits: i32,
    order: MemoryOrder,
) -> u64 {
    let mut net = context.net::<B>();
    // SAFETY: the caller passes a signal or counter that the device communicator has.
    unsafe { read_word(net.as_mut_ptr(), word, bits, order) }
}

/// Waits until a word has reached `least`. `what` describes the wait, given the word's value.
///
/// The polling loop is NCCL's, which looks up the word's address only once per call.
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn wait<B: GinBackend>(
    context: Context<'_>,
    word: Word,
    least: u64,
    bits: i32,
    order: MemoryOrder,
    deadline: Deadline,
    what: impl Fn(u64) -> WaitFor,
) -> Outcome {
    let done = |cycles| {
        let mut net = context.net::<B>();
        let (net, order, coop) = (net.as_mut_ptr(), order as i32, Coop::thread().as_raw());
        // SAFETY: the caller passes a signal or counter that the device communicator has.
        let result = unsafe {
            match word {
                Word::Signal(id) => {
                    raw::ncclGinWaitSignalTimeout(net, &coop, id, least, bits, order, cycles)
                }
                Word::VaSignal { window, offset } => raw::ncclGinWaitSignalTimeoutVA(
                    net, &coop, window, offset, least, bits, order, cycles,
                ),
                Word::Counter(id) => {
                    raw::ncclGinWaitCounterTimeout(net, &coop, id, least, bits, order, cycles)
                }
            }
        };
        result != NCCL_TIMEOUT
    };
    // SAFETY: the caller passes a signal or counter that the device communicator has.
    let seen = || unsafe { read::<B>(context, word, bits, MemoryOrder::Relaxed) };
    poll_slices(context.comm, deadline, SHORT_SLICE, done, || what(seen()))
}

/// Returns the address of a signal's shadow: the value that this rank expects the signal to reach.
#[track_caller]
pub(crate) unsafe fn shadow<B: GinBackend>(context: Context<'_>, signal: u32) -> *mut u64 {
    let mut net = context.net::<B>();
    // SAFETY: the caller passes a signal that the device communicator has.
    unsafe { raw::ncclGinGetSignalShadowPtr(net.as_mut_ptr(), signal) }
}

/// Begins a flush of the operations that this rank has posted to `peer` on a context.
#[track_caller]
pub(crate) unsafe fn flush_async<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
) -> raw::GinRequest {
    let mut net = context.net::<B>();
    let coop = Coop::thread().as_raw();
    let mut request = MaybeUninit::<raw::GinRequest>::zeroed();
    // SAFETY: the caller's contract; a request is two integers, so zeros are valid.
    unsafe {
        raw::ncclGinFlushAsync(
            net.as_mut_ptr(),
            &context.comm.world_team(),
            peer as u32,
            request.as_mut_ptr(),
            &coop,
            0,
            false,
            null_mut(),
        );
        request.assume_init()
    }
}

/// NCCL's result for a wait that timed out.
const NCCL_TIMEOUT: i32 = 8;

/// Waits until a flush is complete.
#[track_caller]
pub(crate) unsafe fn wait_request<B: GinBackend>(
    context: Context<'_>,
    request: raw::GinRequest,
    order: MemoryOrder,
    deadline: Deadline,
) -> Outcome {
    // SAFETY: the caller passes a request of this context, not yet waited for.
    let done = |cycles| unsafe { request_is_done::<B>(context, request, order, cycles) };
    let what = || context.describe_wait(WaitKind::Request);
    // The slices (see `poll_slices`) are long: with PROXY, each call of NCCL's wait for gets posts
    // a new request and ignores the response to that of an earlier call.
    poll_slices(context.comm, deadline, LONG_SLICE, done, what)
}

/// Waits until all operations that this rank has posted on a context are complete.
#[track_caller]
pub(crate) unsafe fn flush<B: GinBackend>(
    context: Context<'_>,
    order: MemoryOrder,
    deadline: Deadline,
) -> Outcome {
    // SAFETY: the caller's context is of the device communicator that the kernel got.
    let done = |cycles| unsafe { is_flushed::<B>(context, order, cycles) };
    let what = || context.describe_wait(WaitKind::Flush);
    poll_slices(context.comm, deadline, SHORT_SLICE, done, what)
}
