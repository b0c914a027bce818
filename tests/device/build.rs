//! Compiles, with the feature `ptx`, the kernels of `devcomm-device-test-kernels` to PTX in
//! `OUT_DIR/kernels`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "ptx")]
    cuda_builder::CudaBuilder::new("devcomm-device-test-kernels")
        .arch(cuda_builder::NvvmArch::Compute90)
        .build()?;
    Ok(())
}
