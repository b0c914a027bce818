//! Matrix products on one GPU, on arrays of Python.

use devcomm::{DataType, DeviceSlice, Gemm, GemmElement};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::PyCommunicator;
use crate::errors::invalid;
use crate::own::Own;
use crate::products::{Products, arrays, shape_of};

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
        let make = |_: &_, stream: &_| Gemm::new(stream);
        Ok(Self { own: Products::make(py, communicator, stream, make)? })
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
        let [a, b, c] = &arrays(&inner.comm, [a, b, c])?;
        b.require_type(a.data_type, "b")?;
        c.require_type(a.data_type, "c")?;
        let shape = shape_of([a, b, c], |m| Some([m, m]), "(m, k), (n, k) and (m, n)")?;
        let call = match a.data_type {
            DataType::Bfloat16 => launch::<bf16>,
            DataType::Float16 => launch::<f16>,
            other => return Err(invalid(format!("a product of {other:?}: it is of bf16 or f16"))),
        };
        call(py, &inner, [a, b, c], shape, stream)
    }

    /// Unloads its kernels, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

fn launch<T: GemmElement<Output = T>>(
    py: Python<'_>,
    inner: &Products<Gemm>,
    arrays: [&Array; 3],
    shape: [usize; 3],
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    inner.with::<T, DeviceSlice<T>, _>(py, arrays, &[], stream, |gemm, [a, b], c| {
        gemm.launch(a, b, c, shape)
    })
}
