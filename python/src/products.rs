//! What matrix products on arrays of Python have in common: a stream of their own, and operands.

use std::sync::Arc;

use devcomm::{
    Activation, DataType, DeviceSlice, Element, Error, GemmElement, GemmOutput, Product, Result,
    Stream, Window,
};
use half::bf16;
use parking_lot::ReentrantMutex;
use pyo3::prelude::*;

use crate::array::{Array, Place, new_tensor};
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::{invalid, invalid_input};
use crate::operand::Operand;
use crate::own::Own;
use crate::signals::waiting;

/// An operation, such as a product, on a stream of its own, and their communicator, which is
/// dropped last, since its GPU keeps the stream.
pub struct Products<G> {
    pub operation: ReentrantMutex<G>,
    pub stream: Stream,
    pub comm: Arc<Comm>,
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
        let operation = ReentrantMutex::new(waiting(py, || make(&comm.communicator, &stream))?);
        let home = comm.home.clone();
        Ok(Own::new(&home, Self { comm, stream, operation }))
    }

    /// Does `work`, which uses these arrays, on the operation's own stream, as if on the one that
    /// was asked for.
    pub fn call<R>(
        &self,
        py: Python<'_>,
        arrays: &[&Array],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&G, &Stream) -> Result<R>,
    ) -> PyResult<R> {
        let Self { comm, stream: own, operation } = self;
        let asked = comm.gpu.stream(stream, py)?;
        let on_own = || {
            let operation = operation.lock();
            fork(&asked, own, || work(&operation, own))
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
            let a = Operand::<T>::new(comm, a, own)?;
            let b = Operand::<T>::new(comm, b, own)?;
            C::with(comm, c, own, |c| work(gemm, [&a.slice, &b.slice], c))
        })
    }
}

/// Memory that a product is written to.
pub trait Written {
    /// Whether C may be a new tensor.
    const MAY_BE_NEW: bool = true;

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
        let operand = Operand::<T>::new(comm, array, stream)?;
        let done = write(&operand.slice)?;
        operand.finish(stream)?;
        Ok(done)
    }
}

impl Written for Window<bf16> {
    const MAY_BE_NEW: bool = false;

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

/// How the matrices of a product fit together.
pub struct Layout<R> {
    /// Whether A and B are stored transposed.
    pub transposed: [bool; 2],
    /// Returns for the rows of A how many the product has, `m`, and how many C has.
    pub rows: R,
    /// The shapes of A, B and C, for messages.
    pub expected: &'static str,
}

/// The matrices of a product, whose shapes fit together.
pub struct Matrices<'py> {
    pub arrays: [Array; 3],
    /// The numbers `[m, n, k]`.
    pub shape: [usize; 3],
    /// The rows of C.
    pub rows: usize,
    /// C, which the caller gave or which is a new tensor.
    pub c: Bound<'py, PyAny>,
}

