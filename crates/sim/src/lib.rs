//! CPU simulator of GPUs and of NCCL's device API: the same kernel function, without a GPU.
//!
//! A launch runs a kernel for every rank, block and thread as a coroutine of one OS thread. Threads take turns where they
//! synchronise (or, on request, at every access), in order or in a random order by seed. Windows and resource buffers, LSA
//! pointers and multicast addresses, all of NCCL's barriers, its reduce-copy functions, shared memory, block barriers, warp
//! operations, atomics and printing behave as on a GPU; what would hang there is a report here: [`Error::Deadlock`] says
//! who waits for what.
//!
//! # The network
//!
//! GIN is the PROXY back end between the simulated ranks. An operation is on its way when the call that posts it returns: its
//! source is read later, its bytes land later still, and its signal comes after them, all when threads wait; with a seed, at
//! random moments. Strong signals come after all that was posted before them in their context to their peer; weak ones
//! after their own put, and with a seed sometimes before earlier ones. So a kernel that forgets a flush or a signal fails
//! for some seed. Windows, peers, signals and counters are checked when an operation is posted.
//!
//! Time does not pass: a wait with a timeout is over when nothing but such waits could go on, one after the other, in an
//! order that the seed fixes.
//!
//! # What it is not
//!
//! Memory is sequentially consistent: a kernel that lacks a fence passes, also one before a put. Plain dereferences of pointers are not
//! seen, only what goes through `cuda_std` and `nccl_device` is. One block's threads run one at a time, so that speed says
//! nothing about a GPU. There is no CFT, of the back ends of GIN there is PROXY alone, and what a kernel promises by a resource
//! sharing mode is not checked.
//!
//! # Safety model
//!
//! [`Simulator::launch`] is unsafe, as a kernel is: a kernel that writes through a wild pointer writes to this process. Accesses
//! through `cuda_std` are checked first; windows, buffers and stacks are surrounded by unmapped pages, and a fault there
//! is a report too. Everything else is safe.
//!
//! The first launch installs a panic hook and a handler for memory faults in the process. Panics and faults outside
//! simulated threads go to those that were there before.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use devcomm_sim::{DevCommConfig, LaunchConfig, Simulator};
//! use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Window};
//!
//! /// Each rank writes its number into every rank's part of `table`, `n_ranks` elements long.
//! #[kernel]
//! unsafe fn introduce(comm: DevComm, table: Window<u32>) {
//!     let team = comm.lsa_team();
//!     LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::this_block(), |barrier| {
//!         barrier.sync(MemoryOrder::Acquire);
//!         let peer = thread::thread_idx_x() as i32;
//!         if peer < team.n_ranks {
//!             // SAFETY: the table has an element a rank, and each is written by one rank.
//!             unsafe { table.lsa(peer).store(team.rank as usize, team.rank as u32) };
//!         }
//!         barrier.sync(MemoryOrder::Release);
//!     });
//! }
//!
//! fn main() -> devcomm_sim::Result<()> {
//!     let sim = Simulator::new(4)?;
//!     let table = sim.window::<u32>(4)?;
//!     let comm = sim.dev_comm(DevCommConfig { lsa_barriers: 1, ..Default::default() })?;
//!     let args = |rank: usize| (comm.rank(rank), table.rank(rank));
//!     // SAFETY: the table has an element a rank, and there are as many threads.
//!     unsafe { sim.launch(introduce, LaunchConfig::new(1, 32), args) }?;
//!     assert_eq!(table.read(3), [0, 1, 2, 3]);
//!     Ok(())
//! }
//! ```

mod barrier;
mod builder;
mod dev_comm;
mod driver;
mod error;
mod gpus;
mod hooks;
mod host_nccl;
mod launch;
mod machine;
mod memory;
mod multicast;
mod nccl;
mod panics;
mod ranks;
mod scheduler;
mod shared;
mod simulation;
mod stack;
mod thread;
mod trap;
mod waits;
mod warp;
mod world;

pub use builder::Builder;
pub use dev_comm::{
    Counters, DevComm, DevCommArg, DevCommConfig, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer,
    ResourceKey, ResourceRequest, Signals, TeamMultimem,
};
pub use devcomm_types::GinConnectionType;
pub use error::{Error, Limit, Result, Site, Stall, ThreadId, Waiter, Waiting};
pub use gpus::Activity;
pub use launch::{LaunchConfig, Report};
pub use machine::{Attached, CallRecord, Effect, Fault, Machine, Ticket};
pub use simulation::Simulation;
pub use thread::OpenSession;
pub use world::{Buffer, Simulator, Window, WindowArg};
