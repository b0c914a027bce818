//! NCCL's device API for Rust kernels: load and store into the memory of other GPUs, and barriers with them.
//!
//! Two layers:
//!
//! * [`raw`]: NCCL's C functions under their own names. On the GPU they are NCCL's own code, linked from
//!   `libnccl_device.bc` and inlined; on the host they reach the simulator.
//! * the typed layer, everything else here: [`DevComm`], [`Window`], [`LsaPtr`], [`Coop`], [`LsaBarrier`]. It is written once
//!   for both, and folds away: a kernel written with it has no call and no stack frame.
//!
//! # Vocabulary
//!
//! The *LSA team* (load/store accessible) is the ranks whose memory this GPU reaches by plain loads and stores, over NVLink
//! for example. A *window* is a buffer that every rank registered with NCCL. A *coop* is the set of threads that makes a
//! cooperative call together.
//!
//! # Safety model
//!
//! Getting a pointer is safe, using one is not: whoever calls an unsafe method of [`LsaPtr`] promises that the index lies in
//! the peer's part of the window and that barriers order the access. Never make a `&[T]` of window memory, since peers
//! write it. Cooperative calls ([`LsaBarrier`], [`Coop::sync`]) want every thread of the coop to make the same call; where one
//! does not, the kernel hangs (the simulator says where).
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::{BarrierIndex, Coop, DevComm, LsaBarrier, MemoryOrder, Window};
//!
//! /// Each rank writes its number into every rank's part of `table`, `n_ranks` elements long.
//! #[kernel]
//! pub unsafe fn introduce(comm: DevComm, table: Window<u32>) {
//!     let team = comm.lsa_team();
//!     LsaBarrier::with(Coop::cta(), &comm, BarrierIndex::this_block(), |barrier| {
//!         barrier.sync(MemoryOrder::Acquire);
//!         let peer = thread::thread_idx_x() as i32;
//!         if peer < team.n_ranks {
//!             // SAFETY: the table has `n_ranks` elements in every rank, and each is written by one rank between barriers.
//!             unsafe { table.lsa(peer).store(team.rank as usize, team.rank as u32) };
//!         }
//!         barrier.sync(MemoryOrder::Release);
//!     });
//! }
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]

mod barrier;
mod comm;
mod coop;
pub mod raw;
mod window;

pub use barrier::{BarrierIndex, LsaBarrier, MemoryOrder};
pub use comm::DevComm;
pub use coop::Coop;
pub use devcomm_types::{DataType, Element, Team};
pub use window::{LsaPtr, Window};
