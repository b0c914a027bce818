//! All-gather, broadcast and all-to-all, of elements of any type.

use devcomm_kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};

use super::call::{Call, Launch};
use super::{Algorithm, Collectives, INVALID, Request, Workspace};
use crate::CollectiveKind;
use crate::check::window;
use crate::prelude::*;

/// The ranks to which a rank sends, and the part of its buffer that each gets.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    AllGather,
    Broadcast { root: usize },
    AllToAll,
}

/// An operation with its buffers. A rank that does not send has no `send`.
pub(super) struct Exchange<T> {
    pattern: Pattern,
    send: Option<DeviceSlice<T>>,
    recv: DeviceSlice<T>,
}

impl Collectives {
    /// Stores all ranks' `send` to every rank's `recv`, in rank order: its length is that of `send`
    /// times the number of ranks. In place, `send` is this rank's chunk of `recv`. Errors are those
    /// of [`Communicator::all_gather`](devcomm_host::Communicator::all_gather).
    pub fn all_gather<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let buffers = (Some(send.device_slice()), recv.device_slice());
        let exchange = Exchange::new(self, Pattern::AllGather, buffers);
        self.run(&exchange, stream, || self.communicator.all_gather(send, recv, stream))
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
        let buffers = (send, recv.device_slice());
        let exchange = Exchange::new(self, Pattern::Broadcast { root }, buffers);
        let send = || exchange.send.clone();
        self.run(&exchange, stream, || self.communicator.broadcast(send(), recv, root, stream))
    }

    /// Stores chunk `r` of rank `i`'s `send` to chunk `i` of rank `r`'s `recv`; both have the same
    /// length, one chunk per rank. Not in place. Errors are those of
    /// [`Communicator::all_to_all`](devcomm_host::Communicator::all_to_all).
    pub fn all_to_all<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let buffers = (Some(send.device_slice()), recv.device_slice());
        let exchange = Exchange::new(self, Pattern::AllToAll, buffers);
        self.run(&exchange, stream, || self.communicator.all_to_all(send, recv, stream))
    }
}

impl Pattern {
    fn kind(self) -> CollectiveKind {
        match self {
            Self::AllGather => CollectiveKind::AllGather,
            Self::Broadcast { .. } => CollectiveKind::Broadcast,
            Self::AllToAll => CollectiveKind::AllToAll,
        }
    }
}

impl<T: Element> Exchange<T> {
    pub(super) fn new(
        collectives: &Collectives,
        pattern: Pattern,
        (send, recv): (Option<DeviceSlice<T>>, DeviceSlice<T>),
    ) -> Self {
        let is_sender = match pattern {
            Pattern::Broadcast { root } => collectives.communicator.rank() == root,
            _ => true,
        };
        Self { pattern, send: send.filter(|_| is_sender), recv }
    }

    /// Returns whether the message is not empty, lengths match, and buffers overlap only in place.
    fn is_valid(&self, rank: usize, ranks: usize) -> bool {
        let (send, recv) = (self.send.as_ref().map(DeviceSlice::len), self.recv.len());
        let matches = match self.pattern {
            Pattern::AllGather => send.and_then(|send| send.checked_mul(ranks)) == Some(recv),
            Pattern::Broadcast { root } => root < ranks && (rank != root || send == Some(recv)),
            Pattern::AllToAll => send == Some(recv) && recv.is_multiple_of(ranks),
        };
        // The element of `recv` at which `send` begins in place.
        let place = match self.pattern {
            Pattern::AllGather => Some((rank * (recv / ranks)) as isize),
            Pattern::Broadcast { .. } => Some(0),
            Pattern::AllToAll => None,
        };
        let is_apart = |send: &DeviceSlice<T>| send.is_apart_or_at(&self.recv, place);
        matches && recv > 0 && self.send.as_ref().is_none_or(is_apart)
    }

