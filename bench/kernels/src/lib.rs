//! Kernels that `devcomm-bench` measures and that `devcomm-kernels` does not ship.
//!
//! `gin_put`, `ll_exchange`, `lsa_barrier` and `reduce_copy` each have a twin in CUDA C++: a file
//! of the same name in `bench/cpp`, with the same entry points and parameters. `cargo xtask twins`
//! compiles both.
//!
//! # Safety model
//!
//! As in `devcomm-kernels`: a kernel is an `unsafe fn` whose documentation says what a launch must
//! guarantee.
#![cfg_attr(target_arch = "nvptx64", no_std)]

// On hosts a kernel is also a type, which often has the name of its file: the inner module keeps
// the names of types and of files apart.
#[path = ""]
mod files {
    pub mod gin_put;
    pub mod ll_exchange;
    pub mod lsa_barrier;
    pub mod lsa_put;
    pub mod p2p;
    pub mod plain;
    pub mod reduce_copy;
    pub mod signal;
    pub mod sum_rows;
}

// On the GPU a kernel is an entry point, with no name to import.
#[allow(unused_imports)]
pub use files::{
    gin_put::*, ll_exchange::*, lsa_barrier::*, lsa_put::*, p2p::*, plain::*, reduce_copy::*,
    signal::*, sum_rows::*,
};
