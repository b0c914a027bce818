//! NCCL's collectives and sends, launched by the host.
//!
//! They take [`Buffer`]s, whose lengths give the number of elements; lengths that do not match are
//! an error. Every method enqueues to the caller's stream, or with `None` to the context's default
//! stream, and returns at once. The memory stays allocated until the operation is done. Where NCCL
//! allows it, the two buffers may be the same memory, or one may be part of the other: *in place*.
//! Buffers that overlap otherwise are an error.

use std::ffi::c_int;
use std::sync::Arc;

use devcomm_types::DataType;

use super::config::LoweredCollectiveConfig;
use super::create::rank_of;
use super::deferred::{Exchanged, Uses};
use super::reduce_op::sealed::{Opened, Operator};
use super::{CollectiveConfig, Communicator, ReduceOp, ReduceOperator};
use crate::device::issuer::Resource;
use crate::device::{Buffer, DeviceSlice, Event, KeepAlive, OnStream};
use crate::error::{Error, Result};
use crate::sys::nccl::call::{Call, CommPtr};
use crate::sys::nccl::calls::{self, Operands};

/// A communicator with a configuration for the collectives that are called on it; see
/// [`Communicator::configured`].
#[derive(Clone, Debug)]
pub struct Configured<'a> {
    communicator: &'a Communicator,
    config: Option<Arc<LoweredCollectiveConfig>>,
    /// The event that the collectives record.
    event: Option<Event>,
}

/// Declares every collective on [`Communicator`] and on [`Configured`], which is `$this` in the
/// body. The body compares lengths before anything is enqueued.
macro_rules! collectives {
    ($(
        $(#[doc = $doc:literal])*
        #[nccl($alias:literal, $alias_config:literal)]
        fn $name:ident<$($generic:ident: $bound:path),*>($($arg:ident: $type:ty),* $(,)?)
        |$this:ident|
            $body:block
    )*) => {
        impl Communicator {
            $(
                $(#[doc = $doc])*
                #[doc = concat!("\nNCCL: `", $alias, "`.")]
                ///
                /// # Errors
                ///
                /// [`Error::InvalidInput`] when lengths do not match, buffers overlap other
                /// than in place, or memory or stream are of another context than the communicator;
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
                    "Does the same as [`Communicator::", stringify!($name), "`].\n\nNCCL: `",
                    $alias_config, "`."
                )]
                ///
                /// # Errors
                ///
                /// Also [`NcclError::Unsupported`](crate::NcclError::Unsupported) from a library
                /// without configurations.
                #[doc(alias = $alias_config)]
                pub fn $name<$($generic: $bound),*>(&self, $($arg: $type),*) -> Result<()> {
                    let $this = self;
                    $body
                }
            )*
        }
    };
}

