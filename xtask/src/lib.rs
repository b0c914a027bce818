//! The modules of xtask that its integration tests use.

pub mod raw;
