//! What the examples, benchmarks and tests of devcomm share.
//!
//! Inputs are functions of a seed, a rank and an index, so that each rank can compute what every
//! other one has, and with it what a result must be.

pub mod gemm;
pub mod machines;
pub mod messages;
pub mod numbers;
pub mod shapes;
pub mod simulated;
pub mod works;
