//! A simulated machine: GPUs, a CUDA driver and an NCCL in Rust, for programs where there is no
//! GPU.
//!
//! A [`Machine`] fills the two tables of C functions by which the host crate reaches the outside
//! ([`devcomm_sys`]), so that a program of the host API runs on it as it is. Host threads take
//! turns, and streams, kernels and the network go on between them, in order or in a random order by
//! seed.
//!
//! # Kernels
//!
//! Each simulated thread is a coroutine of one OS thread. Threads take turns where they synchronise
//! (or, on request, at every access). Windows and resource buffers, LSA pointers and multicast
//! addresses, all of NCCL's barriers, its reduce-copy functions, shared memory, block barriers,
//! warp operations, atomics and printing behave as on a GPU. What goes wrong is a report:
//! [`Machine::failure`] has it in types, the host's errors have its text. What would hang on GPUs
//! is one, too: [`Error::Deadlock`] says who waits for what.
//!
//! # The network
//!
//! GIN is the PROXY back end between the simulated GPUs. An operation is on its way when the call
//! that posts it returns: its source is read later, its bytes land later still, and its signal
//! comes after them, all when threads wait; with a seed, at random moments. Strong signals come
//! after all that was posted before them in their context to their peer; weak ones after their own
//! put, and with a seed sometimes before earlier ones. So a kernel that forgets a flush or a signal
//! fails for some seed. Windows, peers, signals and counters are checked when an operation is
//! posted.
//!
//! # Time
//!
//! The clock is virtual. It moves with what the machine does, and jumps to the next deadline, of a
//! kernel's wait or of a host thread's, when nothing else can happen.
//!
//! # What it is not
//!
//! Memory is sequentially consistent: a kernel that lacks a fence passes, also one before a put.
//! Plain dereferences of pointers are not seen, only what goes through `cuda_std` and `nccl_device`
//! is. One block's threads run one at a time, so that speed says nothing about a GPU. There is no
//! CFT, of the back ends of GIN there is PROXY alone, and what a kernel promises by a resource
//! sharing mode is not checked.
//!
//! # Safety model
//!
//! A launch is unsafe, as a kernel is: a kernel that writes through a wild pointer writes to this
//! process. Accesses through `cuda_std` are checked first; memory and stacks are surrounded by
//! unmapped pages, and a fault there is a report too. Everything else is safe.
//!
//! The first machine installs a panic hook and a handler for memory faults in the process. Panics
//! and faults outside simulated threads go to those that were there before.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use devcomm::{DevCommRequirements, Error, LaunchConfig, WITHOUT_PTX, World};
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
//! fn main() -> Result<(), Error> {
//!     let names = World::simulated(4)?.run(|rank| {
//!         let comm = rank.communicator()?;
//!         let table = comm.window::<u32>(4)?;
//!         let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
//!         let (kernels, stream) = (rank.load(&WITHOUT_PTX)?, rank.stream()?);
//!         let config = LaunchConfig::new(1, 32);
//!         // SAFETY: the table has an element a rank, and there are as many threads.
//!         unsafe { kernels.launch(&stream, introduce, config, (&dev, &table))? };
//!         stream.synchronize()?;
//!         let mut names = [u32::MAX; 4];
//!         table.copy_to_host(&mut names)?;
//!         Ok::<_, Error>(names)
//!     })?;
//!     assert_eq!(names, [[0, 1, 2, 3]; 4]);
//!     Ok(())
//! }
//! ```

mod barrier;
mod dev_comm;
mod driver;
mod error;
mod gpus;
mod hooks;
mod host_nccl;
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

pub use error::{Error, Limit, Result, Site, Stall, ThreadId, Waiter, Waiting};
pub use gpus::Activity;
pub use machine::{Attached, CallRecord, Effect, Fault, Machine, News, Ticket};
pub use simulation::Simulation;
pub use thread::OpenSession;
