//! Matrix products by cuBLASLt, with the fastest of the algorithms that its heuristics propose.

mod algorithm;

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use anyhow::{Context, Result};
use cudarc::cublaslt::{result, sys};
use devcomm::{Communicator, DataType, Stream, SymmetricBuffer};

use algorithm::Algorithm;

/// The workspace that algorithms get, in bytes: what NVIDIA recommends for Hopper.
const SCRATCH: usize = 32 << 20;

/// The number of algorithms that the heuristics are asked for.
const ASKED: usize = 256;

/// The number of these algorithms, the fastest in a short trial, that are timed again.
const TIMED: usize = 8;

/// A handle of the library, and a workspace on one GPU, which all plans of the handle share.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    scratch: SymmetricBuffer<u32>,
}

/// Declares owners of objects of the library, which destroy them when they are dropped.
macro_rules! owners {
    ($($(#[$doc:meta])* $name:ident($object:ident) $destroy:ident;)*) => { $(
        $(#[$doc])*
        struct $name(sys::$object);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the object is this owner's alone, and is not used again.
                let _ = unsafe { result::$destroy(self.0) };
            }
        }
    )* };
}

owners! {
    /// The description of a product.
    Description(cublasLtMatmulDesc_t) destroy_matmul_desc;
    /// The shape and the type of a matrix.
    Layout(cublasLtMatrixLayout_t) destroy_matrix_layout;
    /// What the heuristics may propose.
    Preference(cublasLtMatmulPreference_t) destroy_matmul_pref;
}

impl Layout {
    /// Returns the layout of a column-major matrix whose columns lie one after the other.
    fn new(element: sys::cudaDataType, rows: u64, columns: u64) -> Result<Self> {
        Ok(Self(result::create_matrix_layout(element, rows, columns, rows as i64)?))
    }
}

/// The element types of a product.
#[derive(Clone, Copy)]
pub struct Types {
    /// The type of A and B.
    pub factors: DataType,
    /// The type of C.
    pub product: DataType,
    /// Whether parts of a sum may be added in the type of C, and not only in f32, so that C is
    /// rounded several times.
    pub rounds_parts: bool,
}

impl Types {
    /// Returns the types of a product with sums in f32.
    pub fn new(factors: DataType, product: DataType) -> Self {
        Self { factors, product, rounds_parts: false }
    }

    /// Returns why cuBLASLt has no such product; `None` if it may have one.
    pub fn why_not(self) -> Option<&'static str> {
        (self.factors == DataType::Float8e5m2).then_some(
            "cuBLASLt has no product of e5m2 and e5m2; without it as the reference only samples \
             of the other variants' results are checked",
        )
    }
}

/// The scales and the epilogue of a product, by the addresses of their operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// The scales of A and B, by which the sums are multiplied.
    pub scales: Option<[u64; 2]>,
    /// The bias that is added to each row.
    pub bias: Option<u64>,
    /// Whether GELU follows the bias.
    pub gelu: bool,
    /// The matrix that is added to C.
    pub residual: Option<u64>,
}

/// Returns the library's name of a type; `None` if there are no products of it here.
fn cuda_type(data_type: DataType) -> Option<sys::cudaDataType> {
    use sys::cudaDataType::*;
    match data_type {
        DataType::Float32 => Some(CUDA_R_32F),
        DataType::Float16 => Some(CUDA_R_16F),
        DataType::Bfloat16 => Some(CUDA_R_16BF),
        DataType::Float8e4m3 => Some(CUDA_R_8F_E4M3),
        DataType::Float8e5m2 => Some(CUDA_R_8F_E5M2),
        _ => None,
    }
}

impl CublasLt {
    /// Loads the library for the communicator's GPU; `None` if it is not installed.
    pub fn load(comm: &Communicator) -> Result<Option<Self>> {
        // SAFETY: opening the library runs its initialisers, as intended.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let scratch = comm.mem_alloc::<u32>(SCRATCH / size_of::<u32>())?;
        let handle = result::create_handle().context("cublasLtCreate")?;
        Ok(Some(Self { handle, scratch }))
    }

