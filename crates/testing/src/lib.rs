//! Shared helpers of devcomm's examples, benchmarks and tests.
//!
//! Inputs are functions of a seed, a rank and an index, so that each rank can compute every other
//! rank's input, and the expected result.

pub mod experts;
pub mod gemm;
pub mod machines;
pub mod messages;
pub mod mlp;
pub mod numbers;
pub mod rmsnorm;
pub mod shapes;
pub mod simulated;
pub mod works;
