//! The modules that all others use: options, files, GPUs, ranks, statistics.

pub mod date;
pub mod files;
pub mod gpu;
pub mod kernels;
pub mod links;
pub mod options;
pub mod output;
pub mod ranks;
pub mod stats;
