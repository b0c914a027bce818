//! Calls of collectives, which are explained or enqueued, and the kernels of those that move
//! elements of any type: all-gather, broadcast and all-to-all.

use devcomm_host::{ReduceOperator, Turn};
use devcomm_kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};

use super::reduce::KernelReduction;
use super::{Algorithm, CollectivePlan, Collectives, INVALID, NOT_IN_WINDOW, Request, Workspace};
use crate::CollectiveKind::{self, AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
use crate::prelude::*;

impl Collectives {
    /// Stores all ranks' `send` to every rank's `recv`, in rank order: its length is that of `send`
    /// times the number of ranks. In place, `send` is this rank's chunk of `recv`. Errors are those
    /// of [`Communicator::all_gather`](devcomm_host::Communicator::all_gather).
    pub fn all_gather<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (from, to) = (&send.device_slice(), &recv.device_slice());
        let call = Call::exchange(self, AllGather, Some(from), to, 0);
        call.run(stream, || self.communicator.all_gather(send, recv, stream))
    }

    /// Stores `root`'s `send` to every rank's `recv`; both have the same length. The other ranks'
    /// `send` is not used and may be `None`. In place, `root`'s `send` is its `recv`. Errors are
    /// those of [`Communicator::broadcast`](devcomm_host::Communicator::broadcast).
    pub fn broadcast<T: Element>(
        &self,
        send: Option<DeviceSlice<T>>,
        recv: &impl Buffer<Element = T>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let to = &recv.device_slice();
        let call = Call::exchange(self, Broadcast, send.as_ref(), to, root);
        let send = || call.send.cloned();
        call.run(stream, || self.communicator.broadcast(send(), recv, root, stream))
    }

    /// Stores chunk `r` of rank `i`'s `send` to chunk `i` of rank `r`'s `recv`; both have the same
    /// length, one chunk per rank. Not in place. Errors are those of
    /// [`Communicator::all_to_all`](devcomm_host::Communicator::all_to_all).
    pub fn all_to_all<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (from, to) = (&send.device_slice(), &recv.device_slice());
        let call = Call::exchange(self, AllToAll, Some(from), to, 0);
        call.run(stream, || self.communicator.all_to_all(send, recv, stream))
    }
}

/// A collective with its buffers, of elements `T`.
pub(super) struct Call<'a, T> {
    pub(super) by: &'a Collectives,
    pub(super) kind: CollectiveKind,
    /// The buffer to send, if this rank sends.
    pub(super) send: Option<&'a DeviceSlice<T>>,
    pub(super) recv: &'a DeviceSlice<T>,
    /// The rank that sends in a broadcast.
    pub(super) root: usize,
    /// The operator, and how kernels reduce by it, if they can.
    pub(super) reduction: Option<(ReduceOp, Option<KernelReduction>)>,
}

impl<'a, T: Element> Call<'a, T> {
    /// Returns a call that moves elements. Only the root of a broadcast sends.
    fn exchange(
        by: &'a Collectives,
        kind: CollectiveKind,
        send: Option<&'a DeviceSlice<T>>,
        recv: &'a DeviceSlice<T>,
        root: usize,
    ) -> Self {
        let is_sender = kind != Broadcast || by.communicator.rank() == root;
        Self { by, kind, send: send.filter(|_| is_sender), recv, root, reduction: None }
    }

