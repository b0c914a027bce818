//! Calls as values.

use devcomm_host::{Buffer, DeviceSlice, ReduceOperator, Result};
use devcomm_types::Element;

use super::exchange::{Exchange, Pattern};
use super::plan::Request;
use super::{Collectives, Parts};

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
        Self::new(move |of| Ok(of.request_all_reduce(&send, &recv, of.reducing(&op)?.1)))
    }

    /// Describes a call of [`Collectives::reduce_scatter`].
    pub fn reduce_scatter<S, R, O>(send: &S, recv: &R, op: O) -> Self
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
        O: ReduceOperator<S::Element> + 'a,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        Self::new(move |of| Ok(of.request_reduce_scatter(&send, &recv, of.reducing(&op)?.1)))
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
            Ok(of.request_exchange(&Exchange::new(Pattern::Broadcast { root }, send, &recv)))
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
        Self::new(move |of| Ok(of.request_exchange(&exchange)))
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