impl<'py> Matrices<'py> {
    /// Returns the memory of A and B, which have two dimensions, and of C, which has two or at
    /// least as many elements. Without `c`, C is a new tensor of torch's of the type `new`, for the
    /// stream that is asked for.
    ///
    /// # Errors
    ///
    /// For shapes that do not fit together.
    pub fn new(
        comm: &Comm,
        [a, b]: [&Bound<'py, PyAny>; 2],
        (c, asked): (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyAny>>),
        layout: &Layout<impl Fn(usize) -> Option<[usize; 2]>>,
        new: impl FnOnce(DataType) -> DataType,
    ) -> PyResult<Self> {
        let like = a;
        let (a, b) = (Array::of(comm, a, "a")?, Array::of(comm, b, "b")?);
        let given = c.map(|c| Array::of(comm, c, "c")).transpose()?.map(Array::written);
        let turned = |array: &Array, transposed| match array.shape[..] {
            [columns, rows] if transposed => Some([rows, columns]),
            [rows, columns] => Some([rows, columns]),
            _ => None,
        };
        let [of_a, of_b] = layout.transposed;
        let fits = || {
            let ([rows, k], [n, terms]) = (turned(&a, of_a)?, turned(&b, of_b)?);
            let [m, rows] = (layout.rows)(rows).filter(|_| k == terms)?;
            let fits = given.as_ref().is_none_or(|c| match &c.shape[..] {
                [first, second] => [first, second] == [&rows, &n],
                _ => rows.checked_mul(n).is_some_and(|elements| c.len >= elements),
            });
            fits.then_some(([m, n, k], rows))
        };
        let Some((shape, rows)) = fits() else {
            let of_c = given.map_or(String::new(), |c| format!(" and c of {:?}", c.shape));
            let (a, b, expected) = (&a.shape, &b.shape, layout.expected);
            return Err(invalid(format!(
                "a of shape {a:?}, b of {b:?}{of_c} do not fit together: expected {expected}"
            )));
        };
        let (c, array) = match (c, given) {
            (Some(c), Some(array)) => (c.clone(), array),
            _ => {
                let (shape, new) = ([rows, shape[1]], new(a.data_type));
                let c = new_tensor(like, "new_empty", shape, new, asked)?;
                let array = Array::of(comm, &c, "c")?.written();
                (c, array)
            }
        };
        Ok(Self { arrays: [a, b, array], shape, rows, c })
    }
}

/// What a product adds to the sums, as Python's keywords.
#[derive(Default)]
pub struct Keywords<'a, 'py> {
    pub bias: Option<&'a Bound<'py, PyAny>>,
    pub activation: Option<&'a Bound<'py, PyAny>>,
    pub residual: Option<&'a Bound<'py, PyAny>>,
}

impl Keywords<'_, '_> {
    /// Returns the arrays, of the type and for the `rows` and `n` columns of C.
    pub fn read(&self, comm: &Comm, data_type: DataType, [rows, n]: [usize; 2]) -> PyResult<Added> {
        let array = |array: Option<&Bound<'_, PyAny>>, shape: &[usize], name| {
            let array = array.map(|array| Array::of(comm, array, name));
            array.map(|array| array?.require(data_type, shape, name)).transpose()
        };
        let activation = |name: &Bound<'_, PyAny>| activation_of(name.extract()?);
        Ok(Added {
            bias: array(self.bias, &[n], "bias")?,
            activation: self.activation.map(activation).transpose()?,
            residual: array(self.residual, &[rows, n], "residual")?,
        })
    }
}

/// What a product adds to the sums: arrays of Python, or their memory on the GPU.
pub struct Added<A = Array> {
    bias: Option<A>,
    activation: Option<Activation>,
    residual: Option<A>,
}

impl Added {
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.bias.iter().chain(&self.residual)
    }

    /// Returns the memory on the GPU, of elements of this type.
    pub fn slices<O: Element>(&self, comm: &Comm, own: &Stream) -> Result<Added<DeviceSlice<O>>> {
        let slice = |array: &Option<Array>| {
            let read = |array| Operand::new(comm, array, own);
            Ok::<_, Error>(array.as_ref().map(read).transpose()?.map(|operand| operand.slice))
        };
        let (bias, residual) = (slice(&self.bias)?, slice(&self.residual)?);
        Ok(Added { bias, activation: self.activation, residual })
    }
}

impl<O: Element> Added<DeviceSlice<O>> {
    /// Returns the product with all of it.
    pub fn to<'g, T, G>(&self, mut product: Product<'g, T, O, G>) -> Product<'g, T, O, G>
    where
        T: GemmElement,
        O: GemmOutput<T>,
    {
        if let Some(bias) = &self.bias {
            product = product.bias(bias);
        }
        if let Some(activation) = self.activation {
            product = product.activation(activation);
        }
        match &self.residual {
            Some(residual) => product.residual(residual),
            None => product,
        }
    }
}

/// Returns the activation of this name.
pub fn activation_of(name: &str) -> PyResult<Activation> {
    match name {
        "gelu" => Ok(Activation::Gelu),
        "silu" => Ok(Activation::Silu),
        _ => Err(invalid(format!("activation={name:?}: expected \"gelu\" or \"silu\""))),
    }
}