collectives! {
    /// Reduces all ranks' `send` into every rank's `recv`; both have the same length.
    #[nccl("ncclAllReduce", "ncclAllReduceConfig")]
    fn all_reduce<S: Buffer, R: SameElement<S>, O: ReduceOperator<S::Element>>(
        send: &S, recv: &R, op: O, stream: impl OnStream,
    ) |this| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        same_length("an all-reduce", send.len(), recv.len())?;
        require_place("an all-reduce", &send, &recv, Some(0))?;
        let operation = this.operation(&send).sends(&send)?.receives(&recv)?.combines(&op)?;
        operation.averages_by_product()?.enqueue_configured(this, stream, calls::all_reduce)
    }

    /// Reduces all ranks' `send` into `root`'s `recv`; both have the same length. The other ranks'
    /// `recv` is not used and may be `None`.
    #[nccl("ncclReduce", "ncclReduceConfig")]
    fn reduce<S: Buffer, O: ReduceOperator<S::Element>>(
        send: &S, recv: Option<DeviceSlice<S::Element>>, op: O, root: usize, stream: impl OnStream,
    ) |this| {
        let send = send.device_slice();
        let mut operation = this.operation(&send).with_root(root)?.sends(&send)?;
        if this.communicator.rank() == root {
            let recv = require_buffer("a reduction", "receive in", recv)?;
            same_length("a reduction", send.len(), recv.len())?;
            require_place("a reduction", &send, &recv, Some(0))?;
            operation = operation.receives(&recv)?;
        }
        operation.combines(&op)?.enqueue_configured(this, stream, calls::reduce)
    }

    /// Copies `root`'s `send` to every rank's `recv`; both have the same length. The other ranks'
    /// `send` is not used and may be `None`.
    #[nccl("ncclBroadcast", "ncclBroadcastConfig")]
    fn broadcast<R: Buffer>(
        send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize, stream: impl OnStream,
    ) |this| {
        let recv = recv.device_slice();
        let mut operation = this.operation(&recv).with_root(root)?.receives(&recv)?;
        if this.communicator.rank() == root {
            let send = require_buffer("a broadcast", "send", send)?;
            same_length("a broadcast", send.len(), recv.len())?;
            require_place("a broadcast", &send, &recv, Some(0))?;
            operation = operation.sends(&send)?;
        }
        operation.enqueue_configured(this, stream, calls::broadcast)
    }

    /// Gathers all ranks' `send` in every rank's `recv`, in rank order: its length is that of
    /// `send` times the number of ranks. In place, `send` is this rank's chunk of `recv`.
    #[nccl("ncclAllGather", "ncclAllGatherConfig")]
    fn all_gather<S: Buffer, R: SameElement<S>>(send: &S, recv: &R, stream: impl OnStream) |this| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        this.require_chunks("an all-gather", recv.len(), send.len())?;
        require_place("an all-gather", &send, &recv, this.chunk_at(send.len()))?;
        let operation = this.operation(&send).sends(&send)?.receives(&recv)?;
        operation.enqueue_configured(this, stream, calls::all_gather)
    }

    /// Reduces all ranks' `send`, and copies each rank's chunk of the result to its `recv`. The
    /// length of `send` is that of `recv` times the number of ranks. In place, `recv` is this
    /// rank's chunk of `send`.
    #[nccl("ncclReduceScatter", "ncclReduceScatterConfig")]
    fn reduce_scatter<S: Buffer, R: SameElement<S>, O: ReduceOperator<S::Element>>(
        send: &S, recv: &R, op: O, stream: impl OnStream,
    ) |this| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        this.require_chunks("a reduce-scatter", send.len(), recv.len())?;
        let place = this.chunk_at(recv.len()).map(|at| -at);
        require_place("a reduce-scatter", &send, &recv, place)?;
        let operation = Operation::new(this.communicator, recv.len(), send.data_type());
        let operation = operation.sends(&send)?.receives(&recv)?.combines(&op)?;
        operation.enqueue_configured(this, stream, calls::reduce_scatter)
    }

    /// Copies chunk `r` of rank `i`'s `send` to chunk `i` of rank `r`'s `recv`, for all ranks; both
    /// have the same length, one chunk per rank. Not in place.
    #[nccl("ncclAlltoAll", "ncclAlltoAllConfig")]
    fn all_to_all<S: Buffer, R: SameElement<S>>(send: &S, recv: &R, stream: impl OnStream) |this| {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        same_length("an all-to-all", send.len(), recv.len())?;
        let (len, n_ranks) = (send.len(), this.communicator.n_ranks());
        if !len.is_multiple_of(n_ranks) {
            return Err(Error::invalid(format!(
                "an all-to-all has a chunk for each of {n_ranks} ranks, but its buffers have {len} \
                 elements"
            )));
        }
        let chunk = len / n_ranks;
        require_place("an all-to-all", &send, &recv, None)?;
        let operation = Operation::new(this.communicator, chunk, send.data_type());
        operation.sends(&send)?.receives(&recv)?.enqueue_configured(this, stream, calls::all_to_all)
    }

    /// Gathers all ranks' `send` in `root`'s `recv`, in rank order: its length is that of `send`
    /// times the number of ranks. The other ranks' `recv` is not used and may be `None`. In place,
    /// `root`'s `send` is its chunk of `recv`.
    #[nccl("ncclGather", "ncclGatherConfig")]
    fn gather<S: Buffer>(
        send: &S, recv: Option<DeviceSlice<S::Element>>, root: usize, stream: impl OnStream,
    ) |this| {
        let send = send.device_slice();
        let mut operation = this.operation(&send).with_root(root)?.sends(&send)?;
        if this.communicator.rank() == root {
            let recv = require_buffer("a gather", "receive in", recv)?;
            this.require_chunks("a gather", recv.len(), send.len())?;
            require_place("a gather", &send, &recv, this.chunk_at(send.len()))?;
            operation = operation.receives(&recv)?;
        }
        operation.enqueue_configured(this, stream, calls::gather)
    }

    /// Copies each rank's chunk of `root`'s `send` to its `recv`. The length of `send` is that of
    /// `recv` times the number of ranks. The other ranks' `send` is not used and may be `None`. In
    /// place, `root`'s `recv` is its chunk of `send`.
    #[nccl("ncclScatter", "ncclScatterConfig")]
    fn scatter<R: Buffer>(
        send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize, stream: impl OnStream,
    ) |this| {
        let recv = recv.device_slice();
        let mut operation = this.operation(&recv).with_root(root)?.receives(&recv)?;
        if this.communicator.rank() == root {
            let send = require_buffer("a scatter", "send", send)?;
            this.require_chunks("a scatter", send.len(), recv.len())?;
            let place = this.chunk_at(recv.len()).map(|at| -at);
            require_place("a scatter", &send, &recv, place)?;
            operation = operation.sends(&send)?;
        }
        operation.enqueue_configured(this, stream, calls::scatter)
    }
}

