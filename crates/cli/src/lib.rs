//! The commands of `devcomm`, which `cargo xtask` in a checkout of devcomm has too: set up a
//! machine, start a project, inspect kernels.
//!
//! Each command is a module with a struct of its arguments, whose method `run` returns the exit
//! code; an error is for the caller to print.
//!
//! # Safety model
//!
//! The unsafe code is the calls of the CUDA driver's functions, in [`cuda`].

pub mod bench;
pub mod cuda;
pub mod doctor;
pub mod new;
pub mod ptx;
pub mod setup;
pub mod wheels;
