//! Types that the host and the device share: kernel parameters and what they refer to.
//!
//! The host crate fills these structs, a kernel receives them, and the simulator implements both
//! sides; so they are in a crate that all three depend on and that depends on none of them.
//!
//! * [`nccl`]: mirrors of NCCL's public structs ([`DevComm`], [`Window`], the barrier handles).
//!   Their layout is NCCL's, asserted at compile time.
//! * [`team`]: teams of ranks, and the translation of ranks between them ([`Team`]).
//! * [`cft`]: teams of ranks with logical endpoints of the fabric ([`CftTeamMode`]).
//! * [`gin`]: network communication by kernels ([`GinType`], [`GinConnectionType`]).
//! * [`element`]: the numeric types that NCCL knows ([`Element`], [`DataType`]).
//! * [`tensor_map`]: matrices as TMA reads them ([`TensorMap`]).
//! * [`wait`]: what kernels wait for, and how the host aborts waits ([`WaitFor`], [`AbortBlock`]).
//! * [`launch`]: a kernel with its arguments and the shape of its grid ([`Launch`],
//!   [`LaunchConfig`]).
//! * [`kernel`]: the traits of kernels and of their parameters ([`Kernel`], [`KernelParam`]).
//! * [`args`]: the traits of launch arguments ([`IntoArg`], [`LaunchArgs`]).
//!
//! # Safety model
//!
//! Nothing here dereferences a device address. A launch copies raw bytes and relies on traits that
//! are therefore unsafe to implement: [`KernelParam`] (two types of the same layout), [`Element`]
//! (plain old data of a known size), [`Kernel`] (compiled with these parameters), [`IntoArg`] (a
//! value that is what it says), and the tuples of both, [`KernelArgs`] and [`LaunchArgs`].
//!
//! # Example
//!
//! ```
//! use devcomm_types::Team;
//! let rail = Team { n_ranks: 2, rank: 1, stride: 4 };
//! assert_eq!(rail.to_world(5, 0), 1);
//! ```
#![no_std]

pub mod args;
pub mod cft;
pub mod element;
pub mod gin;
pub mod host_body;
pub mod kernel;
pub mod launch;
pub mod nccl;
pub mod team;
pub mod tensor_map;
pub mod wait;

pub use args::{Arg, ArgInfo, IntoArg, KernelArgs, LaunchArgs};
pub use cft::CftTeamMode;
pub use element::{DataType, Element, F8E4M3, F8E5M2};
pub use gin::{CounterRange, GinConnectionType, GinType, SignalRange};
pub use host_body::HostBody;
pub use kernel::{GridConstant, HostKernel, Kernel, KernelParam, Slice, Unmet};
pub use launch::{Dim3, Launch, LaunchConfig, LaunchTarget, Safe, Safety, Unsafe};
pub use nccl::{DevComm, Window};
pub use team::Team;
pub use tensor_map::{TensorMap, TensorMapDesc};
pub use wait::{AbortBlock, STUCK_RECORDS, StuckRecord, WaitFor, WaitKind};
