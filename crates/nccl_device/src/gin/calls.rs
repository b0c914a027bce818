//! The calls of NCCL's GIN functions, out of line.
//!
//! Each is large (a put of one back end is a thousand lines of PTX), and NCCL's functions are inlined wherever they are called; so
//! each is called in one place, here, and kernels call these. They take plain numbers, so that nothing is passed through
//! memory, and one thread makes them: who cooperates is settled before.

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;

use devcomm_types::{WaitFor, WaitKind};

use super::GinBackend;
use crate::raw;
use crate::wait::{Deadline, LONG_SLICE, Outcome, SHORT_SLICE, poll_slices};
use crate::{Coop, DevComm, MemoryOrder};

/// A context of a device communicator, as the calls take it.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) comm: &'a DevComm,
    pub(crate) index: u32,
    pub(crate) sharing: u8,
}

/// What a put, or a signal alone, does to a signal of the peer's, as NCCL takes it.
#[derive(Clone, Copy)]
pub(crate) struct RemoteAction {
    /// 0: none, 1: a word of a window, 2: an indexed signal.
    pub(crate) kind: i32,
    pub(crate) window: *mut c_void,
    /// Byte offset in the window, or the signal's id.
    pub(crate) place: usize,
    pub(crate) strong: bool,
    /// 0: increment, 1: add.
    pub(crate) op: i32,
    pub(crate) value: u64,
}

impl RemoteAction {
    pub(crate) const NONE: Self =
        Self { kind: 0, window: null_mut(), place: 0, strong: false, op: 0, value: 0 };
}

/// How far the writes before a put have been released already, and how far it needs them: `cuda::thread_scope`.
#[derive(Clone, Copy)]
pub(crate) struct Release {
    pub(crate) given: i32,
    pub(crate) required: i32,
}

/// A counter that is counted, or none.
const NO_COUNTER: u32 = u32::MAX;

impl Context<'_> {
    /// NCCL's object for it. It is made in every call: nothing of it is kept.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn net<B: GinBackend>(self) -> MaybeUninit<raw::Gin> {
        let mut net = MaybeUninit::uninit();
        // SAFETY: fills the object; the context exists, by the constructor of `Gin`. The mask names the back end of the device
        // communicator, which the launch has chosen the kernel's entry by.
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

    /// What a thread waits for that waits for the context's operations.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn operations(self, kind: WaitKind) -> WaitFor {
        WaitFor { kind, index: 0, context: self.index, peer: -1, wanted: 0, seen: 0 }
    }
}

/// A window and a byte offset in it.
pub(crate) type Place = (*mut c_void, usize);

/// A put: `bytes` from `source` of this rank to `target` of world rank `peer`; then the remote action, then the counter.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn put<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
    target: Place,
    source: Place,
    bytes: usize,
    action: RemoteAction,
    counter: Option<u32>,
    release: Release,
) {
    #[inline(never)]
    #[track_caller]
    #[allow(clippy::too_many_arguments)]
    unsafe fn gin_put<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        peer: i32,
        target: Place,
        source: Place,
        bytes: usize,
        action: i32,
        signal: *mut c_void,
        place: usize,
        strong: bool,
        op: i32,
        value: u64,
        counter: u32,
        release: Release,
    ) {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        // SAFETY: the caller's.
        unsafe {
            raw::ncclGinPut_v3(
                net.as_mut_ptr(),
                &comm.world_team(),
                peer,
                target.0,
                target.1,
                source.0,
                source.1,
                bytes,
                action,
                signal,
                place,
                place as u32,
                strong,
                op,
                value,
                counter != NO_COUNTER,
                counter,
                &coop,
                false,
                null_mut(),
                release.given,
                release.required,
                0,
                0,
            );
        }
    }
    let Context { comm, index, sharing } = context;
    let RemoteAction { kind, window, place, strong, op, value } = action;
    let counter = counter.unwrap_or(NO_COUNTER);
    // SAFETY: the caller's.
    unsafe {
        gin_put::<B>(
            comm, index, sharing, peer, target, source, bytes, kind, window, place, strong, op,
            value, counter, release,
        );
    }
}

