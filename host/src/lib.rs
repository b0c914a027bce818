//! Host side of devcomm: NCCL communicators, symmetric windows, device communicators, kernel launch
//! and bootstrap.
//!
//! A [`World`] is the ranks of a job, each with a GPU. It runs a function on every [`Rank`], which
//! makes the [`Communicator`], and from it [`Window`]s that every rank's kernels reach and a
//! [`DevCommResource`] with which they synchronise. [`Kernels`] are the program's compiled kernels
//! on that GPU; a launch takes the windows and the device communicator as arguments and is checked
//! by the compiler.
//!
//! # Example
//!
//! ```no_run
//! use devcomm_host::{DevCommRequirements, Error, KernelSet, LaunchConfig, ReduceOp, World};
//! # use devcomm_types as types;
//! # #[derive(Clone, Copy)] struct DevComm(types::DevComm);
//! # unsafe impl types::KernelParam for DevComm { type Abi = types::DevComm; const IS_DEV_COMM: bool = true; }
//! # #[derive(Clone, Copy)] struct Window(types::Window<f32>);
//! # unsafe impl types::KernelParam for Window { type Abi = types::Window<f32>; }
//! # #[allow(non_camel_case_types)] #[derive(Clone, Copy)] struct lsa_allreduce;
//! # impl types::Kernel for lsa_allreduce {
//! #     const NAME: &'static str = "lsa_allreduce"; const FILE: &'static str = "lsa_allreduce";
//! #     type Args = (DevComm, Window, Window, usize);
//! # }
//! # const KERNELS: KernelSet = KernelSet::new((&[], None));
//! # fn main() -> Result<(), Error> {
//! const BLOCKS: u32 = 32;
//! World::from_env()?.run(|rank| {
//!     let comm = rank.communicator()?;
//!     comm.require_single_lsa_team()?;
//!     let count = 1 << 20;
//!     let (send, recv) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
//!     send.copy_from_host(&vec![1.0; count])?;
//!     let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
//!     let (kernels, stream) = (rank.load(&KERNELS)?, rank.stream()?);
//!     let config = LaunchConfig::new(BLOCKS, 512);
//!     // SAFETY: every rank launches the same, and the kernel ends with a barrier.
//!     unsafe { kernels.launch(&stream, lsa_allreduce, config, (&dev, &send, &recv, count))? };
//!     stream.synchronize()?;
//!     comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
//!     stream.synchronize()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Two machines
//!
//! The machine under it is GPUs or simulated ones: `DEVCOMM_SIMULATE=4` gives any program four, and
//! `World::simulated` chooses them in the program. A simulated machine runs the bodies that
//! kernels have on the host, needs neither driver nor NCCL, and has a clock of its own. There, a
//! wait that nothing can end is [`Error::Deadlock`], and what only GPUs can do is
//! [`Error::NotSimulated`]. The feature `simulator` (on by default) has it.
//!
//! # Beside other bindings
//!
//! Who knows nccl4py, pynccl or `torch.cuda.nccl` finds the same things under the same terms;
//! `docs/host_api.md` of the repository has them side by side. [`Communicator`] has the lifecycle
//! and the collectives, [`group()`] takes operations together, [`MultiGpu`] drives all GPUs from
//! one thread, [`Stream::capture`] makes graphs, and [`DeviceSlice`] is memory of other libraries.
//!
//! # Safety model
//!
//! Everything is safe but [`Kernels::launch`], whose contract is the kernel's, and what takes raw
//! pointers, streams or communicators of others, whose lifetime only the caller knows. Three rules
//! make that so:
//!
//! * what a rank makes stays on the rank's thread (nothing of it is `Send` but [`AbortHandle`] and
//!   [`KernelAbortHandle`]), where its CUDA context is current, as NCCL asks;
//! * memory, windows, device communicators, graphs and modules are freed only when this rank's
//!   streams are idle. If they cannot come to rest, because a rank is lost or a deadline was
//!   missed, these things are left to the end of the process;
//! * every wait looks at the health of the job, so that a dead rank is an error and not a hang; and
//!   whatever ends a communicator early has its kernels leave first, so that they do not wait for
//!   ever for a rank that is gone.
//!
//! Unsafe code that talks to NCCL and the driver is in the private module `sys`.

// From the bottom up: a layer uses those before it, and none after it (`tests/layers.rs`).
mod communicator;
mod device;
mod error;
mod machine;
mod sys;
mod world;

pub use communicator::{
    AbortHandle, CftTeamMode, CollectiveConfig, CommConfig, Communicator, Configured, Counters,
    CtaPolicy, CustomReduceOp, DevCommRequirements, DevCommResource, Estimate, GinBarriers,
    GinTypes, GraphUsageMode, Group, HostCftMode, Library, LlA2a, LogicalEndpoint, LsaBarriers,
    MemoryStat, MultiGpu, NvlsHostMode, OLDEST_VERSION, Params, Properties, ReduceOp,
    ReduceOperator, RegisteredBuffer, RequirementsRefusal, ResourceBuffer, ResourceKey,
    ResourceRequest, SameElement, ShrinkMode, Signal, Signals, SymmetricBuffer, TeamMultimem,
    UniqueId, VendorValue, Versions, WaitSignalDesc, Window, WindowFlags, group, simulate,
};
pub use devcomm_locate::{NcclVersion, NotFound};
#[cfg(feature = "simulator")]
pub use devcomm_sim::{CallRecord, Effect, Fault, Machine as SimulatedMachine, Simulation};
pub use devcomm_types::{
    CounterRange, DataType, Dim3, Element, F8E4M3, F8E5M2, GinConnectionType, GinType,
    LaunchConfig, SignalRange, Team, TensorMap, TensorMapDesc, WaitFor, WaitKind,
};
pub use device::{
    Buffer, Context, DeviceLimits, DeviceSlice, Dynamic, Event, FunctionInfo, Graph,
    KernelAbortHandle, KernelSet, Kernels, ModuleSource, Stream, visible_gpus,
};
pub use error::{AbortCause, Error, LaunchRefusal, Result, StuckWait};
pub use sys::nccl::DEV_COMM_VERSION;
pub use world::{GinLoopback, LocalJob, Rank, World, WorldBuilder};
