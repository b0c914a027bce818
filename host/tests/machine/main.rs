//! Tests of the host crate on simulated machines, whose driver and NCCL calls are recorded and can
//! be made to fail.
//!
//! A test runs the ranks of a world, which check their results and the driver and NCCL calls.
#![cfg(feature = "simulator")]

mod abort_handles;
mod aborts;
mod agreement;
mod children;
mod collectives;
mod copies;
mod dlpack;
mod failures;
mod faults;
mod forks;
mod graphs;
mod groups;
mod interrupts;
mod kept;
mod kernels;
mod launches;
mod life;
mod lifecycle;
mod nonblocking;
mod one_sided;
mod other_libraries;
mod requirements;
mod side_channel;
mod streams;
mod stuck;
mod support;
mod survivors;
mod threads;
