//! The modules of xtask that its integration tests use.

pub mod licences;
pub mod packages;
pub mod project;
pub mod raw;