/// A put of the `size` low bytes of `value`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn put_value<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
    target: Place,
    bits: u64,
    size: usize,
    action: RemoteAction,
    release: Release,
) {
    #[inline(never)]
    #[track_caller]
    #[allow(clippy::too_many_arguments)]
    unsafe fn gin_put_value<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        peer: i32,
        target: Place,
        bits: u64,
        size: usize,
        action: i32,
        signal: *mut c_void,
        place: usize,
        strong: bool,
        op: i32,
        value: u64,
        release: Release,
    ) {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        // SAFETY: the caller's.
        unsafe {
            raw::ncclGinPutValue_v3(
                net.as_mut_ptr(),
                &comm.world_team(),
                peer,
                target.0,
                target.1,
                bits,
                size,
                action,
                signal,
                place,
                place as u32,
                strong,
                op,
                value,
                &coop,
                false,
                null_mut(),
                release.given,
                release.required,
                0,
            );
        }
    }
    let Context { comm, index, sharing } = context;
    let RemoteAction { kind, window, place, strong, op, value } = action;
    // SAFETY: the caller's.
    unsafe {
        gin_put_value::<B>(
            comm, index, sharing, peer, target, bits, size, kind, window, place, strong, op, value,
            release,
        );
    }
}

/// A signal without data.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn signal<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
    action: RemoteAction,
    release: Release,
) {
    #[inline(never)]
    #[track_caller]
    #[allow(clippy::too_many_arguments)]
    unsafe fn gin_signal<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        peer: i32,
        action: i32,
        window: *mut c_void,
        place: usize,
        strong: bool,
        op: i32,
        value: u64,
        release: Release,
    ) {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        // SAFETY: the caller's.
        unsafe {
            raw::ncclGinSignal_v3(
                net.as_mut_ptr(),
                &comm.world_team(),
                peer,
                action,
                window,
                place,
                place as u32,
                strong,
                op,
                value,
                &coop,
                false,
                null_mut(),
                release.given,
                release.required,
                0,
            );
        }
    }
    let Context { comm, index, sharing } = context;
    let RemoteAction { kind, window, place, strong, op, value } = action;
    // SAFETY: the caller's.
    unsafe {
        gin_signal::<B>(
            comm, index, sharing, peer, kind, window, place, strong, op, value, release,
        );
    }
}

/// A get: `bytes` from `source` of world rank `peer` to `target` of this rank.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn get<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
    source: Place,
    target: Place,
    bytes: usize,
) {
    #[inline(never)]
    #[track_caller]
    #[allow(clippy::too_many_arguments)]
    unsafe fn gin_get<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        peer: i32,
        source: Place,
        target: Place,
        bytes: usize,
    ) {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        // SAFETY: the caller's.
        unsafe {
            raw::ncclGinGet_v2(
                net.as_mut_ptr(),
                &comm.world_team(),
                peer,
                source.0,
                source.1,
                target.0,
                target.1,
                bytes,
                &coop,
                false,
                null_mut(),
                0,
                0,
            );
        }
    }
    let Context { comm, index, sharing } = context;
    // SAFETY: the caller's.
    unsafe { gin_get::<B>(comm, index, sharing, peer, source, target, bytes) }
}

/// A value that peers or the network write, which a thread reads and waits for.
#[derive(Clone, Copy)]
pub enum Word {
    Signal(u32),
    VaSignal { window: *mut c_void, offset: usize },
    Counter(u32),
}

/// Reads the low `bits` of a word.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
unsafe fn read_word(net: *mut raw::Gin, word: Word, bits: i32, order: MemoryOrder) -> u64 {
    // SAFETY: the caller's.
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

/// Bits of a word that a comparison looks at.
pub(crate) const ALL_BITS: i32 = 64;

/// Counters have fewer. NCCL: `ncclGinWaitCounter`.
pub(crate) const COUNTER_BITS: i32 = 56;

/// The value of a word.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn read<B: GinBackend>(
    context: Context<'_>,
    word: Word,
    bits: i32,
    order: MemoryOrder,
) -> u64 {
    let mut net = context.net::<B>();
    // SAFETY: the caller's.
    unsafe { read_word(net.as_mut_ptr(), word, bits, order) }
}

/// Waits until a word has reached `least`; `what` says what for, given the word's value.
///
/// NCCL polls, for a slice of time, since it looks up once where the word is.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
        // SAFETY: the caller's.
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
    // SAFETY: the caller's.
    let seen = || unsafe { read::<B>(context, word, bits, MemoryOrder::Relaxed) };
    poll_slices(context.comm, deadline, SHORT_SLICE, done, || what(seen()))
}