fn same_length(operation: &str, send: usize, recv: usize) -> Result<()> {
    if send == recv {
        return Ok(());
    }
    Err(Error::invalid(format!("lengths must match: {operation} from {send} elements to {recv}")))
}

/// Fails for buffers that overlap, unless `send` begins at element `place` of `recv`: negative
/// where `recv` is a chunk of `send`, and `None` for an operation that does not work in place.
fn require_place<T, U>(
    operation: &str,
    send: &DeviceSlice<T>,
    recv: &DeviceSlice<U>,
    place: Option<isize>,
) -> Result<()> {
    if send.is_apart_or_at(recv, place) {
        return Ok(());
    }
    let in_place = match place {
        None => "it does not work in place",
        Some(0) => "in place, they begin at one address",
        Some(_) => "in place, one is this rank's chunk of the other",
    };
    Err(Error::invalid(format!(
        "the buffers of {operation} overlap: it sends {send:?} and receives in {recv:?}; {in_place}"
    )))
}

fn require_buffer<T>(operation: &str, what: &str, buffer: Option<T>) -> Result<T> {
    buffer
        .ok_or_else(|| Error::invalid(format!("{operation}: the root passed no buffer to {what}")))
}

impl<'a> Configured<'a> {
    /// Fails unless a buffer of length `len` has one chunk of length `chunk` per rank.
    fn require_chunks(&self, operation: &str, len: usize, chunk: usize) -> Result<()> {
        let n_ranks = self.communicator.n_ranks();
        if chunk.checked_mul(n_ranks) == Some(len) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{operation} of {n_ranks} ranks needs {n_ranks} chunks in one of its buffers, but \
             {len} elements are not {n_ranks} times {chunk}"
        )))
    }

    /// Returns where this rank's chunk of `len` elements begins, among those of all ranks. The
    /// product does not overflow: [`require_chunks`](Self::require_chunks) has accepted `len`.
    fn chunk_at(&self, len: usize) -> Option<isize> {
        isize::try_from(self.communicator.rank() * len).ok()
    }

    /// Returns an operation on the elements of `slice`.
    fn operation<T>(&self, slice: &DeviceSlice<T>) -> Operation<'a> {
        Operation::new(self.communicator, slice.len(), slice.data_type())
    }
}

/// A buffer with elements of the same type as `S`.
pub trait SameElement<S: Buffer>: Buffer<Element = S::Element> {}

impl<S: Buffer, R: Buffer<Element = S::Element>> SameElement<S> for R {}

