//! All-reduces and reduce-scatters.

use std::any::Any;

use devcomm_host::{DataType, ReduceOp, ReduceOperator, ReduceScale};
use devcomm_kernels::collectives::lamport_allreduce::ROWS;
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};
use devcomm_types::F8E5M2;
use half::f16;

use super::call::{Call, Launch};
use super::{Algorithm, CollectivePlan, Collectives, INVALID, Request, UNREDUCED, Workspace};
use crate::CollectiveKind::{self, AllReduce, ReduceScatter};
use crate::check::window;
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
        let reduce = Reduce::new(self, AllReduce, buffers, &op)?;
        self.run(&reduce, stream, || self.communicator.all_reduce(send, recv, op, stream))
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
        let reduce = Reduce::new(self, ReduceScatter, buffers, &op)?;
        self.run(&reduce, stream, || self.communicator.reduce_scatter(send, recv, op, stream))
    }
}

/// An all-reduce or a reduce-scatter with its buffers.
pub(super) struct Reduce<'a, T> {
    kind: CollectiveKind,
    send: &'a DeviceSlice<T>,
    recv: &'a DeviceSlice<T>,
    operator: ReduceOp,
    by_kernel: Option<KernelReduction>,
}

impl<'a, T: Element> Reduce<'a, T> {
    pub(super) fn new(
        collectives: &Collectives,
        kind: CollectiveKind,
        [send, recv]: [&'a DeviceSlice<T>; 2],
        op: &impl ReduceOperator<T>,
    ) -> Result<Self> {
        let (operator, scale) = op.parts(&collectives.communicator)?;
        let by_kernel = KernelReduction::new(operator, scale, collectives.communicator.n_ranks());
        Ok(Self { kind, send, recv, operator, by_kernel })
    }

    /// Returns the request of an all-reduce of floats of 16 or 32 bits.
    fn request_all_reduce(
        &self,
        collectives: &Collectives,
        workspace: &Workspace,
        short: Request,
        reduction: ReductionArgs<u32, f32, f32>,
    ) -> Request {
        let (Self { send, recv, .. }, ranks) = (self, collectives.communicator.n_ranks());
        let options = workspace.options;
        let most_blocks = options.most_blocks(2, collectives.multiprocessors());
        // Two ranks move as many bytes in one step as in two.
        let rows = (ranks > 2).then_some(ROWS as u32);
        let most =
            rows.map_or(usize::MAX, |rows| (rows * most_blocks * short.most_threads) as usize);
        let vectors = short.bytes.div_ceil(16);
        let is_short = vectors <= options.all_reduce_slots(ranks).min(most);
        let aligned = (send.device_address() | recv.device_address()).is_multiple_of(16);
        let pushes = aligned && Window::<T>::index_of(recv).is_some();
        let pulls = pushes && is_sum(reduction) && begins_a_window(send) && begins_a_window(recv);
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

    /// Launches `lamport_allreduce_any`.
    ///
    /// # Safety
    ///
    /// As [`Call::launch`].
    unsafe fn launch_any(&self, launch: &Launch<'_>, operator: u32, divisor: u32) -> Result<()> {
        let Workspace { dev_comm, memory, .. } = launch.workspace;
        let [input, output] = [self.send, self.recv].map(DeviceSlice::device_address);
        let (count, config, target) = (self.recv.len(), launch.config(), launch.target());
        let args = (dev_comm, memory, input, output, count, operator, divisor);
        macro_rules! any {
            ($type:ty) => {
                // SAFETY: the caller keeps the buffers allocated and orders the launches;
                // `Workspace::new` allocates what the kernel needs.
                unsafe { kernels::lamport_allreduce_any::<$type>::launch(args, config, &target) }
            };
        }
        match T::DATA_TYPE {
            DataType::Int8 => any!(i8),
            DataType::Uint8 => any!(u8),
            DataType::Int32 => any!(i32),
            DataType::Uint32 => any!(u32),
            DataType::Int64 => any!(i64),
            DataType::Uint64 => any!(u64),
            DataType::Float64 => any!(f64),
            DataType::Float8e4m3 => any!(F8E4M3),
            DataType::Float8e5m2 => any!(F8E5M2),
            DataType::Float32 | DataType::Float16 | DataType::Bfloat16 => refuse(UNREDUCED),
        }
    }
}

impl<T: Element> Call<T> for Reduce<'_, T> {
    fn buffers(&self) -> (Option<&DeviceSlice<T>>, &DeviceSlice<T>) {
        (Some(self.send), self.recv)
    }

    fn terms(&self) -> String {
        let name = match self.kind {
            ReduceScatter => "reduce_scatter to",
            _ => "all_reduce of",
        };
        format!("{name} {} {}, {:?}", self.recv.len(), T::NAME, self.operator)
    }

    fn request(&self, collectives: &Collectives) -> Request {
        let Self { kind, send, recv, by_kernel, .. } = *self;
        let ranks = collectives.communicator.n_ranks();
        let by_nccl = |reason| Request::by_nccl(kind, reason);
        let Some(workspace) = &collectives.workspace else {
            return by_nccl(collectives.unreached());
        };
        // The parts of `send`, and the element of `recv` at which `send` begins in place.
        let (parts, place) = match kind {
            ReduceScatter => (ranks, -((collectives.communicator.rank() * recv.len()) as isize)),
            _ => (1, 0),
        };
        let fit = recv.len().checked_mul(parts) == Some(send.len());
        if recv.is_empty() || !fit || !send.is_apart_or_at(recv, Some(place)) {
            return by_nccl(INVALID);
        }
        let bytes = recv.byte_len();
        let short = |slots, room| Request {
            data_type: T::DATA_TYPE,
            ..collectives.in_one_step(workspace, kind, bytes, slots, room)
        };
        match (by_kernel, kind) {
            (Some(KernelReduction::Floats(_)), ReduceScatter) => {
                let addresses = send.device_address() | recv.device_address();
                let is_aligned = (addresses | bytes as u64).is_multiple_of(16);
                let pulls = is_aligned && Window::<T>::index_of(send).is_some();
                Request {
                    pull: pulls.then(|| workspace.plan(Algorithm::Pull, room::PULL_REDUCE_SCATTER)),
                    ..short(bytes.div_ceil(16), room::LAMPORT_REDUCE_SCATTER)
                }
            }
            (Some(KernelReduction::Floats(reduction)), _) => {
                let room = match ranks {
                    2 => room::LAMPORT_ALLREDUCE_TWO,
                    _ => room::LAMPORT_ALLREDUCE,
                };
                let short = short(bytes.div_ceil(16), room);
                self.request_all_reduce(collectives, workspace, short, reduction)
            }
            (Some(KernelReduction::Any { .. }), AllReduce) => Request {
                nccl: "as the message is too long for one step",
                ..short(lamport_exchange::slots(bytes), room::LAMPORT_ALLREDUCE_ANY)
            },
            _ => by_nccl(UNREDUCED),
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { collectives, workspace, plan, .. } = *launch;
        let Workspace { dev_comm, options, inbox, memory, .. } = workspace;
        let (Self { send, recv, .. }, target, config) = (self, launch.target(), launch.config());
        let (input, output, count) = (send.device_address(), recv.device_address(), recv.len());
        let reduction = match self.by_kernel {
            Some(KernelReduction::Floats(reduction)) => reduction,
            // SAFETY: the caller keeps the buffers allocated and orders the launches.
            Some(KernelReduction::Any { operator, divisor }) => unsafe {
                return self.launch_any(launch, operator, divisor);
            },
            None => return refuse(UNREDUCED),
        };
        let short = (dev_comm, memory, input, output, count, reduction);
        let ranks = collectives.communicator.n_ranks();
        // SAFETY: the caller keeps the buffers allocated and orders the launches. `request` has
        // checked that they have the elements, are aligned for the plan, and begin their windows
        // where no index is passed. `Workspace::new` allocates what the kernels need.
        of_floats!(T::DATA_TYPE, Float => unsafe {
            match (self.kind, plan.algorithm, ranks) {
                (ReduceScatter, Algorithm::Lamport, _) => {
                    kernels::lamport_reduce_scatter::<Float>::launch(short, config, &target)
                }
                (ReduceScatter, ..) => {
                    let (window, first) = window::<Float, T>("the buffer to send", send)?;
                    let args = (dev_comm, &window, first, send.len(), output, reduction);
                    kernels::pull_reduce_scatter::<Float>::launch(args, config, &target)
                }
                (_, Algorithm::Push, _) => {
                    let (window, first) = window::<Float, T>("the buffer to receive in", recv)?;
                    let (is_long, chunk) = pushed(send.byte_len(), ranks, plan.blocks);
                    let config = if is_long { options.independent(plan) } else { config };
                    let args = (
                        dev_comm, input, &window, first, count, inbox, chunk, reduction,
                    );
                    kernels::push_allreduce::<Float>::launch(args, config, &target)
                }
                (_, Algorithm::Pull, _) => {
                    let (from, _) = window::<Float, T>("the buffer to send", send)?;
                    let (to, _) = window::<Float, T>("the buffer to receive in", recv)?;
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

/// Returns whether elements are added without factors: `lsa_allreduce` has no other reduction.
fn is_sum(ReductionArgs { operator, input, output }: ReductionArgs<u32, f32, f32>) -> bool {
    (operator, input, output) == (Reduction::SUM, 1.0, 1.0)
}

/// Returns whether a buffer begins where its window does: `lsa_allreduce` takes no offset.
fn begins_a_window<T: Element>(buffer: &DeviceSlice<T>) -> bool {
    Window::<T>::index_of(buffer) == Some(0)
}

/// How kernels reduce the elements of the ranks.
#[derive(Clone, Copy)]
pub(super) enum KernelReduction {
    /// Floats of 16 and 32 bits, reduced in `f32`.
    Floats(ReductionArgs<u32, f32, f32>),
    /// Other elements, by one of [`Reduction`]'s operators; results are divided.
    Any { operator: u32, divisor: u32 },
}

impl KernelReduction {
    /// Returns `None` for what no kernel does: products of floats of 16 and 32 bits, scalars in
    /// device memory, and scalars for other elements.
    pub(super) fn new<T: Element>(
        op: ReduceOp,
        scale: ReduceScale<T>,
        ranks: usize,
    ) -> Option<Self> {
        let (operator, divisor) = match op {
            ReduceOp::Sum => (Reduction::SUM, 1),
            ReduceOp::Avg => (Reduction::SUM, ranks as u32),
            ReduceOp::Max => (Reduction::MAX, 1),
            ReduceOp::Min => (Reduction::MIN, 1),
            ReduceOp::Prod => (Reduction::PROD, 1),
        };
        if !matches!(T::DATA_TYPE, DataType::Float32 | DataType::Float16 | DataType::Bfloat16) {
            let is_plain = matches!(scale, ReduceScale::One);
            return is_plain.then_some(Self::Any { operator, divisor });
        }
        let input = match scale {
            ReduceScale::One => 1.0,
            ReduceScale::Value(value) => as_f32(&value)?,
            ReduceScale::Unknown => return None,
        };
        let output = 1.0 / divisor as f32;
        let is_done = operator != Reduction::PROD;
        is_done.then_some(Self::Floats(ReductionArgs { operator, input, output }))
    }
}

/// Returns the value of a float of 16 or 32 bits.
fn as_f32(value: &dyn Any) -> Option<f32> {
    let of_f16 = || value.downcast_ref().copied().map(f16::to_f32);
    let of_bf16 = || value.downcast_ref().copied().map(bf16::to_f32);
    value.downcast_ref().copied().or_else(of_f16).or_else(of_bf16)
}