/// Sets a word to 0; nothing else may touch it meanwhile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn reset<B: GinBackend>(context: Context<'_>, word: Word) {
    #[inline(never)]
    #[track_caller]
    unsafe fn gin_reset<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        kind: i32,
        window: *mut c_void,
        place: usize,
    ) {
        let mut net = Context { comm, index, sharing }.net::<B>();
        // SAFETY: the caller's.
        unsafe {
            match kind {
                0 => raw::ncclGinResetCounter(net.as_mut_ptr(), place as u32),
                1 => raw::ncclGinResetSignalVA(net.as_mut_ptr(), window, place),
                _ => raw::ncclGinResetSignal(net.as_mut_ptr(), place as u32),
            }
        }
    }
    let Context { comm, index, sharing } = context;
    let (kind, window, place) = match word {
        Word::Counter(id) => (0, null_mut(), id as usize),
        Word::VaSignal { window, offset } => (1, window, offset),
        Word::Signal(id) => (2, null_mut(), id as usize),
    };
    // SAFETY: the caller's.
    unsafe { gin_reset::<B>(comm, index, sharing, kind, window, place) }
}

/// Where this rank keeps what it expects of a signal.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn shadow<B: GinBackend>(context: Context<'_>, signal: u32) -> *mut u64 {
    let mut net = context.net::<B>();
    // SAFETY: the caller's.
    unsafe { raw::ncclGinGetSignalShadowPtr(net.as_mut_ptr(), signal) }
}

/// Begins a flush of what this rank has sent to `peer` on a context.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn flush_async<B: GinBackend>(
    context: Context<'_>,
    peer: i32,
) -> raw::GinRequest {
    let mut net = context.net::<B>();
    let coop = Coop::thread().as_raw();
    let mut request = MaybeUninit::<raw::GinRequest>::zeroed();
    // SAFETY: the caller's; the request is plain numbers, so that zeros are one too.
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

/// NCCL's result for a wait that took too long.
const NCCL_TIMEOUT: i32 = 8;

/// Waits until a flush is through, by the GPU's clock of nanoseconds (0: for ever).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn wait_request<B: GinBackend>(
    context: Context<'_>,
    request: raw::GinRequest,
    order: MemoryOrder,
    deadline: Deadline,
) -> Outcome {
    #[inline(never)]
    #[track_caller]
    unsafe fn gin_wait<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        request0: u64,
        request1: u64,
        order: i32,
        cycles: u64,
    ) -> bool {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        let mut request = raw::GinRequest([request0, request1]);
        // SAFETY: the caller's.
        let result = unsafe {
            raw::ncclGinWaitTimeout(
                net.as_mut_ptr(),
                &mut request,
                &coop,
                false,
                null_mut(),
                order,
                cycles,
            )
        };
        result != NCCL_TIMEOUT
    }
    let Context { comm, index, sharing } = context;
    // SAFETY: the caller's.
    let done = |cycles| unsafe {
        gin_wait::<B>(comm, index, sharing, request.0[0], request.0[1], order as i32, cycles)
    };
    let what = || context.operations(WaitKind::Request);
    // Over PROXY, the wait for gets posts a request in each slice, and the answer to one of an earlier slice does not count.
    poll_slices(comm, deadline, LONG_SLICE, done, what)
}

/// Waits until everything that this thread's rank has sent on a context is through.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) unsafe fn flush<B: GinBackend>(
    context: Context<'_>,
    order: MemoryOrder,
    deadline: Deadline,
) -> Outcome {
    #[inline(never)]
    #[track_caller]
    unsafe fn gin_flush<B: GinBackend>(
        comm: &DevComm,
        index: u32,
        sharing: u8,
        order: i32,
        cycles: u64,
    ) -> bool {
        let mut net = Context { comm, index, sharing }.net::<B>();
        let coop = Coop::thread().as_raw();
        // SAFETY: the caller's.
        let result = unsafe {
            raw::ncclGinFlushTimeout(net.as_mut_ptr(), &coop, order, false, null_mut(), cycles)
        };
        result != NCCL_TIMEOUT
    }
    let Context { comm, index, sharing } = context;
    // SAFETY: the caller's.
    let done = |cycles| unsafe { gin_flush::<B>(comm, index, sharing, order as i32, cycles) };
    let what = || context.operations(WaitKind::Flush);
    poll_slices(comm, deadline, SHORT_SLICE, done, what)
}
