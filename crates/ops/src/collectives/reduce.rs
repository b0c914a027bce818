//! All-reduces and reduce-scatters.

use std::any::Any;

use devcomm_host::{
    Buffer, DataType, DeviceSlice, ReduceOp, ReduceOperator, ReduceScale, Result, Stream, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::lamport_allreduce::ROWS;
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};
use devcomm_kernels::collectives::{lamport_exchange, room};
use devcomm_types::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::{
    Algorithm, CollectivePlan, Collectives, Grid, INVALID, PLAIN, Request, UNREDUCED, Workspace,
};
use crate::CollectiveKind;
use crate::check::refuse;
use crate::lamport::LamportMemory;
use crate::launch::Takes;

/// The most vectors of 16 bytes that a block of `push_allreduce` pushes to each peer in a round: to
/// all together 128 KiB. With half as much, the barriers take 2 % of the time on two H200s.
pub(super) const fn most_pushed(ranks: usize) -> usize {
    (128 << 10) / 16 / ranks.saturating_sub(1).next_power_of_two()
}

/// The threads of a block of `lsa_allreduce`, if there is room for them: as many as were measured.
const PULL_THREADS: u32 = 128;

/// The longest message in bytes that is pushed by a dependent launch.
const MOST_DEPENDENT: usize = 64 << 20;

