//! Helpers for the tests of NCCL's C functions.

use core::mem::MaybeUninit;
use core::ptr::null_mut;

use devcomm::{DevCommRequirements, GinConnectionType};
use nccl_device::raw::{self, CoopAny, DevComm, Gin, Team};

/// NCCL's back-end mask for PROXY.
pub const PROXY: u32 = 1 << 2;
/// Memory orders, with C++'s numbers.
pub const RELAXED: i32 = 0;
pub const ACQ_REL: i32 = 4;
/// Scopes of CUDA's atomics.
pub const SYSTEM: i32 = 0;
pub const THREAD: i32 = 3;
/// NCCL's result of a wait that timed out, `ncclTimeout`.
pub const TIMEOUT: i32 = 8;
/// NCCL's signal operations.
pub const INC: i32 = 0;
pub const ADD: i32 = 1;
/// NCCL's signal types.
pub const NONE: i32 = 0;
pub const VA: i32 = 1;
pub const INDEXED: i32 = 2;
/// The numbers of lowest bits that a read or a wait compares: all of a signal and of a counter.
pub const SIGNAL_BITS: i32 = 64;
pub const COUNTER_BITS: i32 = 56;

/// Returns an object that `init` initialises.
fn initialised<T>(init: impl FnOnce(*mut T)) -> T {
    let mut object = MaybeUninit::uninit();
    init(object.as_mut_ptr());
    // SAFETY: `init` has initialised the object.
    unsafe { object.assume_init() }
}

#[track_caller]
pub fn cta() -> CoopAny {
    // SAFETY: the pointer is valid for writing a coop.
    initialised(|coop| unsafe { raw::ncclCoopAnyInitCta(coop) })
}

#[track_caller]
pub fn thread_coop() -> CoopAny {
    // SAFETY: the pointer is valid for writing a coop.
    initialised(|coop| unsafe { raw::ncclCoopAnyInitThread(coop) })
}

#[track_caller]
pub fn gin(comm: &DevComm, context: u32) -> Gin {
    // SAFETY: the pointer is valid for writing a handle; `comm` is a device communicator.
    initialised(|net| unsafe { raw::ncclGin_C_init(net, PROXY, comm, context as i32) })
}

/// A location in a window: its handle, and an offset in bytes.
pub type WindowOffset = (*mut core::ffi::c_void, usize);

/// The signal of an operation: none, an increment (strong if `true`), or an addition.
#[derive(Clone, Copy)]
pub enum SignalMode {
    Nothing,
    Inc(u32, bool),
    IncVa(WindowOffset, bool),
    AddTo(u32, u64),
    AddVa(WindowOffset, u64),
}

impl SignalMode {
    /// Returns NCCL's parameters: signal type, window and offset, id, strong, operation, argument.
    pub fn params(self) -> (i32, WindowOffset, u32, bool, i32, u64) {
        match self {
            Self::Nothing => (NONE, (null_mut(), 0), 0, false, INC, 0),
            Self::Inc(id, strong) => (INDEXED, (null_mut(), 0), id, strong, INC, 0),
            Self::IncVa(location, strong) => (VA, location, 0, strong, INC, 0),
            Self::AddTo(id, value) => (INDEXED, (null_mut(), 0), id, true, ADD, value),
            Self::AddVa(location, value) => (VA, location, 0, true, ADD, value),
        }
    }
}

/// Posts a put by one thread.
///
/// # Safety
///
/// The contract of `ncclGinPut_v3`.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "NCCL's function has 24")]
pub unsafe fn put(
    net: &mut Gin,
    team: &Team,
    peer: i32,
    dst: WindowOffset,
    src: WindowOffset,
    bytes: usize,
    then: SignalMode,
    counter: Option<u32>,
) {
    let (kind, va, id, strong, op, arg) = then.params();
    // SAFETY: the test's kernel passes a context that it initialised, and windows that it got.
    unsafe {
        raw::ncclGinPut_v3(
            net,
            team,
            peer,
            dst.0,
            dst.1,
            src.0,
            src.1,
            bytes,
            kind,
            va.0,
            va.1,
            id,
            strong,
            op,
            arg,
            counter.is_some(),
            counter.unwrap_or(0),
            &thread_coop(),
            false,
            null_mut(),
            THREAD,
            SYSTEM,
            0,
            0,
        );
    }
}

/// Posts a put of the lowest `bytes` bytes of a value, by one thread.
///
/// # Safety
///
/// The contract of `ncclGinPutValue`.
#[track_caller]
pub unsafe fn put_value(
    net: &mut Gin,
    team: &Team,
    peer: i32,
    (window, offset): WindowOffset,
    (value, bytes): (u64, usize),
    then: SignalMode,
) {
    let (kind, _, id, _, op, arg) = then.params();
    let (signals, one, none) = (kind == INDEXED, thread_coop(), null_mut());
    // SAFETY: the test's kernel passes a context that it initialised, and windows that it got.
    unsafe {
        raw::ncclGinPutValue(
            net, team, peer, window, offset, value, bytes, signals, id, op, arg, &one, false, none,
            THREAD, SYSTEM,
        );
    }
}

/// Posts a signal by one thread.
///
/// # Safety
///
/// The contract of `ncclGinSignal_v3`.
#[track_caller]
pub unsafe fn signal(net: &mut Gin, team: &Team, peer: i32, then: SignalMode) {
    let (kind, va, id, strong, op, arg) = then.params();
    // SAFETY: the test's kernel passes a context that it initialised, and windows that it got.
    unsafe {
        raw::ncclGinSignal_v3(
            net,
            team,
            peer,
            kind,
            va.0,
            va.1,
            id,
            strong,
            op,
            arg,
            &thread_coop(),
            false,
            null_mut(),
            THREAD,
            SYSTEM,
            0,
        );
    }
}

/// Returns NCCL's handle of a window.
pub fn handle<T: devcomm_types::Element>(
    window: &nccl_device::Window<T>,
) -> *mut core::ffi::c_void {
    // SAFETY: the handle is the window's first field.
    unsafe { *std::ptr::from_ref(window).cast() }
}

/// Waits on one thread until a signal has reached `least`.
///
/// # Safety
///
/// The contract of `ncclGinWaitSignal`.
#[track_caller]
pub unsafe fn wait(net: &mut Gin, id: u32, least: u64) {
    // SAFETY: the test's kernel passes a context that it initialised, and windows that it got.
    unsafe { raw::ncclGinWaitSignal(net, &thread_coop(), id, least, SIGNAL_BITS, ACQ_REL) };
}

/// Flushes a context on one thread.
///
/// # Safety
///
/// The contract of `ncclGinFlush`.
#[track_caller]
pub unsafe fn flush(net: &mut Gin) {
    // SAFETY: the test's kernel passes a context that it initialised, and windows that it got.
    unsafe { raw::ncclGinFlush(net, &thread_coop(), ACQ_REL) };
}

/// Returns requirements of GIN to every rank, and of some LSA barriers, signals and counters.
pub fn full() -> DevCommRequirements {
    DevCommRequirements::new()
        .lsa_barriers(4)
        .gin_connection(GinConnectionType::Full)
        .gin_signals(16)
        .gin_counters(4)
        .gin_va_signals(true)
}
