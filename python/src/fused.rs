//! Matrix products with a collective, on arrays of Python.

use devcomm::{
    AllGatherGemm, Communicator, DataType, DeviceSlice, GemmAllReduce, GemmReduceScatter, Result,
    Stream, Window,
};
use half::bf16;
use pyo3::prelude::*;

use crate::communicator::PyCommunicator;
use crate::errors::exception;
use crate::own::{Own, detached};
use crate::products::{Products, Written, arrays, shape_of};

type Slice = DeviceSlice<bf16>;

/// A product with a collective.
pub trait Fused: Send + Sized + 'static {
    /// The memory of C.
    type C: Written;

    /// The shapes of A, B and C.
    const SHAPES: &str;

    /// Prepares products whose largest exchanged matrix has these extents.
    fn prepare(comm: &Communicator, stream: &Stream, most: [usize; 2]) -> Result<Self>;

    /// Returns the rows of the product and of C, for those of A.
    fn rows(rows_of_a: usize, ranks: usize) -> Option<[usize; 2]>;

    fn launch(&self, factors: [&Slice; 2], c: &Self::C, shape: [usize; 3]) -> Result<()>;

    /// Returns the fastest plan.
    fn measure(&self, factors: [&Slice; 2], c: &Self::C, shape: [usize; 3]) -> Result<String>;

    fn explain(&self, shape: [usize; 3]) -> Result<String>;
}

impl<G: Fused> Products<G> {
    fn on_arrays<R>(
        &self,
        all: [&Bound<'_, PyAny>; 3],
        stream: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&G, [&Slice; 2], &G::C, [usize; 3]) -> Result<R>,
    ) -> PyResult<R> {
        let (py, [a, b, c]) = (all[0].py(), &arrays(&self.comm, all)?);
        for (array, name) in [(a, "a"), (b, "b"), (c, "c")] {
            array.require_type(DataType::Bfloat16, name)?;
        }
        let ranks = self.comm.communicator.n_ranks();
        let shape = shape_of([a, b, c], |rows| G::rows(rows, ranks), G::SHAPES)?;
        self.with(py, [a, b, c], &[], stream, |gemm, ab, c| work(gemm, ab, c, shape))
    }
}

/// Defines the class of a product with a collective: its documentation, its names in Python, here
/// and in Rust, its memory of C, its extents, rows and shapes, and the documentation of a call.
macro_rules! class {
    (
        $(#[$doc:meta])* $name:literal $class:ident $gemm:ident ($m:ident, $most:ident) -> $c:ty;
        rows: $rows:expr; shapes: $shapes:literal; $(#[$call:meta])*
    ) => {
        impl Fused for $gemm {
            type C = $c;

            const SHAPES: &str = $shapes;

            fn prepare(comm: &Communicator, stream: &Stream, most: [usize; 2]) -> Result<Self> {
                Self::new(comm, stream, most[0], most[1])
            }

            fn rows(rows_of_a: usize, ranks: usize) -> Option<[usize; 2]> {
                let rows: fn(usize, usize) -> Option<[usize; 2]> = $rows;
                rows(rows_of_a, ranks)
            }

            fn launch(&self, [a, b]: [&Slice; 2], c: &$c, shape: [usize; 3]) -> Result<()> {
                $gemm::launch(self, a, b, c, shape)
            }

            fn measure(&self, [a, b]: [&Slice; 2], c: &$c, shape: [usize; 3]) -> Result<String> {
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
            #[pyo3(signature = (communicator, $m, $most, *, stream=None))]
            fn new(
                py: Python<'_>,
                communicator: &PyCommunicator,
                $m: usize,
                $most: usize,
                stream: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<Self> {
                let make = |comm: &_, stream: &_| $gemm::prepare(comm, stream, [$m, $most]);
                Ok(Self { own: Products::make(py, communicator, stream, make)? })
            }

            $(#[$call])*
            #[pyo3(signature = (a, b, c, *, stream=None))]
            fn __call__(
                &self,
                a: &Bound<'_, PyAny>,
                b: &Bound<'_, PyAny>,
                c: &Bound<'_, PyAny>,
                stream: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<()> {
                self.own.get()?.on_arrays([a, b, c], stream, Fused::launch)
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
                self.own.get()?.on_arrays([a, b, c], stream, Fused::measure)
            }

            /// Returns how a product of this shape, with all rows, is done, and why.
            fn explain(&self, py: Python<'_>, m: usize, n: usize, k: usize) -> PyResult<String> {
                let inner = self.own.get()?;
                let explain = || Fused::explain(&*inner.gemm.lock(), [m, n, k]);
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
    /// m, n: the largest product's rows and columns. stream: the one that runs the products; those
    /// that are enqueued to another one are ordered with its work by events. None: torch's current
    /// one, or devcomm's own if that is the default stream.
    "GemmAllReduce" PyGemmAllReduce GemmAllReduce(m, n) -> Window<bf16>;
    rows: |m, _| Some([m, m]);
    shapes: "(m, k), (n, k) and (m, n)";

    /// Enqueues a product: a of shape (m, k), b of (n, k), this rank's part of the k terms, and c a
    /// window, or a tensor at the beginning of one, of (m, n). Every rank passes the same window. k
    /// is a multiple of 8.
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

    /// Enqueues a product: a of shape (m, k) and b of (n, k), this rank's part of the k terms, and
    /// c of (m / ranks, n), this rank's part of the rows. m is a multiple of the number of ranks.
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

    /// Enqueues a product: a of shape (m / ranks, k), this rank's part of the rows, b of (n, k),
    /// and c of (m, n). n may differ between the ranks.
}