    pub(super) fn reduce(
        by: &'a Collectives,
        kind: CollectiveKind,
        [send, recv]: [&'a DeviceSlice<T>; 2],
        op: &impl ReduceOperator<T>,
    ) -> Result<Self> {
        let (operator, scale) = op.parts(&by.communicator)?;
        let by_kernel = KernelReduction::new(operator, scale, by.communicator.n_ranks());
        let reduction = Some((operator, by_kernel));
        Ok(Self { by, kind, send: Some(send), recv, root: 0, reduction })
    }

    /// Returns whether the message is not empty, lengths match, and buffers overlap only in place.
    fn is_valid(&self, rank: usize, ranks: usize) -> bool {
        let (send, recv) = (self.send.map(DeviceSlice::len), self.recv.len());
        let is_same = send == Some(recv);
        let is_whole = |part: Option<usize>, whole| {
            part.and_then(|part| part.checked_mul(ranks)).is_some_and(|len| Some(len) == whole)
        };
        // Whether the lengths match, and the element of `recv` at which `send` begins in place.
        let (matches, place) = match self.kind {
            AllReduce => (is_same, Some(0)),
            ReduceScatter => (is_whole(Some(recv), send), Some(-((rank * recv) as isize))),
            AllGather => (is_whole(send, Some(recv)), Some((rank * (recv / ranks)) as isize)),
            AllToAll => (is_same && recv.is_multiple_of(ranks), None),
            Broadcast => (self.root < ranks && (rank != self.root || is_same), Some(0)),
        };
        let is_apart = |send: &DeviceSlice<T>| send.is_apart_or_at(self.recv, place);
        matches && recv > 0 && self.send.is_none_or(is_apart)
    }

    /// Returns what is asked for. An invalid call is for NCCL, whose function reports the error.
    pub(super) fn request(&self) -> Request {
        let comm = &self.by.communicator;
        let Some(workspace) = &self.by.workspace else {
            return Request::by_nccl(self.kind, self.by.unreached());
        };
        if !self.is_valid(comm.rank(), comm.n_ranks()) {
            return Request::by_nccl(self.kind, INVALID);
        }
        match self.reduction {
            Some((_, by_kernel)) => self.request_reduction(workspace, by_kernel),
            None => self.request_exchange(workspace),
        }
    }

    /// Returns the request of a message that is sent in one step if its slots are not too many, by
    /// a kernel of which a multiprocessor has room for `room` threads.
    pub(super) fn in_one_step(
        &self,
        workspace: &Workspace,
        (bytes, slots): (usize, usize),
        room: u32,
    ) -> Request {
        let is_short = slots <= workspace.options.slots(self.by.communicator.n_ranks());
        Request {
            bytes,
            slots: is_short.then_some(slots as u32),
            most_blocks: self.by.smallest.multiprocessors,
            most_threads: workspace.threads(room),
            ..Request::by_nccl(self.kind, NOT_IN_WINDOW)
        }
    }

    /// Returns what a checked world compares.
    fn terms(&self) -> String {
        let name = match self.kind {
            AllReduce => "all_reduce of".to_owned(),
            ReduceScatter => "reduce_scatter to".to_owned(),
            Broadcast => format!("Broadcast {{ root: {} }} of", self.root),
            kind => format!("{kind:?} of"),
        };
        let operator = self.reduction.map_or(String::new(), |(op, _)| format!(", {op:?}"));
        format!("{name} {} {}{operator}", self.recv.len(), T::NAME)
    }

    /// Explains the collective, or enqueues it: by a kernel, once its buffers are checked and, in a
    /// checked world, its terms compared, or by NCCL.
    pub(super) fn run(&self, stream: &Stream, nccl: impl FnOnce() -> Result<()>) -> Result<()> {
        let request = self.request();
        let how = self.by.decide(&request);
        if self.by.answers(|| Ok((how, request.candidates(self.by.table.find(&request)))))? {
            return Ok(());
        }
        let plan = how.plan;
        let workspace = self.by.workspace.as_ref().filter(|_| plan.algorithm != Algorithm::Nccl);
        let Some(workspace) = workspace else { return nccl() };
        self.by.require_own(self.send, self.recv, stream)?;
        self.by.compare(plan, || self.terms())?;
        let launch =
            Launch { call: self, workspace, plan, stream, _turn: self.by.order.begin(stream)? };
        match self.reduction {
            Some((_, by_kernel)) => launch.reduce(by_kernel),
            None => launch.exchange(),
        }
    }

    fn messages(&self) -> MessagesArgs<usize, usize, usize, u32> {
        let output_bytes = self.recv.byte_len();
        let chunk = output_bytes / self.by.communicator.n_ranks();
        let (bytes, input_stride, sender) = match self.kind {
            Broadcast => (output_bytes, 0, self.root as u32),
            AllToAll => (chunk, chunk, Messages::ALL),
            _ => (chunk, 0, Messages::ALL),
        };
        MessagesArgs { bytes, input_stride, output_bytes, sender }
    }

    fn request_exchange(&self, workspace: &Workspace) -> Request {
        let ranks = self.by.communicator.n_ranks();
        let (bytes, is_broadcast) = (self.messages().bytes, self.kind == Broadcast);
        // Whether all messages begin at multiples of 16 bytes. A broadcast's message need not: only
        // the root knows where it begins, and copies it.
        let send = self.send.map_or(0, DeviceSlice::device_address);
        let of_all = if is_broadcast { 0 } else { send | bytes as u64 };
        let is_aligned = (of_all | self.recv.device_address()).is_multiple_of(16);
        // A root that pushes to several peers takes longer than NCCL, where ranks pass data on.
        let is_pushed = ranks == 2 || !is_broadcast;
        let pushes = is_pushed && is_aligned && Window::<u8>::index_of(self.recv).is_some();
        let message = (bytes, lamport_exchange::slots(bytes));
        let nccl =
            if is_pushed { NOT_IN_WINDOW } else { "as the message is too long for one step" };
        Request {
            nccl,
            push: pushes.then(|| workspace.plan(Algorithm::Push, room::PUSH_EXCHANGE)),
            ..self.in_one_step(workspace, message, room::LAMPORT_EXCHANGE)
        }
    }
}

/// A call in its turn, whose [request](Call::request) the plan can do: its kernel may be launched.
/// Dropping a buffer waits for the stream.
pub(super) struct Launch<'a, T> {
    pub(super) call: &'a Call<'a, T>,
    pub(super) workspace: &'a Workspace,
    pub(super) plan: CollectivePlan,
    pub(super) stream: &'a Stream,
    _turn: Turn<'a>,
}

