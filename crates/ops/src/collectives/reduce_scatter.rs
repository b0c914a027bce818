//! Reduce-scatter.

use devcomm_host::{Buffer, DataType, DeviceSlice, ReduceOperator, Result, Stream, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::room;
use devcomm_types::Element;

use super::reduction::Reducing;
use super::{Algorithm, Collectives, INVALID, PLAIN, Request, UNREDUCED, Workspace};
use crate::CollectiveKind;
use crate::check::refuse;
use crate::lamport::LamportMemory;
use crate::launch::launch;

impl Collectives {
    /// Stores to every rank's `recv` its chunk of the reduction of all ranks' `send`, whose length
    /// is that of `recv` times the number of ranks. In place, `recv` is this rank's chunk of
    /// `send`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::reduce_scatter`](devcomm_host::Communicator::reduce_scatter).
    pub fn reduce_scatter<S, R, O>(&self, send: &S, recv: &R, op: O, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let (operator, reducing) = self.reducing(&op)?;
        let request = self.request_reduce_scatter(&send, &recv, reducing);
        let (Some((workspace, plan)), Some(Reducing::Floats(reduction))) =
            (self.kernel(&request), reducing)
        else {
            return self.communicator.reduce_scatter(&send, &recv, op, stream);
        };
        self.require_own(Some(&send), &recv, stream)?;
        let (count, name) = (recv.len(), S::Element::NAME);
        self.compare(Some(plan), || format!("reduce_scatter to {count} {name}, {operator:?}"))?;
        let _turn = self.begin(stream)?;
        let Workspace { dev_comm, memory: LamportMemory { slots, state, capacity }, .. } =
            workspace;
        let (count, data_type) = (recv.len(), S::Element::DATA_TYPE);
        let target = self.compiled.on(stream);
        let (output, config) = (recv.device_address(), workspace.options.config(plan));
        // SAFETY: the buffers have the elements, aligned for loads; dropping one waits for the
        // stream. The workspace is as the kernels need it, and the launches that use it are ordered.
        of_floats!(data_type, Float => unsafe {
            if plan.algorithm == Algorithm::Lamport {
                let input = send.device_address();
                let args = (dev_comm, slots, state, *capacity, input, output, count, reduction);
                return launch::<kernels::lamport_reduce_scatter<Float>, _>(args, config, &target);
            }
            let Some((input, first)) = Window::<Float>::containing(&send) else {
                return refuse("the buffer to send is in no window".to_owned());
            };
            let args = (dev_comm, &input, first, send.len(), output, reduction);
            launch::<kernels::pull_reduce_scatter<Float>, _>(args, config, &target)
        })
    }

    /// NCCL also does what there is an error for.
    pub(super) fn request_reduce_scatter<T: Element>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        reducing: Option<Reducing>,
    ) -> Request {
        let (ranks, bytes) = (self.communicator.n_ranks(), recv.byte_len());
        let by_nccl = |reason| Request::by_nccl(Some(CollectiveKind::ReduceScatter), reason);
        let Some(workspace) = &self.workspace else { return by_nccl(self.unreached()) };
        let chunk = -((self.communicator.rank() * recv.len()) as isize);
        let fit = recv.len().checked_mul(ranks) == Some(send.len());
        if recv.is_empty() || !fit || !send.is_apart_or_at(recv, Some(chunk)) {
            return by_nccl(INVALID);
        }
        if !matches!(reducing, Some(Reducing::Floats(_))) {
            return by_nccl(UNREDUCED);
        }
        let slots = bytes.div_ceil(16);
        let addresses = send.device_address() | recv.device_address();
        let is_aligned = bytes.is_multiple_of(16) && addresses.is_multiple_of(16);
        let pulls = is_aligned && Window::<T>::containing(send).is_some();
        Request {
            data_type: T::DATA_TYPE,
            bytes,
            slots: (slots <= workspace.options.slots(ranks)).then_some(slots as u32),
            most_blocks: self.multiprocessors(),
            most_threads: workspace.options.threads(room::LAMPORT_REDUCE_SCATTER),
            pull: pulls.then_some(workspace.grid(room::PULL_REDUCE_SCATTER)),
            ..by_nccl(PLAIN)
        }
    }
}
