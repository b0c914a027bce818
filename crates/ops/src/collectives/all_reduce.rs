//! All-reduces.

use devcomm_host::{Buffer, DataType, DeviceSlice, LaunchConfig, ReduceOp, Result, Stream, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::lamport_allreduce::ROWS;
use devcomm_kernels::collectives::push_allreduce;
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};
use devcomm_types::Element;
use half::{bf16, f16};

use super::{Algorithm, Collectives, THREADS, Workspace};
use crate::check::refuse;

/// The most vectors of 16 bytes that a block of `push_allreduce` pushes to each peer in a round: to
/// all together 128 KiB. With half as much, the barriers take 2 % of the time on two H200s.
pub(super) const fn most_pushed(ranks: usize) -> usize {
    (128 << 10) / 16 / ranks.saturating_sub(1).next_power_of_two()
}

impl Collectives {
    /// How an all-reduce of these buffers is done.
    #[must_use]
    pub fn all_reduce_algorithm<S, R>(&self, send: &S, recv: &R, op: ReduceOp) -> Algorithm
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        self.choose(&send.device_slice(), &recv.device_slice(), op)
    }

    pub(super) fn choose<T: Element>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
    ) -> Algorithm {
        let bytes = send.len() * T::DATA_TYPE.size();
        let reduces =
            matches!(T::DATA_TYPE, DataType::Float32 | DataType::Float16 | DataType::Bfloat16);
        match &self.workspace {
            Some(workspace) if reduces && op != ReduceOp::Prod && !send.is_empty() => {
                let aligned = (send.device_address() | recv.device_address()).is_multiple_of(16);
                // Two ranks move as many bytes in one step as in two.
                if bytes <= 16 * self.most_vectors(workspace) {
                    Algorithm::Lamport
                } else if aligned && Window::<T>::containing(recv).is_some() {
                    Algorithm::Push
                } else {
                    Algorithm::Nccl
                }
            }
            _ => Algorithm::Nccl,
        }
    }

    /// Every rank's `recv` gets the reduction of all ranks' `send`; both have the same length.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`](devcomm_host::Communicator::all_reduce).
    pub fn all_reduce<S, R>(&self, send: &S, recv: &R, op: ReduceOp, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let algorithm = self.choose(&send, &recv, op);
        let Some(workspace) = self.workspace.as_ref().filter(|_| algorithm != Algorithm::Nccl)
        else {
            return self.communicator.all_reduce(&send, &recv, op, stream);
        };
        self.check(&send, &recv, stream)?;
        self.order(stream)?;
        // SAFETY: both buffers have the elements; dropping one waits for the stream.
        unsafe {
            match algorithm {
                Algorithm::Push => self.push(workspace, &send, &recv, op, stream),
                _ => self.lamport(workspace, &send, &recv, op, stream),
            }
        }
    }

    pub(super) fn reduction(&self, op: ReduceOp) -> ReductionArgs<u32, f32, f32> {
        let (operator, output) = match op {
            ReduceOp::Max => (Reduction::MAX, 1.0),
            ReduceOp::Min => (Reduction::MIN, 1.0),
            ReduceOp::Avg => (Reduction::SUM, 1.0 / self.communicator.n_ranks() as f32),
            _ => (Reduction::SUM, 1.0),
        };
        ReductionArgs { operator, input: 1.0, output }
    }

    /// Blocks of `lamport_allreduce`: a multiprocessor has room for two.
    fn most_blocks(&self) -> u32 {
        2 * self.communicator.context().limits().multiprocessors
    }

    /// The most vectors of `lamport_allreduce`.
    fn most_vectors(&self, workspace: &Workspace) -> usize {
        let capacity = workspace.options.capacity(self.communicator.n_ranks());
        match self.communicator.n_ranks() {
            2 => capacity,
            _ => capacity.min(ROWS * self.most_blocks() as usize * THREADS as usize),
        }
    }

    /// Launches `lamport_allreduce`.
    ///
    /// # Safety
    ///
    /// The buffers stay allocated until the kernel has ended.
    unsafe fn lamport<T: Element>(
        &self,
        workspace: &Workspace,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, slots, slots_state, .. } = workspace;
        let capacity = options.capacity(self.communicator.n_ranks()) as u32;
        let (count, data_type) = (send.len(), T::DATA_TYPE);
        let vectors = (count * data_type.size()).div_ceil(16) as u32;
        let mut config = self.lamport_config(vectors, stream);
        let most_blocks = self.most_blocks();
        if vectors > most_blocks * config.block.x {
            config.block.x = THREADS;
        }
        config.grid.x = vectors.div_ceil(config.block.x).min(most_blocks);
        let (send, recv) = (send.device_address(), recv.device_address());
        let (reduction, target) = (self.reduction(op), self.compiled.on(stream));
        macro_rules! launch {
            ($type:ty) => {{
                let launch = kernels::lamport_allreduce::<$type>::args(
                    dev_comm,
                    slots,
                    slots_state,
                    capacity,
                    send,
                    recv,
                    count,
                    reduction,
                );
                // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
                // launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        of_floats!(data_type, launch)
    }

    /// Launches `push_allreduce`.
    ///
    /// # Safety
    ///
    /// As [`lamport`](Self::lamport).
    unsafe fn push<T: Element>(
        &self,
        workspace: &Workspace,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, inbox, .. } = workspace;
        let (count, data_type, blocks) = (send.len(), T::DATA_TYPE, options.push_blocks);
        let vectors = (count * data_type.size()).div_ceil(16);
        let ranks = self.communicator.n_ranks();
        // Rounds of equal length.
        let each = vectors.div_ceil(ranks * blocks as usize);
        let rounds = each.div_ceil(most_pushed(ranks));
        let chunk = each.div_ceil(rounds).next_multiple_of(64) as u32;
        let config = LaunchConfig::new(blocks, push_allreduce::THREADS).with_dependent();
        let send = send.device_address();
        let (reduction, target) = (self.reduction(op), self.compiled.on(stream));
        macro_rules! launch {
            ($type:ty) => {{
                let Some((window, first)) = Window::<$type>::containing(recv) else {
                    return refuse("the buffer to receive in is in no window".to_owned());
                };
                let launch = kernels::push_allreduce::<$type>::args(
                    dev_comm, send, &window, first, count, inbox, chunk, reduction,
                );
                // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
                // launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        of_floats!(data_type, launch)
    }

    fn check<T>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        stream: &Stream,
    ) -> Result<()> {
        self.require_own(Some(send), recv, stream)?;
        if send.len() != recv.len() {
            let (send, recv) = (send.len(), recv.len());
            return refuse(format!("an all-reduce of {send} elements has {recv} results"));
        }
        Ok(())
    }
}