impl<T: Element> Launch<'_, T> {
    fn exchange(self) -> Result<()> {
        let Self { call: &Call { by, send, recv, .. }, workspace, plan, stream, .. } = self;
        let Workspace { dev_comm, memory, options, .. } = workspace;
        let messages = self.call.messages();
        let mut input = send.map_or(0, DeviceSlice::device_address);
        let (target, config) = (by.compiled.on(stream), options.config(plan));
        if plan.algorithm == Algorithm::Lamport {
            let output = recv.device_address();
            let args = (dev_comm, memory.args(), input, output, messages);
            // Ranks may take different types: a slot has the same bytes with each of them.
            use lamport_exchange::{LongVector, Vector};
            let slots = lamport_exchange::slots(messages.bytes) as u32;
            let is_long = lamport_exchange::is_long(slots, plan.blocks * plan.threads);
            let zeros = (input | output | messages.bytes as u64).trailing_zeros();
            // SAFETY: a `Launch` has its turn and buffers; `Workspace::new` allocates the rest.
            return with_type!((zeros, is_long), Unit => unsafe {
                kernels::lamport_exchange::<Unit>::launch(args, config, &target)
            }; { (4.., true) => LongVector, (4.., false) => Vector, (2.., _) => u32, _ => u8 });
        }
        let (output, first) = window::<u8, T>("the buffer to receive in", recv)?;
        // Only the root of a broadcast gets here with such an input, and sends its output instead.
        if let Some(send) = send.filter(|_| !input.is_multiple_of(16)) {
            stream.copy(send, recv)?;
            input = recv.device_address();
        }
        let kernel = kernels::push_exchange::args(dev_comm, input, &output, first, messages);
        // SAFETY: a `Launch` has its turn and buffers: messages are aligned, or the copy is.
        unsafe { kernel.config(config).launch(&target) }
    }
}
