//! NCCL's collectives and sends, launched by the host.
//!
//! They take [`Buffer`]s, whose lengths say how many elements; lengths that do not fit are an
//! error. Everything is enqueued to the caller's stream and returns at once. The memory stays
//! allocated until the stream has passed it. Where NCCL allows it, the two buffers may be the same
//! memory, or the one a part of the other: *in place*.

use std::any::Any;
use std::ffi::c_int;
use std::rc::Rc;
use std::sync::Arc;

use devcomm_types::DataType;

use super::config::LoweredCollectiveConfig;
use super::create::rank_of;
use super::reduce_op::sealed::Operator;
use super::{CollectiveConfig, Communicator, ReduceOperator};
use crate::device::{Buffer, DeviceSlice, Event, Stream};
use crate::error::{Error, Result};
use crate::sys::nccl::call::{Call, CommPtr};
use crate::sys::nccl::calls::{self, Operands};

/// A communicator with a configuration for the collectives that are called on it; see
/// [`Communicator::configured`].
#[derive(Clone, Debug)]
pub struct Configured<'a> {
    communicator: &'a Communicator,
    config: Option<Arc<LoweredCollectiveConfig>>,
    /// What the collectives record.
    event: Option<Event>,
}

/// Declares every collective twice: on the communicator, and with a configuration. The body is that
/// of the second, `of`, and compares lengths before anything is enqueued.
macro_rules! collectives {
    ($(
        $(#[doc = $doc:literal])*
        #[nccl($alias:literal, $alias_config:literal)]
        fn $name:ident<$($generic:ident: $bound:path),*>($($arg:ident: $type:ty),* $(,)?)
        |$of:ident|
            $body:block
    )*) => {
        impl Communicator {
            $(
                $(#[doc = $doc])*
                #[doc = concat!("\nNCCL: `", $alias, "`.")]
                ///
                /// # Errors
                ///
                /// [`Error::InvalidInput`] when lengths do not fit each other, or memory or stream
                /// are of another context than the communicator;
                /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
                /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
                #[doc(alias = $alias)]
                pub fn $name<$($generic: $bound),*>(&self, $($arg: $type),*) -> Result<()> {
                    Configured { communicator: self, config: None, event: None }.$name($($arg),*)
                }
            )*
        }

        /// The collectives, with a configuration.
        impl Configured<'_> {
            $(
                #[doc = concat!(
                    "As [`Communicator::", stringify!($name), "`].\n\nNCCL: `", $alias_config, "`."
                )]
                ///
                /// # Errors
                ///
                /// Also [`NcclError::Unsupported`](crate::NcclError::Unsupported) from a library
                /// without configurations.
                #[doc(alias = $alias_config)]
                pub fn $name<$($generic: $bound),*>(&self, $($arg: $type),*) -> Result<()> {
                    let $of = self;
                    $body
                }
            )*
        }
    };
}

