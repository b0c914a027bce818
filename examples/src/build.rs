//! Compiles the kernels of `devcomm-example-kernels` to PTX, into `OUT_DIR/kernels`, if the feature
//! `ptx` is on.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=src/build.rs");
    #[cfg(feature = "ptx")]
    cuda_builder::CudaBuilder::new("devcomm-example-kernels")
        .arch(cuda_builder::NvvmArch::Compute90)
        .build()?;
    Ok(())
}
