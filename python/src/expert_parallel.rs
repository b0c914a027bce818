//! Expert parallelism on arrays of Python.

use std::sync::{Arc, OnceLock};

use devcomm::{
    Activation, Buffer, Communicator, DataType, DeviceSlice, ExpertParallel, ExpertParallelOptions,
    F8E4M3, GroupedGemm, Result, Stream, SymmetricBuffer, Tokens,
};
use half::bf16;
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::{invalid, invalid_input};
use crate::grouped::numbers_of;
use crate::operand::Operand;
use crate::own::Own;
use crate::products::{Products, activation_of};

/// The operation, and the memory that `layer` needs in addition, made by its first call.
struct Experts {
    parallel: ExpertParallel,
    gemm: OnceLock<GroupedGemm>,
    /// The elements of a row that the experts' first product writes, and the rows.
    inner: OnceLock<(usize, SymmetricBuffer<bf16>)>,
    rows: OnceLock<SymmetricBuffer<bf16>>,
}

/// A layer of experts that the ranks share: tokens go to the ranks of their experts, and the
/// experts' results return. Collective, with the same numbers on every rank.
///
/// hidden: the elements of a token, a multiple of 8 up to 8192. tokens: the most tokens of a rank.
/// experts: the experts of all ranks together; each rank has the same number, rank 0 the first
///     ones. top_k: the experts of a token.
/// alignment: the index of each expert's first row is a multiple of this. f8: whether tokens go to
///     the experts as float8_e4m3fn with a scale for each 128 elements. rows: None for low latency;
///     for high throughput (prefill, training), in which rows arrive in the order of the experts,
///     the most rows that a rank receives. stream: as for GemmAllReduce.
///
/// A step is `dispatch`, `group`, the experts' work on the rows, and `combine`; or `layer`, which
/// is all of them. The number of tokens may differ between the ranks, and be 0. If a capture by
/// torch fails, the next operation is a `dispatch` or `layer`.
#[pyclass(name = "ExpertParallel", module = "devcomm", frozen)]
pub struct PyExpertParallel {
    own: Own<Products<Experts>>,
    /// The elements of a token.
    #[pyo3(get)]
    hidden: usize,
    /// The most tokens of a rank.
    #[pyo3(get)]
    tokens: usize,
    top_k: usize,
    /// Whether tokens go to the experts as 8-bit floats.
    #[pyo3(get)]
    f8: bool,
    /// The experts of each rank.
    #[pyo3(get)]
    local_experts: usize,
    /// The most rows of this rank's experts: those that `group` may put in order.
    #[pyo3(get)]
    most_rows: usize,
}