    /// Plans `C = A x B^T` of shape `[m, n, k]`; `None` if cuBLASLt has no algorithm for it.
    ///
    /// 8-bit floats are added by the tensor cores alone (`CUBLASLT_MATMUL_DESC_FAST_ACCUM`), as the
    /// kernel in Rust does.
    pub fn plan(
        &self,
        [m, n, k]: [usize; 3],
        types: Types,
        extras: Extras,
    ) -> Result<Option<Plan<'_>>> {
        use sys::cublasLtMatmulPreferenceAttributes_t::*;
        let (rows, columns, terms) = (m as u64, n as u64, k as u64);
        let (Some(factor), Some(product), None) =
            (cuda_type(types.factors), cuda_type(types.product), types.why_not())
        else {
            return Ok(None);
        };
        // cuBLASLt's matrices are column-major: it computes the transpose, B x A^T, whose columns
        // are our rows.
        let mut plan = Plan {
            library: self,
            matmul: Description(result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )?),
            b: Layout::new(factor, terms, columns)?,
            a: Layout::new(factor, terms, rows)?,
            c: Layout::new(product, columns, rows)?,
            algorithms: Vec::new(),
            chosen: Cell::new(0),
            residual: extras.residual,
        };
        plan.describe_product(types, extras)?;
        let reductions = match types.rounds_parts {
            true => sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_MASK,
            false => sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
        };
        // SAFETY: the type consists of numbers and of a status, which is a success if it is 0.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; ASKED] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        let preference = Preference(result::create_matmul_pref()?);
        // SAFETY: the library's objects are live, and the attributes have their documented types.
        let status = unsafe {
            let set = |attribute, (value, size)| {
                result::set_matmul_pref_attribute(preference.0, attribute, value, size)
            };
            set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, addressed(&SCRATCH))?;
            set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, addressed(&reductions))?;
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.matmul.0,
                plan.b.0,
                plan.a.0,
                plan.c.0,
                plan.c.0,
                preference.0,
                ASKED as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        if status != sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            status.result().context("cublasLtMatmulAlgoGetHeuristic")?;
        }
        let usable = found.iter().take(count as usize).filter(|found| found.state.result().is_ok());
        plan.algorithms = usable.map(|found| Algorithm(found.algo)).collect();
        if plan.algorithms.is_empty() {
            return Ok(None);
        }
        Ok(Some(plan))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: plans borrow the library, so none is left.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The description of a product, and the algorithms that can compute it.
pub struct Plan<'a> {
    library: &'a CublasLt,
    matmul: Description,
    a: Layout,
    b: Layout,
    c: Layout,
    /// The algorithm that the heuristics expect to be the fastest comes first.
    algorithms: Vec<Algorithm>,
    /// The index of the algorithm that is used: 0 until [`choose`](Self::choose) has ended.
    chosen: Cell<usize>,
    /// The residual, as in [`Extras`].
    residual: Option<u64>,
}

/// Returns the address and the size of an attribute's value.
fn addressed<T>(value: &T) -> (*const c_void, usize) {
    (ptr::from_ref(value).cast(), size_of::<T>())
}

