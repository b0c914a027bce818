//! The modules that all others use: options, files, GPUs, ranks, statistics.

mod date;
mod files;
pub mod gpu;
mod kernels;
pub mod links;
pub mod options;
pub mod output;
pub mod ranks;
pub mod stats;

pub use date::date;
pub use files::TwinFiles;
pub use kernels::KERNELS;
pub use output::{OutputOptions, validate_output};
pub use stats::{Spread, geometric_mean};
