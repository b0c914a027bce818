//! Collectives on arrays of Python.

use std::sync::Arc;

use devcomm::{
    Collectives, DataType, DeviceSlice, Element, F8E4M3, Parts, ReduceOp, Result, Stream,
};
use parking_lot::ReentrantMutex;
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::invalid;
use crate::operand::{Operand, with_type};
use crate::own::Own;
use crate::signals::waiting;

/// Collectives, and their communicator, which is dropped last, since its GPU keeps streams.
struct Inner {
    collectives: ReentrantMutex<Collectives>,
    comm: Arc<Comm>,
}

/// Collectives on a communicator: by devcomm's kernels where load and store reach all ranks, and by
/// NCCL.
///
/// Every rank calls the same operations in the same order, with arrays of the same types and
/// lengths. They are enqueued to torch's current stream, to the given one, or without torch to
/// devcomm's own, and can be captured in torch's CUDA graphs. A stream that is given by its handle,
/// a number, must last as long as the communicator and what was made of it; as an object it does.
/// An array of the host (numpy's, or torch's on the CPU) is copied to the GPU and back; the call
/// returns when its result is there.
#[pyclass(name = "Collectives", module = "devcomm", frozen)]
pub struct PyCollectives {
    own: Own<Inner>,
}

#[derive(Clone, Copy)]
enum Operation {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast { root: usize },
    AllToAll,
}

impl Operation {
    fn enqueue<T: Element>(
        self,
        collectives: &Collectives,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            Self::AllReduce(op) => collectives.all_reduce(send, recv, op, stream),
            Self::AllGather => collectives.all_gather(send, recv, stream),
            Self::ReduceScatter(op) => collectives.reduce_scatter(send, recv, op, stream),
            // In place: the ranks other than the root do not read it.
            Self::Broadcast { root } => {
                collectives.broadcast(Some(send.clone()), recv, root, stream)
            }
            Self::AllToAll => collectives.all_to_all(send, recv, stream),
        }
    }
}

impl PyCollectives {
    /// Does an operation, whose result replaces `send` if there is no `recv`.
    fn operate(
        &self,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        operation: Operation,
    ) -> PyResult<()> {
        let (py, inner) = (send.py(), self.own.get()?);
        let Inner { comm, collectives } = &*inner;
        let (asked, stream) = (stream, comm.gpu.stream(stream, py)?);
        let rank = comm.communicator.rank();
        let first = match (recv, operation) {
            (Some(_), _) => Array::of(comm, send, "send")?,
            (None, Operation::Broadcast { root }) if root == rank => {
                Array::of(comm, send, "the array")?
            }
            (None, _) => Array::of(comm, send, "the array")?.written(),
        };
        let second = recv.map(|recv| Array::of(comm, recv, "recv")).transpose()?;
        let second = second.map(Array::written);
        if let Some(second) = &second {
            second.require_type(first.data_type, "recv")?;
        }
        let call = || {
            let collectives = &*collectives.lock();
            with_type!(first.data_type, T => {
                let Some(second) = &second else {
                    let both = Operand::<T>::new(comm, &first, &stream)?;
                    operation.enqueue(collectives, &both.slice, &both.slice, &stream)?;
                    return both.finish(&stream);
                };
                let send = Operand::<T>::new(comm, &first, &stream)?;
                let recv = Operand::<T>::new(comm, second, &stream)?;
                operation.enqueue(collectives, &send.slice, &recv.slice, &stream)?;
                recv.finish(&stream)
            })
        };
        let arrays: Vec<_> = std::iter::once(&first).chain(&second).collect();
        comm.gpu.call(py, (&stream, asked), &arrays, call)
    }
}

#[pymethods]
impl PyCollectives {
    /// Prepares collectives of this communicator. Collective.
    #[new]
    fn new(py: Python<'_>, communicator: &PyCommunicator) -> PyResult<Self> {
        let comm = communicator.get()?;
        let collectives = waiting(py, || Collectives::new(&comm.communicator))?;
        let home = comm.home.clone();
        let collectives = ReentrantMutex::new(collectives);
        Ok(Self { own: Own::new(&home, Inner { collectives, comm }) })
    }

