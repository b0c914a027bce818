//! Matrix products whose rows are gathered before or scattered after, on arrays of Python.

use devcomm::{AllGatherGemm, DataType, GemmReduceScatter};
use half::bf16;
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::PyCommunicator;
use crate::errors::{exception, invalid};
use crate::gemm::{Products, arrays};
use crate::own::{Own, detached};
use crate::signals::waiting;

/// Checks the types and shapes of A and B, of two dimensions and the same number of terms, and of
/// C, and returns the rows of A, those of B, and the terms.
fn rows_and_terms(
    [a, b, c]: [&Array; 3],
    rows_of_c: impl Fn(usize) -> Option<usize>,
) -> PyResult<[usize; 3]> {
    for (array, name) in [(a, "a"), (b, "b"), (c, "c")] {
        array.require_type(DataType::Bfloat16, name)?;
    }
    let found = match (&a.shape[..], &b.shape[..], &c.shape[..]) {
        (&[rows, k], &[n, terms], &[rows_c, n_c]) if terms == k && n_c == n => {
            (rows_of_c(rows) == Some(rows_c)).then_some([rows, n, k])
        }
        _ => None,
    };
    found.ok_or_else(|| {
        let (a, b, c) = (&a.shape, &b.shape, &c.shape);
        invalid(format!("a of shape {a:?}, b of {b:?} and c of {c:?} do not fit together"))
    })
}

/// This rank's rows of the sum over the ranks of `a @ b.T`, in bfloat16: a product followed by a
/// reduce-scatter, in one kernel where that is faster. Collective, with the same m and n on every
/// rank.
///
/// m, n: the largest product's rows, of all ranks, and columns. stream: as for GemmAllReduce.
#[pyclass(name = "GemmReduceScatter", module = "devcomm", frozen)]
pub struct PyGemmReduceScatter {
    own: Own<Products<GemmReduceScatter>>,
}

#[pymethods]
impl PyGemmReduceScatter {
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
        let gemm = waiting(py, || GemmReduceScatter::new(&comm.communicator, &stream, m, n))?;
        Ok(Self { own: Own::new(Products { comm, stream, gemm }) })
    }

    /// Enqueues a product: a of shape (m, k) and b of (n, k), this rank's part of the k terms, and
    /// c of (m / ranks, n), this rank's part of the rows. m is a multiple of the number of ranks.
    #[pyo3(signature = (a, b, c, *, stream=None))]
    fn __call__(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.with([a, b, c], stream, |gemm, [a, b, c], shape| gemm.launch(a, b, c, shape))
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
        self.with([a, b, c], stream, |gemm, [a, b, c], shape| {
            Ok(gemm.measure(a, b, c, shape)?.to_string())
        })
    }

    /// How a product of this shape is done, and why.
    fn explain(&self, py: Python<'_>, m: usize, n: usize, k: usize) -> PyResult<String> {
        let inner = self.own.get()?;
        Ok(detached(py, || inner.gemm.explain([m, n, k])).map_err(exception)?.to_string())
    }

    /// Frees its workspace, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

type Slices<'a> = [&'a devcomm::DeviceSlice<bf16>; 3];

impl PyGemmReduceScatter {
    fn with<R>(
        &self,
        [a, b, c]: [&Bound<'_, PyAny>; 3],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&GemmReduceScatter, Slices<'_>, [usize; 3]) -> devcomm::Result<R>,
    ) -> PyResult<R> {
        let (py, inner) = (a.py(), self.own.get()?);
        let [a, b, c] = &arrays(&inner.comm, [(a, "a"), (b, "b"), (c, "c")])?;
        let ranks = inner.comm.communicator.n_ranks();
        let parts = |rows: usize| rows.is_multiple_of(ranks).then_some(rows / ranks);
        let shape = rows_and_terms([a, b, c], parts)?;
        inner.with(py, [a, b, c], &[], stream, |gemm, slices| work(gemm, slices, shape))
    }
}

/// The product of all ranks' rows of a with this rank's b, in bfloat16: an all-gather followed by
/// `c = a @ b.T`, in one kernel where that is faster. Collective, with the same m and k on every
/// rank.
///
/// m, k: the largest product's rows, of all ranks, and terms. stream: as for GemmAllReduce.
#[pyclass(name = "AllGatherGemm", module = "devcomm", frozen)]
pub struct PyAllGatherGemm {
    own: Own<Products<AllGatherGemm>>,
}

#[pymethods]
impl PyAllGatherGemm {
    #[new]
    #[pyo3(signature = (communicator, m, k, *, stream=None))]
    fn new(
        py: Python<'_>,
        communicator: &PyCommunicator,
        m: usize,
        k: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let comm = communicator.get()?;
        let stream = comm.gpu.capturable(stream, py)?;
        let gemm = waiting(py, || AllGatherGemm::new(&comm.communicator, &stream, m, k))?;
        Ok(Self { own: Own::new(Products { comm, stream, gemm }) })
    }

    /// Enqueues a product: a of shape (m / ranks, k), this rank's part of the rows, b of (n, k),
    /// and c of (m, n). n may differ between the ranks.
    #[pyo3(signature = (a, b, c, *, stream=None))]
    fn __call__(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.with([a, b, c], stream, |gemm, [a, b, c], shape| gemm.launch(a, b, c, shape))
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
        self.with([a, b, c], stream, |gemm, [a, b, c], shape| {
            Ok(gemm.measure(a, b, c, shape)?.to_string())
        })
    }

    /// How a product of this shape, with all ranks' rows, is done, and why.
    fn explain(&self, py: Python<'_>, m: usize, n: usize, k: usize) -> PyResult<String> {
        let inner = self.own.get()?;
        Ok(detached(py, || inner.gemm.explain([m, n, k])).map_err(exception)?.to_string())
    }

    /// Frees its workspace, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

impl PyAllGatherGemm {
    fn with<R>(
        &self,
        [a, b, c]: [&Bound<'_, PyAny>; 3],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&AllGatherGemm, Slices<'_>, [usize; 3]) -> devcomm::Result<R>,
    ) -> PyResult<R> {
        let (py, inner) = (a.py(), self.own.get()?);
        let [a, b, c] = &arrays(&inner.comm, [(a, "a"), (b, "b"), (c, "c")])?;
        let ranks = inner.comm.communicator.n_ranks();
        let [rows, n, k] = rows_and_terms([a, b, c], |rows| rows.checked_mul(ranks))?;
        let shape = [rows * ranks, n, k];
        inner.with(py, [a, b, c], &[], stream, |gemm, slices| work(gemm, slices, shape))
    }
}