impl Communicator {
    /// Returns a handle whose collectives use `config`, which must be the same on every rank.
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
        let config = Some(Arc::new(config.lower(self.library().loaded())?));
        Ok(Configured { communicator: self, config, event: None })
    }

    /// Does the same as [`configured`](Self::configured); each collective also records `event` when
    /// its kernel has been launched completely, so that another stream can start its work then.
    /// Either every rank passes an event or none does; in a group, at most one collective of a
    /// communicator has an event.
    ///
    /// NCCL: `launchCompletionEvent` of `ncclCollConfig_t`.
    ///
    /// # Errors
    ///
    /// Also [`Error::InvalidInput`] for an event of another context, or one with timing
    /// ([`Context::event_without_timing`](crate::Context::event_without_timing) creates one without
    /// timing).
    #[doc(alias = "launchCompletionEvent")]
    pub fn configured_recording(
        &self,
        config: &CollectiveConfig,
        event: &Event,
    ) -> Result<Configured<'_>> {
        self.require_own(event.context(), "an event")?;
        if event.is_timed() {
            return Err(Error::invalid(
                "a collective records only events that were created without timing",
            ));
        }
        // SAFETY: an untimed event of this device; every operation with this configuration keeps
        // the event alive.
        let config = unsafe { config.clone().launch_completion_event(event.handle().raw().cast()) };
        Ok(Configured { event: Some(event.clone()), ..self.configured(&config)? })
    }

    /// Sends a buffer to rank `peer`, which [receives](Self::recv) it. Sends and receives that wait
    /// for each other belong in one [`group`](crate::group()), which does them at the same time:
    /// what is received there overlaps no other buffer, unless a rank receives from itself what it
    /// sends.
    ///
    /// NCCL: `ncclSend`.
    ///
    /// # Errors
    ///
    /// The errors are those of the collectives; [`Error::InvalidInput`] for an unknown rank.
    #[doc(alias = "ncclSend")]
    pub fn send<S: Buffer>(&self, send: &S, peer: usize, stream: impl OnStream) -> Result<()> {
        let (send, peer) = (send.device_slice(), self.peer(peer)?);
        let operation = Operation::new(self, send.len(), send.data_type()).sends(&send)?;
        let operation = operation.exchanges(&send, false, peer).to(peer);
        operation.enqueue(stream, |comm, operands| calls::send(comm, operands, peer))
    }

    /// Receives a buffer from rank `peer`, which [sends](Self::send) one of the same length.
    ///
    /// NCCL: `ncclRecv`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`send`](Self::send).
    #[doc(alias = "ncclRecv")]
    pub fn recv<R: Buffer>(&self, recv: &R, peer: usize, stream: impl OnStream) -> Result<()> {
        let (recv, peer) = (recv.device_slice(), self.peer(peer)?);
        let operation = Operation::new(self, recv.len(), recv.data_type()).receives(&recv)?;
        let operation = operation.exchanges(&recv, true, peer).from(peer);
        operation.enqueue(stream, |comm, operands| calls::recv(comm, operands, peer))
    }

    /// Returns `rank` as NCCL's int; an error for an unknown rank.
    pub(crate) fn peer(&self, rank: usize) -> Result<c_int> {
        rank_of(rank, self.n_ranks())
    }
}

/// Builder of an operation: its operands, and what it keeps alive.
pub(crate) struct Operation<'a> {
    communicator: &'a Communicator,
    data_type: DataType,
    operands: Operands,
    /// What the ranks' calls have in common, in addition to count and type: ", root 1".
    terms: String,
    uses: Uses,
}

impl<'a> Operation<'a> {
    pub(crate) fn new(communicator: &'a Communicator, count: usize, data_type: DataType) -> Self {
        let operands = Operands { count, data_type: data_type as c_int, ..Operands::default() };
        let (terms, uses) = Default::default();
        Self { communicator, data_type, operands, terms, uses }
    }

    pub(crate) fn sends<T>(mut self, slice: &DeviceSlice<T>) -> Result<Self> {
        self.operands.send = self.add_slice(slice)?;
        Ok(self)
    }

