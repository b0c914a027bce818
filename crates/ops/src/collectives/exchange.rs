//! All-gather, broadcast and all-to-all, of elements of any type.

use devcomm_host::{Buffer, DeviceSlice, LaunchConfig, Result, Stream, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm_kernels::collectives::lamport_exchange;
use devcomm_types::Element;

use super::{Algorithm, Collectives, THREADS, Workspace};
use crate::check::refuse;

/// Who gets what.
#[derive(Clone, Copy)]
enum Pattern {
    AllGather,
    Broadcast { root: usize },
    AllToAll,
}

/// An operation. A rank that does not send has no `send`.
struct Exchange<T> {
    pattern: Pattern,
    send: Option<DeviceSlice<T>>,
    recv: DeviceSlice<T>,
}

impl Collectives {
    /// How an all-gather of these buffers is done.
    #[must_use]
    pub fn all_gather_algorithm<S, R>(&self, send: &S, recv: &R) -> Algorithm
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        self.choose_exchange(&Exchange::new(Pattern::AllGather, Some(send.device_slice()), recv))
    }

    /// Every rank's `recv` gets all ranks' `send`, in rank order: its length is that of `send`
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
        match self.exchange(&exchange, stream)? {
            Algorithm::Nccl => self.communicator.all_gather(send, recv, stream),
            _ => Ok(()),
        }
    }

    /// How a broadcast from rank `root` to these buffers is done.
    #[must_use]
    pub fn broadcast_algorithm<R>(
        &self,
        send: Option<DeviceSlice<R::Element>>,
        recv: &R,
        root: usize,
    ) -> Algorithm
    where
        R: Buffer<Element: Element>,
    {
        self.choose_exchange(&self.broadcast_from(root, send, recv))
    }

    /// Every rank's `recv` gets `root`'s `send`; both have the same length. The other ranks' `send`
    /// is not used and may be `None`. In place, `root`'s `send` is its `recv`.
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
        let exchange = self.broadcast_from(root, send, recv);
        match self.exchange(&exchange, stream)? {
            Algorithm::Nccl => self.communicator.broadcast(exchange.send, recv, root, stream),
            _ => Ok(()),
        }
    }

    fn broadcast_from<R>(
        &self,
        root: usize,
        send: Option<DeviceSlice<R::Element>>,
        recv: &R,
    ) -> Exchange<R::Element>
    where
        R: Buffer<Element: Element>,
    {
        let send = send.filter(|_| self.communicator.rank() == root);
        Exchange::new(Pattern::Broadcast { root }, send, recv)
    }

    /// How an all-to-all of these buffers is done.
    #[must_use]
    pub fn all_to_all_algorithm<S, R>(&self, send: &S, recv: &R) -> Algorithm
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        self.choose_exchange(&Exchange::new(Pattern::AllToAll, Some(send.device_slice()), recv))
    }

    /// Chunk `i` of rank `r`'s `recv` gets chunk `r` of rank `i`'s `send`; both have the same
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
        match self.exchange(&exchange, stream)? {
            Algorithm::Nccl => self.communicator.all_to_all(send, recv, stream),
            _ => Ok(()),
        }
    }

    /// NCCL also does what there is an error for.
    fn choose_exchange<T: Element>(&self, exchange: &Exchange<T>) -> Algorithm {
        let (ranks, rank) = (self.communicator.n_ranks(), self.communicator.rank());
        let Some(workspace) = self.workspace.as_ref().filter(|_| exchange.is_valid(rank, ranks))
        else {
            return Algorithm::Nccl;
        };
        let messages = exchange.messages(ranks);
        // A root that pushes to several peers takes longer than NCCL, where ranks pass data on.
        let is_pushed = ranks == 2 || !matches!(exchange.pattern, Pattern::Broadcast { .. });
        let is_aligned = exchange.is_aligned(messages.bytes);
        if lamport_exchange::slots(messages.bytes) <= workspace.options.slots(ranks) {
            Algorithm::Lamport
        } else if is_pushed && is_aligned && Window::<u8>::containing(&exchange.recv).is_some() {
            Algorithm::Push
        } else {
            Algorithm::Nccl
        }
    }

    /// Launches the kernel of an algorithm, which this returns. NCCL's is left to the caller.
    fn exchange<T: Element>(&self, exchange: &Exchange<T>, stream: &Stream) -> Result<Algorithm> {
        let Exchange { send, recv, .. } = exchange;
        let algorithm = self.choose_exchange(exchange);
        let Some(Workspace { dev_comm, options, slots, slots_state, .. }) =
            self.workspace.as_ref().filter(|_| algorithm != Algorithm::Nccl)
        else {
            return Ok(Algorithm::Nccl);
        };
        self.require_own(send.as_ref(), recv, stream)?;
        let messages = exchange.messages(self.communicator.n_ranks());
        let mut input = send.as_ref().map_or(0, DeviceSlice::device_address);
        let target = self.compiled.on(stream);
        self.order(stream)?;
        if algorithm == Algorithm::Lamport {
            let used = lamport_exchange::slots(messages.bytes) as u32;
            let config = self.lamport_config(used, stream);
            let capacity = options.capacity(self.communicator.n_ranks()) as u32;
            let output = recv.device_address();
            macro_rules! launch {
                ($unit:ty) => {{
                    let launch = kernels::lamport_exchange::<$unit>::args(
                        dev_comm,
                        slots,
                        slots_state,
                        capacity,
                        input,
                        output,
                        messages,
                    );
                    // SAFETY: the buffers have the bytes; dropping one waits for the stream. The
                    // workspace is as the kernel needs it, and the launches that use it are
                    // ordered.
                    unsafe { launch.config(config).launch(&target) }?;
                }};
            }
            let has_words = (input | output | messages.bytes as u64).is_multiple_of(4);
            if has_words { launch!(u32) } else { launch!(u8) }
        } else {
            let Some((output, first)) = Window::<u8>::containing(recv) else {
                return refuse("the buffer to receive in is in no window".to_owned());
            };
            if let Some(send) = send.as_ref().filter(|_| !input.is_multiple_of(16)) {
                stream.copy(send, recv)?;
                input = recv.device_address();
            }
            let config = LaunchConfig::new(options.push_blocks, THREADS).with_dependent();
            let launch = kernels::push_exchange::args(dev_comm, input, &output, first, messages);
            // SAFETY: the buffers have the bytes, aligned; dropping one waits for the stream.
            // Launches that use the device communicator are ordered.
            unsafe { launch.config(config).launch(&target) }?;
        }
        Ok(algorithm)
    }
}

impl<T: Element> Exchange<T> {
    fn new<R>(pattern: Pattern, send: Option<DeviceSlice<T>>, recv: &R) -> Self
    where
        R: Buffer<Element = T>,
    {
        Self { pattern, send, recv: recv.device_slice() }
    }

    /// Whether there is something to send, and the lengths match.
    fn is_valid(&self, rank: usize, ranks: usize) -> bool {
        let (send, recv) = (self.send.as_ref().map(DeviceSlice::len), self.recv.len());
        let matches = match self.pattern {
            Pattern::AllGather => send.and_then(|send| send.checked_mul(ranks)) == Some(recv),
            Pattern::Broadcast { root } => root < ranks && (rank != root || send == Some(recv)),
            Pattern::AllToAll => send == Some(recv) && recv.is_multiple_of(ranks),
        };
        matches && recv > 0
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
