//! One-sided operations, launched by the host: a rank writes to a window of a peer, and signals the
//! peer.

use std::ffi::c_int;

use devcomm_types::Element;

use super::collectives::Operation;
use super::deferred::Uses;
use super::{Communicator, Window};
use crate::device::{Buffer, OnStream};
use crate::error::{Error, Result};
use crate::sys::nccl::calls::{self, Target};
use devcomm_sys::nccl::RawWaitSignal;

/// The target of a signal: a rank, the index of one of its signals, and the context to use.
///
/// NCCL counts signals for each pair of ranks and context. A communicator has one signal and one
/// context unless its [`CommConfig`](crate::CommConfig) asks for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signal {
    /// The rank that is signalled.
    pub peer: usize,
    /// Index of the signal, below `num_rma_sig` of the configuration.
    pub index: u32,
    /// Index of the context, below `num_rma_ctx` of the configuration.
    pub context: u32,
}

impl Signal {
    /// Returns the first signal of rank `peer`, in the first context.
    #[must_use]
    pub const fn to(peer: usize) -> Self {
        Self { peer, index: 0, context: 0 }
    }
}

/// Signals to wait for: `count` of them from rank `peer`. NCCL: `ncclWaitSignalDesc_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclWaitSignalDesc_t")]
pub struct WaitSignalDesc {
    /// The rank that sends the signals.
    pub peer: usize,
    /// The number of signals to wait for.
    pub count: u32,
    /// Index of the signal.
    pub index: u32,
    /// Index of the context.
    pub context: u32,
}

impl WaitSignalDesc {
    /// Returns one signal from rank `peer`: the first, in the first context.
    #[must_use]
    pub const fn from(peer: usize) -> Self {
        Self { peer, count: 1, index: 0, context: 0 }
    }

    /// Sets the number of signals.
    #[must_use]
    pub const fn count(mut self, count: u32) -> Self {
        self.count = count;
        self
    }
}

impl Communicator {
    /// Copies `local` to `window` of rank `to.peer`, from element `at` on, and then signals that
    /// rank, which sees the data once it has [waited](Self::wait_signal). `local` must also be in a
    /// window of this communicator.
    ///
    /// `window` is this rank's handle. Its length on the peer is the limit; for a communicator
    /// without a [`World`](crate::World), which does not know that length, there is
    /// [`put_signal_unchecked`](Self::put_signal_unchecked).
    ///
    /// NCCL: `ncclPutSignal`, which counts the offset in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for elements beyond the end of the peer's window, a window whose
    /// length there is not known, or an unknown rank or index;
    /// [`StateError::Closed`](crate::StateError::Closed),
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
    #[doc(alias = "ncclPutSignal")]
    pub fn put_signal<T, B>(
        &self,
        local: &B,
        window: &Window<T>,
        at: usize,
        to: Signal,
        stream: impl OnStream,
    ) -> Result<()>
    where
        T: Element,
        B: Buffer<Element = T>,
    {
        let (local, peer) = (local.device_slice(), to.peer);
        self.peer(peer)?;
        let Some(len) = window.len_of(peer) else {
            return Err(Error::invalid(format!(
                "a put to a window whose length on rank {peer} is not known, because its \
                 communicator has no World; use put_signal_unchecked"
            )));
        };
        let n = local.len();
        if at.checked_add(n).is_none_or(|end| end > len) {
            return Err(Error::invalid(format!(
                "a put of {n} elements at element {at} of a window of {len} elements on rank {peer}"
            )));
        }
        // SAFETY: the elements are within the peer's window.
        unsafe { self.put_signal_unchecked(&local, window, at, to, stream) }
    }

    /// Does the same as [`put_signal`](Self::put_signal), for a window whose length on the peer is
    /// not known.
    ///
    /// # Safety
    ///
    /// The peer's window has `at + local.len()` elements: NCCL compares with this rank's length.
    ///
    /// # Errors
    ///
    /// The errors are those of [`put_signal`](Self::put_signal), except for elements beyond the
    /// end.
    pub unsafe fn put_signal_unchecked<T, B>(
        &self,
        local: &B,
        window: &Window<T>,
        at: usize,
        to: Signal,
        stream: impl OnStream,
    ) -> Result<()>
    where
        T: Element,
        B: Buffer<Element = T>,
    {
        let (local, target) = (local.device_slice(), self.target(to)?);
        if !std::sync::Arc::ptr_eq(window.communicator().handle(), self.handle()) {
            return Err(Error::invalid("the window is registered with another communicator"));
        }
        let offset = at.checked_mul(size_of::<T>());
        let offset = offset.ok_or_else(|| Error::invalid("a put beyond all addresses"))?;
        let handle = window.handle()?;
        let put = Operation::new(self, local.len(), local.data_type()).sends(&local)?;
        put.uses(window.resource())
            .to(target.peer)
            .enqueue(stream, |comm, put| calls::put_signal(comm, put, target, handle, offset))
    }

    /// Signals a rank.
    ///
    /// NCCL: `ncclSignal`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`put_signal`](Self::put_signal). NCCL initializes one-sided
    /// operations with the first window; before that, this fails unless the configuration sets
    /// `rma_eager_init`.
    #[doc(alias = "ncclSignal")]
    pub fn signal(&self, to: Signal, stream: impl OnStream) -> Result<()> {
        let (target, stream) = (self.target(to)?, self.stream(&stream));
        let raw_stream = stream.handle().raw() as u64;
        let terms = format!("rank {}", target.peer);
        self.enqueue(stream, Uses::default(), &terms, |comm| {
            calls::signal(comm, target, raw_stream)
        })
    }

    /// Makes the stream wait for signals: later work in it sees what the peers put before they
    /// signaled. A wait consumes its signals.
    ///
    /// NCCL: `ncclWaitSignal`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`signal`](Self::signal); [`Error::InvalidInput`] for no signals at
    /// all.
    #[doc(alias = "ncclWaitSignal")]
    pub fn wait_signal(&self, signals: &[WaitSignalDesc], stream: impl OnStream) -> Result<()> {
        if signals.is_empty() {
            return Err(Error::invalid("no signals to wait for"));
        }
        let raw = |desc: &WaitSignalDesc| {
            Ok(RawWaitSignal {
                op_count: int(desc.count, "count of signals")?,
                peer: self.peer(desc.peer)?,
                signal_index: int(desc.index, "signal index")?,
                context: int(desc.context, "context index")?,
            })
        };
        let waits = signals.iter().map(raw).collect::<Result<Vec<_>>>()?;
        let peers: Vec<_> = signals.iter().map(|signal| signal.peer.to_string()).collect();
        let terms = format!("ranks {}", peers.join(", "));
        let stream = self.stream(&stream);
        let raw_stream = stream.handle().raw() as u64;
        let call = |comm| calls::wait_signal(comm, waits, raw_stream);
        self.enqueue(stream, Uses::default(), &terms, call)
    }

    fn target(&self, to: Signal) -> Result<Target> {
        let peer = self.peer(to.peer)?;
        let (signal, context) = (int(to.index, "signal index")?, int(to.context, "context index")?);
        Ok(Target { peer, signal, context })
    }
}

/// Returns `value` as NCCL's int.
fn int(value: u32, what: &str) -> Result<c_int> {
    c_int::try_from(value)
        .map_err(|_| Error::invalid(format!("{what} {value} does not fit NCCL's int")))
}
