//! Products that do not compile: with a type of C that has no kernel, with scales of 16-bit floats,
//! and of transposed 8-bit floats.
//!
//! ```compile_fail,E0271
//! # use devcomm::{DeviceSlice, F8E4M3, Gemm};
//! fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<f32>) {
//!     gemm.launch(a, a, c, [1, 1, 16]).unwrap();
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use devcomm::{DeviceSlice, F8E4M3, Gemm};
//! # use half::f16;
//! fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<f16>) {
//!     gemm.product([1, 1, 16]).launch(a, a, c).unwrap();
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use devcomm::{DeviceSlice, Gemm};
//! # use half::bf16;
//! fn product(gemm: &Gemm, a: &DeviceSlice<bf16>, scale: &DeviceSlice<f32>) {
//!     gemm.product([1, 1, 8]).scales([scale; 2]).launch(a, a, a).unwrap();
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use devcomm::{DeviceSlice, F8E4M3, Gemm};
//! # use half::bf16;
//! fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<bf16>) {
//!     gemm.product([16; 3]).transposed_a().launch(a, a, c).unwrap();
//! }
//! ```
