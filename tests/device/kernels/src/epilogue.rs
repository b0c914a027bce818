//! A product with a custom epilogue, around the body of a shipped kernel.

use cuda_std::prelude::*;
use devcomm_kernels::gemm::epilogue::{Epilogue, Fragment};
use devcomm_kernels::gemm::gemm_mma;

/// The positive sums, each row times a number, in `f16`.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct ScaledRelu {
    /// A number for each row.
    pub rows: *const f32,
}

impl Epilogue for ScaledRelu {
    type Output = f16;

    fn apply<F: Fragment>(&self, sums: &mut F) {
        // SAFETY: the kernel's caller passes a number for each row of C.
        sums.update_in_c(|sum, row, _| unsafe {
            sum.max(0.0) * mem::load(self.rows.add(row as usize))
        });
    }
}

/// Computes `C = relu(A x B^T)` times a number for each row.
///
/// # Safety
///
/// The contract is that of `gemm_mma`, and `epilogue` has a number for each of the `m` rows.
#[kernel(arch = "sm_80", max_threads = 128)]
pub unsafe fn product_of_ones_own(
    a: *const bf16,
    b: *const bf16,
    c: *mut f16,
    m: u32,
    n: u32,
    k: u32,
    epilogue: ScaledRelu,
) {
    // SAFETY: the test passes matrices of these sizes.
    unsafe { gemm_mma::product([a, b], c, [m, n, k], [false; 2], epilogue) }
}
