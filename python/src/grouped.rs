//! Matrix products of groups of rows, each with a factor of its own, on arrays of Python.

use devcomm::{Activation, DataType, DeviceSlice, GroupedGemm, HalfElement, RowGroups};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::array::{Array, new_tensor};
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::invalid;
use crate::operand::Operand;
use crate::own::Own;
use crate::products::{Products, activation_of};

/// Products of groups of rows on one GPU, in bfloat16 or float16, with sums in float32: each group
/// of rows of a is multiplied with a matrix of its own, as the tokens of an expert are.
///
/// stream: as for GemmAllReduce.
#[pyclass(name = "GroupedGemm", module = "devcomm", frozen)]
pub struct PyGroupedGemm {
    own: Own<Products<GroupedGemm>>,
}

#[pymethods]
impl PyGroupedGemm {
    #[new]
    #[pyo3(signature = (communicator, *, stream=None))]
    fn new(
        py: Python<'_>,
        communicator: &PyCommunicator,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let make = |_: &_, stream: &_| GroupedGemm::new(stream);
        Ok(Self { own: Products::make(py, communicator, stream, make)? })
    }

    /// Enqueues the products of all groups: a of shape (m, k), b of (groups, n, k), and c of
    /// (m, n). Group i has sizes[i] rows from offsets[i] on; both are of uint32 or int32, one
    /// element for each group, and read on the GPU when the products run. Rows that are in no
    /// group are not written, and those from m on are left out. Returns c; for None a new tensor,
    /// if a is a tensor of torch's, with zeros in the rows that are in no group.
    ///
    /// activation: "gelu" (its tanh approximation) or "silu", of the sums; None: none.
    #[pyo3(signature = (a, b, c, offsets, sizes, *, activation=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn __call__<'py>(
        &self,
        a: &Bound<'py, PyAny>,
        b: &Bound<'py, PyAny>,
        c: Option<&Bound<'py, PyAny>>,
        offsets: &Bound<'py, PyAny>,
        sizes: &Bound<'py, PyAny>,
        activation: Option<&str>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, inner) = (a.py(), self.own.get()?);
        let like = a;
        let array = |array, name| Array::of(&inner.comm, array, name);
        let (a, b) = (array(a, "a")?, array(b, "b")?);
        let c = match c {
            Some(c) => c.clone(),
            None => {
                // `launch` refuses an array that lacks a dimension.
                let extent = |array: &Array, i| array.shape.get(i).copied().unwrap_or_default();
                let shape = [extent(&a, 0), extent(&b, 1)];
                new_tensor(like, "new_zeros", shape, a.data_type, stream)?
            }
        };
        let factors = [a, b, array(&c, "c")?.written()];
        let groups = [(offsets, "offsets"), (sizes, "sizes")];
        let [offsets, sizes] = groups.map(|(array, name)| numbers_of(&inner.comm, array, name));
        let groups = [offsets?, sizes?];
        let activation = activation.map(activation_of).transpose()?;
        let call = match factors[0].data_type {
            DataType::Bfloat16 => launch::<bf16>,
            DataType::Float16 => launch::<f16>,
            other => return Err(invalid(format!("a product of {other:?}: it is of bf16 or f16"))),
        };
        call(py, &inner, &factors, &groups, activation, stream)?;
        Ok(c)
    }

    /// Unloads its kernels, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

/// Returns an array of int32 or uint32 as one of uint32.
pub fn numbers_of(comm: &Comm, array: &Bound<'_, PyAny>, name: &str) -> PyResult<Array> {
    let mut array = Array::of(comm, array, name)?;
    if array.data_type != DataType::Int32 {
        array.require_type(DataType::Uint32, name)?;
    }
    // Torch has few operations of unsigned numbers; indices and sizes are not negative.
    array.data_type = DataType::Uint32;
    Ok(array)
}

fn launch<T: HalfElement>(
    py: Python<'_>,
    inner: &Products<GroupedGemm>,
    [a, b, c]: &[Array; 3],
    [offsets, sizes]: &[Array; 2],
    activation: Option<Activation>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    b.require_type(a.data_type, "b")?;
    c.require_type(a.data_type, "c")?;
    let count = sizes.len;
    let shape = match (&a.shape[..], &b.shape[..], &c.shape[..]) {
        (&[m, k], &[groups, n, terms], &[rows, columns])
            if [groups, terms, rows, columns] == [count, k, m, n] =>
        {
            [m, n, k]
        }
        (a, b, c) => {
            return Err(invalid(format!(
                "a of shape {a:?}, b of {b:?} and c of {c:?} for {count} groups: expected (m, k), \
                 (groups, n, k) and (m, n)"
            )));
        }
    };
    if offsets.len < count {
        let offsets = offsets.len;
        return Err(invalid(format!("{offsets} offsets for {count} sizes: expected as many")));
    }
    let own = &inner.stream;
    inner.with(py, [a, b, c], &[offsets, sizes], stream, |gemm, [a, b], c: &DeviceSlice<T>| {
        let offsets = Operand::<u32>::new(&inner.comm, offsets, own)?;
        let sizes = Operand::<u32>::new(&inner.comm, sizes, own)?;
        let groups = RowGroups { offsets: offsets.slice.clone(), sizes: sizes.slice.clone() };
        gemm.launch(a, b, c, &groups, shape, activation)
    })
}
