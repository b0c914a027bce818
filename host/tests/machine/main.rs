//! Everything the host does, on simulated machines whose calls are recorded and can be made to
//! fail.
//!
//! A test is a promise that the ranks of a world keep. Their own asserts look at results, and at
//! the calls that were made for them.
#![cfg(feature = "simulator")]

mod aborts;
mod children;
mod collectives;
mod copies;
mod failures;
mod graphs;
mod groups;
mod kernels;
mod life;
mod lifecycle;
mod one_sided;
mod requirements;
mod streams;
mod support;
