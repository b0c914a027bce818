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
//!     comm.all_reduce(&send, &recv, count, ReduceOp::Sum, &stream)?;
//!     stream.synchronize()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Safety model
//!
//! Everything is safe but [`Kernels::launch`], whose contract is the kernel's. Three rules make that so:
//!
//! * what a rank makes stays on the rank's thread (nothing of it is `Send`), where its CUDA context is current, as NCCL asks;
//! * memory, windows, device communicators and modules are freed only when this rank's streams are idle. If they cannot
//!   come to rest, because a rank is lost or a deadline was missed, these things are left to the end of the process;
//! * every wait looks at the health of the job, so that a dead rank is an error and not a hang.
//!
//! Unsafe code that talks to NCCL and the driver is in the private module `sys`.

mod bootstrap;
mod communicator;
mod context;
mod dev_comm;
mod error;
mod kernels;
mod launch;
mod library;
mod memory;
mod sidecar;
mod stream;
mod sys;
mod window;

pub use bootstrap::rank::Rank;
pub use bootstrap::spawn::LocalJob;
pub use bootstrap::world::World;
pub use communicator::{Communicator, Properties, ReduceOp};
pub use context::{Context, visible_gpus};
pub use dev_comm::{DevCommRequirements, DevCommResource};
pub use devcomm_locate::{NcclVersion, NotFound};
pub use error::{Error, Result};
pub use kernels::{KernelSet, Kernels, ModuleSource};
pub use launch::{DeviceLimits, Dim3, FunctionInfo, LaunchConfig, LaunchRefusal};
pub use library::{DEV_COMM_VERSION, Library, OLDEST_VERSION, UniqueId};
pub use memory::Memory;
pub use stream::{Event, Stream};
pub use window::Window;
