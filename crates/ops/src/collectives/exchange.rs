//! All-gather, broadcast and all-to-all, of elements of any type.

use devcomm_host::{Buffer, DeviceSlice, Result, Stream, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};
use devcomm_types::Element;

use super::{Algorithm, Collectives, INVALID, PLAIN, Request, Workspace};
use crate::CollectiveKind;
use crate::check::refuse;
use crate::lamport::LamportMemory;
use crate::launch::Takes;

/// The ranks that get a part, and which one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    AllGather,
    Broadcast { root: usize },
    AllToAll,
}

/// An operation. A rank that does not send has no `send`.
pub(super) struct Exchange<T> {
    pattern: Pattern,
    send: Option<DeviceSlice<T>>,
    recv: DeviceSlice<T>,
}

impl Collectives {
    /// Stores all ranks' `send` to every rank's `recv`, in rank order: its length is that of `send`
    /// times the number of ranks. In place, `send` is this rank's chunk of `recv`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather`](devcomm_host::Communicator::all_gather).
    pub fn all_gather<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let exchange = Exchange::new(Pattern::AllGather, Some(send.device_slice()), recv);
        match self.is_left_to_nccl(&exchange, stream)? {
            true => self.communicator.all_gather(send, recv, stream),
            false => Ok(()),
        }
    }

    /// Stores `root`'s `send` to every rank's `recv`; both have the same length. The other ranks'
    /// `send` is not used and may be `None`. In place, `root`'s `send` is its `recv`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`](devcomm_host::Communicator::broadcast).
    pub fn broadcast<R>(
        &self,
        send: Option<DeviceSlice<R::Element>>,
        recv: &R,
        root: usize,
        stream: &Stream,
    ) -> Result<()>
    where
        R: Buffer<Element: Element>,
    {
        let send = send.filter(|_| self.communicator.rank() == root);
        let exchange = Exchange::new(Pattern::Broadcast { root }, send, recv);
        match self.is_left_to_nccl(&exchange, stream)? {
            true => self.communicator.broadcast(exchange.send, recv, root, stream),
            false => Ok(()),
        }
    }

    /// Stores chunk `r` of rank `i`'s `send` to chunk `i` of rank `r`'s `recv`; both have the same
    /// length, one chunk per rank. Not in place.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_to_all`](devcomm_host::Communicator::all_to_all).
    pub fn all_to_all<S, R>(&self, send: &S, recv: &R, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let exchange = Exchange::new(Pattern::AllToAll, Some(send.device_slice()), recv);
        match self.is_left_to_nccl(&exchange, stream)? {
            true => self.communicator.all_to_all(send, recv, stream),
            false => Ok(()),
        }
    }

    /// NCCL also does what there is an error for.
    pub(super) fn request_exchange<T: Element>(&self, exchange: &Exchange<T>) -> Request {
        let (ranks, rank) = (self.communicator.n_ranks(), self.communicator.rank());
        let by_nccl = |reason| Request::by_nccl(Some(exchange.pattern.kind()), reason);
        let Some(workspace) = &self.workspace else { return by_nccl(self.unreached()) };
        if !exchange.is_valid(rank, ranks) {
            return by_nccl(INVALID);
        }
        let bytes = exchange.messages(ranks).bytes;
        let slots = lamport_exchange::slots(bytes);
        // A root that pushes to several peers takes longer than NCCL, where ranks pass data on.
        let is_pushed = ranks == 2 || !matches!(exchange.pattern, Pattern::Broadcast { .. });
        let pushes = is_pushed
            && exchange.is_aligned(bytes)
            && Window::<u8>::index_of(&exchange.recv).is_some();
        Request {
            bytes,
            slots: (slots <= workspace.options.slots(ranks)).then_some(slots as u32),
            most_blocks: self.multiprocessors(),
            most_threads: workspace.options.threads(room::LAMPORT_EXCHANGE),
            push: pushes.then_some(workspace.grid(room::PUSH_EXCHANGE)),
            ..by_nccl(PLAIN)
        }
    }

    /// Launches a kernel, or returns whether NCCL has to do it.
    fn is_left_to_nccl<T: Element>(&self, exchange: &Exchange<T>, stream: &Stream) -> Result<bool> {
        let Exchange { pattern, send, recv } = exchange;
        let (request, count, name) = (self.request_exchange(exchange), recv.len(), T::NAME);
        let terms = || format!("{pattern:?} of {count} {name}");
        let Some((workspace, plan, _turn)) =
            self.start(&request, send.as_ref(), recv, stream, terms)?
        else {
            return Ok(true);
        };
        let Workspace {
            dev_comm, options, memory: LamportMemory { slots, state, capacity }, ..
        } = workspace;
        let messages = exchange.messages(self.communicator.n_ranks());
        let mut input = send.as_ref().map_or(0, DeviceSlice::device_address);
        let (target, config) = (self.compiled.on(stream), options.config(plan));
        if plan.algorithm == Algorithm::Lamport {
            let output = recv.device_address();
            let args = (dev_comm, slots, state, *capacity, input, output, messages);
            // SAFETY: the buffers have the bytes; dropping one waits for the stream. The workspace
            // is as the kernel needs it, and the launches that use it are ordered.
            unsafe {
                type Vector = lamport_exchange::Vector;
                match (input | output | messages.bytes as u64).trailing_zeros() {
                    4.. => kernels::lamport_exchange::<Vector>::launch(args, config, &target),
                    2.. => kernels::lamport_exchange::<u32>::launch(args, config, &target),
                    _ => kernels::lamport_exchange::<u8>::launch(args, config, &target),
                }?;
            }
        } else {
            let Some((output, first)) = Window::<u8>::containing(recv) else {
                return refuse("the buffer to receive in is in no window");
            };
            if let Some(send) = send.as_ref().filter(|_| !input.is_multiple_of(16)) {
                stream.copy(send, recv)?;
                input = recv.device_address();
            }
            let launch = kernels::push_exchange::args(dev_comm, input, &output, first, messages);
            // SAFETY: the buffers have the bytes, aligned; dropping one waits for the stream.
            // Launches that use the device communicator are ordered.
            unsafe { launch.config(config).launch(&target) }?;
        }
        Ok(false)
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
    pub(super) fn new<R>(pattern: Pattern, send: Option<DeviceSlice<T>>, recv: &R) -> Self
    where
        R: Buffer<Element = T>,
    {
        Self { pattern, send, recv: recv.device_slice() }
    }

    /// Whether there is something to send, lengths match, and the buffers overlap in place only.
    fn is_valid(&self, rank: usize, ranks: usize) -> bool {
        let (send, recv) = (self.send.as_ref().map(DeviceSlice::len), self.recv.len());
        let matches = match self.pattern {
            Pattern::AllGather => send.and_then(|send| send.checked_mul(ranks)) == Some(recv),
            Pattern::Broadcast { root } => root < ranks && (rank != root || send == Some(recv)),
            Pattern::AllToAll => send == Some(recv) && recv.is_multiple_of(ranks),
        };
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

    /// Whether all messages of this many bytes begin at multiples of 16 bytes. That of a broadcast
    /// is copied if it does not, as only the root knows.
    fn is_aligned(&self, bytes: usize) -> bool {
        let send = self.send.as_ref().map_or(0, DeviceSlice::device_address);
        let recv = self.recv.device_address();
        match self.pattern {
            Pattern::Broadcast { .. } => recv.is_multiple_of(16),
            _ => (send | recv).is_multiple_of(16) && bytes.is_multiple_of(16),
        }
    }
}
