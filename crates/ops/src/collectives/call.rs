//! Calls of collectives, which can be explained and enqueued.

use devcomm_host::ReduceOperator;

use super::kernel_reduction::KernelReduction;
use super::plan::Request;
use super::{Algorithm, CollectivePlan, Collectives, INVALID, Parts, Workspace};
use crate::CollectiveKind::{self, AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
use crate::prelude::*;

/// A collective with its buffers, of elements `T`.
pub(super) struct Call<'a, T> {
    /// What performs it.
    pub(super) by: &'a Collectives,
    pub(super) kind: CollectiveKind,
    /// The buffer to send, if this rank sends.
    pub(super) send: Option<&'a DeviceSlice<T>>,
    pub(super) recv: &'a DeviceSlice<T>,
    /// The rank that sends in a broadcast.
    pub(super) root: usize,
    /// The operator, and how kernels reduce by it, if they can.
    pub(super) reduction: Option<(ReduceOp, Option<KernelReduction>)>,
}

impl<'a, T: Element> Call<'a, T> {
    /// Returns a call that moves elements. Only the root of a broadcast sends.
    pub(super) fn exchange(
        by: &'a Collectives,
        kind: CollectiveKind,
        send: Option<&'a DeviceSlice<T>>,
        recv: &'a DeviceSlice<T>,
        root: usize,
    ) -> Self {
        let is_sender = kind != Broadcast || by.communicator.rank() == root;
        Self { by, kind, send: send.filter(|_| is_sender), recv, root, reduction: None }
    }

    /// Returns a call that reduces elements.
    pub(super) fn reduce(
        by: &'a Collectives,
        kind: CollectiveKind,
        [send, recv]: [&'a DeviceSlice<T>; 2],
        op: &impl ReduceOperator<T>,
    ) -> Result<Self> {
        let (operator, scale) = op.parts(&by.communicator)?;
        let by_kernel = KernelReduction::new(operator, scale, by.communicator.n_ranks());
        let reduction = Some((operator, by_kernel));
        Ok(Self { by, kind, send: Some(send), recv, root: 0, reduction })
    }

    /// Returns the index of a buffer in a window of the communicator, if it is in one. A window
    /// of another communicator is as other memory to kernels: its ranks are others.
    pub(super) fn index_in_window(&self, buffer: &DeviceSlice<T>) -> Option<usize> {
        Window::<T>::index_of(buffer, &self.by.communicator)
    }

    /// Returns whether the message is not empty, lengths match, and buffers overlap only in place.
    fn is_valid(&self, rank: usize, ranks: usize) -> bool {
        let (send, recv) = (self.send.map(DeviceSlice::len), self.recv.len());
        let is_same = send == Some(recv);
        let is_whole = |part: Option<usize>, whole| {
            part.and_then(|part| part.checked_mul(ranks)).is_some_and(|len| Some(len) == whole)
        };
        // Whether the lengths match, and the element of `recv` at which `send` begins in place.
        let (matches, place) = match self.kind {
            AllReduce => (is_same, Some(0)),
            ReduceScatter => (is_whole(Some(recv), send), Some(-((rank * recv) as isize))),
            AllGather => (is_whole(send, Some(recv)), Some((rank * (recv / ranks)) as isize)),
            AllToAll => (is_same && recv.is_multiple_of(ranks), None),
            Broadcast => (self.root < ranks && (rank != self.root || is_same), Some(0)),
        };
        let is_apart = |send: &DeviceSlice<T>| send.is_apart_or_at(self.recv, place);
        matches && recv > 0 && self.send.is_none_or(is_apart)
    }

    /// Returns what is asked for. An invalid call is for NCCL, whose function reports the error.
    pub(super) fn request(&self) -> Request {
        let comm = &self.by.communicator;
        let Some(workspace) = &self.by.workspace else {
            return Request::by_nccl(self.kind, self.by.unreached());
        };
        if !self.is_valid(comm.rank(), comm.n_ranks()) {
            return Request::by_nccl(self.kind, INVALID);
        }
        match self.reduction {
            Some((_, by_kernel)) => self.request_reduction(workspace, by_kernel),
            None => self.request_exchange(workspace),
        }
    }

    /// Returns the request of a message that is sent in one step if its slots are not too many. A
    /// multiprocessor has room for `room` threads of the kernel.
    pub(super) fn in_one_step(
        &self,
        workspace: &Workspace,
        (bytes, slots): (usize, usize),
        room: u32,
    ) -> Request {
        let is_short = slots <= workspace.options.slots(self.by.communicator.n_ranks());
        Request {
            bytes,
            slots: is_short.then_some(slots as u32),
            most_blocks: self.by.smallest.multiprocessors,
            most_threads: workspace.threads(room),
            ..Request::by_nccl(self.kind, super::NOT_IN_WINDOW)
        }
    }

    /// Returns what a checked world compares.
    fn terms(&self) -> String {
        let name = match self.kind {
            AllReduce => "all_reduce of".to_owned(),
            ReduceScatter => "reduce_scatter to".to_owned(),
            Broadcast => format!("Broadcast {{ root: {} }} of", self.root),
            kind => format!("{kind:?} of"),
        };
        let operator = self.reduction.map_or(String::new(), |(op, _)| format!(", {op:?}"));
        format!("{name} {} {}{operator}", self.recv.len(), T::NAME)
    }

    /// Enqueues the collective: by a kernel, once its buffers are checked and, in a checked world,
    /// its terms compared, or by NCCL.
    pub(super) fn run(&self, stream: &Stream, nccl: impl FnOnce() -> Result<()>) -> Result<()> {
        let plan = self.by.decide(&self.request()).plan;
        let workspace = self.by.workspace.as_ref().filter(|_| plan.algorithm != Algorithm::Nccl);
        let Some(workspace) = workspace else { return nccl() };
        self.by.require_own(self.send, self.recv, stream)?;
        self.by.compare(plan, || self.terms())?;
        let _turn = self.by.order.begin(stream)?;
        // SAFETY: `request` has checked the buffers and chosen the plan for them; dropping a buffer
        // waits for the stream. `_turn` orders the launches that use the workspace.
        unsafe {
            match self.reduction {
                Some((_, by)) => self.launch_reduction(workspace, by, plan, stream),
                None => self.launch_exchange(workspace, plan, stream),
            }
        }
    }
}

/// A call of a method of [`Collectives`], as a value, to ask about: how it would be done, and which
/// plans can do it. Nothing is launched.
///
/// Each of its functions has the name of a method, and its arguments except the stream.
///
/// ```no_run
/// # use devcomm::{Collective, Collectives, ReduceOp, Result, Window};
/// # fn f(collectives: &Collectives, x: &Window<f32>) -> Result<()> {
/// let how = collectives.explain(&Collective::all_reduce(x, x, ReduceOp::Sum))?;
/// println!("{how}"); // lamport:4x128, as the message is short
/// # Ok(())
/// # }
/// ```
pub struct Collective<'a>(pub(super) Box<Choose<'a>>);