    /// Puts into every rank's recv the reduction of all ranks' send, of the same length; without
    /// recv, in place.
    ///
    /// op: "sum", "prod", "max", "min" or "avg", or torch.distributed.ReduceOp's.
    #[pyo3(signature = (send, recv=None, op=None, *, stream=None))]
    fn all_reduce(
        &self,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        op: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(send, recv, stream, Operation::AllReduce(operator(op)?))
    }

    /// Puts into every rank's recv all ranks' send, in rank order: its length is that of send
    /// times the number of ranks. In place, send is this rank's part of recv.
    #[pyo3(signature = (send, recv, *, stream=None))]
    fn all_gather(
        &self,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(send, Some(recv), stream, Operation::AllGather)
    }

    /// Puts into every rank's recv its part of the reduction of all ranks' send, whose length is
    /// that of recv times the number of ranks.
    ///
    /// op: as for all_reduce.
    #[pyo3(signature = (send, recv, op=None, *, stream=None))]
    fn reduce_scatter(
        &self,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(send, Some(recv), stream, Operation::ReduceScatter(operator(op)?))
    }

    /// Puts into every rank's array that of the rank root.
    #[pyo3(signature = (array, root=0, *, stream=None))]
    fn broadcast(
        &self,
        array: &Bound<'_, PyAny>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(array, None, stream, Operation::Broadcast { root })
    }

    /// Part i of rank r's recv gets part r of rank i's send: both have the same length, one part
    /// for each rank. Not in place.
    #[pyo3(signature = (send, recv, *, stream=None))]
    fn all_to_all(
        &self,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(send, Some(recv), stream, Operation::AllToAll)
    }

    /// The parts of send, one after the other, go to the ranks in their order; those of recv come
    /// from them. send_counts and recv_counts have the elements of each part: what a rank sends to
    /// another is what that receives from it. Not in place.
    #[pyo3(signature = (send, send_counts, recv, recv_counts, *, stream=None))]
    fn all_to_all_v(
        &self,
        send: &Bound<'_, PyAny>,
        send_counts: Vec<usize>,
        recv: &Bound<'_, PyAny>,
        recv_counts: Vec<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (send.py(), self.own.get()?);
        let Inner { comm, collectives } = &*inner;
        let (asked, stream) = (stream, comm.gpu.stream(stream, py)?);
        let (from, to) = (Array::of(comm, send, "send")?, Array::of(comm, recv, "recv")?.written());
        to.require_type(from.data_type, "recv")?;
        let (sent, received) = (offsets(&send_counts), offsets(&recv_counts));
        let call = || {
            let collectives = &*collectives.lock();
            with_type!(from.data_type, T => {
                let send = Operand::<T>::new(comm, &from, &stream)?;
                let recv = Operand::<T>::new(comm, &to, &stream)?;
                let sent = Parts { counts: &send_counts, offsets: &sent };
                let received = Parts { counts: &recv_counts, offsets: &received };
                collectives.all_to_all_v(&send.slice, sent, &recv.slice, received, &stream)?;
                recv.finish(&stream)
            })
        };
        comm.gpu.call(py, (&stream, asked), &[&from, &to], call)
    }

