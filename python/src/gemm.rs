//! Matrix products on arrays of Python: alone, and fused with an all-reduce.

use std::rc::Rc;

use devcomm::{DataType, DeviceSlice, Element, Gemm, GemmAllReduce, Result, Stream, Window};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::array::{Array, Place};
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::{exception, invalid};
use crate::operand::{Operand, Use};
use crate::own::{Own, detached};
use crate::signals::waiting;

/// Returns the shape `[m, n, k]` of a product of A, `m x k`, and B, `n x k`, and that of C if it
/// has two dimensions.
fn shape_of(a: &Array, b: &Array, c: &Array) -> PyResult<[usize; 3]> {
    let (&[m, k], &[n, terms]) = (&a.shape[..], &b.shape[..]) else {
        let (a, b) = (&a.shape, &b.shape);
        return Err(invalid(format!("a of shape {a:?} and b of {b:?}, expected (m, k), (n, k)")));
    };
    let fits = match &c.shape[..] {
        [rows, columns] => [*rows, *columns] == [m, n],
        _ => m.checked_mul(n).is_some_and(|elements| c.len >= elements),
    };
    if terms != k || !fits {
        let (a, b, c) = (&a.shape, &b.shape, &c.shape);
        return Err(invalid(format!(
            "a of shape {a:?}, b of {b:?}, c of {c:?}: expected (m, k), (n, k) and (m, n)"
        )));
    }
    Ok([m, n, k])
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

struct Fused {
    comm: Rc<Comm>,
    stream: Stream,
    gemm: GemmAllReduce,
}

/// The product `c = sum over the ranks of a @ b.T` in bfloat16, by one kernel that communicates
/// while it multiplies where that is faster. Collective, with the same m and n on every rank.
///
/// m, n: the largest product's rows and columns. stream: the one that runs the products; those
/// that are enqueued to another one are ordered with its work by events. None: torch's current one,
/// or devcomm's own if that is the default stream.
#[pyclass(name = "GemmAllReduce", module = "devcomm", frozen)]
pub struct PyGemmAllReduce {
    own: Own<Fused>,
}

#[pymethods]
impl PyGemmAllReduce {
    #[new]
    #[pyo3(signature = (communicator, m, n, *, stream=None))]
    fn new(
        py: Python<'_>,
        communicator: &PyCommunicator,
        m: usize,
        n: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let comm = communicator.get()?;
        let stream = comm.gpu.capturable(stream, py)?;
        let gemm = waiting(py, || GemmAllReduce::new(&comm.communicator, &stream, m, n))?;
        Ok(Self { own: Own::new(Fused { comm, stream, gemm }) })
    }

    /// Enqueues a product: a of shape (m, k), b of (n, k), this rank's part of the k terms, and c a
    /// window, or a tensor at the beginning of one, of (m, n). Every rank passes the same window. k
    /// is a multiple of 8.
    ///
    /// In a captured graph, tensors of torch's that were made before the capture must last as long
    /// as the graph.
    #[pyo3(signature = (a, b, c, *, stream=None))]
    fn __call__(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.with([a, b, c], stream, |gemm, [a, b], c, shape| gemm.launch(a, b, c, shape))
    }

    /// Times the plans of this shape, as products of these arrays, and does products of it by the
    /// fastest from now on; returns that plan. Collective, and not in a captured graph.
    #[pyo3(signature = (a, b, c, *, stream=None))]
    fn measure(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        self.with([a, b, c], stream, |gemm, [a, b], c, shape| {
            Ok(gemm.measure(a, b, c, shape)?.to_string())
        })
    }

    /// Returns how a product of this shape is done, and why.
    fn explain(&self, py: Python<'_>, m: usize, n: usize, k: usize) -> PyResult<String> {
        let inner = self.own.get()?;
        Ok(detached(py, || inner.gemm.explain([m, n, k])).map_err(exception)?.to_string())
    }

    /// Frees its workspace, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

impl PyGemmAllReduce {
    /// Does `work` on its stream with arrays of Python, as if on the stream that was asked for.
    fn with<R>(
        &self,
        [a, b, c]: [&Bound<'_, PyAny>; 3],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(
            &GemmAllReduce,
            [&DeviceSlice<bf16>; 2],
            &Window<bf16>,
            [usize; 3],
        ) -> Result<R>,
    ) -> PyResult<R> {
        let (py, inner) = (a.py(), self.own.get()?);
        let Fused { comm, stream: own, gemm } = &*inner;
        let [a, b, c] = arrays(comm, [(a, "a"), (b, "b"), (c, "c")])?;
        for (array, name) in [(&a, "a"), (&b, "b"), (&c, "c")] {
            array.require_type(DataType::Bfloat16, name)?;
        }
        let shape = shape_of(&a, &b, &c)?;
        let asked = comm.gpu.stream(stream, py)?;
        let window = match &c.place {
            Place::Window(window) => Some(Rc::clone(window)),
            Place::Gpu { .. } => comm.windows().into_iter().find(|one| one.address() == c.address),
            _ => None,
        };
        let window = window.ok_or_else(|| invalid("c is at the beginning of no window"))?;
        let on_own = || {
            let c: &Window<bf16> = window.typed()?;
            fork(&asked, own, || {
                let a = Operand::<bf16>::new(comm, &a, Use::Read, own)?;
                let b = Operand::<bf16>::new(comm, &b, Use::Read, own)?;
                work(gemm, [&a.slice, &b.slice], c, shape)
            })
        };
        comm.gpu.call(py, (&asked, stream), &[&a, &b, &c], on_own)
    }
}

/// Products on a stream of their own.
pub struct Products<G> {
    pub comm: Rc<Comm>,
    pub stream: Stream,
    pub gemm: G,
}

impl<G> Products<G> {
    /// Does `work` on their stream with A and B, which it reads, and C, which it writes, as if on
    /// the stream that was asked for. It reads the `others` too.
    pub fn with<T: Element, R>(
        &self,
        py: Python<'_>,
        arrays: [&Array; 3],
        others: &[&Array],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&G, [&DeviceSlice<T>; 3]) -> Result<R>,
    ) -> PyResult<R> {
        let Self { comm, stream: own, gemm } = self;
        let ([a, b, c], asked) = (arrays, comm.gpu.stream(stream, py)?);
        let on_own = || {
            fork(&asked, own, || {
                let a = Operand::<T>::new(comm, a, Use::Read, own)?;
                let b = Operand::<T>::new(comm, b, Use::Read, own)?;
                let c = Operand::<T>::new(comm, c, Use::Write, own)?;
                let done = work(gemm, [&a.slice, &b.slice, &c.slice])?;
                c.finish(own)?;
                Ok(done)
            })
        };
        comm.gpu.call(py, (&asked, stream), &[&arrays, others].concat(), on_own)
    }
}

/// The product `c = a @ b.T` on one GPU, in bfloat16 or float16, with sums in float32.
///
/// stream: as for GemmAllReduce.
#[pyclass(name = "Gemm", module = "devcomm", frozen)]
pub struct PyGemm {
    own: Own<Products<Gemm>>,
}

#[pymethods]
impl PyGemm {
    #[new]
    #[pyo3(signature = (communicator, *, stream=None))]
    fn new(
        py: Python<'_>,
        communicator: &PyCommunicator,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let comm = communicator.get()?;
        let stream = comm.gpu.capturable(stream, py)?;
        let gemm = waiting(py, || Gemm::new(&stream))?;
        Ok(Self { own: Own::new(Products { comm, stream, gemm }) })
    }

    /// Enqueues a product: a of shape (m, k), b of (n, k), c of (m, n), all of one type.
    #[pyo3(signature = (a, b, c, *, stream=None))]
    fn __call__(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (a.py(), self.own.get()?);
        let [a, b, c] = &arrays(&inner.comm, [(a, "a"), (b, "b"), (c, "c")])?;
        b.require_type(a.data_type, "b")?;
        c.require_type(a.data_type, "c")?;
        let shape = shape_of(a, b, c)?;
        match a.data_type {
            DataType::Bfloat16 => {
                inner.with::<bf16, _>(py, [a, b, c], &[], stream, |gemm, [a, b, c]| {
                    gemm.launch(a, b, c, shape)
                })
            }
            DataType::Float16 => {
                inner.with::<f16, _>(py, [a, b, c], &[], stream, |gemm, [a, b, c]| {
                    gemm.launch(a, b, c, shape)
                })
            }
            other => Err(invalid(format!("a product of {other:?}: it is of bf16 or f16"))),
        }
    }

    /// Unloads its kernels, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

pub fn arrays(comm: &Comm, all: [(&Bound<'_, PyAny>, &str); 3]) -> PyResult<[Array; 3]> {
    let [a, b, c] = all.map(|(array, name)| Array::of(comm, array, name));
    Ok([a?, b?, c?])
}
