//! Compiles, with the feature `ptx`, the kernels of `devcomm-guide-kernels` to PTX, into
//! `OUT_DIR/kernels`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "ptx")]
    cuda_builder::CudaBuilder::new("devcomm-guide-kernels").build()?;
    Ok(())
}
