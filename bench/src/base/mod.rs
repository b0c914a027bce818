//! What everything else uses: flags, files, ranks, numbers.

pub mod date;
pub mod files;
pub mod gpu;
pub mod kernels;
pub mod links;
pub mod options;
pub mod output;
pub mod ranks;
pub mod stats;
