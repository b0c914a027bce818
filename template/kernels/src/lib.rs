//! The kernels. They compile for GPUs, which have no `std`, and for the host, where simulated GPUs
//! run them.
#![no_std]

mod sum;

pub use sum::sum_of_all;