collectives! {
    /// Every rank's `recv` gets the combination of all ranks' `send`; both have the same length.
    #[nccl("ncclAllReduce", "ncclAllReduceConfig")]
    fn all_reduce<S: Buffer, R: SameElement<S>, O: ReduceOperator<S::Element>>(
        send: &S, recv: &R, op: O, stream: &Stream,
    ) |of| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        same_length("an all-reduce", send.len(), recv.len())?;
        let on = of.operation(&send).sends(&send)?.receives(&recv)?.combines(&op)?;
        on.enqueue_configured(of, stream, calls::all_reduce)
    }

    /// `root`'s `recv` gets the combination of all ranks' `send`; both have the same length. The
    /// other ranks' `recv` is not used and may be `None`.
    #[nccl("ncclReduce", "ncclReduceConfig")]
    fn reduce<S: Buffer, O: ReduceOperator<S::Element>>(
        send: &S, recv: Option<DeviceSlice<S::Element>>, op: O, root: usize, stream: &Stream,
    ) |of| {
        let send = send.device_slice();
        let mut on = of.operation(&send).with_root(root)?.sends(&send)?;
        if of.communicator.rank() == root {
            let recv = needed("a reduction", "receive in", recv)?;
            same_length("a reduction", send.len(), recv.len())?;
            on = on.receives(&recv)?;
        }
        on.combines(&op)?.enqueue_configured(of, stream, calls::reduce)
    }

    /// Every rank's `recv` gets `root`'s `send`; both have the same length. The other ranks' `send`
    /// is not used and may be `None`.
    #[nccl("ncclBroadcast", "ncclBroadcastConfig")]
    fn broadcast<R: Buffer>(
        send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize, stream: &Stream,
    ) |of| {
        let recv = recv.device_slice();
        let mut on = of.operation(&recv).with_root(root)?.receives(&recv)?;
        if of.communicator.rank() == root {
            let send = needed("a broadcast", "send", send)?;
            same_length("a broadcast", send.len(), recv.len())?;
            on = on.sends(&send)?;
        }
        on.enqueue_configured(of, stream, calls::broadcast)
    }

    /// Every rank's `recv` gets all ranks' `send`, in order of ranks: its length is that of `send`
    /// times the number of ranks. In place, `send` is this rank's part of `recv`.
    #[nccl("ncclAllGather", "ncclAllGatherConfig")]
    fn all_gather<S: Buffer, R: SameElement<S>>(send: &S, recv: &R, stream: &Stream) |of| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        of.in_parts("an all-gather", recv.len(), send.len())?;
        let on = of.operation(&send).sends(&send)?.receives(&recv)?;
        on.enqueue_configured(of, stream, calls::all_gather)
    }

    /// Every rank's `recv` gets its part of the reduction of all ranks' `send`, whose length is
    /// that of `recv` times the number of ranks. In place, `recv` is this rank's part of `send`.
    #[nccl("ncclReduceScatter", "ncclReduceScatterConfig")]
    fn reduce_scatter<S: Buffer, R: SameElement<S>, O: ReduceOperator<S::Element>>(
        send: &S, recv: &R, op: O, stream: &Stream,
    ) |of| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        of.in_parts("a reduce-scatter", send.len(), recv.len())?;
        let on = Operation::new(of.communicator, recv.len(), send.data_type());
        let on = on.sends(&send)?.receives(&recv)?.combines(&op)?;
        on.enqueue_configured(of, stream, calls::reduce_scatter)
    }

    /// Part `i` of every rank's `recv` gets part `rank` of rank `i`'s `send`; both have the same
    /// length, one part per rank. Not in place.
    #[nccl("ncclAlltoAll", "ncclAlltoAllConfig")]
    fn all_to_all<S: Buffer, R: SameElement<S>>(send: &S, recv: &R, stream: &Stream) |of| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        same_length("an all-to-all", send.len(), recv.len())?;
        let part = send.len() / of.communicator.n_ranks();
        of.in_parts("an all-to-all", send.len(), part)?;
        let on = Operation::new(of.communicator, part, send.data_type());
        on.sends(&send)?.receives(&recv)?.enqueue_configured(of, stream, calls::all_to_all)
    }

    /// `root`'s `recv` gets all ranks' `send`, in order of ranks: its length is that of `send`
    /// times the number of ranks. The other ranks' `recv` is not used and may be `None`. In place,
    /// `root`'s `send` is its part of `recv`.
    #[nccl("ncclGather", "ncclGatherConfig")]
    fn gather<S: Buffer>(
        send: &S, recv: Option<DeviceSlice<S::Element>>, root: usize, stream: &Stream,
    ) |of| {
        let send = send.device_slice();
        let mut on = of.operation(&send).with_root(root)?.sends(&send)?;
        if of.communicator.rank() == root {
            let recv = needed("a gather", "receive in", recv)?;
            of.in_parts("a gather", recv.len(), send.len())?;
            on = on.receives(&recv)?;
        }
        on.enqueue_configured(of, stream, calls::gather)
    }

    /// Every rank's `recv` gets its part of `root`'s `send`, whose length is that of `recv` times
    /// the number of ranks. The other ranks' `send` is not used and may be `None`. In place,
    /// `root`'s `recv` is its part of `send`.
    #[nccl("ncclScatter", "ncclScatterConfig")]
    fn scatter<R: Buffer>(
        send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize, stream: &Stream,
    ) |of| {
        let recv = recv.device_slice();
        let mut on = of.operation(&recv).with_root(root)?.receives(&recv)?;
        if of.communicator.rank() == root {
            let send = needed("a scatter", "send", send)?;
            of.in_parts("a scatter", send.len(), recv.len())?;
            on = on.sends(&send)?;
        }
        on.enqueue_configured(of, stream, calls::scatter)
    }
}

