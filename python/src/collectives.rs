//! Collectives on arrays of Python.

use std::rc::Rc;

use devcomm::{Collectives, DeviceSlice, Element, ReduceOp, Result, Stream};
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::invalid;
use crate::operand::{Operand, Use, with_type};
use crate::own::Own;
use crate::signals::waiting;

struct Inner {
    comm: Rc<Comm>,
    collectives: Collectives,
}

/// Collectives on a communicator: by devcomm's kernels where load and store reach all ranks, and by
/// NCCL.
///
/// Every rank calls the same operations in the same order, with arrays of the same types and
/// lengths. They are enqueued to torch's current stream, to the given one, or without torch to
/// devcomm's own, and can be captured in torch's CUDA graphs. An array of the host (numpy's, or
/// torch's on the CPU) is copied to the GPU and back; the call returns when its result is there.
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
            Self::Broadcast { root } => {
                collectives.broadcast(Some(send.clone()), recv, root, stream)
            }
            Self::AllToAll => collectives.all_to_all(send, recv, stream),
        }
    }
}

impl PyCollectives {
    /// Does an operation; without `recv`, `send` is that too.
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
        let first = Array::of(comm, send, if recv.is_some() { "send" } else { "the array" })?;
        let second = recv.map(|recv| Array::of(comm, recv, "recv")).transpose()?;
        if let Some(second) = &second {
            second.require_type(first.data_type, "recv")?;
        }
        let call = || {
            with_type!(first.data_type, T => {
                let Some(second) = &second else {
                    let both = Operand::<T>::new(comm, &first, Use::Write, &stream)?;
                    operation.enqueue(collectives, &both.slice, &both.slice, &stream)?;
                    return both.finish(&stream);
                };
                let send = Operand::<T>::new(comm, &first, Use::Read, &stream)?;
                let recv = Operand::<T>::new(comm, second, Use::Write, &stream)?;
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
    /// For collectives of this communicator. Collective.
    #[new]
    fn new(py: Python<'_>, communicator: &PyCommunicator) -> PyResult<Self> {
        let comm = communicator.get()?;
        let collectives = waiting(py, || Collectives::new(&comm.communicator))?;
        Ok(Self { own: Own::new(Inner { collectives, comm }) })
    }

    /// Every rank's recv gets the reduction of all ranks' send, of the same length; without recv,
    /// in place.
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

    /// Every rank's recv gets all ranks' send, in rank order: its length is that of send times the
    /// number of ranks. In place, send is this rank's part of recv.
    #[pyo3(signature = (send, recv, *, stream=None))]
    fn all_gather(
        &self,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.operate(send, Some(recv), stream, Operation::AllGather)
    }

    /// Every rank's recv gets its part of the reduction of all ranks' send, whose length is that of
    /// recv times the number of ranks.
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

    /// Every rank's array gets that of the rank root.
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

    /// Frees its workspace, when its last operation is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

/// The operator that `op` names; None: the sum.
fn operator(op: Option<&Bound<'_, PyAny>>) -> PyResult<ReduceOp> {
    let Some(op) = op else { return Ok(ReduceOp::Sum) };
    let name = op.str()?;
    ReduceOp::from_name(name.extract()?).ok_or_else(|| {
        invalid(format!("op={name}: expected \"sum\", \"prod\", \"max\", \"min\" or \"avg\""))
    })
}
