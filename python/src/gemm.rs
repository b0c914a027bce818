//! Matrix products on one GPU, on arrays of Python.

use devcomm::{
    DataType, DeviceSlice, Error, F8E4M3, F8E5M2, Gemm, GemmElement, GemmOutput, HalfElement,
    Product, ScaledElement,
};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::array::Array;
use crate::communicator::{Comm, PyCommunicator};
use crate::errors::invalid;
use crate::operand::Operand;
use crate::own::Own;
use crate::products::{Added, Keywords, Layout, Matrices, Products};

/// The product `c = a @ b.T` on one GPU, with sums in float32: of bfloat16 or float16, and on
/// Hopper GPUs of float8_e4m3fn or float8_e5m2.
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

    /// Enqueues a product: a of shape (m, k) and b of (n, k), of one type, and c of (m, n), of the
    /// same type, of bfloat16 for 8-bit floats, or of float32. Returns c; without c a new tensor,
    /// if a is a tensor of torch's.
    ///
    /// c is `activation(a @ b.T + bias) + residual`: bias of shape (n,) and residual of (m, n), of
    /// c's type, and activation "gelu" (its tanh approximation) or "silu". residual may be c.
    ///
    /// transposed_a, transposed_b: whether a is of shape (k, m), and b of (k, n); not of 8-bit
    ///     floats.
    /// scales: of 8-bit floats, two arrays of one float32, that of a and that of b, by which the
    ///     sums are multiplied. block_scales: of 8-bit floats with c in bfloat16, two arrays of
    ///     float32: of shape (ceil(k / 128), m), for 128 columns of a row of a each, and of
    ///     (ceil(n / 128), ceil(k / 128)), for 128 x 128 elements of b each.
    #[pyo3(signature = (
        a, b, c=None, *, bias=None, activation=None, residual=None, scales=None, block_scales=None,
        transposed_a=false, transposed_b=false, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn __call__<'py>(
        &self,
        a: &Bound<'py, PyAny>,
        b: &Bound<'py, PyAny>,
        c: Option<&Bound<'py, PyAny>>,
        bias: Option<&Bound<'py, PyAny>>,
        activation: Option<&Bound<'py, PyAny>>,
        residual: Option<&Bound<'py, PyAny>>,
        scales: Option<[Bound<'py, PyAny>; 2]>,
        block_scales: Option<[Bound<'py, PyAny>; 2]>,
        transposed_a: bool,
        transposed_b: bool,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let inner = &*self.own.get()?;
        let (comm, transposed) = (&*inner.comm, [transposed_a, transposed_b]);
        let layout = Layout { transposed, rows: |m| Some([m, m]), expected: SHAPES };
        let matrices = Matrices::new(comm, [a, b], (c, stream), &layout, output)?;
        let (Matrices { arrays: [of_a, of_b, of_c], .. }, [m, n, k]) = (&matrices, matrices.shape);
        of_b.require_type(of_a.data_type, "b")?;
        let added = Keywords { bias, activation, residual };
        let added = added.read(comm, of_c.data_type, [m, n])?;
        let [blocks_of_n, blocks_of_k] = [n, k].map(|extent| extent.div_ceil(128));
        let scales = match (scales, block_scales) {
            (None, None) => None,
            (Some(scales), None) => {
                Some(Scales { per_block: false, of: read(comm, &scales, "scales", None)? })
            }
            (None, Some(scales)) => {
                let shapes = [[blocks_of_k, m], [blocks_of_n, blocks_of_k]];
                let of = read(comm, &scales, "block_scales", Some(shapes))?;
                Some(Scales { per_block: true, of })
            }
            (Some(_), Some(_)) => return Err(invalid("scales and block_scales: only one of them")),
        };
        Call { inner, matrices: &matrices, added, transposed, scales, stream }.launch()?;
        Ok(matrices.c)
    }

    /// Unloads its kernels, when its last product is done.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }
}

const SHAPES: &str =
    "(m, k), (n, k) and (m, n), with transposed_a (k, m), with transposed_b (k, n)";

/// The scales of A and of B: arrays of Python, or their memory on the GPU.
struct Scales<A = Array> {
    per_block: bool,
    of: [A; 2],
}

