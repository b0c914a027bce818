//! Matrix products with a collective, on arrays of Python.

use devcomm::{
    AllGatherGemm, DataType, DeviceSlice, GemmAllReduce, GemmOptions, GemmReduceScatter, Result,
    Window, Wire,
};
use half::bf16;
use pyo3::prelude::*;

use crate::communicator::PyCommunicator;
use crate::errors::{exception, invalid, invalid_input};
use crate::own::{Own, detached};
use crate::products::{Added, Keywords, Layout, Matrices, Products, Written};

type Slice = DeviceSlice<bf16>;

/// A product with a collective. A `shape` is `[m, n, k]`.
pub trait Fused: Send + Sized + 'static {
    /// The memory of C.
    type C: Written;

    /// The shapes of A, B and C.
    const SHAPES: &str;

    /// Returns the rows of the product and of C, for those of A.
    fn rows(rows_of_a: usize, ranks: usize) -> Option<[usize; 2]>;

    fn launch(
        &self,
        factors: [&Slice; 2],
        c: &Self::C,
        shape: [usize; 3],
        added: &Added<Slice>,
    ) -> Result<()>;

    /// Returns the fastest plan, of products to which nothing is added: the last argument is there
    /// as [`launch`](Self::launch) has it.
    fn measure(
        &self,
        factors: [&Slice; 2],
        c: &Self::C,
        shape: [usize; 3],
        _: &Added<Slice>,
    ) -> Result<String>;

    fn explain(&self, shape: [usize; 3]) -> Result<String>;
}

impl<G: Fused> Products<G> {
    /// Does `work` with the arrays A, B and C and what is added. Returns C and what `work` returns.
    fn on_arrays<'py, R>(
        &self,
        factors: [&Bound<'py, PyAny>; 2],
        c: Option<&Bound<'py, PyAny>>,
        added: &Keywords<'_, 'py>,
        stream: Option<&Bound<'py, PyAny>>,
        work: impl FnOnce(&G, [&Slice; 2], &G::C, [usize; 3], &Added<Slice>) -> Result<R>,
    ) -> PyResult<(Bound<'py, PyAny>, R)> {
        let (py, comm) = (factors[0].py(), &*self.comm);
        if c.is_none() && !G::C::MAY_BE_NEW {
            return Err(invalid(
                "c is left out: it is in a window, which every rank passes; \
                 torch.ops.devcomm.gemm_all_reduce returns a tensor",
            ));
        }
        let ranks = comm.communicator.n_ranks();
        let rows = |rows| G::rows(rows, ranks);
        let layout = Layout { transposed: [false; 2], rows, expected: G::SHAPES };
        let matrices = Matrices::new(comm, factors, (c, stream), &layout, |of_a| of_a)?;
        let Matrices { arrays: [a, b, array_of_c], shape, rows, c } = matrices;
        for (array, name) in [(&a, "a"), (&b, "b"), (&array_of_c, "c")] {
            array.require_type(DataType::Bfloat16, name)?;
        }
        let added = added.read(comm, DataType::Bfloat16, [rows, shape[1]])?;
        let others: Vec<_> = added.arrays().collect();
        let done = self.with(py, [&a, &b, &array_of_c], &others, stream, |gemm, ab, c| {
            work(gemm, ab, c, shape, &added.slices(comm, &self.stream)?)
        })?;
        Ok((c, done))
    }
}

