//! A simulated machine: GPUs, a CUDA driver and NCCL in Rust, to run programs on computers without
//! a GPU.
//!
//! A [`Machine`] implements the two function tables that the host crate calls ([`devcomm_sys`]), so
//! a program of the host API runs on it unchanged. Host threads take turns; streams, kernels and
//! the network make progress between turns, in an order that the settings determine.
//!
//! # Kernels
//!
//! Each simulated thread is a coroutine; all run on one OS thread. Threads switch where they
//! synchronise or, on request, at every access. Windows and resource buffers, LSA pointers and
//! multicast addresses, all of NCCL's barriers, its reduce-copy functions, shared memory, block
//! barriers, clusters, warp operations, atomics and printing behave as on a GPU. Every error is
//! reported: [`Machine::failure`] returns it, the host's errors contain its message. What would
//! hang on GPUs is reported too: [`Error::Deadlock`] lists what each thread waits for.
//!
//! # Schedules
//!
//! In what order threads run is a setting: fixed, random by a seed, by random priorities
//! ([`Simulation::pct`]), unfair ([`Simulation::lag`]) or chosen step by step
//! ([`Simulation::choices`]). A run is a function of the settings, whose text form repeats it.
//!
//! # The network
//!
//! GIN uses the PROXY back end between the simulated GPUs. When the call that posts an operation
//! returns, the operation is in flight: its source is read later, then its data and its signal are
//! written. This happens while threads wait; with a seed, at random times. A strong signal follows
//! all operations posted before it in the same context to the same peer. A weak signal follows its
//! own put and what its rank had flushed before, and with a seed may overtake other operations.
//! Windows, peers, signals and counters are checked when an operation is posted.
//!
//! # Races
//!
//! Two accesses to the same memory, one of them a write, that no synchronisation orders by PTX's
//! memory model, are an error ([`Error::Race`]) that names both: kernel, rank, block, thread and
//! line. The detection covers kernels, asynchronous copies, `wgmma`, GIN, streams, graphs,
//! collectives and copies of the host, and finds most races whatever the schedule. What a host
//! thread enqueues is ordered after another GPU's work only if that GPU's thread had waited for it
//! before the two threads met ([`Machine::exchange`]). The threads of one GPU may meet unseen: they
//! share what they have waited for. With [`Simulation::weak`], atomic loads see old values, and
//! copies read their source and write their target late.
//!
//! # Time
//!
//! The clock is virtual. It advances with the machine's work. When no thread can run, it jumps to
//! the next deadline of a wait in a kernel or in a host thread; but while a host thread is outside
//! the machine, it advances as the time outside does.
//!
//! # Limitations
//!
//! Plain dereferences of pointers are not checked; only accesses through `cuda_std` and
//! `nccl_device` are. Asynchronous copies read their source at once, except with
//! [`Simulation::weak`]: a race with such a read is reported, but the copy does not see wrong data.
//! Threads run one at a time, so simulated time does not predict a GPU's. CFT is not simulated,
//! PROXY is the only GIN back end, and misuse of GIN's resource sharing modes is not detected.
//!
//! # Safety model
//!
//! Kernels run in this process, so an unsafe kernel that writes through an invalid pointer writes
//! to the process's memory. Accesses through `cuda_std` are checked first. Device memory and stacks
//! are surrounded by unmapped pages, and a fault there is reported. The rest of the API is safe.
//!
//! The first machine installs a panic hook and a handler for memory faults in the process. Panics
//! and faults outside simulated threads are passed to the previous ones.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use devcomm::{DevCommRequirements, Error, WITHOUT_PTX, World};
//! use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};
//!
//! /// Each rank writes its rank into every rank's part of `table`, which has `n_ranks` elements.
//! #[kernel]
//! unsafe fn introduce(comm: DevComm, table: Window<u32>) {
//!     let team = comm.lsa_team();
//!     let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
//!     barrier.sync(MemoryOrder::Acquire);
//!     let peer = thread::thread_idx_x() as i32;
//!     if peer < team.n_ranks {
//!         // SAFETY: the table has one element per rank, and one rank writes each.
//!         unsafe { table.lsa(peer).store(team.rank as usize, team.rank as u32) };
//!     }
//!     barrier.sync(MemoryOrder::Release);
//! }
//!
//! fn main() -> Result<(), Error> {
//!     let names = World::simulated(4)?.run(|rank| {
//!         rank.load(&WITHOUT_PTX)?;
//!         let (comm, stream) = (rank.communicator()?, rank.stream()?);
//!         let table = comm.window::<u32>(4)?;
//!         let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
//!         // SAFETY: the table has one element per rank, and all ranks launch the same grid.
//!         unsafe { introduce::args(&dev, &table).grid(1).block(32).launch(&stream)? };
//!         stream.synchronize()?;
//!         let mut names = [u32::MAX; 4];
//!         table.copy_to_host(&mut names)?;
//!         Ok::<_, Error>(names)
//!     })?;
//!     assert_eq!(names, [[0, 1, 2, 3]; 4]);
//!     Ok(())
//! }
//! ```

mod base;
mod gpu;
mod machine;
mod memory;
mod race;

pub use self::base::error::{
    Error, Limit, Race, RaceAccess, Result, Site, Stall, ThreadId, Waiter, Waiting,
};
pub use self::base::mutation::{Change, Mutation};
pub use self::base::schedule::{Choice, Lag};
pub use self::base::simulation::Simulation;
pub use self::gpu::gpus::Activity;
pub use self::gpu::nccl::Unflushed;
pub use self::gpu::thread::OpenSession;
pub use self::machine::{
    Attached, CallRecord, Effect, EventCount, Fault, Machine, ThreadEffect, ThreadFault, Ticket,
};
pub use self::memory::traffic::Traffic;