fn same_length(operation: &str, send: usize, recv: usize) -> Result<()> {
    if send == recv {
        return Ok(());
    }
    Err(Error::invalid(format!("lengths must match: {operation} from {send} elements to {recv}")))
}

fn needed<T>(operation: &str, what: &str, buffer: Option<T>) -> Result<T> {
    buffer
        .ok_or_else(|| Error::invalid(format!("{operation}: the root passed no buffer to {what}")))
}

impl<'a> Configured<'a> {
    /// One part per rank.
    fn in_parts(&self, operation: &str, whole: usize, part: usize) -> Result<()> {
        let n_ranks = self.communicator.n_ranks();
        if part.checked_mul(n_ranks) == Some(whole) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{operation} among {n_ranks} ranks with parts of {part} elements and a whole of \
             {whole}: the whole must be {n_ranks} parts"
        )))
    }

    /// An operation on the elements of `slice`.
    fn operation<T>(&self, slice: &DeviceSlice<T>) -> Operation<'a> {
        Operation::new(self.communicator, slice.len(), slice.data_type())
    }
}

/// A buffer with elements of the same type as `S`.
pub trait SameElement<S: Buffer>: Buffer<Element = S::Element> {}

impl<S: Buffer, R: Buffer<Element = S::Element>> SameElement<S> for R {}

impl Communicator {
    /// Collectives called on what this returns use `config`, which must be the same on every rank.
    ///
    /// ```no_run
    /// # use devcomm_host::{CollectiveConfig, Communicator, ReduceOp, Result};
    /// # use devcomm_host::{Stream, SymmetricBuffer};
    /// # fn f(comm: &Communicator, a: &SymmetricBuffer<f32>, stream: &Stream) -> Result<()> {
    /// let config = CollectiveConfig::new().max_ctas(4);
    /// comm.configured(&config)?.all_reduce(a, a, ReduceOp::Sum, stream)
    /// # }
    /// ```
    ///
    /// NCCL: `ncclCollConfig_t`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for values that NCCL would refuse,
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) from an older library.
    #[doc(alias = "ncclCollConfig_t")]
    pub fn configured(&self, config: &CollectiveConfig) -> Result<Configured<'_>> {
        let config = Some(Arc::new(config.lower(self.library().version())?));
        Ok(Configured { communicator: self, config, event: None })
    }

    /// As [`configured`](Self::configured); each collective also records `event` when its kernel
    /// has been launched completely, so that another stream can start its work then. Every rank
    /// passes an event of its own, or none does; at most one collective of a communicator with an
    /// event is in a group.
    ///
    /// NCCL: `launchCompletionEvent` of `ncclCollConfig_t`.
    ///
    /// # Errors
    ///
    /// Also [`Error::InvalidInput`] for an event of another context, or one that was made with
    /// timing ([`Context::event_without_timing`](crate::Context::event_without_timing) makes the
    /// other kind).
    #[doc(alias = "launchCompletionEvent")]
    pub fn configured_recording(
        &self,
        config: &CollectiveConfig,
        event: &Event,
    ) -> Result<Configured<'_>> {
        self.require_own(event.context(), "an event")?;
        if event.is_timed() {
            return Err(Error::invalid(
                "a collective records only events that were made without timing",
            ));
        }
        // SAFETY: an untimed event of this device; every operation with this configuration keeps
        // it.
        let config = unsafe { config.clone().launch_completion_event(event.as_raw()) };
        Ok(Configured { event: Some(event.clone()), ..self.configured(&config)? })
    }

    /// Sends a buffer to rank `peer`, which [receives](Self::recv) it. Sends and receives that wait
    /// for each other belong in one [`group`](crate::group()).
    ///
    /// NCCL: `ncclSend`.
    ///
    /// # Errors
    ///
    /// As the collectives; [`Error::InvalidInput`] for a rank that there is not.
    #[doc(alias = "ncclSend")]
    pub fn send<S: Buffer>(&self, send: &S, peer: usize, stream: &Stream) -> Result<()> {
        let (send, peer) = (send.device_slice(), self.peer(peer)?);
        let on = Operation::new(self, send.len(), send.data_type()).sends(&send)?;
        on.enqueue(stream, |comm, on| calls::send(comm, on, peer))
    }

    /// Receives a buffer from rank `peer`, which [sends](Self::send) one of that length.
    ///
    /// NCCL: `ncclRecv`.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    #[doc(alias = "ncclRecv")]
    pub fn recv<R: Buffer>(&self, recv: &R, peer: usize, stream: &Stream) -> Result<()> {
        let (recv, peer) = (recv.device_slice(), self.peer(peer)?);
        let on = Operation::new(self, recv.len(), recv.data_type()).receives(&recv)?;
        on.enqueue(stream, |comm, on| calls::recv(comm, on, peer))
    }

    /// NCCL's number of a rank.
    pub(crate) fn peer(&self, rank: usize) -> Result<c_int> {
        rank_of(rank, self.n_ranks())
    }
}