    fn receives<T>(mut self, slice: &DeviceSlice<T>) -> Result<Self> {
        self.operands.recv = self.add_slice(slice)?;
        Ok(self)
    }

    /// Checks the slice, keeps it alive, and returns its address.
    fn add_slice<T>(&mut self, slice: &DeviceSlice<T>) -> Result<u64> {
        self.communicator.require_own(slice.context(), "memory")?;
        if slice.data_type() as c_int != self.operands.data_type {
            return Err(Error::invalid(format!("{slice:?} with elements of another type")));
        }
        self.uses.kept.extend(slice.keep_alive());
        Ok(slice.device_address())
    }

    /// Adds the memory of a send or a receive, which is compared with that of others in its group.
    fn exchanges<T>(mut self, memory: &DeviceSlice<T>, is_received: bool, peer: c_int) -> Self {
        let begin = memory.device_address();
        let bytes = begin..begin + memory.byte_len() as u64;
        let is_own = peer as usize == self.communicator.rank();
        self.uses.exchanged = Some(Exchanged { bytes, is_received, is_own });
        self
    }

    fn with_root(mut self, root: usize) -> Result<Self> {
        self.operands.root = self.communicator.peer(root)?;
        self.terms += &format!(", root {root}");
        Ok(self)
    }

    fn combines(mut self, operator: &impl Operator) -> Result<Self> {
        let (op, resource) = operator.resolve(self.communicator, self.data_type)?;
        self.operands.op = op;
        self.terms += &format!(", {}", operator.name());
        self.uses.open.extend(resource.map(|Opened(resource)| resource));
        Ok(self)
    }

    /// Replaces the average of floats, except `f64`, by a sum of products, which is how NCCL
    /// computes it anyway.
    ///
    /// For an all-reduce of windows NCCL looks for a symmetric kernel of the average, and has none:
    /// the call fails with "invalid device function" (2.32.3).
    fn averages_by_product(mut self) -> Result<Self> {
        if self.operands.op == ReduceOp::Avg as c_int {
            self.operands.op = self.communicator.average(self.data_type)?;
        }
        Ok(self)
    }

    /// Returns its terms, which are equal on all ranks if it is a collective.
    fn terms(&self) -> String {
        format!("{} elements {:?}{}", self.operands.count, self.data_type, self.terms)
    }

    pub(crate) fn to(mut self, peer: c_int) -> Self {
        self.terms += &format!(", to rank {peer}");
        self
    }

    fn from(mut self, peer: c_int) -> Self {
        self.terms += &format!(", from rank {peer}");
        self
    }

    /// Does the same as [`enqueue`](Self::enqueue), with the configuration and its event, which are
    /// kept alive as long as the buffers.
    fn enqueue_configured(
        mut self,
        configured: &Configured<'_>,
        stream: impl OnStream,
        call: impl FnOnce(CommPtr, Operands, Option<Arc<LoweredCollectiveConfig>>) -> Call,
    ) -> Result<()> {
        let config = configured.config.clone();
        self.uses.kept.extend(config.clone().map(|config| config as KeepAlive));
        self.uses.kept.extend(configured.event.as_ref().map(Event::keep_alive));
        let terms = self.terms();
        let Self { communicator, operands, uses, .. } = self;
        let stream = communicator.stream(&stream);
        let operands = Operands { stream: stream.handle().raw() as u64, ..operands };
        let call = |comm| call(comm, operands, config);
        communicator.enqueue_collective(stream, uses, &terms, call)
    }

    /// Uses a resource, which must be open.
    pub(super) fn uses(mut self, resource: Arc<dyn Resource>) -> Self {
        self.uses.open.push(resource);
        self
    }

    pub(crate) fn enqueue(
        self,
        stream: impl OnStream,
        call: impl FnOnce(CommPtr, Operands) -> Call,
    ) -> Result<()> {
        let stream = self.communicator.stream(&stream);
        let terms = self.terms();
        let mut operands = self.operands;
        operands.stream = stream.handle().raw() as u64;
        self.communicator.enqueue(stream, self.uses, &terms, |comm| call(comm, operands))
    }
}
