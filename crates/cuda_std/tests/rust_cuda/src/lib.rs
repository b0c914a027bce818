//! Kernels in the style of Rust-CUDA's examples, which compile with this `cuda_std` and with that
//! of Rust-CUDA at commit ac2674f03208462709f538f07b10e3f8153c93b6 (August 2025). Only the manifest
//! selects one.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, missing_docs)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

// Each kernel is in a file of its name.
#[path = ""]
mod files {
    pub mod matrix_product;
    pub mod vector_add;
    pub mod warp_sum;
}

pub use files::matrix_product::matrix_product;
pub use files::vector_add::vector_add;
pub use files::warp_sum::warp_sum;