impl Plan<'_> {
    /// Sets the attributes of the product.
    fn describe_product(&self, types: Types, extras: Extras) -> Result<()> {
        use sys::cublasLtMatmulDescAttributes_t::*;
        let set = |attribute, (value, size)| {
            // SAFETY: the description is live, and an attribute has its documented type.
            unsafe { result::set_matmul_desc_attribute(self.matmul.0, attribute, value, size) }
        };
        let epilogue = match (extras.bias, extras.gelu) {
            (Some(_), true) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
            (Some(_), false) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (None, _) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        };
        // cuBLASLt's A, which is our B, is transposed: 1 is CUBLAS_OP_T.
        set(CUBLASLT_MATMUL_DESC_TRANSA, addressed(&1_i32))?;
        if types.factors.size() == 1 {
            set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, addressed(&1_i8))?;
        }
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, addressed(&epilogue))?;
        // cuBLASLt's A is our B.
        let [scale_a, scale_b] = extras.scales.map_or([None; 2], |scales| scales.map(Some));
        for (attribute, address) in [
            (CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale_b),
            (CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scale_a),
            (CUBLASLT_MATMUL_DESC_BIAS_POINTER, extras.bias),
        ] {
            address.map_or(Ok(()), |address| set(attribute, addressed(&address)))?;
        }
        Ok(())
    }

    /// Chooses the fastest algorithm: tries each, and times those that were fastest again.
    /// `slowest` turns this rank's times into those of the slowest rank, so that all ranks choose
    /// the same algorithm.
    pub fn choose(
        &self,
        try_one: impl Fn() -> Result<f64>,
        time: impl Fn() -> Result<f64>,
        slowest: impl Fn(&[f64]) -> Result<Vec<f64>>,
    ) -> Result<()> {
        let sorted = |algorithms: Vec<usize>, time: &dyn Fn() -> Result<f64>| -> Result<_> {
            let own: Result<Vec<f64>> = algorithms
                .iter()
                .map(|&algorithm| {
                    self.chosen.set(algorithm);
                    time()
                })
                .collect();
            let mut timed: Vec<_> = slowest(&own?)?.into_iter().zip(algorithms).collect();
            timed.sort_by(|a, b| a.0.total_cmp(&b.0));
            Ok(timed.into_iter().map(|(_, algorithm)| algorithm).collect::<Vec<_>>())
        };
        let mut fastest = sorted((0..self.algorithms.len()).collect(), &try_one)?;
        fastest.truncate(TIMED);
        self.chosen.set(sorted(fastest, &time)?[0]);
        Ok(())
    }

    /// Describes the chosen algorithm.
    pub fn describe(&self) -> String {
        let (chosen, tried) = (self.chosen.get(), self.algorithms.len());
        format!("{} (number {} of {tried} tried)", self.algorithms[chosen], chosen + 1)
    }

    /// Enqueues the product of the matrices at these addresses.
    ///
    /// # Safety
    ///
    /// A, B, C, and the operands that the plan got as [`Extras`] (scales, bias, residual) are
    /// allocated, and as large as the plan's shape and types need. Until the stream has completed
    /// the product, nothing else accesses C, and nothing writes the others; the residual may be C
    /// itself. All products of one [`CublasLt`] use its workspace, so no other one of them runs at
    /// the same time: they are enqueued on one stream, or on streams that the caller orders.
    pub unsafe fn enqueue(&self, [a, b, c]: [u64; 3], stream: &Stream) -> devcomm::Result<()> {
        // Without a residual beta is 0, so that C is not read.
        let (one, beta) = (1.0_f32, f32::from(u8::from(self.residual.is_some())));
        let added = self.residual.unwrap_or(c) as *const c_void;
        let c = c as *mut c_void;
        let algorithm = &raw const self.algorithms[self.chosen.get()].0;
        // SAFETY: the description and the layouts are the plan's. The caller's operands are as
        // large as these say, and no other product uses the workspace meanwhile. A `CUstream` is
        // also a `cudaStream_t`.
        let enqueued = unsafe {
            result::matmul(
                self.library.handle,
                self.matmul.0,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                b as *const c_void,
                self.b.0,
                a as *const c_void,
                self.a.0,
                added,
                self.c.0,
                c,
                self.c.0,
                algorithm,
                self.library.scratch.device_address() as *mut c_void,
                SCRATCH,
                stream.as_raw().cast(),
            )
        };
        let refused =
            |error| devcomm::Error::InvalidInput { what: format!("cublasLtMatmul: {error}") };
        enqueued.map_err(refused)
    }
}