    fn messages(&self, ranks: usize) -> MessagesArgs<usize, usize, usize, u32> {
        let output_bytes = self.recv.len() * size_of::<T>();
        let chunk = output_bytes / ranks;
        let (bytes, input_stride, sender) = match self.pattern {
            Pattern::AllGather => (chunk, 0, Messages::ALL),
            Pattern::Broadcast { root } => (output_bytes, 0, root as u32),
            Pattern::AllToAll => (chunk, chunk, Messages::ALL),
        };
        MessagesArgs { bytes, input_stride, output_bytes, sender }
    }

    /// Returns whether all messages, of `bytes` bytes, begin at multiples of 16 bytes. A
    /// broadcast's message need not: only the root knows where it begins, and copies it. A rank
    /// that does not send counts as aligned.
    fn is_aligned(&self, bytes: usize) -> bool {
        let send = self.send.as_ref().map_or(0, DeviceSlice::device_address);
        let recv = self.recv.device_address();
        match self.pattern {
            Pattern::Broadcast { .. } => recv.is_multiple_of(16),
            _ => (send | recv).is_multiple_of(16) && bytes.is_multiple_of(16),
        }
    }
}

impl<T: Element> Call<T> for Exchange<T> {
    fn buffers(&self) -> (Option<&DeviceSlice<T>>, &DeviceSlice<T>) {
        (self.send.as_ref(), &self.recv)
    }

    fn terms(&self) -> String {
        format!("{:?} of {} {}", self.pattern, self.recv.len(), T::NAME)
    }

    fn request(&self, collectives: &Collectives) -> Request {
        let (ranks, rank) = (collectives.communicator.n_ranks(), collectives.communicator.rank());
        let by_nccl = |reason| Request::by_nccl(self.pattern.kind(), reason);
        let Some(workspace) = &collectives.workspace else {
            return by_nccl(collectives.unreached());
        };
        if !self.is_valid(rank, ranks) {
            return by_nccl(INVALID);
        }
        let (bytes, kind) = (self.messages(ranks).bytes, self.pattern.kind());
        // A root that pushes to several peers takes longer than NCCL, where ranks pass data on.
        let is_pushed = ranks == 2 || !matches!(self.pattern, Pattern::Broadcast { .. });
        let pushes =
            is_pushed && self.is_aligned(bytes) && Window::<u8>::index_of(&self.recv).is_some();
        let (slots, room) = (lamport_exchange::slots(bytes), room::LAMPORT_EXCHANGE);
        Request {
            push: pushes.then(|| workspace.plan(Algorithm::Push, room::PUSH_EXCHANGE)),
            ..collectives.in_one_step(workspace, kind, bytes, slots, room)
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let Workspace { dev_comm, memory, .. } = launch.workspace;
        let messages = self.messages(launch.collectives.communicator.n_ranks());
        let mut input = self.send.as_ref().map_or(0, DeviceSlice::device_address);
        let (target, config) = (launch.target(), launch.config());
        if launch.plan.algorithm == Algorithm::Lamport {
            let output = self.recv.device_address();
            let args = (dev_comm, memory, input, output, messages);
            // Ranks may take different types: a slot has the same bytes with each of them.
            type Vector = lamport_exchange::Vector;
            // SAFETY: the caller keeps the buffers allocated and orders the launches;
            // `Workspace::new` allocates what the kernel needs.
            return unsafe {
                match (input | output | messages.bytes as u64).trailing_zeros() {
                    4.. => kernels::lamport_exchange::<Vector>::launch(args, config, &target),
                    2.. => kernels::lamport_exchange::<u32>::launch(args, config, &target),
                    _ => kernels::lamport_exchange::<u8>::launch(args, config, &target),
                }
            };
        }
        let (output, first) = window::<u8, T>("the buffer to receive in", &self.recv)?;
        // Only the root of a broadcast gets here with such an input, and sends its output instead.
        if let Some(send) = self.send.as_ref().filter(|_| !input.is_multiple_of(16)) {
            launch.stream.copy(send, &self.recv)?;
            input = self.recv.device_address();
        }
        let kernel = kernels::push_exchange::args(dev_comm, input, &output, first, messages);
        // SAFETY: the caller keeps the buffers allocated and orders the launches; `request` has
        // checked that messages are aligned, or the copy is.
        unsafe { kernel.config(config).launch(&target) }
    }
}