/// Returns the scales of A and of B, of these shapes or of one element each.
fn read(
    comm: &Comm,
    scales: &[Bound<'_, PyAny>; 2],
    name: &str,
    shapes: Option<[[usize; 2]; 2]>,
) -> PyResult<[Array; 2]> {
    let one = |factor: usize| {
        let name = format!("{name}[{factor}]");
        let array = Array::of(comm, &scales[factor], &name)?;
        let shape = match shapes {
            Some(shapes) => shapes[factor].to_vec(),
            None => vec![1; array.shape.len()],
        };
        array.require(DataType::Float32, &shape, &name)
    };
    Ok([one(0)?, one(1)?])
}

/// Returns the type of a new C, for the type of A.
fn output(of_a: DataType) -> DataType {
    match of_a {
        DataType::Float8e4m3 | DataType::Float8e5m2 => DataType::Bfloat16,
        other => other,
    }
}

/// A product on arrays.
struct Call<'a, 'py> {
    inner: &'a Products<Gemm>,
    matrices: &'a Matrices<'py>,
    added: Added,
    transposed: [bool; 2],
    scales: Option<Scales>,
    stream: Option<&'a Bound<'py, PyAny>>,
}

impl Call<'_, '_> {
    /// Enqueues the product, if its types have one.
    fn launch(&self) -> PyResult<()> {
        use DataType::{Bfloat16, Float8e4m3, Float8e5m2, Float16, Float32};
        let [a, _, c] = self.matrices.arrays.each_ref().map(|array| array.data_type);
        match a {
            Float8e4m3 | Float8e5m2 if self.transposed != [false; 2] => {
                return Err(invalid(format!("transposed factors of {a:?}: they are of 16 bits")));
            }
            Float8e4m3 | Float8e5m2 => {}
            _ if self.scales.is_some() => {
                return Err(invalid(format!("scales of {a:?}: they are those of 8-bit floats")));
            }
            _ => {}
        }
        match (a, c) {
            (Bfloat16, Bfloat16) => self.run::<bf16, bf16>(turned),
            (Bfloat16, Float32) => self.run::<bf16, f32>(turned),
            (Float16, Float16) => self.run::<f16, f16>(turned),
            (Float16, Float32) => self.run::<f16, f32>(turned),
            (Float8e4m3, Bfloat16) => self.run::<F8E4M3, bf16>(scaled_by_block),
            (Float8e5m2, Bfloat16) => self.run::<F8E5M2, bf16>(scaled_by_block),
            (Float8e4m3 | Float8e5m2, Float32)
                if self.scales.as_ref().is_some_and(|scales| scales.per_block) =>
            {
                Err(invalid("block_scales with c in Float32: c is of Bfloat16"))
            }
            (Float8e4m3, Float32) => self.run::<F8E4M3, f32>(scaled),
            (Float8e5m2, Float32) => self.run::<F8E5M2, f32>(scaled),
            _ => Err(invalid(format!(
                "a product of {a:?} in {c:?}: it is of bf16 or f16 in the same type, of 8-bit \
                 floats in bf16, or of any of these in f32"
            ))),
        }
    }

    /// Enqueues a product of `T` in `O`, to which `add` adds what products of some types have.
    fn run<T: GemmElement, O: GemmOutput<T>>(&self, add: Add<T, O>) -> PyResult<()> {
        let Self { inner, matrices, added, transposed, scales, stream } = self;
        let (comm, own, [a, b, c]) = (&*inner.comm, &inner.stream, &matrices.arrays);
        let of_scales = scales.iter().flat_map(|scales| &scales.of);
        let others: Vec<_> = added.arrays().chain(of_scales).collect();
        let py = matrices.c.py();
        inner.with::<T, DeviceSlice<O>, _>(py, [a, b, c], &others, *stream, |gemm, [a, b], c| {
            let read = |array: &Array| Ok::<_, Error>(Operand::new(comm, array, own)?.slice);
            let on_gpu = |Scales { per_block, of: [a, b] }: &Scales| {
                Ok::<_, Error>(Scales { per_block: *per_block, of: [read(a)?, read(b)?] })
            };
            let scales = scales.as_ref().map(on_gpu).transpose()?;
            let product = added.slices(comm, own)?.to(gemm.product(matrices.shape));
            add(product, *transposed, scales).launch(a, b, c)
        })
    }
}

/// A function that adds transposed factors or scales to a product.
type Add<T, O> =
    for<'g> fn(Product<'g, T, O>, [bool; 2], Option<Scales<Factor>>) -> Product<'g, T, O>;
type Factor = DeviceSlice<f32>;

/// Adds transposed factors; the caller has refused scales.
fn turned<T: HalfElement, O: GemmOutput<T>>(
    product: Product<'_, T, O>,
    [of_a, of_b]: [bool; 2],
    _: Option<Scales<Factor>>,
) -> Product<'_, T, O> {
    let product = if of_a { product.transposed_a() } else { product };
    if of_b { product.transposed_b() } else { product }
}

/// Adds scales of whole factors; the caller has refused transposed factors, and scales of blocks.
fn scaled<T: ScaledElement, O: GemmOutput<T>>(
    product: Product<'_, T, O>,
    _: [bool; 2],
    scales: Option<Scales<Factor>>,
) -> Product<'_, T, O> {
    match scales {
        Some(Scales { of: [a, b], .. }) => product.scales([&a, &b]),
        None => product,
    }
}

/// Adds scales of blocks or of whole factors; the caller has refused transposed factors.
fn scaled_by_block<T: ScaledElement>(
    product: Product<'_, T, T::Output>,
    transposed: [bool; 2],
    scales: Option<Scales<Factor>>,
) -> Product<'_, T, T::Output> {
    match scales {
        Some(Scales { per_block: true, of: [a, b] }) => product.block_scales(&a, &b),
        scales => scaled(product, transposed, scales),
    }
}
