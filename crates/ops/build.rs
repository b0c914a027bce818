//! Compiles the kernels of `devcomm-kernels` to PTX in `OUT_DIR/kernels`, with the feature `ptx`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "ptx")]
    cuda_builder::CudaBuilder::new("devcomm-kernels")
        .arch(cuda_builder::NvvmArch::Compute90)
        .check_all(true)
        .build()?;
    Ok(())
}