impl Collectives {
    /// NCCL also does what there is an error for.
    pub(super) fn request_all_reduce<T: Element>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        reducing: Option<Reducing>,
    ) -> Request {
        let (ranks, bytes) = (self.communicator.n_ranks(), send.byte_len());
        let by_nccl = |reason| Request::by_nccl(Some(CollectiveKind::AllReduce), reason);
        let Some(workspace) = &self.workspace else { return by_nccl(self.unreached()) };
        let fit = send.len() == recv.len() && send.is_apart_or_at(recv, Some(0));
        if send.is_empty() || !fit {
            return by_nccl(INVALID);
        }
        let options = workspace.options;
        let is_sum = match reducing {
            Some(Reducing::Floats(reduction)) => is_sum(reduction),
            Some(Reducing::Any { .. }) => {
                let slots = lamport_exchange::slots(bytes);
                return Request {
                    data_type: T::DATA_TYPE,
                    bytes,
                    slots: (slots <= options.slots(ranks)).then_some(slots as u32),
                    most_blocks: self.multiprocessors(),
                    most_threads: options.threads(room::LAMPORT_ALLREDUCE_ANY),
                    ..by_nccl("as the message is too long for one step")
                };
            }
            None => return by_nccl(UNREDUCED),
        };
        let most_blocks = options.most_blocks(2, self.multiprocessors());
        let most_threads = options.threads(match ranks {
            2 => room::LAMPORT_ALLREDUCE_TWO,
            _ => room::LAMPORT_ALLREDUCE,
        });
        // Two ranks move as many bytes in one step as in two.
        let rows = (ranks > 2).then_some(ROWS as u32);
        let most = rows.map_or(usize::MAX, |rows| (rows * most_blocks * most_threads) as usize);
        let vectors = bytes.div_ceil(16);
        let is_short = vectors <= options.all_reduce_slots(ranks).min(most);
        let aligned = (send.device_address() | recv.device_address()).is_multiple_of(16);
        let pushes = aligned && Window::<T>::index_of(recv).is_some();
        let pulls = pushes && is_sum && begins_a_window(send) && begins_a_window(recv);
        Request {
            data_type: T::DATA_TYPE,
            bytes,
            slots: is_short.then_some(vectors as u32),
            rows,
            most_blocks,
            most_threads,
            // There are slots for each of these blocks.
            push: pushes.then_some(workspace.grid(room::PUSH_ALLREDUCE)),
            pull: pulls.then(|| {
                let grid = workspace.grid(room::LSA_ALLREDUCE);
                Grid { threads: grid.threads.min(PULL_THREADS), ..grid }
            }),
            ..by_nccl(PLAIN)
        }
    }

    /// Stores the reduction of all ranks' `send` to every rank's `recv`; both have the same length.
    /// Elements of 8 bits and integers, and those of 64 bits, are sent in one step or by NCCL;
    /// products of other floats, and scalars in device memory, are left to NCCL.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`](devcomm_host::Communicator::all_reduce).
    pub fn all_reduce<S, R, O>(&self, send: &S, recv: &R, op: O, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let (operator, reducing) = self.reducing(&op)?;
        let request = self.request_all_reduce(&send, &recv, reducing);
        let (count, name) = (send.len(), S::Element::NAME);
        let terms = || format!("all_reduce of {count} {name}, {operator:?}");
        let Some((workspace, plan, _turn)) =
            self.start(&request, Some(&send), &recv, stream, terms)?
        else {
            return self.communicator.all_reduce(&send, &recv, op, stream);
        };
        // SAFETY: both buffers have the elements; dropping one waits for the stream.
        unsafe {
            match (reducing, plan.algorithm) {
                (Some(Reducing::Floats(reduction)), Algorithm::Push) => {
                    self.push(workspace, plan, &send, &recv, reduction, stream)
                }
                (Some(Reducing::Floats(_)), Algorithm::Pull) => {
                    self.pull(workspace, plan, &send, &recv, stream)
                }
                (Some(reducing), _) => {
                    self.lamport(workspace, plan, &send, &recv, reducing, stream)
                }
                (None, _) => refuse(UNREDUCED),
            }
        }
    }

    /// Launches `lamport_allreduce_two`, `lamport_allreduce` or `lamport_allreduce_any`.
    ///
    /// # Safety
    ///
    /// The buffers stay allocated until the kernel has ended.
    unsafe fn lamport<T: Element>(
        &self,
        workspace: &Workspace,
        plan: CollectivePlan,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        reducing: Reducing,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace {
            dev_comm, options, memory: LamportMemory { slots, state, capacity }, ..
        } = workspace;
        let (count, config) = (send.len(), options.config(plan));
        let (send, recv) = (send.device_address(), recv.device_address());
        let target = self.compiled.on(stream);
        match reducing {
            // SAFETY: the caller's contract; the workspace is as the kernels need it, and the
            // launches that use it are ordered.
            Reducing::Floats(reduction) => unsafe {
                let args = (dev_comm, slots, state, *capacity, send, recv, count, reduction);
                of_floats!(T::DATA_TYPE, Float => match self.communicator.n_ranks() {
                    2 => kernels::lamport_allreduce_two::<Float>::launch(args, config, &target),
                    4 => kernels::lamport_allreduce::<Float, 4>::launch(args, config, &target),
                    _ => kernels::lamport_allreduce::<Float, 8>::launch(args, config, &target),
                })
            },
            Reducing::Any { operator, divisor } => {
                let args =
                    (dev_comm, slots, state, *capacity, send, recv, count, operator, divisor);
                macro_rules! any {
                    ($type:ty) => {
                        // SAFETY: the workspace is as the kernel needs it, and its launches are
                        // ordered.
                        unsafe {
                            kernels::lamport_allreduce_any::<$type>::launch(args, config, &target)
                        }
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
    }

    /// Launches `push_allreduce`.
    ///
    /// # Safety
    ///
    /// As [`lamport`](Self::lamport).
    unsafe fn push<T: Element>(
        &self,
        workspace: &Workspace,
        plan: CollectivePlan,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        reduction: ReductionArgs<u32, f32, f32>,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, inbox, options, .. } = workspace;
        let (count, ranks) = (send.len(), self.communicator.n_ranks());
        // The blocks of a launch that begins early are divided unevenly among the multiprocessors,
        // which takes a long message more time than the launch.
        let is_long = send.byte_len() > MOST_DEPENDENT;
        let config = if is_long { options.independent(plan) } else { options.config(plan) };
        // Rounds of equal length.
        let vectors = send.byte_len().div_ceil(16);
        let each = vectors.div_ceil(ranks * plan.blocks as usize);
        let rounds = each.div_ceil(most_pushed(ranks));
        let chunk = each.div_ceil(rounds).next_multiple_of(64) as u32;
        let send = send.device_address();
        let target = self.compiled.on(stream);
        of_floats!(T::DATA_TYPE, Float => {
            let Some((window, first)) = Window::<Float>::containing(recv) else {
                return refuse("the buffer to receive in is in no window");
            };
            let args = (dev_comm, send, &window, first, count, inbox, chunk, reduction);
            // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
            // launches that use it are ordered.
            unsafe { kernels::push_allreduce::<Float>::launch(args, config, &target) }
        })
    }

    /// Launches `lsa_allreduce`.
    ///
    /// # Safety
    ///
    /// As [`lamport`](Self::lamport).
    unsafe fn pull<T: Element>(
        &self,
        workspace: &Workspace,
        plan: CollectivePlan,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, .. } = workspace;
        // The kernel does not wait for the previous one: it is launched when that has ended.
        let (config, target) = (options.independent(plan), self.compiled.on(stream));
        of_floats!(T::DATA_TYPE, Float => {
            let both = Window::<Float>::containing(send).zip(Window::<Float>::containing(recv));
            let Some(((from, _), (to, _))) = both else {
                return refuse("the buffers are not both in windows");
            };
            let args = (dev_comm, &from, &to, send.len());
            // SAFETY: the caller's contract; the buffers begin their windows, and the launches that
            // use the device communicator are ordered.
            unsafe { kernels::lsa_allreduce::<Float>::launch(args, config, &target) }
        })
    }

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
        let (count, name) = (recv.len(), S::Element::NAME);
        let terms = || format!("reduce_scatter to {count} {name}, {operator:?}");
        let (Some((workspace, plan, _turn)), Some(Reducing::Floats(reduction))) =
            (self.start(&request, Some(&send), &recv, stream, terms)?, reducing)
        else {
            return self.communicator.reduce_scatter(&send, &recv, op, stream);
        };
        let Workspace { dev_comm, memory: LamportMemory { slots, state, capacity }, .. } =
            workspace;
        let target = self.compiled.on(stream);
        let (output, config) = (recv.device_address(), workspace.options.config(plan));
        // SAFETY: the buffers have the elements, aligned for loads; dropping one waits for the
        // stream. The workspace is as the kernels need it, and launches that use it are ordered.
        of_floats!(S::Element::DATA_TYPE, Float => unsafe {
            if plan.algorithm == Algorithm::Lamport {
                let input = send.device_address();
                let args = (dev_comm, slots, state, *capacity, input, output, count, reduction);
                return kernels::lamport_reduce_scatter::<Float>::launch(args, config, &target);
            }
            let Some((input, first)) = Window::<Float>::containing(&send) else {
                return refuse("the buffer to send is in no window");
            };
            let args = (dev_comm, &input, first, send.len(), output, reduction);
            kernels::pull_reduce_scatter::<Float>::launch(args, config, &target)
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
        let pulls = is_aligned && Window::<T>::index_of(send).is_some();
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

/// Whether all elements are added as they are: `lsa_allreduce` has no other reduction.
fn is_sum(ReductionArgs { operator, input, output }: ReductionArgs<u32, f32, f32>) -> bool {
    (operator, input, output) == (Reduction::SUM, 1.0, 1.0)
}

/// Whether a buffer begins where its window does: `lsa_allreduce` takes no offset.
fn begins_a_window<T: Element>(buffer: &DeviceSlice<T>) -> bool {
    Window::<T>::index_of(buffer) == Some(0)
}

/// What kernels do with the elements of the ranks.
#[derive(Clone, Copy)]
pub(super) enum Reducing {
    /// Floats of 16 and 32 bits, reduced in `f32`.
    Floats(ReductionArgs<u32, f32, f32>),
    /// Other elements, by one of [`Reduction`]'s operators; results are divided.
    Any { operator: u32, divisor: u32 },
}

impl Reducing {
    /// `None` for what no kernel does: products of floats of 16 and 32 bits, and scalars that are
    /// not known or not of these.
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

/// The value of a float of 16 or 32 bits.
fn as_f32(value: &dyn Any) -> Option<f32> {
    let of_f16 = || value.downcast_ref().copied().map(f16::to_f32);
    let of_bf16 = || value.downcast_ref().copied().map(bf16::to_f32);
    value.downcast_ref().copied().or_else(of_f16).or_else(of_bf16)
}
