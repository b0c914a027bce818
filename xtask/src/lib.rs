//! The parts of the project's tasks that tests use as well.

pub mod raw;