/// Defines the class of a product with a collective: its documentation, its names in Python, here
/// and in Rust, its extents and options, its memory of C, its rows and shapes, how it is made and
/// launched, the keywords that it adds, and the documentation of a call.
macro_rules! class {
    (
        $(#[$doc:meta])* $name:literal $class:ident $gemm:ident
            ($m:ident, $most:ident $(, $option:ident)?) -> $c:ty;
        rows: $rows:expr; shapes: $shapes:literal; new: |$comm:ident, $stream:ident| $new:expr;
        launch: $launch:expr; keywords: [$($keyword:ident),*]; $(#[$call:meta])*
    ) => {
        impl Fused for $gemm {
            type C = $c;

            const SHAPES: &str = $shapes;

            fn rows(rows_of_a: usize, ranks: usize) -> Option<[usize; 2]> {
                let rows: fn(usize, usize) -> Option<[usize; 2]> = $rows;
                rows(rows_of_a, ranks)
            }

            fn launch(
                &self,
                factors: [&Slice; 2],
                c: &$c,
                shape: [usize; 3],
                added: &Added<Slice>,
            ) -> Result<()> {
                type Launch = fn(&$gemm, [&Slice; 2], &$c, [usize; 3], &Added<Slice>) -> Result<()>;
                let launch: Launch = $launch;
                launch(self, factors, c, shape, added)
            }

            fn measure(
                &self,
                [a, b]: [&Slice; 2],
                c: &$c,
                shape: [usize; 3],
                _: &Added<Slice>,
            ) -> Result<String> {
                Ok($gemm::measure(self, a, b, c, shape)?.to_string())
            }

            fn explain(&self, shape: [usize; 3]) -> Result<String> {
                Ok($gemm::explain(self, shape)?.to_string())
            }
        }

        $(#[$doc])*
        #[pyclass(name = $name, module = "devcomm", frozen)]
        pub struct $class {
            own: Own<Products<$gemm>>,
        }

        #[pymethods]
        impl $class {
            #[new]
            #[pyo3(signature = (communicator, $m, $most, *, $($option=None,)? stream=None))]
            fn new(
                py: Python<'_>,
                communicator: &PyCommunicator,
                $m: usize,
                $most: usize,
                $($option: Option<&str>,)?
                stream: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<Self> {
                let make = |$comm: &_, $stream: &_| $new;
                Ok(Self { own: Products::make(py, communicator, stream, make)? })
            }

            $(#[$call])*
            #[pyo3(signature = (a, b, c=None, *, $($keyword=None,)* stream=None))]
            #[allow(clippy::too_many_arguments, reason = "keywords of Python")]
            fn __call__<'py>(
                &self,
                a: &Bound<'py, PyAny>,
                b: &Bound<'py, PyAny>,
                c: Option<&Bound<'py, PyAny>>,
                $($keyword: Option<&Bound<'py, PyAny>>,)*
                stream: Option<&Bound<'py, PyAny>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                #[allow(clippy::needless_update, reason = "some have all keywords")]
                let added = Keywords { $($keyword,)* ..Keywords::default() };
                let inner = self.own.get()?;
                Ok(inner.on_arrays([a, b], c, &added, stream, Fused::launch)?.0)
            }

            /// Times the plans of this shape, as products of these arrays, and does products of it
            /// by the fastest from now on; returns that plan. Collective, and not in a captured
            /// graph.
            #[pyo3(signature = (a, b, c, *, stream=None))]
            fn measure(
                &self,
                a: &Bound<'_, PyAny>,
                b: &Bound<'_, PyAny>,
                c: &Bound<'_, PyAny>,
                stream: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<String> {
                let inner = self.own.get()?;
                let added = Keywords::default();
                Ok(inner.on_arrays([a, b], Some(c), &added, stream, Fused::measure)?.1)
            }

            /// Returns how a product of this shape, with all rows, is done, and why.
            fn explain(&self, py: Python<'_>, m: usize, n: usize, k: usize) -> PyResult<String> {
                let inner = self.own.get()?;
                let explain = || Fused::explain(&*inner.operation.lock(), [m, n, k]);
                detached(py, explain).map_err(exception)
            }

            /// Frees its workspace, when its last product is done.
            fn close(&self, py: Python<'_>) -> PyResult<()> {
                self.own.close(py)
            }
        }
    };
}

class! {
    /// The product `c = sum over the ranks of a @ b.T` in bfloat16, by one kernel that communicates
    /// while it multiplies where that is faster. Collective, with the same m and n on every rank.
    ///
    /// m, n: the largest product's rows and columns. wire: the type in which the ranks send partial
    /// sums, "bf16", "f32" or "e4m3" (8-bit floats with scales); None: "bf16". stream: the one that
    /// runs the products; those that are enqueued to another one are ordered with its work by
    /// events. None: torch's current one, or devcomm's own if that is the default stream.
    "GemmAllReduce" PyGemmAllReduce GemmAllReduce(m, n, wire) -> Window<bf16>;
    rows: |m, _| Some([m, m]);
    shapes: "(m, k), (n, k) and (m, n)";
    new: |comm, stream| {
        let wire = wire.map_or(Ok(Wire::Bf16), str::parse);
        let wire = wire.map_err(|error| invalid_input(error.to_string()))?;
        GemmOptions::new().wire(wire).build(comm, stream, m, n)
    };
    launch: |gemm, [a, b], c, shape, _| gemm.launch(a, b, c, shape);
    keywords: [];

    /// Enqueues a product: a of shape (m, k), b of (n, k), this rank's part of the k terms, and c a
    /// window, or a tensor at the beginning of one, of (m, n), which is returned. Every rank passes
    /// the same window. k is a multiple of 8.
    ///
    /// In a captured graph, tensors of torch's that were made before the capture must last as long
    /// as the graph.
}

class! {
    /// This rank's rows of the sum over the ranks of `a @ b.T`, in bfloat16: a product followed by
    /// a reduce-scatter, in one kernel where that is faster. Collective, with the same m and n on
    /// every rank.
    ///
    /// m, n: the largest product's rows, of all ranks, and columns. stream: as for GemmAllReduce.
    "GemmReduceScatter" PyGemmReduceScatter GemmReduceScatter(m, n) -> DeviceSlice<bf16>;
    rows: |m, ranks| m.is_multiple_of(ranks).then_some([m, m / ranks]);
    shapes: "(m, k), (n, k) and (m / ranks, n)";
    new: |comm, stream| GemmReduceScatter::new(comm, stream, m, n);
    launch: |gemm, [a, b], c, shape, _| gemm.launch(a, b, c, shape);
    keywords: [];

    /// Enqueues a product: a of shape (m, k) and b of (n, k), this rank's part of the k terms, and
    /// c of (m / ranks, n), this rank's part of the rows. m is a multiple of the number of ranks.
    /// Returns c; without c a new tensor, if a is a tensor of torch's.
}

class! {
    /// The product of all ranks' rows of a with this rank's b, in bfloat16: an all-gather followed
    /// by `c = a @ b.T`, in one kernel where that is faster. Collective, with the same m and k on
    /// every rank.
    ///
    /// m, k: the largest product's rows, of all ranks, and terms. stream: as for GemmAllReduce.
    "AllGatherGemm" PyAllGatherGemm AllGatherGemm(m, k) -> DeviceSlice<bf16>;
    rows: |part, ranks| part.checked_mul(ranks).map(|m| [m, m]);
    shapes: "(m / ranks, k), (n, k) and (m, n)";
    new: |comm, stream| AllGatherGemm::new(comm, stream, m, k);
    launch: |gemm, [a, b], c, shape, added| added.to(gemm.product(shape)).launch(a, b, c);
    keywords: [bias, activation, residual];

    /// Enqueues a product: a of shape (m / ranks, k), this rank's part of the rows, b of (n, k),
    /// and c of (m, n). n may differ between the ranks. Returns c; without c a new tensor, if a is
    /// a tensor of torch's.
    ///
    /// c is `activation(a @ b.T + bias) + residual`: bias of shape (n,), activation "gelu" (its
    /// tanh approximation) or "silu", and residual of (m, n), which may be c. With one of them the
    /// product follows the all-gather, so all ranks pass some or none.
}
