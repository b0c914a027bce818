//! Host side of devcomm: NCCL communicators, symmetric windows, device communicators, kernel launch
//! and bootstrap.
//!
//! A [`World`] is the set of ranks of a job, one GPU per rank. It runs a function on each [`Rank`],
//! which creates a [`Communicator`] and from it [`Window`]s (memory that all ranks' kernels access)
//! and a [`DevCommResource`] (a device communicator, with which kernels synchronize). Both are
//! arguments of a kernel launch, whose types the compiler checks.
//!
//! # Example
//!
//! ```no_run
//! use cuda_std::prelude::*;
//! use devcomm_host::{DevCommRequirements, Error, ReduceOp, World};
//! # use nccl_device::{DevComm, Window};
//! # #[kernel]
//! # fn lsa_allreduce(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {}
//! # use devcomm_host::WITHOUT_PTX as KERNELS;
//!
//! # fn main() -> Result<(), Error> {
//! const BLOCKS: u32 = 32;
//! World::from_env()?.run(|rank| {
//!     rank.load(&KERNELS)?;
//!     let (comm, stream) = (rank.communicator()?, rank.stream()?);
//!     comm.require_single_lsa_team()?;
//!     let count = 1 << 20;
//!     let (send, recv) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
//!     stream.fill(&send, 1.0)?;
//!     let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
//!     lsa_allreduce::args(&dev, &send, &recv, count).grid(BLOCKS).block(512).launch(&stream)?;
//!     comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
//!     stream.synchronize()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Real and simulated GPUs
//!
//! A program runs on real or on simulated GPUs: `DEVCOMM_SIMULATE=4` gives any program four
//! simulated GPUs, and `World::simulated` selects them in code. The simulator runs kernels compiled
//! for the host, needs neither driver nor NCCL, and has its own clock. There, a wait that can never
//! end fails with [`StateError::Deadlock`], and a call that needs a real GPU fails with
//! [`DriverError::NotSimulated`]. The feature `simulator` (on by default) enables the simulator.
//!
//! # Compared with other bindings
//!
//! This API uses the terms of nccl4py, pynccl and `torch.cuda.nccl`; `docs/host_api.md` of the
//! repository compares them. [`Communicator`] has the lifecycle and the collectives, [`group()`]
//! starts operations together, [`MultiGpu`] drives all GPUs from one thread, [`Stream::capture`]
//! captures CUDA graphs, and [`DeviceSlice`] wraps memory of other libraries.
//!
//! # Safety model
//!
//! Everything is safe except launches of kernels that are `unsafe fn`s, whose contract is the
//! kernel's, and functions that take raw pointers, streams or communicators of other libraries,
//! whose lifetime only the caller knows. Four rules make the rest safe:
//!
//! * any thread may use what a rank creates: each call makes the rank's CUDA context current, NCCL
//!   is called for one thread at a time per communicator, and a thread closes an object only if
//!   neither the GPU nor a call in progress on another thread uses it ([`Context`] says more);
//! * memory, windows, device communicators, graphs and modules are freed only when this rank's
//!   streams are idle. If the streams cannot become idle, because a rank is lost or a deadline was
//!   missed, these resources are kept until the process ends;
//! * what a rank writes to a peer by a launch or a put is within the peer's memory: windows know
//!   their length on every rank, and a call with memory whose length on a peer is not known is
//!   `unsafe`;
//! * every wait checks the health of the job, so that a dead rank is an error and not a hang; and
//!   a communicator that ends early first asks its kernels to exit, so that they do not wait
//!   forever for a lost rank.
//!
//! In one point safe code trusts the other ranks. If they pass another count to a collective of
//! NCCL, it hangs or writes beyond the end of a buffer. A checked world
//! ([`WorldBuilder::checked`], on in debug builds) compares the ranks' calls, and refuses different
//! ones.
//!
//! Unsafe code that calls NCCL and the driver is in the private module `sys`.

// Layers, lowest first: error, machine, sys, device, communicator, world (the workspace's
// `tests/layers.rs`).
mod communicator;
mod device;
mod error;
mod machine;
mod sys;
mod world;

#[doc(hidden)]
pub use communicator::CollectiveCall;
pub use communicator::{
    AbortHandle, BorrowedRegistration, CftTeamMode, CollectiveConfig, CommConfig, CommResource,
    Communicator, Configured, Counters, CtaPolicy, CustomReduceOp, DevCommRequirements,
    DevCommResource, Estimate, GinBarriers, GinTypes, GraphUsageMode, Group, HostCftMode, Library,
    LlA2a, LogicalEndpoint, LsaBarriers, MemoryStat, MultiGpu, NvlsHostMode, OLDEST_VERSION,
    Params, Properties, ReduceOp, ReduceOperator, ReduceScale, RegisteredBuffer,
    RequirementsRefusal, ResourceBuffer, ResourceKey, ResourceRequest, SameElement, ShrinkMode,
    Signal, Signals, SymmetricBuffer, TeamMultimem, UniqueId, VendorValue, Versions,
    WaitSignalDesc, Window, WindowFlags, group, simulate,
};
/// The crate by which the driver is called. Its streams and memory can be passed to this API.
pub use cudarc;
pub use devcomm_locate::{NcclVersion, NotFound};
#[cfg(feature = "simulator")]
pub use devcomm_sim::{
    CallRecord, Effect, Fault, Lag, Machine as SimulatedMachine, Simulation, ThreadEffect,
    ThreadFault,
};
pub use devcomm_types::{
    CounterRange, DataType, Dim3, Element, F8E4M3, F8E5M2, GinConnectionType, GinType, Launch,
    LaunchConfig, LaunchTarget, SignalRange, Team, TensorMap, TensorMapDesc, WaitFor, WaitKind,
};
pub use device::{
    Buffer, Context, DeviceBuffer, DeviceLimits, DeviceSlice, Dynamic, Event, FunctionInfo, Graph,
    KernelAbortHandle, KernelSet, Kernels, KernelsOn, ModuleSource, OnStream, ParamInfo,
    PinnedBuffer, RawArg, Scope, ScopeThread, Stream, StreamOrder, Turn, WITHOUT_PTX, visible_gpus,
};
pub use error::{
    AbortCause, DevCommError, DriverError, Error, LaunchError, LaunchRefusal, NcclError,
    NcclResult, Result, StateError, StuckWait, WorldError,
};
pub use machine::interruptible;
pub use sys::dlpack::DlpackTensor;
pub use sys::nccl::DEV_COMM_VERSION;
/// What `#[devcomm::test]` expands to.
#[cfg(feature = "simulator")]
#[doc(hidden)]
pub use world::run_test;
#[cfg(feature = "simulator")]
pub use world::{Check, CheckReport, check, check_exhaustive, check_pct, check_random, replay};
pub use world::{GinLoopback, LocalJob, Rank, SideChannel, World, WorldBuilder};