/// An operation under construction.
pub(crate) struct Operation<'a> {
    communicator: &'a Communicator,
    data_type: DataType,
    on: Operands,
    keep: Vec<Rc<dyn Any>>,
}

impl<'a> Operation<'a> {
    pub(crate) fn new(communicator: &'a Communicator, count: usize, data_type: DataType) -> Self {
        let on = Operands { count, data_type: data_type as c_int, ..Operands::default() };
        Self { communicator, data_type, on, keep: Vec::new() }
    }

    pub(crate) fn sends<T>(mut self, slice: &DeviceSlice<T>) -> Result<Self> {
        self.on.send = self.takes(slice)?;
        Ok(self)
    }

    fn receives<T>(mut self, slice: &DeviceSlice<T>) -> Result<Self> {
        self.on.recv = self.takes(slice)?;
        Ok(self)
    }

    fn takes<T>(&mut self, slice: &DeviceSlice<T>) -> Result<u64> {
        self.communicator.require_own(slice.context(), "memory")?;
        if slice.data_type() as c_int != self.on.data_type {
            return Err(Error::invalid(format!("{slice:?} beside elements of another type")));
        }
        self.keep.extend(slice.keep());
        Ok(slice.device_address())
    }

    fn with_root(mut self, root: usize) -> Result<Self> {
        self.on.root = self.communicator.peer(root)?;
        Ok(self)
    }

    fn combines(mut self, op: &impl Operator) -> Result<Self> {
        let (op, keep) = op.resolve(self.communicator, self.data_type)?;
        self.on.op = op;
        self.keep.extend(keep);
        Ok(self)
    }

    /// As [`enqueue`](Self::enqueue), with the configuration and its event, which are kept until a
    /// group has ended.
    fn enqueue_configured(
        mut self,
        of: &Configured<'_>,
        stream: &Stream,
        call: impl FnOnce(CommPtr, Operands, Option<Arc<LoweredCollectiveConfig>>) -> Call,
    ) -> Result<()> {
        let config = of.config.clone();
        self.keep.extend(config.clone().map(|config| Rc::new(config) as Rc<dyn Any>));
        self.keep.extend(of.event.as_ref().map(Event::keep));
        self.enqueue(stream, |comm, on| call(comm, on, config))
    }

    pub(crate) fn keep(mut self, what: Rc<dyn Any>) -> Self {
        self.keep.push(what);
        self
    }

    pub(crate) fn enqueue(
        self,
        stream: &Stream,
        call: impl FnOnce(CommPtr, Operands) -> Call,
    ) -> Result<()> {
        let mut on = self.on;
        on.stream = stream.handle().raw() as u64;
        self.communicator.enqueue(stream, self.keep, |comm| call(comm, on))
    }
}
