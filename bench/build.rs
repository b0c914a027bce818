//! Compiles the kernels of `devcomm-bench-kernels` to PTX, into `OUT_DIR/kernels`.

use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    CudaBuilder::new("devcomm-bench-kernels").arch(NvvmArch::Compute90).build()?;
    Ok(())
}