    /// residual gets itself plus the sum of all ranks' input, and output that sum normalised by
    /// RMSNorm: for each token, a row of as many elements as weight has, it is
    /// sum * weight / sqrt(mean(sum ** 2) + eps). Without output, input gets it. All are of one
    /// type, float16, bfloat16 or float32.
    ///
    /// scale: one float32 by which the normalised sum is divided, of an output in float8_e4m3fn.
    #[pyo3(signature = (
        input, residual, weight, output=None, *, eps=1e-6, scale=None, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn all_reduce_rmsnorm(
        &self,
        input: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        eps: f32,
        scale: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, inner) = (input.py(), self.own.get()?);
        let Inner { comm, collectives } = &*inner;
        let (asked, stream) = (stream, comm.gpu.stream(stream, py)?);
        let array = |array, name| Array::of(comm, array, name);
        let [input, residual, weight] =
            [array(input, "input")?, array(residual, "residual")?, array(weight, "weight")?];
        residual.require_type(input.data_type, "residual")?;
        weight.require_type(input.data_type, "weight")?;
        let output = output.map(|output| array(output, "output")).transpose()?;
        let output = output.map(Array::written);
        let scale = scale.map(|scale| array(scale, "scale")).transpose()?;
        match (&output, &scale) {
            (Some(output), None) => output.require_type(input.data_type, "output")?,
            (Some(output), Some(scale)) => {
                output.require_type(DataType::Float8e4m3, "output")?;
                require_one(scale)?;
            }
            (None, Some(_)) => {
                return Err(invalid("scale without output: it is of a quantised one"));
            }
            (None, None) => {}
        }
        // Without an output the input is that; with a quantised one NCCL may reduce in place.
        let written = output.is_none() || scale.is_some();
        let (input, residual) = (Array { written, ..input }, residual.written());
        let call = || {
            let collectives = &*collectives.lock();
            with_type!(input.data_type, T => {
                let input = Operand::<T>::new(comm, &input, &stream)?;
                let residual = Operand::<T>::new(comm, &residual, &stream)?;
                let weight = Operand::<T>::new(comm, &weight, &stream)?;
                let (x, sums, factors) = (&input.slice, &residual.slice, &weight.slice);
                match (&output, &scale) {
                    (Some(output), Some(scale)) => {
                        let output = Operand::<F8E4M3>::new(comm, output, &stream)?;
                        let scale = Operand::<f32>::new(comm, scale, &stream)?;
                        let quantised = (&output.slice, &scale.slice);
                        collectives.all_reduce_rmsnorm_quantised(
                            x, sums, factors, quantised, eps, &stream,
                        )?;
                        output.finish(&stream)?;
                    }
                    (Some(output), None) => {
                        let output = Operand::<T>::new(comm, output, &stream)?;
                        let to = &output.slice;
                        collectives.all_reduce_rmsnorm(x, sums, factors, to, eps, &stream)?;
                        output.finish(&stream)?;
                    }
                    (None, _) => {
                        collectives.all_reduce_rmsnorm(x, sums, factors, x, eps, &stream)?;
                    }
                }
                residual.finish(&stream)?;
                input.finish(&stream)
            })
        };
        let arrays = [&input, &residual, &weight];
        let arrays: Vec<_> = arrays.into_iter().chain(&output).chain(&scale).collect();
        comm.gpu.call(py, (&stream, asked), &arrays, call)
    }

    /// Frees its workspace, when its last operation is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

/// Returns where parts of these counts begin that lie one after the other. The operation refuses
/// what saturates, as no array has so many elements.
fn offsets(counts: &[usize]) -> Vec<usize> {
    let ends = counts.iter().scan(0_usize, |end, count| {
        *end = end.saturating_add(*count);
        Some(*end)
    });
    std::iter::once(0).chain(ends).take(counts.len()).collect()
}

/// Returns the operator that `op` names; None: the sum.
fn operator(op: Option<&Bound<'_, PyAny>>) -> PyResult<ReduceOp> {
    let Some(op) = op else { return Ok(ReduceOp::Sum) };
    let name = op.str()?;
    ReduceOp::from_name(name.extract()?).ok_or_else(|| {
        invalid(format!("op={name}: expected \"sum\", \"prod\", \"max\", \"min\" or \"avg\""))
    })
}

/// Fails unless a scale is one number.
fn require_one(scale: &Array) -> PyResult<()> {
    scale.require_type(DataType::Float32, "scale")?;
    if scale.len == 1 {
        return Ok(());
    }
    Err(invalid(format!("scale has {} elements: it is one", scale.len)))
}