#[pymethods]
impl PyExpertParallel {
    #[new]
    #[pyo3(signature = (
        communicator, hidden, tokens, experts, top_k, *, alignment=1, f8=false, rows=None,
        stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        communicator: &PyCommunicator,
        hidden: usize,
        tokens: usize,
        experts: usize,
        top_k: usize,
        alignment: usize,
        f8: bool,
        rows: Option<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let options = ExpertParallelOptions::new(hidden, tokens, experts, top_k);
        let options = options.alignment(alignment);
        let options = if f8 { options.f8() } else { options };
        let options = rows.map_or(options, |rows| options.throughput(rows));
        let make = |comm: &Communicator, _: &Stream| {
            let parallel = options.build(comm)?;
            let (gemm, inner, rows) = Default::default();
            Ok(Experts { parallel, gemm, inner, rows })
        };
        let own = Products::make(py, communicator, stream, make)?;
        let inner = own.get()?;
        let most_rows = inner.operation.lock().parallel.most_rows();
        // `build` has refused a number of experts that is no multiple of the ranks'.
        let local_experts = experts / inner.comm.communicator.n_ranks();
        Ok(Self { own, hidden, tokens, top_k, f8, local_experts, most_rows })
    }

    /// The communicator.
    #[getter]
    fn communicator(&self) -> PyResult<PyCommunicator> {
        Ok(PyCommunicator::new(Arc::clone(&self.own.get()?.comm)))
    }

    /// Sends this rank's tokens to the ranks of their experts, and receives those of all ranks:
    /// input of shape (n, hidden) in bfloat16, n up to `tokens`; ids of (n, top_k) in int32, the
    /// experts of each token or -1 for none; and weights of (n, top_k) in float32.
    #[pyo3(signature = (input, ids, weights, *, stream=None))]
    fn dispatch(
        &self,
        input: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (input.py(), self.own.get()?);
        let tokens = self.routed(&inner.comm, [input, ids, weights])?;
        inner.call(py, &tokens.each_ref(), stream, |of, stream| {
            of.dispatch(&inner.comm, &tokens, stream)
        })
    }

    /// Puts the rows that were received in the order of this rank's experts, one for each token and
    /// expert: rows of shape (n, hidden) in bfloat16, n up to most_rows; it is most_rows
    /// if the object was made with rows=.
    ///
    /// offsets, of local_experts + 1 elements, and sizes, of local_experts, both of int32 or
    /// uint32, get the first row of each expert and the index after the last one, and the number of
    /// each one's rows, as GroupedGemm takes them. With f8, rows are of float8_e4m3fn, and scales
    /// of (hidden / 128, n) in float32 gets their scales. origins, of most_rows elements in
    /// int32 or uint32, gets `rank * tokens + i` for a row of token i of that rank.
    #[pyo3(signature = (
        rows, offsets=None, sizes=None, *, scales=None, origins=None, stream=None
    ))]
    fn group(
        &self,
        rows: &Bound<'_, PyAny>,
        offsets: Option<&Bound<'_, PyAny>>,
        sizes: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        origins: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (rows.py(), self.own.get()?);
        let comm = &*inner.comm;
        if scales.is_some() != self.f8 {
            let text = match self.f8 {
                true => "scales= is missing: this object was made with f8=True",
                false => "scales= is for objects that were made with f8=True",
            };
            return Err(invalid(text));
        }
        let data_type = if self.f8 { DataType::Float8e4m3 } else { DataType::Bfloat16 };
        let rows = self.rows_of(comm, rows, "rows", data_type)?.written();
        let scales = scales.map(|scales| {
            let expected = [self.hidden / 128, rows.shape[0]];
            Array::of(comm, scales, "scales")?.require(DataType::Float32, &expected, "scales")
        });
        let scales = scales.transpose()?.map(Array::written);
        let numbers = |array: Option<&Bound<'_, PyAny>>, len, name| {
            let array = array.map(|array| numbers_of(comm, array, name));
            let array =
                array.map(|array| array?.require(DataType::Uint32, &[len], name)).transpose()?;
            Ok::<_, PyErr>(array.map(Array::written))
        };
        let offsets = numbers(offsets, self.local_experts + 1, "offsets")?;
        let sizes = numbers(sizes, self.local_experts, "sizes")?;
        let origins = numbers(origins, self.most_rows, "origins")?;
        let others = [&scales, &offsets, &sizes, &origins].into_iter().flatten();
        let arrays: Vec<_> = std::iter::once(&rows).chain(others).collect();
        inner.call(py, &arrays, stream, |Experts { parallel, .. }, stream| {
            match &scales {
                None => {
                    let rows = Operand::<bf16>::new(comm, &rows, stream)?;
                    parallel.group(&rows.slice, stream)?;
                    rows.finish(stream)?;
                }
                Some(scales) => {
                    let rows = Operand::<F8E4M3>::new(comm, &rows, stream)?;
                    let scales = Operand::<f32>::new(comm, scales, stream)?;
                    parallel.group_f8(&rows.slice, &scales.slice, stream)?;
                    rows.finish(stream)?;
                    scales.finish(stream)?;
                }
            }
            let numbers = [
                (&offsets, parallel.groups().offsets),
                (&sizes, parallel.groups().sizes),
                (&origins, parallel.origins()),
            ];
            for (array, numbers) in numbers {
                let Some(array) = array else { continue };
                let array = Operand::<u32>::new(comm, array, stream)?;
                stream.copy(&numbers, &array.slice)?;
                array.finish(stream)?;
            }
            Ok(())
        })
    }

    /// Returns the experts' results to the tokens: rows of shape (n, hidden), where `group` has put
    /// the rows, and output of (tokens, hidden), which gets for each token of the last dispatch the
    /// sum of its experts' rows times their weights, plus its row of residual, if there is one; all
    /// in bfloat16, with sums in float32.
    #[pyo3(signature = (rows, output, residual=None, *, stream=None))]
    fn combine(
        &self,
        rows: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (rows.py(), self.own.get()?);
        let comm = &*inner.comm;
        let rows = self.rows_of(comm, rows, "rows", DataType::Bfloat16)?;
        let outputs = self.outputs(comm, output, residual)?;
        let arrays: Vec<_> = std::iter::once(&rows).chain(outputs.all()).collect();
        inner.call(py, &arrays, stream, |of, stream| {
            let rows = Operand::<bf16>::new(comm, &rows, stream)?;
            outputs.combine(&of.parallel, comm, &rows.slice, stream)
        })
    }

    /// Does a whole step, with experts of two matrices: input, ids and weights as for `dispatch`,
    /// up of shape (local_experts, inner, hidden) and down of (local_experts, hidden, inner),
    /// output and residual as for `combine`. A token's row x becomes
    /// `activation(x @ up[e].T) @ down[e].T` in each of its experts e.
    ///
    /// activation: "gelu" (its tanh approximation) or "silu"; None: none. inner is the same number
    /// in all calls of this object. Not with f8.
    #[pyo3(signature = (
        input, ids, weights, up, down, output, residual=None, *, activation="silu", stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn layer(
        &self,
        input: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        up: &Bound<'_, PyAny>,
        down: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (input.py(), self.own.get()?);
        let comm = &*inner.comm;
        let activation = activation.map(activation_of).transpose()?;
        let tokens = self.routed(comm, [input, ids, weights])?;
        let (up, down) = (Array::of(comm, up, "up")?, Array::of(comm, down, "down")?);
        // `require` refuses an array that lacks this dimension.
        let wide = up.shape.get(1).copied().unwrap_or_default();
        let (experts, hidden) = (self.local_experts, self.hidden);
        let up = up.require(DataType::Bfloat16, &[experts, wide, hidden], "up")?;
        let down = down.require(DataType::Bfloat16, &[experts, hidden, wide], "down")?;
        let outputs = self.outputs(comm, output, residual)?;
        let arrays: Vec<_> = tokens.iter().chain([&up, &down]).chain(outputs.all()).collect();
        inner.call(py, &arrays, stream, |of, stream| {
            let up = Operand::<bf16>::new(comm, &up, stream)?;
            let down = Operand::<bf16>::new(comm, &down, stream)?;
            of.dispatch(comm, &tokens, stream)?;
            let matrices = [&up.slice, &down.slice];
            let rows = of.multiply(comm, matrices, [wide, hidden], activation, stream)?;
            outputs.combine(&of.parallel, comm, rows, stream)
        })
    }

    /// Waits for the last operation, and raises InvalidInput if the routing of any since the last
    /// check was wrong: experts that do not exist, or rows for which there was no room.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.own.get()?;
        inner.call(py, &[], None, |of, _| of.parallel.check())
    }

    /// Frees its memory, when its last operation is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

