//! The ids of signals and counters, and the action of a put on a signal.

use core::ptr::null_mut;

use devcomm_types::{CounterRange, SignalRange};

use super::calls::{RemoteAction, Word};
use crate::{DevComm, Window};

/// A signal: a 64-bit value in each rank and context, which peers increase. NCCL:
/// `ncclGinSignal_t`.
///
/// The number is for the contexts of the device communicator from which it was made. For those of
/// another one, which a kernel can have too if its launch is unsafe, it stands for another signal,
/// such as a barrier's, or for none, and nothing on a GPU checks that.
#[doc(alias = "ncclGinSignal_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalId(u32);

impl SignalId {
    /// Returns signal `index` of a range that the host reserved. Traps when the range, or the
    /// device communicator, has no such signal.
    ///
    /// # Safety
    ///
    /// The host reserved the range for this device communicator: other signals may be those of its
    /// barriers. Only its contexts use the signal.
    #[track_caller]
    pub unsafe fn of(comm: &DevComm, range: SignalRange, index: u32) -> Self {
        let id = u64::from(range.first) + u64::from(index);
        let reserved = comm.as_raw().gin_signal_count;
        assert!(index < range.count && id < reserved.into(), "the signal is not reserved");
        Self(id as u32)
    }

    /// Returns a signal by NCCL's id.
    ///
    /// # Safety
    ///
    /// The host reserved the signal for the device communicator whose contexts use it, and it does
    /// not belong to a barrier.
    pub const unsafe fn from_raw(id: u32) -> Self {
        Self(id)
    }

    /// Returns NCCL's id.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Increments the peer's signal. NCCL requires a reset of the signal between increments and
    /// [`add`](Self::add). NCCL: `ncclGin_SignalInc`.
    #[doc(alias = "ncclGin_SignalInc")]
    pub const fn inc(self) -> SignalAction {
        SignalAction { target: Target::Id(self.0), op: Op::Inc, strength: Strength::Default }
    }

    /// Adds `value` to the peer's signal. NCCL: `ncclGin_SignalAdd`.
    #[doc(alias = "ncclGin_SignalAdd")]
    pub const fn add(self, value: u64) -> SignalAction {
        SignalAction { target: Target::Id(self.0), op: Op::Add(value), strength: Strength::Default }
    }
}

/// An element of a window that is used as a signal. NCCL: the window and offset of
/// `ncclGin_VASignalInc`.
#[derive(Clone, Copy)]
pub struct VaSignal {
    window: Window<u64>,
    index: usize,
}

impl VaSignal {
    /// Returns the element `index` of a window.
    ///
    /// # Safety
    ///
    /// The window has the element in every rank and was registered with `NCCL_WIN_STRICT_ORDERING`.
    /// The device communicator was created with `gin_va_signals`. While the element is a signal, it
    /// is written only by this crate's signal functions.
    pub const unsafe fn new(window: Window<u64>, index: usize) -> Self {
        Self { window, index }
    }

    /// Increments the peer's signal. NCCL: `ncclGin_VASignalInc`.
    #[doc(alias = "ncclGin_VASignalInc")]
    pub const fn inc(self) -> SignalAction {
        SignalAction { target: Target::Va(self), op: Op::Inc, strength: Strength::Default }
    }

    /// Adds `value` to the peer's signal. NCCL: `ncclGin_VASignalAdd`.
    #[doc(alias = "ncclGin_VASignalAdd")]
    pub const fn add(self, value: u64) -> SignalAction {
        SignalAction { target: Target::Va(self), op: Op::Add(value), strength: Strength::Default }
    }

    fn byte_offset(self) -> usize {
        self.index * size_of::<u64>()
    }
}

mod sealed {
    pub trait Sealed {
        fn word(self) -> super::Word;
    }
}

/// A signal that a kernel can wait for: a [`SignalId`] or a [`VaSignal`].
pub trait Signal: Copy + sealed::Sealed {}

impl Signal for SignalId {}
impl Signal for VaSignal {}

impl sealed::Sealed for SignalId {
    fn word(self) -> Word {
        Word::Signal(self.0)
    }
}

impl sealed::Sealed for VaSignal {
    fn word(self) -> Word {
        Word::VaSignal { window: self.window.as_raw(), offset: self.byte_offset() }
    }
}

/// Returns the 64-bit word of a signal.
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
    Default,
    Weak,
    Strong,
}

/// An update of a signal of the peer: after a put's data has arrived, or without data.
///
/// Without a call of [`strong`](Self::strong) or [`weak`](Self::weak), the signal is strong if the
/// device communicator was created with `gin_strong_signals`, the default.
#[derive(Clone, Copy)]
pub struct SignalAction {
    target: Target,
    op: Op,
    strength: Strength,
}

impl SignalAction {
    /// Makes the signal visible only after the data of all puts that this rank posted before
    /// to the same peer on the same context. Traps unless the device communicator was created with
    /// `gin_strong_signals`. NCCL: `ncclGin_StrongSignalInc`, `ncclGin_StrongSignalAdd`.
    #[doc(alias = "ncclGin_StrongSignalInc")]
    #[must_use]
    pub const fn strong(self) -> Self {
        Self { strength: Strength::Strong, ..self }
    }

    /// Makes the signal visible only after the data of its own put, but perhaps before the
    /// data of earlier puts. NCCL: `ncclGin_WeakSignalInc`, `ncclGin_WeakSignalAdd`.
    #[doc(alias = "ncclGin_WeakSignalInc")]
    #[must_use]
    pub const fn weak(self) -> Self {
        Self { strength: Strength::Weak, ..self }
    }

    /// Returns the action as parameters of NCCL's functions.
    #[track_caller]
    pub(super) fn lower(self, strong_by_default: bool) -> RemoteAction {
        const VA: i32 = 1;
        const INDEXED: i32 = 2;
        let (kind, window, offset_or_id) = match self.target {
            Target::Id(id) => (INDEXED, null_mut(), id as usize),
            Target::Va(signal) => (VA, signal.window.as_raw(), signal.byte_offset()),
        };
        let (op, value) = match self.op {
            Op::Inc => (0, 1),
            Op::Add(value) => (1, value),
        };
        let strong = match self.strength {
            Strength::Default => strong_by_default,
            Strength::Weak => false,
            Strength::Strong => {
                assert!(
                    strong_by_default,
                    "the device communicator was made without gin_strong_signals"
                );
                true
            }
        };
        RemoteAction { kind, window, offset_or_id, strong, op, value }
    }
}

/// A counter: a 56-bit value in this rank and each context, which a put increments after its source
/// has been read. NCCL: `ncclGinCounter_t`.
#[doc(alias = "ncclGinCounter_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterId(u32);

impl CounterId {
    /// Returns counter `index` of a range that the host reserved. Traps when the range, or the
    /// device communicator, has no such counter.
    ///
    /// # Safety
    ///
    /// The host reserved the range for this device communicator: other counters may be those of
    /// other users. Only its contexts use the counter.
    #[track_caller]
    pub unsafe fn of(comm: &DevComm, range: CounterRange, index: u32) -> Self {
        let id = u64::from(range.first) + u64::from(index);
        let reserved = comm.as_raw().gin_counter_count;
        assert!(index < range.count && id < reserved.into(), "the counter is not reserved");
        Self(id as u32)
    }

    /// Returns NCCL's id.
    pub const fn get(self) -> u32 {
        self.0
    }
}
