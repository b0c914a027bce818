//! Calls as values: to be asked about, and to be enqueued.

use devcomm_host::{
    Buffer, DeviceSlice, KernelsOn, LaunchConfig, ReduceOperator, Result, Stream, Window,
};
use devcomm_types::Element;

use super::exchange::{Exchange, Pattern};
use super::plan::Request;
use super::reduce::Reduce;
use super::{CollectivePlan, Collectives, Parts, Workspace};
use crate::CollectiveKind::{self, AllReduce, ReduceScatter};
use crate::check::refuse;

/// A collective with its buffers, of elements `T`.
pub(super) trait Call<T> {
    /// Returns the buffer to send, if this rank sends, and that to receive in.
    fn buffers(&self) -> (Option<&DeviceSlice<T>>, &DeviceSlice<T>);

    /// Returns what is asked for. NCCL also does what there is an error for.
    fn request(&self, of: &Collectives) -> Request;

    /// Returns what a checked world compares.
    fn terms(&self) -> String;

    /// Launches the kernel of the plan.
    ///
    /// # Safety
    ///
    /// The plan does what was asked for, by buffers that stay allocated until the kernel has ended.
    /// Launches are ordered.
    unsafe fn launch(&self, on: &On<'_>) -> Result<()>;
}

/// What the launch of a collective's kernel needs.
#[derive(Clone, Copy)]
pub(super) struct On<'a> {
    pub(super) of: &'a Collectives,
    pub(super) workspace: &'a Workspace,
    pub(super) plan: CollectivePlan,
    pub(super) stream: &'a Stream,
}

impl<'a> On<'a> {
    /// The shape of a dependent launch.
    pub(super) fn config(&self) -> LaunchConfig {
        self.workspace.options.config(self.plan)
    }

    pub(super) fn target(&self) -> KernelsOn<'a> {
        self.of.compiled.on(self.stream)
    }
}

/// The window that a buffer is in, with elements `W`, and the index of its first element.
pub(super) fn window<W: Element, T: Element>(
    what: &str,
    slice: &DeviceSlice<T>,
) -> Result<(Window<W>, usize)> {
    match Window::containing(slice) {
        Some(found) => Ok(found),
        None => refuse(format!("the buffer {what} is in no window")),
    }
}

impl Collectives {
    /// Enqueues a collective by a kernel, once its buffers are checked and, in a checked world, its
    /// terms compared; `false` if NCCL has to do it.
    pub(super) fn by_kernel<T>(&self, call: &impl Call<T>, stream: &Stream) -> Result<bool> {
        let Some((workspace, plan)) = self.kernel(&call.request(self)) else { return Ok(false) };
        let (send, recv) = call.buffers();
        self.require_own(send, recv, stream)?;
        self.compare(plan, || call.terms())?;
        let _turn = self.begin(stream)?;
        // SAFETY: the buffers have the elements; dropping one waits for the stream. `_turn` orders
        // the launches, which use the workspace one after the other.
        unsafe { call.launch(&On { of: self, workspace, plan, stream }) }.map(|()| true)
    }

    /// The request of a message of `bytes` that is sent in one step if its `slots` are not too
    /// many, by a kernel with `room` on a multiprocessor.
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
            ..Request::by_nccl(Some(kind), super::PLAIN)
        }
    }
}

/// A call of a method of [`Collectives`], as a value, to ask about: how it would be done, and which
/// plans can do it. Nothing is launched.
///
/// Each of its functions is named as the method, and takes its arguments but the stream.
///
/// ```no_run
/// # use devcomm::{Collective, Collectives, ReduceOp, Result, Window};
/// # fn f(collectives: &Collectives, x: &Window<f32>) -> Result<()> {
/// let how = collectives.explain(&Collective::all_reduce(x, x, ReduceOp::Sum))?;
/// println!("{how}"); // lamport:4x128, as the message is short
/// # Ok(())
/// # }
/// ```
pub struct Collective<'a>(Box<Ask<'a>>);

type Ask<'a> = dyn Fn(&Collectives) -> Result<Request> + 'a;

impl<'a> Collective<'a> {
    fn new(request: impl Fn(&Collectives) -> Result<Request> + 'a) -> Self {
        Self(Box::new(request))
    }

    pub(super) fn request(&self, of: &Collectives) -> Result<Request> {
        (self.0)(of)
    }

    /// Describes a call of [`Collectives::all_reduce`].
    pub fn all_reduce<S, R, O>(send: &S, recv: &R, op: O) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element> + 'a,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::new(move |of| Ok(Reduce::new(of, AllReduce, [&send, &recv], &op)?.request(of)))
    }

    /// Describes a call of [`Collectives::reduce_scatter`].
    pub fn reduce_scatter<S, R, O>(send: &S, recv: &R, op: O) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element> + 'a,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::new(move |of| Ok(Reduce::new(of, ReduceScatter, [&send, &recv], &op)?.request(of)))
    }

    /// Describes a call of [`Collectives::all_gather`].
    pub fn all_gather<S, R>(send: &S, recv: &R) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        Self::exchange(Exchange::new(Pattern::AllGather, Some(send.device_slice()), recv))
    }

    /// Describes a call of [`Collectives::broadcast`].
    pub fn broadcast<R>(send: Option<DeviceSlice<R::Element>>, recv: &R, root: usize) -> Self
    where
        R: Buffer<Element: Element>,
    {
        let recv = recv.device_slice();
        Self::new(move |of| {
            let send = send.clone().filter(|_| of.communicator.rank() == root);
            Ok(Exchange::new(Pattern::Broadcast { root }, send, &recv).request(of))
        })
    }

    /// Describes a call of [`Collectives::all_to_all`].
    pub fn all_to_all<S, R>(send: &S, recv: &R) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        Self::exchange(Exchange::new(Pattern::AllToAll, Some(send.device_slice()), recv))
    }

    fn exchange<T: Element>(exchange: Exchange<T>) -> Self {
        Self::new(move |of| Ok(exchange.request(of)))
    }

    /// Describes a call of [`Collectives::all_to_all_v`].
    pub fn all_to_all_v<S, R>(send: &S, sent: Parts<'a>, recv: &R, received: Parts<'a>) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::new(move |of| {
            let sides = of.sides((send.clone(), sent), (recv.clone(), received))?;
            Ok(of.request_exchange_v(&sides))
        })
    }

    /// Describes a call of [`Collectives::all_reduce_rmsnorm`], or of its quantised form, which has
    /// the same plans: with the input as the output.
    pub fn all_reduce_rmsnorm<I, R, W, O>(input: &I, residual: &R, weight: &W, output: &O) -> Self
    where
        I: Buffer<Element: Element>,
        R: Buffer<Element = I::Element>,
        W: Buffer<Element = I::Element>,
        O: Buffer<Element = I::Element>,
    {
        let buffers = [input.device_slice(), residual.device_slice(), weight.device_slice()];
        let output = output.device_slice();
        Self::new(move |of| Ok(of.request_rmsnorm(&buffers, &output)?.0))
    }
}

impl std::fmt::Debug for Collective<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Collective")
    }
}