/// Returns how a call is done, and the plans that can do it.
type Choose<'a> = dyn Fn(&Collectives) -> Result<(Explanation, Vec<CollectivePlan>)> + 'a;

impl<'a> Collective<'a> {
    /// Describes a call of [`Collectives::all_reduce`].
    pub fn all_reduce<T: Element>(
        send: &impl Buffer<Element = T>,
        recv: &impl Buffer<Element = T>,
        op: impl ReduceOperator<T> + 'a,
    ) -> Self {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::of(move |by| Ok(Call::reduce(by, AllReduce, [&send, &recv], &op)?.request()))
    }

    /// Describes a call of [`Collectives::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(
        send: &impl Buffer<Element = T>,
        recv: &impl Buffer<Element = T>,
        op: impl ReduceOperator<T> + 'a,
    ) -> Self {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::of(move |by| Ok(Call::reduce(by, ReduceScatter, [&send, &recv], &op)?.request()))
    }

    /// Describes a call of [`Collectives::all_gather`].
    pub fn all_gather<T: Element>(
        send: &impl Buffer<Element = T>,
        recv: &impl Buffer<Element = T>,
    ) -> Self {
        let (send, recv) = (Some(send.device_slice()), recv.device_slice());
        Self::of(move |by| Ok(Call::exchange(by, AllGather, send.as_ref(), &recv, 0).request()))
    }

    /// Describes a call of [`Collectives::broadcast`].
    pub fn broadcast<R>(send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize) -> Self
    where
        R: Buffer<Element: Element>,
    {
        let recv = recv.device_slice();
        Self::of(move |by| Ok(Call::exchange(by, Broadcast, send.as_ref(), &recv, root).request()))
    }

    /// Describes a call of [`Collectives::all_to_all`].
    pub fn all_to_all<T: Element>(
        send: &impl Buffer<Element = T>,
        recv: &impl Buffer<Element = T>,
    ) -> Self {
        let (send, recv) = (Some(send.device_slice()), recv.device_slice());
        Self::of(move |by| Ok(Call::exchange(by, AllToAll, send.as_ref(), &recv, 0).request()))
    }

    fn of(request: impl Fn(&Collectives) -> Result<Request> + 'a) -> Self {
        Self(Box::new(move |by| {
            let request = request(by)?;
            Ok((by.decide(&request), request.candidates(by.table.find(&request))))
        }))
    }

    /// Describes a call of [`Collectives::all_to_all_v`].
    pub fn all_to_all_v<S, R>(send: &S, sent: Parts<'a>, recv: &R, received: Parts<'a>) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self(Box::new(move |collectives| {
            let sides = collectives.sides((send.clone(), sent), (recv.clone(), received))?;
            let how = collectives.explain_exchange_v(&sides);
            Ok((how, vec![how.plan]))
        }))
    }

    /// Describes a call of [`Collectives::all_reduce_rmsnorm`]. With the input as the output, the
    /// plans are also those of its quantised form.
    pub fn all_reduce_rmsnorm<T: Element>(
        input: &impl Buffer<Element = T>,
        residual: &impl Buffer<Element = T>,
        weight: &impl Buffer<Element = T>,
        output: &impl Buffer<Element = T>,
    ) -> Self {
        let [input, residual] = [input.device_slice(), residual.device_slice()];
        let buffers = [input, residual, weight.device_slice(), output.device_slice()];
        Self(Box::new(move |collectives| {
            let how = collectives.explain_rmsnorm(&buffers)?;
            Ok((how, vec![how.plan]))
        }))
    }
}

impl std::fmt::Debug for Collective<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Collective")
    }
}
