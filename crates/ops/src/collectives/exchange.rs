//! All-gather, broadcast and all-to-all, of elements of any type.

use devcomm_kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};

use super::call::Call;
use super::{Algorithm, CollectivePlan, Collectives, NOT_IN_WINDOW, Request, Workspace};
use crate::CollectiveKind::{AllGather, AllToAll, Broadcast};
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

impl<T: Element> Call<'_, T> {
    fn messages(&self, ranks: usize) -> MessagesArgs<usize, usize, usize, u32> {
        let output_bytes = self.recv.byte_len();
        let chunk = output_bytes / ranks;
        let (bytes, input_stride, sender) = match self.kind {
            Broadcast => (output_bytes, 0, self.root as u32),
            AllToAll => (chunk, chunk, Messages::ALL),
            _ => (chunk, 0, Messages::ALL),
        };
        MessagesArgs { bytes, input_stride, output_bytes, sender }
    }

    /// Returns the request of a call that moves elements.
    pub(super) fn request_exchange(&self, workspace: &Workspace) -> Request {
        let ranks = self.by.communicator.n_ranks();
        let (bytes, is_broadcast) = (self.messages(ranks).bytes, self.kind == Broadcast);
        // Whether all messages begin at multiples of 16 bytes. A broadcast's message need not: only
        // the root knows where it begins, and copies it.
        let send = self.send.map_or(0, DeviceSlice::device_address);
        let of_all = if is_broadcast { 0 } else { send | bytes as u64 };
        let is_aligned = (of_all | self.recv.device_address()).is_multiple_of(16);
        // A root that pushes to several peers takes longer than NCCL, where ranks pass data on.
        let is_pushed = ranks == 2 || !is_broadcast;
        let pushes = is_pushed && is_aligned && self.index_in_window(self.recv).is_some();
        let message = (bytes, lamport_exchange::slots(bytes));
        let nccl =
            if is_pushed { NOT_IN_WINDOW } else { "as the message is too long for one step" };
        Request {
            nccl,
            push: pushes.then(|| workspace.plan(Algorithm::Push, room::PUSH_EXCHANGE)),
            ..self.in_one_step(workspace, message, room::LAMPORT_EXCHANGE)
        }
    }

    /// Launches the kernel of a plan that moves elements.
    ///
    /// # Safety
    ///
    /// The plan can do the [request](Self::request), and the buffers stay allocated until the
    /// kernel has ended. Launches of the workspace's kernels are ordered.
    pub(super) unsafe fn launch_exchange(
        &self,
        Workspace { dev_comm, memory, options, .. }: &Workspace,
        plan: CollectivePlan,
        stream: &Stream,
    ) -> Result<()> {
        let messages = self.messages(self.by.communicator.n_ranks());
        let mut input = self.send.map_or(0, DeviceSlice::device_address);
        let (target, config) = (self.by.compiled.on(stream), options.config(plan));
        if plan.algorithm == Algorithm::Lamport {
            let output = self.recv.device_address();
            let args = (dev_comm, memory, input, output, messages);
            // Ranks may take different types: a slot has the same bytes with each of them.
            use lamport_exchange::{LongVector, Vector};
            let slots = lamport_exchange::slots(messages.bytes) as u32;
            let is_long = lamport_exchange::is_long(slots, plan.blocks * plan.threads);
            // SAFETY: the caller keeps the buffers allocated and orders the launches;
            // `Workspace::new` allocates what the kernel needs.
            return unsafe {
                match (input | output | messages.bytes as u64).trailing_zeros() {
                    4.. if is_long => {
                        kernels::lamport_exchange::<LongVector>::launch(args, config, &target)
                    }
                    4.. => kernels::lamport_exchange::<Vector>::launch(args, config, &target),
                    2.. => kernels::lamport_exchange::<u32>::launch(args, config, &target),
                    _ => kernels::lamport_exchange::<u8>::launch(args, config, &target),
                }
            };
        }
        let (output, first) =
            window::<u8, T>("the buffer to receive in", self.recv, &self.by.communicator)?;
        // Only the root of a broadcast gets here with such an input, and sends its output instead.
        if let Some(send) = self.send.filter(|_| !input.is_multiple_of(16)) {
            stream.copy(send, self.recv)?;
            input = self.recv.device_address();
        }
        let kernel = kernels::push_exchange::args(dev_comm, input, &output, first, messages);
        // SAFETY: the caller keeps the buffers allocated and orders the launches; `request` has
        // checked that messages are aligned, or the copy is.
        unsafe { kernel.config(config).launch(&target) }
    }
}