impl PyExpertParallel {
    /// Returns the tokens' rows, experts and weights.
    fn routed(&self, comm: &Comm, all: [&Bound<'_, PyAny>; 3]) -> PyResult<[Array; 3]> {
        let [input, ids, weights] = all;
        let input = self.rows_of(comm, input, "input", DataType::Bfloat16)?;
        let routing = [input.shape[0], self.top_k];
        let ids = Array::of(comm, ids, "ids")?.require(DataType::Int32, &routing, "ids")?;
        let weights = Array::of(comm, weights, "weights")?;
        Ok([input, ids, weights.require(DataType::Float32, &routing, "weights")?])
    }

    /// Returns rows of `hidden` elements.
    fn rows_of(
        &self,
        comm: &Comm,
        array: &Bound<'_, PyAny>,
        name: &str,
        data_type: DataType,
    ) -> PyResult<Array> {
        let array = Array::of(comm, array, name)?;
        // `require` refuses an array of 0 dimensions, which has no columns.
        let rows = array.shape.first().copied().unwrap_or_default();
        array.require(data_type, &[rows, self.hidden], name)
    }

    fn outputs(
        &self,
        comm: &Comm,
        output: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Outputs> {
        let rows = |array, name| self.rows_of(comm, array, name, DataType::Bfloat16);
        let output = rows(output, "output")?.written();
        let residual = residual.map(|residual| rows(residual, "residual")).transpose()?;
        if let Some(residual) = &residual
            && residual.shape != output.shape
        {
            let (residual, output) = (&residual.shape, &output.shape);
            return Err(invalid(format!("residual of shape {residual:?}, output of {output:?}")));
        }
        Ok(Outputs { output, residual })
    }
}

/// Where results return to, and what is added to them.
struct Outputs {
    output: Array,
    residual: Option<Array>,
}

impl Outputs {
    fn all(&self) -> impl Iterator<Item = &Array> {
        std::iter::once(&self.output).chain(&self.residual)
    }

    fn combine<R: Buffer<Element = bf16>>(
        &self,
        parallel: &ExpertParallel,
        comm: &Comm,
        rows: &R,
        stream: &Stream,
    ) -> Result<()> {
        let read = |array| Operand::<bf16>::new(comm, array, stream);
        let residual = self.residual.as_ref().map(read).transpose()?;
        let output = Operand::<bf16>::new(comm, &self.output, stream)?;
        let residual = residual.as_ref().map(|residual| &residual.slice);
        parallel.combine(rows, &output.slice, residual, stream)?;
        output.finish(stream)
    }
}

impl Experts {
    /// Sends the tokens: their rows, experts and weights.
    fn dispatch(&self, comm: &Comm, tokens: &[Array; 3], stream: &Stream) -> Result<()> {
        let [input, ids, weights] = tokens;
        let count = input.shape[0];
        let input = Operand::<bf16>::new(comm, input, stream)?;
        let ids = Operand::<i32>::new(comm, ids, stream)?;
        let weights = Operand::<f32>::new(comm, weights, stream)?;
        let (input, ids, weights) = (&input.slice, &ids.slice, &weights.slice);
        self.parallel.dispatch(Tokens { count, input, ids, weights }, stream)
    }

    /// Puts the rows in order, and multiplies those of each expert with its two matrices.
    fn multiply(
        &self,
        comm: &Comm,
        [up, down]: [&DeviceSlice<bf16>; 2],
        [wide, hidden]: [usize; 2],
        activation: Option<Activation>,
        stream: &Stream,
    ) -> Result<&SymmetricBuffer<bf16>> {
        let (parallel, most) = (&self.parallel, self.parallel.most_rows());
        let gemm = made(&self.gemm, || GroupedGemm::new(stream))?;
        let rows = made(&self.rows, || comm.communicator.mem_alloc(most * hidden))?;
        let alloc = || Ok((wide, comm.communicator.mem_alloc(most * wide)?));
        let (first, inner) = made(&self.inner, alloc)?;
        if *first != wide {
            return Err(invalid_input(format!(
                "up has {wide} rows, and in the first call it had {first}: make another \
                 ExpertParallel for them"
            )));
        }
        parallel.group(rows, stream)?;
        let groups = parallel.groups();
        gemm.launch(rows, up, inner, &groups, [most, wide, hidden], activation)?;
        gemm.launch(inner, down, rows, &groups, [most, hidden, wide], None)?;
        Ok(rows)
    }
}

/// Returns what is there, made the first time. The caller holds the lock on the operation, so no
/// other thread makes it too.
fn made<T>(there: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(there) = there.get() {
        return Ok(there);
    }
    let new = make()?;
    Ok(there.get_or_init(|| new))
}
