//! Matrix products by cuBLASLt, with the algorithm that its heuristics choose.

use std::ffi::c_void;

use anyhow::{Context, Result};
use cudarc::cublaslt::{result, sys};
use devcomm::{Communicator, Stream, SymmetricBuffer};
use half::bf16;

/// Workspace of an algorithm, in bytes.
const SCRATCH: usize = 64 << 20;

/// A handle of the library, and a workspace on one GPU.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    scratch: SymmetricBuffer<u32>,
}

/// The type of the product's elements.
#[derive(Clone, Copy)]
pub enum Output {
    F32,
    Bf16,
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
    pub fn plan(&self, [m, n, k]: [usize; 3], output: Output) -> Result<Option<Plan<'_>>> {
        use sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
        let (rows, columns, terms) = (m as u64, n as u64, k as u64);
        let product = match output {
            Output::F32 => CUDA_R_32F,
            Output::Bf16 => CUDA_R_16BF,
        };
        let matmul =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        // cuBLASLt's matrices are column-major: it computes the transpose, B x A^T, whose columns
        // are our rows.
        let mut plan = Plan {
            library: self,
            matmul,
            b: result::create_matrix_layout(CUDA_R_16BF, terms, columns, k as i64)?,
            a: result::create_matrix_layout(CUDA_R_16BF, terms, rows, k as i64)?,
            c: result::create_matrix_layout(product, columns, rows, n as i64)?,
            algorithm: None,
        };
        // CUBLAS_OP_T, and the workspace limit, as addressable values.
        let (transposed, scratch) = (1_i32, SCRATCH);
        let preference = result::create_matmul_pref()?;
        // SAFETY: the descriptors are live, and the attributes have their documented types and
        // sizes.
        let found = unsafe {
            result::set_matmul_desc_attribute(
                matmul,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const scratch).cast(),
                size_of_val(&scratch),
            )?;
            let found = result::get_matmul_algo_heuristic(
                self.handle,
                matmul,
                plan.b,
                plan.a,
                plan.c,
                plan.c,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            found
        };
        match found {
            Ok(found) => plan.algorithm = Some(found.algo),
            Err(error) if error.0 == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => {
                return Ok(None);
            }
            Err(error) => return Err(error).context("cublasLtMatmulAlgoGetHeuristic"),
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

/// A product's descriptors and algorithm.
pub struct Plan<'a> {
    library: &'a CublasLt,
    matmul: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

impl Plan<'_> {
    /// Enqueues the product.
    ///
    /// # Safety
    ///
    /// The buffers have the elements of the plan's shape and type, and nothing else uses them until
    /// the stream has completed the product.
    pub unsafe fn enqueue(
        &self,
        a: &SymmetricBuffer<bf16>,
        b: &SymmetricBuffer<bf16>,
        c: u64,
        stream: &Stream,
    ) -> devcomm::Result<()> {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let c = c as *mut c_void;
        let algorithm = self.algorithm.as_ref().map_or(std::ptr::null(), |algorithm| algorithm);
        // SAFETY: the descriptors are the plan's, the rest is the caller's contract. A `CUstream`
        // is also a `cudaStream_t`.
        let enqueued = unsafe {
            result::matmul(
                self.library.handle,
                self.matmul,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                b.device_address() as *const c_void,
                self.b,
                a.device_address() as *const c_void,
                self.a,
                c,
                self.c,
                c,
                self.c,
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

impl Drop for Plan<'_> {
    fn drop(&mut self) {
        // SAFETY: the descriptors are the plan's, and not used again.
        unsafe {
            let _ = result::destroy_matmul_desc(self.matmul);
            for layout in [self.a, self.b, self.c] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
