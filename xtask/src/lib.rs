//! Parts of the tasks that tests use.

pub mod raw;
