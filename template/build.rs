//! Compiles the kernels for GPUs, with the feature `ptx`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "ptx")]
    cuda_builder::CudaBuilder::new("{{project-name}}-kernels")
        .arch(cuda_builder::NvvmArch::Compute90)
        .build()?;
    Ok(())
}
