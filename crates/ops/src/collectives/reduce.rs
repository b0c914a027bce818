//! All-reduces and reduce-scatters.

use devcomm_host::ReduceOperator;
use devcomm_kernels::collectives::lamport_allreduce::ROWS;
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};

use super::call::Call;
use super::kernel_reduction::KernelReduction;
use super::{Algorithm, CollectivePlan, Collectives, Request, UNREDUCED, Workspace};
use crate::CollectiveKind::{AllReduce, ReduceScatter};
use crate::prelude::*;

/// Returns the most vectors of 16 bytes that a block of `push_allreduce` pushes to each peer in a
/// round, at most 128 KiB to all peers: a power of two, of 2, 4 or 8 ranks at least 1024. With
/// 64 KiB, the barriers take 2 % of the time on two H200.
pub(super) const fn most_pushed(ranks: usize) -> usize {
    (128 << 10) / 16 / (ranks - 1).next_power_of_two()
}

/// The threads of a block of `lsa_allreduce`, if there is room: the number that was measured.
const PULL_THREADS: u32 = 128;

/// The longest message in bytes that is pushed by a dependent launch.
const MOST_DEPENDENT: usize = 64 << 20;

impl Collectives {
    /// Stores the reduction of all ranks' `send` to every rank's `recv`; both have the same length.
    /// Integers, and floats of 8 and 64 bits, are sent in one step or by NCCL; products of other
    /// floats, and scalars in device memory, are left to NCCL. Errors are those of
    /// [`Communicator::all_reduce`](devcomm_host::Communicator::all_reduce).
    pub fn all_reduce<S, R, O>(&self, send: &S, recv: &R, op: O, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element>,
    {
        let buffers = [&send.device_slice(), &recv.device_slice()];
        let call = Call::reduce(self, AllReduce, buffers, &op)?;
        call.run(stream, || self.communicator.all_reduce(send, recv, op, stream))
    }

    /// Stores to every rank's `recv` its chunk of the reduction of all ranks' `send`, whose length
    /// is that of `recv` times the number of ranks. In place, `recv` is this rank's chunk of
    /// `send`. Errors are those of
    /// [`Communicator::reduce_scatter`](devcomm_host::Communicator::reduce_scatter).
    pub fn reduce_scatter<S, R, O>(&self, send: &S, recv: &R, op: O, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element>,
    {
        let buffers = [&send.device_slice(), &recv.device_slice()];
        let call = Call::reduce(self, ReduceScatter, buffers, &op)?;
        call.run(stream, || self.communicator.reduce_scatter(send, recv, op, stream))
    }
}

impl<T: Element> Call<'_, T> {
    /// Returns the request of a call that reduces elements.
    pub(super) fn request_reduction(
        &self,
        workspace: &Workspace,
        by_kernel: Option<KernelReduction>,
    ) -> Request {
        let Self { kind, send, recv, .. } = *self;
        let options = workspace.options;
        let (ranks, bytes) = (self.by.communicator.n_ranks(), recv.byte_len());
        let addresses = send.map_or(0, DeviceSlice::device_address) | recv.device_address();
        let vectors = bytes.div_ceil(16);
        let short = |slots, room| Request {
            data_type: T::DATA_TYPE,
            ..self.in_one_step(workspace, (bytes, slots), room)
        };
        let reduction = match (by_kernel, kind) {
            (Some(KernelReduction::Floats(reduction)), AllReduce) => reduction,
            (Some(KernelReduction::Floats(_)), _) => {
                let is_aligned = (addresses | bytes as u64).is_multiple_of(16);
                let pulls =
                    is_aligned && send.is_some_and(|send| self.index_in_window(send).is_some());
                return Request {
                    pull: pulls.then(|| workspace.plan(Algorithm::Pull, room::PULL_REDUCE_SCATTER)),
                    ..short(vectors, room::LAMPORT_REDUCE_SCATTER)
                };
            }
            (Some(KernelReduction::Any { .. }), AllReduce) => {
                return Request {
                    nccl: "as the message is too long for one step",
                    ..short(lamport_exchange::slots(bytes), room::LAMPORT_ALLREDUCE_ANY)
                };
            }
            _ => return Request::by_nccl(kind, UNREDUCED),
        };
        let is_two = ranks == 2;
        let room = if is_two { room::LAMPORT_ALLREDUCE_TWO } else { room::LAMPORT_ALLREDUCE };
        let short = short(vectors, room);
        let most_blocks = options.most_blocks(2, self.by.smallest.multiprocessors);
        // Two ranks move as many bytes in one step as in two: a thread may have any number of rows.
        let rows = (!is_two).then_some(ROWS as u32);
        let most =
            rows.map_or(usize::MAX, |rows| (rows * most_blocks * short.most_threads) as usize);
        let is_short = vectors <= options.all_reduce_slots(ranks).min(most);
        let pushes = addresses.is_multiple_of(16) && self.index_in_window(recv).is_some();
        // `lsa_allreduce` adds elements without factors, in buffers that begin where their windows
        // do.
        let ReductionArgs { operator, input, output } = reduction;
        let is_sum = (operator, input, output) == (Reduction::SUM, 1.0, 1.0);
        let begins = |buffer| self.index_in_window(buffer) == Some(0);
        let pulls = pushes && is_sum && send.is_some_and(begins) && begins(recv);
        Request {
            slots: is_short.then_some(vectors as u32),
            rows,
            most_blocks,
            // The inbox has slots for each block of this grid.
            push: pushes.then(|| workspace.plan(Algorithm::Push, room::PUSH_ALLREDUCE)),
            pull: pulls.then(|| {
                let plan = workspace.plan(Algorithm::Pull, room::LSA_ALLREDUCE);
                CollectivePlan { threads: plan.threads.min(PULL_THREADS), ..plan }
            }),
            ..short
        }
    }

    /// Launches the kernel of a plan that reduces elements.
    ///
    /// # Safety
    ///
    /// The plan can do the [request](Self::request), and the buffers stay allocated until the
    /// kernel has ended. Launches of the workspace's kernels are ordered.
    pub(super) unsafe fn launch_reduction(
        &self,
        workspace: &Workspace,
        by_kernel: Option<KernelReduction>,
        plan: CollectivePlan,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, inbox, memory, .. } = workspace;
        let (Some(send), Some(by_kernel)) = (self.send, by_kernel) else {
            return refuse(UNREDUCED);
        };
        let (recv, comm) = (self.recv, &self.by.communicator);
        let ranks = comm.n_ranks();
        let (input, output, count) = (send.device_address(), recv.device_address(), recv.len());
        let (target, config) = (self.by.compiled.on(stream), options.config(plan));
        let reduction = match by_kernel {
            KernelReduction::Floats(reduction) => reduction,
            KernelReduction::Any { operator, divisor } => {
                let args = (dev_comm, memory, input, output, count, operator, divisor);
                // SAFETY: the caller keeps the buffers allocated and orders the launches;
                // `Workspace::new` allocates what the kernel needs.
                return with_type!(T::DATA_TYPE, Other => unsafe {
                    kernels::lamport_allreduce_any::<Other>::launch(args, config, &target)
                }; {
                    DataType::Int8 => i8, DataType::Uint8 => u8, DataType::Int32 => i32,
                    DataType::Uint32 => u32, DataType::Int64 => i64, DataType::Uint64 => u64,
                    DataType::Float64 => f64, DataType::Float8e4m3 => F8E4M3, _ => F8E5M2
                });
            }
        };
        let short = (dev_comm, memory, input, output, count, reduction);
        // SAFETY: the caller keeps the buffers allocated and orders the launches. `request` has
        // checked that they have the elements, are aligned for the plan, and begin their windows
        // where no index is passed. `Workspace::new` allocates what the kernels need.
        with_element!(T::DATA_TYPE, Float in f32, f16, bf16 => unsafe {
            match (self.kind, plan.algorithm, ranks) {
                (ReduceScatter, Algorithm::Lamport, _) => {
                    kernels::lamport_reduce_scatter::<Float>::launch(short, config, &target)
                }
                (ReduceScatter, ..) => {
                    let (window, first) = window::<Float, T>("the buffer to send", send, comm)?;
                    let args = (dev_comm, &window, first, send.len(), output, reduction);
                    kernels::pull_reduce_scatter::<Float>::launch(args, config, &target)
                }
                (_, Algorithm::Push, _) => {
                    let to = window::<Float, T>("the buffer to receive in", recv, comm)?;
                    let (window, first) = to;
                    let (is_long, chunk) = pushed(send.byte_len(), ranks, plan.blocks);
                    let config = if is_long { options.independent(plan) } else { config };
                    let args = (
                        dev_comm, input, &window, first, count, inbox, chunk, reduction,
                    );
                    kernels::push_allreduce::<Float>::launch(args, config, &target)
                }
                (_, Algorithm::Pull, _) => {
                    let (from, _) = window::<Float, T>("the buffer to send", send, comm)?;
                    let (to, _) = window::<Float, T>("the buffer to receive in", recv, comm)?;
                    // The kernel does not wait for the previous one, so it is no dependent launch.
                    let (config, args) = (options.independent(plan), (dev_comm, &from, &to, count));
                    kernels::lsa_allreduce::<Float>::launch(args, config, &target)
                }
                (.., 2) => kernels::lamport_allreduce_two::<Float>::launch(short, config, &target),
                (.., 4) => kernels::lamport_allreduce::<Float, 4>::launch(short, config, &target),
                _ => kernels::lamport_allreduce::<Float, 8>::launch(short, config, &target),
            }
        })
    }
}

/// Returns whether a pushed message is too long for a dependent launch, and the vectors of a block
/// in each of several rounds of equal length. The blocks of a dependent launch may be divided
/// unevenly among the multiprocessors, which takes a long message more time than it saves. Rounded
/// up to a multiple of 64, the vectors are still at most [`most_pushed`], which 64 divides.
fn pushed(bytes: usize, ranks: usize, blocks: u32) -> (bool, u32) {
    let each = bytes.div_ceil(16).div_ceil(ranks * blocks as usize);
    let rounds = each.div_ceil(most_pushed(ranks));
    (bytes > MOST_DEPENDENT, each.div_ceil(rounds).next_multiple_of(64) as u32)
}
