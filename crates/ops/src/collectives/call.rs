//! Calls of collectives as values, which can be explained and enqueued.

use devcomm_host::{KernelsOn, ReduceOperator};

use super::exchange::{Exchange, Pattern};
use super::plan::{Choice, Request};
use super::reduce::Reduce;
use super::{CollectivePlan, Collectives, Parts, Workspace};
use crate::CollectiveKind::{self, AllReduce, ReduceScatter};
use crate::prelude::*;

/// A collective with its buffers, of elements `T`.
pub(super) trait Call<T> {
    /// Returns the buffer to send, if this rank sends, and that to receive in.
    fn buffers(&self) -> (Option<&DeviceSlice<T>>, &DeviceSlice<T>);

    /// Returns what is asked for. An invalid call is for NCCL, whose function reports the error.
    fn request(&self, collectives: &Collectives) -> Request;

    /// Returns what a checked world compares.
    fn terms(&self) -> String;

    /// Launches the kernel of the plan.
    ///
    /// # Safety
    ///
    /// The plan can do the [request](Self::request), and the buffers stay allocated until the
    /// kernel has ended. Launches of the workspace's kernels are ordered.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()>;
}

/// What the launch of a collective's kernel needs.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) collectives: &'a Collectives,
    pub(super) workspace: &'a Workspace,
    pub(super) plan: CollectivePlan,
    pub(super) stream: &'a Stream,
}

impl<'a> Launch<'a> {
    pub(super) fn config(&self) -> LaunchConfig {
        self.workspace.options.config(self.plan)
    }

    pub(super) fn target(&self) -> KernelsOn<'a> {
        self.collectives.compiled.on(self.stream)
    }
}

impl Collectives {
    /// Enqueues a collective: by a kernel, once its buffers are checked and, in a checked world,
    /// its terms compared, or by NCCL.
    pub(super) fn run<T>(
        &self,
        call: &impl Call<T>,
        stream: &Stream,
        by_nccl: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let plan = self.decide(&call.request(self)).plan;
        let Some(workspace) = self.memory_of(plan) else { return by_nccl() };
        let (send, recv) = call.buffers();
        self.require_own(send, recv, stream)?;
        self.compare(plan, || call.terms())?;
        let _turn = self.order.begin(stream)?;
        // SAFETY: `request` has checked the buffers and chosen the plan for them; dropping a buffer
        // waits for the stream. `_turn` orders the launches that use the workspace.
        unsafe { call.launch(&Launch { collectives: self, workspace, plan, stream }) }
    }

    /// Returns the request of a message of `bytes` that is sent in one step if its `slots` are not
    /// too many. A multiprocessor has room for `room` threads of the kernel.
    pub(super) fn in_one_step(
        &self,
        Workspace { options, .. }: &Workspace,
        kind: CollectiveKind,
        bytes: usize,
        slots: usize,
        room: u32,
    ) -> Request {
        let is_short = slots <= options.slots(self.communicator.n_ranks());
        Request {
            bytes,
            slots: is_short.then_some(slots as u32),
            most_blocks: self.multiprocessors(),
            most_threads: options.threads(room),
            ..Request::by_nccl(kind, super::NOT_IN_WINDOW)
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
pub struct Collective<'a>(Box<Choose<'a>>);

type Choose<'a> = dyn Fn(&Collectives) -> Result<Choice> + 'a;

impl<'a> Collective<'a> {
    pub(super) fn choice(&self, collectives: &Collectives) -> Result<Choice> {
        (self.0)(collectives)
    }

    /// Describes a call of [`Collectives::all_reduce`].
    pub fn all_reduce<S, R, O>(send: &S, recv: &R, op: O) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element> + 'a,
    {
        Self::reduce(AllReduce, send, recv, op)
    }

    /// Describes a call of [`Collectives::reduce_scatter`].
    pub fn reduce_scatter<S, R, O>(send: &S, recv: &R, op: O) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element> + 'a,
    {
        Self::reduce(ReduceScatter, send, recv, op)
    }

    fn reduce<T: Element>(
        kind: CollectiveKind,
        send: &impl Buffer<Element = T>,
        recv: &impl Buffer<Element = T>,
        op: impl ReduceOperator<T> + 'a,
    ) -> Self {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self(Box::new(move |collectives| {
            let reduce = Reduce::new(collectives, kind, [&send, &recv], &op)?;
            Ok(Choice::Open(reduce.request(collectives)))
        }))
    }

    /// Describes a call of [`Collectives::all_gather`].
    pub fn all_gather<S, R>(send: &S, recv: &R) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::exchange(Pattern::AllGather, Some(send), recv)
    }

    /// Describes a call of [`Collectives::broadcast`].
    pub fn broadcast<R>(send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize) -> Self
    where
        R: Buffer<Element: Element>,
    {
        Self::exchange(Pattern::Broadcast { root }, send, recv.device_slice())
    }

    /// Describes a call of [`Collectives::all_to_all`].
    pub fn all_to_all<S, R>(send: &S, recv: &R) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::exchange(Pattern::AllToAll, Some(send), recv)
    }

    fn exchange<T: Element>(
        pattern: Pattern,
        send: Option<DeviceSlice<T>>,
        recv: DeviceSlice<T>,
    ) -> Self {
        Self(Box::new(move |collectives| {
            let exchange = Exchange::new(collectives, pattern, (send.clone(), recv.clone()));
            Ok(Choice::Open(exchange.request(collectives)))
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
            Ok(Choice::Fixed(collectives.explain_exchange_v(&sides)))
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
        let buffers = [input.device_slice(), residual.device_slice(), weight.device_slice()];
        let output = output.device_slice();
        Self(Box::new(move |collectives| {
            Ok(Choice::Fixed(collectives.explain_rmsnorm(&buffers, &output)?))
        }))
    }
}

impl std::fmt::Debug for Collective<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Collective")
    }
}
