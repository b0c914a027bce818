//! What matrix products on arrays of Python have in common: a stream of their own, and operands.

use std::sync::Arc;

use devcomm::{DeviceSlice, Element, Result, Stream, Window};
use half::bf16;
use parking_lot::ReentrantMutex;
use pyo3::prelude::*;

use crate::array::{Array, Place};
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::{invalid, invalid_input};
use crate::operand::{Operand, Use};
use crate::own::Own;
use crate::signals::waiting;

/// Products on a stream of their own.
pub struct Products<G> {
    pub comm: Arc<Comm>,
    pub stream: Stream,
    pub gemm: ReentrantMutex<G>,
}

impl<G: Send + 'static> Products<G> {
    /// Returns what `make` makes for products on the stream that is asked for, or devcomm's own
    /// instead of the default stream, which cannot be captured.
    pub fn make(
        py: Python<'_>,
        communicator: &PyCommunicator,
        asked: Option<&Bound<'_, PyAny>>,
        make: impl FnOnce(&devcomm::Communicator, &Stream) -> Result<G>,
    ) -> PyResult<Own<Self>> {
        let comm = communicator.get()?;
        let stream = comm.gpu.capturable(asked, py)?;
        let gemm = ReentrantMutex::new(waiting(py, || make(&comm.communicator, &stream))?);
        let home = comm.home.clone();
        Ok(Own::new(&home, Self { comm, stream, gemm }))
    }

    /// Does `work` on their stream, which uses these arrays, as if on the stream that was asked
    /// for.
    pub fn call<R>(
        &self,
        py: Python<'_>,
        arrays: &[&Array],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&G, &Stream) -> Result<R>,
    ) -> PyResult<R> {
        let Self { comm, stream: own, gemm } = self;
        let asked = comm.gpu.stream(stream, py)?;
        let on_own = || {
            let gemm = gemm.lock();
            fork(&asked, own, || work(&gemm, own))
        };
        comm.gpu.call(py, (&asked, stream), arrays, on_own)
    }

    /// Does `work` with A and B, which it reads, and C, which it writes. It reads the `others` too.
    pub fn with<T: Element, C: Written, R>(
        &self,
        py: Python<'_>,
        arrays: [&Array; 3],
        others: &[&Array],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&G, [&DeviceSlice<T>; 2], &C) -> Result<R>,
    ) -> PyResult<R> {
        let (comm, [a, b, c]) = (&self.comm, arrays);
        self.call(py, &[&arrays, others].concat(), stream, |gemm, own| {
            let a = Operand::<T>::new(comm, a, Use::Read, own)?;
            let b = Operand::<T>::new(comm, b, Use::Read, own)?;
            C::with(comm, c, own, |c| work(gemm, [&a.slice, &b.slice], c))
        })
    }
}

/// Memory that a product is written to.
pub trait Written {
    /// Calls `write` with the memory of an array.
    fn with<R>(
        comm: &Comm,
        array: &Array,
        stream: &Stream,
        write: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R>;
}

impl<T: Element> Written for DeviceSlice<T> {
    fn with<R>(
        comm: &Comm,
        array: &Array,
        stream: &Stream,
        write: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        let operand = Operand::<T>::new(comm, array, Use::Write, stream)?;
        let done = write(&operand.slice)?;
        operand.finish(stream)?;
        Ok(done)
    }
}

impl Written for Window<bf16> {
    fn with<R>(
        comm: &Comm,
        array: &Array,
        _: &Stream,
        write: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        let window = match &array.place {
            Place::Window(window) => Some(Arc::clone(window)),
            Place::Gpu { .. } => {
                comm.windows().into_iter().find(|one| one.address() == array.address)
            }
            _ => None,
        };
        let window = window.ok_or_else(|| invalid_input("c is at the beginning of no window"))?;
        write(window.typed()?)
    }
}

/// Enqueues `work` to `own`, as if to `asked`: after what is there, and before what follows, also
/// if it fails when a part of it is enqueued. If `asked` is captured, so is the work.
fn fork<R>(asked: &Stream, own: &Stream, work: impl FnOnce() -> Result<R>) -> Result<R> {
    if asked.as_raw() == own.as_raw() {
        return work();
    }
    let order = |first: &Stream, second: &Stream| {
        let event = own.context().event_without_timing()?;
        first.record(&event)?;
        second.wait_event(&event)
    };
    order(asked, own)?;
    let done = work();
    let joined = order(own, asked);
    done.and_then(|done| joined.map(|()| done))
}

/// Returns the memory of the matrices A, B and C.
pub fn arrays(comm: &Comm, [a, b, c]: [&Bound<'_, PyAny>; 3]) -> PyResult<[Array; 3]> {
    Ok([Array::of(comm, a, "a")?, Array::of(comm, b, "b")?, Array::of(comm, c, "c")?])
}

/// Returns the shape `[m, n, k]` of a product of A and B of two dimensions and the same number `k`
/// of terms. `rows` says for those of A how many the product has, `m`, and how many C has. C has
/// two dimensions, or at least as many elements.
///
/// # Errors
///
/// For other shapes, of which `expected` says how they fit.
pub fn shape_of(
    [a, b, c]: [&Array; 3],
    rows: impl Fn(usize) -> Option<[usize; 2]>,
    expected: &str,
) -> PyResult<[usize; 3]> {
    let found = match (&a.shape[..], &b.shape[..]) {
        (&[rows_of_a, k], &[n, terms]) if terms == k => rows(rows_of_a).map(|rows| (rows, n, k)),
        _ => None,
    };
    let found = found.filter(|([_, rows], n, _)| match &c.shape[..] {
        [first, second] => [first, second] == [rows, n],
        _ => rows.checked_mul(*n).is_some_and(|elements| c.len >= elements),
    });
    found.map(|([m, _], n, k)| [m, n, k]).ok_or_else(|| {
        let (a, b, c) = (&a.shape, &b.shape, &c.shape);
        invalid(format!(
            "a of shape {a:?}, b of {b:?} and c of {c:?} do not fit together: expected {expected}"
        ))
    })
}
