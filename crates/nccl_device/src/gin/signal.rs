//! Signals and counters, and what a put does to a signal.

use core::ptr::null_mut;

use devcomm_types::{CounterRange, SignalRange};

use super::calls::{RemoteAction, Word};
use crate::{DevComm, Window};

/// A signal: a number of 64 bits that each rank has for each context, and that peers raise. NCCL:
/// `ncclGinSignal_t`.
#[doc(alias = "ncclGinSignal_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalId(u32);

impl SignalId {
    /// Signal `index` of a range that the host reserved. Traps when the range, or the device
    /// communicator, has no such signal.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn of(comm: &DevComm, range: SignalRange, index: u32) -> Self {
        let id = u64::from(range.first) + u64::from(index);
        let reserved = comm.as_raw().gin_signal_count;
        assert!(index < range.count && id < reserved.into(), "the signal is not reserved");
        Self(id as u32)
    }

    /// A signal by its number.
    ///
    /// # Safety
    ///
    /// The host reserved it, and it is not one of a barrier's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const unsafe fn from_raw(id: u32) -> Self {
        Self(id)
    }

    /// NCCL's number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Raises the peer's signal by one. Not to be mixed with [`add`](Self::add) on one signal,
    /// unless it is reset between. NCCL: `ncclGin_SignalInc`.
    #[doc(alias = "ncclGin_SignalInc")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn inc(self) -> SignalAction {
        SignalAction { target: Target::Id(self.0), op: Op::Inc, strength: Strength::AsMade }
    }

    /// Raises the peer's signal by `value`. NCCL: `ncclGin_SignalAdd`.
    #[doc(alias = "ncclGin_SignalAdd")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn add(self, value: u64) -> SignalAction {
        SignalAction { target: Target::Id(self.0), op: Op::Add(value), strength: Strength::AsMade }
    }
}

/// A signal in a window: any word of it. The window was registered with strict ordering, and the
/// device communicator made with `gin_va_signals`. NCCL: `ncclGin_VASignalInc`'s window and offset.
#[derive(Clone, Copy)]
pub struct VaSignal {
    window: Window<u64>,
    index: usize,
}

impl VaSignal {
    /// Element `index` of a window.
    ///
    /// # Safety
    ///
    /// The window has it in every rank and was registered with `NCCL_WIN_STRICT_ORDERING`; the
    /// device communicator was made with `gin_va_signals`; and while it is a signal nobody writes
    /// it but by the functions here.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const unsafe fn new(window: Window<u64>, index: usize) -> Self {
        Self { window, index }
    }

    /// Raises the peer's signal by one. NCCL: `ncclGin_VASignalInc`.
    #[doc(alias = "ncclGin_VASignalInc")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn inc(self) -> SignalAction {
        SignalAction { target: Target::Va(self), op: Op::Inc, strength: Strength::AsMade }
    }

    /// Raises the peer's signal by `value`. NCCL: `ncclGin_VASignalAdd`.
    #[doc(alias = "ncclGin_VASignalAdd")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn add(self, value: u64) -> SignalAction {
        SignalAction { target: Target::Va(self), op: Op::Add(value), strength: Strength::AsMade }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn byte_offset(self) -> usize {
        self.index * size_of::<u64>()
    }
}

mod sealed {
    pub trait Sealed {
        fn word(self) -> super::Word;
    }
}

/// What a kernel can wait for as a signal: a [`SignalId`] or a [`VaSignal`].
pub trait Signal: Copy + sealed::Sealed {}

impl Signal for SignalId {}
impl Signal for VaSignal {}

impl sealed::Sealed for SignalId {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn word(self) -> Word {
        Word::Signal(self.0)
    }
}

impl sealed::Sealed for VaSignal {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn word(self) -> Word {
        Word::VaSignal { window: self.window.as_raw(), offset: self.byte_offset() }
    }
}

/// The word that a signal is.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn word(signal: impl Signal) -> Word {
    sealed::Sealed::word(signal)
}

#[derive(Clone, Copy)]
enum Target {
    Id(u32),
    Va(VaSignal),
}

#[derive(Clone, Copy)]
enum Op {
    Inc,
    Add(u64),
}

#[derive(Clone, Copy)]
enum Strength {
    AsMade,
    Weak,
    Strong,
}

/// What happens to a signal of the peer's when a put has arrived.
///
/// Unless it is said otherwise, a signal is as strong as the device communicator was made for
/// (`gin_strong_signals`, which is on by default).
#[derive(Clone, Copy)]
pub struct SignalAction {
    target: Target,
    op: Op,
    strength: Strength,
}

impl SignalAction {
    /// Whoever sees the signal sees every put that this rank posted before on the same context to
    /// the same peer. The device communicator was made with `gin_strong_signals`, or the kernel
    /// traps. NCCL: `ncclGin_StrongSignalInc`, `ncclGin_StrongSignalAdd`.
    #[doc(alias = "ncclGin_StrongSignalInc")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub const fn strong(self) -> Self {
        Self { strength: Strength::Strong, ..self }
    }

    /// Whoever sees the signal sees the data of its own put, and perhaps nothing of others. NCCL:
    /// `ncclGin_WeakSignalInc`, `ncclGin_WeakSignalAdd`.
    #[doc(alias = "ncclGin_WeakSignalInc")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub const fn weak(self) -> Self {
        Self { strength: Strength::Weak, ..self }
    }

    /// As NCCL takes it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lower(self, strong_by_default: bool) -> RemoteAction {
        const VA: i32 = 1;
        const INDEXED: i32 = 2;
        let (kind, window, place) = match self.target {
            Target::Id(id) => (INDEXED, null_mut(), id as usize),
            Target::Va(signal) => (VA, signal.window.as_raw(), signal.byte_offset()),
        };
        let (op, value) = match self.op {
            Op::Inc => (0, 1),
            Op::Add(value) => (1, value),
        };
        let strong = match self.strength {
            Strength::AsMade => strong_by_default,
            Strength::Weak => false,
            Strength::Strong => {
                assert!(
                    strong_by_default,
                    "the device communicator was made without gin_strong_signals"
                );
                true
            }
        };
        RemoteAction { kind, window, place, strong, op, value }
    }
}

/// A counter: a number of 56 bits that this rank has for each context, and that its puts raise when
/// their source has been read. NCCL: `ncclGinCounter_t`.
#[doc(alias = "ncclGinCounter_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterId(u32);

impl CounterId {
    /// Counter `index` of a range that the host reserved. Traps when the range, or the device
    /// communicator, has no such counter.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn of(comm: &DevComm, range: CounterRange, index: u32) -> Self {
        let id = u64::from(range.first) + u64::from(index);
        let reserved = comm.as_raw().gin_counter_count;
        assert!(index < range.count && id < reserved.into(), "the counter is not reserved");
        Self(id as u32)
    }

    /// NCCL's number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn get(self) -> u32 {
        self.0
    }
}
