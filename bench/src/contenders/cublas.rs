//! Products of groups of rows by one call of cuBLAS.

use std::ffi::c_int;

use anyhow::{Context, Result};
use cudarc::cublas::sys::{
    self, cublasComputeType_t as Compute, cublasOperation_t as Transposition, cudaDataType,
};
use devcomm::{Communicator, Stream, SymmetricBuffer};

/// The workspace that NVIDIA recommends for Hopper, in bytes.
const SCRATCH: usize = 32 << 20;

/// `C = A x B^T` in bf16 for each group of rows, with sums in f32, by `cublasGemmGroupedBatchedEx`.
pub struct GroupedProduct {
    handle: sys::cublasHandle_t,
    /// The number of rows of each group that has any.
    rows: Vec<c_int>,
    columns: Vec<c_int>,
    terms: Vec<c_int>,
    /// The addresses of B, A and C of each group, on the GPU.
    addresses: [SymmetricBuffer<u64>; 3],
    scratch: SymmetricBuffer<u32>,
}

impl GroupedProduct {
    /// Prepares products of groups of these rows, at these addresses of A, B and C; `None` if
    /// cuBLAS is not installed.
    pub fn new(
        comm: &Communicator,
        groups: &[(usize, [u64; 3])],
        [n, k]: [usize; 2],
    ) -> Result<Option<Self>> {
        // SAFETY: opening the library runs its initialisers, as intended.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let scratch = comm.mem_alloc::<u32>(SCRATCH / size_of::<u32>())?;
        let addresses = |which: usize| -> Result<SymmetricBuffer<u64>> {
            let all: Vec<u64> = groups.iter().map(|(_, addresses)| addresses[which]).collect();
            let buffer = comm.mem_alloc(all.len())?;
            buffer.copy_from_host(&all)?;
            Ok(buffer)
        };
        let [a, b, c] = [addresses(0)?, addresses(1)?, addresses(2)?];
        // Nothing after this fails, so `Self` destroys the handle.
        let handle = cudarc::cublas::result::create_handle().context("cublasCreate")?;
        let product = Self {
            handle,
            rows: groups.iter().map(|(rows, _)| *rows as c_int).collect(),
            columns: vec![n as c_int; groups.len()],
            terms: vec![k as c_int; groups.len()],
            addresses: [b, a, c],
            scratch,
        };
        Ok(Some(product))
    }

    /// Enqueues the products.
    ///
    /// # Safety
    ///
    /// The buffers at the addresses are as large as the products need. Until the stream has
    /// completed the products, nothing else accesses C or writes A or B, and no other call of this
    /// object runs, since all calls use its workspace.
    pub unsafe fn enqueue(&self, stream: &Stream) -> devcomm::Result<()> {
        let groups = self.rows.len();
        let [b, a, c] = self.addresses.each_ref().map(|all| all.device_address());
        // cuBLAS's matrices are column-major: it computes the transpose, B x A^T. A group of
        // cuBLAS, which is some products of one shape, is a single product here (`size`).
        let (op_b, op_a) =
            (vec![Transposition::CUBLAS_OP_T; groups], vec![Transposition::CUBLAS_OP_N; groups]);
        let (one, zero, size) = (vec![1.0_f32; groups], vec![0.0_f32; groups], vec![1; groups]);
        let bf16 = cudaDataType::CUDA_R_16BF;
        // SAFETY: the arrays have an element for each group, and cuBLAS reads those of the host
        // within the call; the caller's buffers are as large as the products need, and no other
        // call uses the workspace meanwhile. A `CUstream` is also a `cudaStream_t`.
        let done = unsafe {
            sys::cublasSetStream_v2(self.handle, stream.as_raw().cast()).result().and_then(|()| {
                let workspace = self.scratch.device_address() as *mut _;
                // A new stream resets the workspace.
                sys::cublasSetWorkspace_v2(self.handle, workspace, SCRATCH).result()?;
                sys::cublasGemmGroupedBatchedEx(
                    self.handle,
                    op_b.as_ptr(),
                    op_a.as_ptr(),
                    self.columns.as_ptr(),
                    self.rows.as_ptr(),
                    self.terms.as_ptr(),
                    one.as_ptr().cast(),
                    b as *const _,
                    bf16,
                    self.terms.as_ptr(),
                    a as *const _,
                    bf16,
                    self.terms.as_ptr(),
                    zero.as_ptr().cast(),
                    c as *const _,
                    bf16,
                    self.columns.as_ptr(),
                    groups as c_int,
                    size.as_ptr(),
                    Compute::CUBLAS_COMPUTE_32F,
                )
                .result()
            })
        };
        let refused = |error| devcomm::Error::InvalidInput {
            what: format!("cublasGemmGroupedBatchedEx: {error}"),
        };
        done.map_err(refused)
    }
}

impl Drop for GroupedProduct {
    fn drop(&mut self) {
        // SAFETY: the handle is the product's, and not used again.
        let _ = unsafe { cudarc::cublas::result::destroy_handle(self.handle) };
    }
}
