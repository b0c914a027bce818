//! Reduce-scatter.

use devcomm_host::{Buffer, DataType, DeviceSlice, LaunchConfig, ReduceOp, Result, Stream, Window};
use devcomm_kernels as kernels;
use devcomm_types::Element;
use half::{bf16, f16};

use super::{Algorithm, Collectives, THREADS, Workspace};
use crate::check::refuse;

impl Collectives {
    /// How a reduce-scatter of these buffers is done.
    #[must_use]
    pub fn reduce_scatter_algorithm<S, R>(&self, send: &S, recv: &R, op: ReduceOp) -> Algorithm
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        self.choose_reduce_scatter(&send.device_slice(), &recv.device_slice(), op)
    }

    /// Every rank's `recv` gets its chunk of the reduction of all ranks' `send`, whose length is
    /// that of `recv` times the number of ranks. In place, `recv` is this rank's chunk of `send`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::reduce_scatter`](devcomm_host::Communicator::reduce_scatter).
    pub fn reduce_scatter<S, R>(
        &self,
        send: &S,
        recv: &R,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let algorithm = self.choose_reduce_scatter(&send, &recv, op);
        let Some(workspace) = self.workspace.as_ref().filter(|_| algorithm != Algorithm::Nccl)
        else {
            return self.communicator.reduce_scatter(&send, &recv, op, stream);
        };
        self.require_own(Some(&send), &recv, stream)?;
        self.order(stream)?;
        let Workspace { dev_comm, options, slots, slots_state, .. } = workspace;
        let (count, data_type) = (recv.len(), S::Element::DATA_TYPE);
        let (reduction, target) = (self.reduction(op), self.compiled.on(stream));
        let output = recv.device_address();
        macro_rules! by_lamport {
            ($type:ty) => {{
                let vectors = recv.byte_len().div_ceil(16) as u32;
                let config = self.lamport_config(vectors, stream);
                let capacity = options.capacity(self.communicator.n_ranks()) as u32;
                let launch = kernels::lamport_reduce_scatter::<$type>::args(
                    dev_comm,
                    slots,
                    slots_state,
                    capacity,
                    send.device_address(),
                    output,
                    count,
                    reduction,
                );
                // SAFETY: the buffers have the elements; dropping one waits for the stream. The
                // workspace is as the kernel needs it, and the launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        macro_rules! by_loads {
            ($type:ty) => {{
                let Some((input, first)) = Window::<$type>::containing(&send) else {
                    return refuse("the buffer to send is in no window".to_owned());
                };
                let config = LaunchConfig::new(options.push_blocks, THREADS).with_dependent();
                let launch = kernels::pull_reduce_scatter::<$type>::args(
                    dev_comm,
                    &input,
                    first,
                    send.len(),
                    output,
                    reduction,
                );
                // SAFETY: the buffers have the elements, aligned; dropping one waits for the
                // stream. Launches that use the device communicator are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        match algorithm {
            Algorithm::Lamport => of_floats!(data_type, by_lamport),
            _ => of_floats!(data_type, by_loads),
        }
    }

    /// NCCL also does what there is an error for.
    fn choose_reduce_scatter<T: Element>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
    ) -> Algorithm {
        let (ranks, bytes) = (self.communicator.n_ranks(), recv.byte_len());
        let is_valid = !recv.is_empty() && recv.len().checked_mul(ranks) == Some(send.len());
        match &self.workspace {
            Some(workspace) if is_valid && reduces::<T>(op) => {
                let addresses = send.device_address() | recv.device_address();
                let is_aligned = bytes.is_multiple_of(16) && addresses.is_multiple_of(16);
                if bytes <= 16 * workspace.options.slots(ranks) {
                    Algorithm::Lamport
                } else if is_aligned && Window::<T>::containing(send).is_some() {
                    Algorithm::Pull
                } else {
                    Algorithm::Nccl
                }
            }
            _ => Algorithm::Nccl,
        }
    }
}

/// Whether kernels reduce elements `T` by this operation.
fn reduces<T: Element>(op: ReduceOp) -> bool {
    op != ReduceOp::Prod
        && matches!(T::DATA_TYPE, DataType::Float32 | DataType::Float16 | DataType::Bfloat16)
}
