//! Host side of devcomm: NCCL communicators, symmetric windows, device communicators, kernel launch and bootstrap.
//!
//! A [`World`] is the ranks of a job, each with a GPU. It runs a function on every [`Rank`], which makes the
//! [`Communicator`], and from it [`Window`]s that every rank's kernels reach and a [`DevCommResource`] with which they
//! synchronise. [`Kernels`] are the program's compiled kernels on that GPU; a launch takes the windows and the device
//! communicator as arguments and is checked by the compiler.
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
//! # Beside other bindings
//!
//! Who knows nccl4py, pynccl or `torch.cuda.nccl` finds the same things under the same terms; `docs/host_api.md` of the repository
//! has them side by side. [`Communicator`] has the lifecycle and the collectives, [`group()`] takes operations together, [`MultiGpu`]
//! drives all GPUs from one thread, [`Stream::capture`] makes graphs, and [`DeviceSlice`] is memory of other libraries.
//!
//! # Safety model
//!
//! Everything is safe but [`Kernels::launch`], whose contract is the kernel's, and what takes raw pointers, streams or
//! communicators of others, whose lifetime only the caller knows. Three rules make that so:
//!
//! * what a rank makes stays on the rank's thread (nothing of it is `Send` but [`AbortHandle`] and [`KernelAbortHandle`]), where its CUDA context is
//!   current, as NCCL asks;
//! * memory, windows, device communicators, graphs and modules are freed only when this rank's streams are idle. If they cannot
//!   come to rest, because a rank is lost or a deadline was missed, these things are left to the end of the process;
//! * every wait looks at the health of the job, so that a dead rank is an error and not a hang; and whatever ends a communicator
//!   early has its kernels leave first, so that they do not wait for ever for a rank that is gone.
//!
//! Unsafe code that talks to NCCL and the driver is in the private module `sys`.

mod abort;
mod bootstrap;
mod collectives;
mod communicator;
mod config;
mod context;
mod dev_comm;
mod error;
mod gin_loopback;
mod graph;
mod group;
mod health;
mod kernels;
mod launch;
mod library;
mod machine;
mod multi_gpu;
mod one_sided;
mod params;
mod properties;
mod reduce_op;
mod registered_buffer;
mod sidecar;
mod slice;
mod stream;
mod symmetric_buffer;
mod sys;
mod window;

pub use abort::{AbortCause, KernelAbortHandle, StuckWait};
pub use bootstrap::builder::WorldBuilder;
pub use bootstrap::rank::Rank;
pub use bootstrap::spawn::LocalJob;
pub use bootstrap::world::World;
pub use collectives::{Configured, SameElement};
pub use communicator::{AbortHandle, CftTeamMode, Communicator, MemoryStat, ShrinkMode};
pub use config::{
    CollectiveConfig, CommConfig, CtaPolicy, GraphUsageMode, HostCftMode, NvlsHostMode, VendorValue,
};
pub use context::{Context, visible_gpus};
pub use dev_comm::{
    Counters, DevCommRequirements, DevCommResource, GinBarriers, LlA2a, LsaBarriers,
    RequirementsRefusal, ResourceBuffer, ResourceKey, ResourceRequest, Signals, TeamMultimem,
};
pub use devcomm_locate::{NcclVersion, NotFound};
#[cfg(feature = "simulator")]
pub use devcomm_sim::Simulation;
pub use devcomm_types::{
    CounterRange, DataType, Element, F8E4M3, F8E5M2, GinConnectionType, GinType, SignalRange, Team,
    TensorMap, Tiling, WaitFor, WaitKind,
};
pub use error::{Error, Result};
pub use gin_loopback::GinLoopback;
pub use graph::Graph;
pub use group::{Estimate, Group, group, simulate};
pub use kernels::{KernelSet, Kernels, ModuleSource};
pub use launch::{DeviceLimits, Dim3, FunctionInfo, LaunchConfig, LaunchRefusal};
pub use library::{DEV_COMM_VERSION, Library, OLDEST_VERSION, UniqueId, Versions};
pub use multi_gpu::MultiGpu;
pub use one_sided::{Signal, WaitSignalDesc};
pub use params::Params;
pub use properties::{GinTypes, Properties};
pub use reduce_op::{CustomReduceOp, ReduceOp, ReduceOperator};
pub use registered_buffer::RegisteredBuffer;
pub use slice::{Buffer, DeviceSlice, Dynamic};
pub use stream::{Event, Stream};
pub use symmetric_buffer::SymmetricBuffer;
pub use window::{LogicalEndpoint, Window, WindowFlags};
