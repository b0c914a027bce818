//! Compiles the kernels of `devcomm-device-test-kernels` to PTX, into `OUT_DIR/kernels`.

use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    CudaBuilder::new("devcomm-device-test-kernels").arch(NvvmArch::Compute90).build()?;
    Ok(())
}
