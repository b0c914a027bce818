//! NCCL's device API for Rust kernels: access to the memory of other GPUs by load and store and
//! over the network, and the synchronization that orders it.
//!
//! The crate has two layers:
//!
//! * [`raw`]: NCCL's C functions under their own names. On the GPU they are NCCL's own code, linked
//!   from `libnccl_device.bc` and inlined; on the host they reach the simulator.
//! * the typed layer, everything else in this crate: one implementation for GPU and host. It is
//!   inlined, so that a kernel that loads and stores makes no call and has no stack frame. Only the
//!   network operations of [`gin`] are calls.
//!
//! The typed layer has:
//!
//! * [`DevComm`], [`Team`], [`Coop`]: which ranks communicate, and which threads cooperate.
//! * [`Window`], [`LsaPtr`], [`ResourceBuffer`]: memory that every rank has a part of.
//! * [`LsaBarrier`], [`GinBarrier`], [`HybridBarrier`]: barriers between ranks by load and store,
//!   over the network, or both.
//! * [`NeighborBarrier`]: a barrier between each rank and its two neighbours; [`GridBarrier`]: a
//!   barrier of the blocks of a grid.
//! * [`Flag`]: a word by which one rank tells another that its data is written; [`Epoch`]: the
//!   number of a launch, as the flags' value.
//! * [`TileExchange`]: tiles that ranks push to each other while they compute.
//! * [`gin`]: puts, gets, signals, counters, flushes.
//! * [`Lamport`]: messages of floats without separate flags, a protocol that is named after Leslie
//!   Lamport: a slot holds the word [`EMPTY`], which no message has, until a message is stored to
//!   it. [`message_word`] makes the words of messages.
//! * [`PeerTiles`], [`PeerRegTiles`]: sums of a matrix over the ranks. Each rank sends tiles of its
//!   matrix, from shared memory or from registers, and [`Owners`] say which rank adds which tile.
//! * [`LlA2a`]: NCCL's low-latency (LL) all-to-all, whose messages carry their own flags, and
//!   [`LlA2aBuffer::all_reduce`]: an all-reduce of a few numbers inside a kernel.
//! * [`reduce_copy`]: sums and other reductions over the ranks' memory.
//! * [`Timeout`], [`DevComm::wait_until`]: timeouts of waits, and a wait for any condition. The
//!   host can abort every wait.
//! * [`DevComm::cft_team`], [`CftPlace`]: queries of CFT, NCCL's API for logical endpoints of the
//!   fabric. Its operations are not in this crate.
//!
//! # Vocabulary
//!
//! The *LSA team* (load/store accessible) is the ranks whose memory this GPU reaches by plain loads
//! and stores, over NVLink for example. The *rail team* is the ranks with the same LSA rank in
//! every LSA team. A *window* is a buffer that every rank registered with NCCL. A *coop* is the set
//! of threads that makes a cooperative call together. *GIN* is NCCL's GPU-initiated networking. A
//! *multimem* (multicast) address maps the same offset in the memory of every rank.
//!
//! # Safety model
//!
//! Getting a pointer is safe, using one is not: the caller of an unsafe method of [`LsaPtr`], or of
//! a put, get or reduction, guarantees that the index lies in the peer's part of the window and
//! that barriers or signals order the access. Never make a `&[T]` of window memory, since peers
//! write it.
//!
//! Barriers, signals, counters, flushes and LL all-to-all are safe: indices, ids and peers are
//! checked, and an invalid one traps. Every thread of a coop must make the same cooperative call;
//! otherwise the kernel hangs (the simulator reports where), and the host can abort it.
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
//!     let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
//!     barrier.sync(MemoryOrder::Acquire);
//!     let peer = thread::thread_idx_x() as i32;
//!     if peer < team.n_ranks {
//!         // SAFETY: the table has `n_ranks` elements in every rank, and each is written by one
//!         // rank between barriers.
//!         unsafe { table.lsa(peer).store(team.rank as usize, team.rank as u32) };
//!     }
//!     barrier.sync(MemoryOrder::Release);
//! }
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]

/// The names that most files use.
mod prelude {
    pub(crate) use cuda_std::atomic::{Order, Scope};
    pub(crate) use cuda_std::reduce::ReduceOp;
    pub(crate) use cuda_std::vector::{Accumulate, Vec16};
    pub(crate) use cuda_std::{hint, mem, thread, track_callers, warp};
    pub(crate) use devcomm_types::{Element, Team, WaitFor, WaitKind};

    pub(crate) use crate::call::CoopCall;
    pub(crate) use crate::wait::{Deadline, Outcome, finish, finish_by, finish_timed, poll};
    pub(crate) use crate::{Coop, DevComm, MemoryOrder, TimedOut, Timeout, Window, raw};
}

mod barrier;
mod call;
mod cft;
mod comm;
mod coop;
mod flag;
pub mod gin;
mod lamport;
mod ll_a2a;
mod order;
mod peer_owners;
mod peer_reg_tiles;
mod peer_tiles;
pub mod raw;
pub mod reduce_copy;
mod resource;
mod tile_exchange;
mod wait;
mod window;

pub use barrier::{
    Arrival, BarrierIndex, FenceLevel, GinBarrier, GinBarriers, GridBarrier, HybridBarrier,
    LsaBarrier, LsaBarriers, NeighborBarrier,
};
pub use cft::CftPlace;
pub use comm::DevComm;
pub use coop::Coop;
pub use devcomm_types::nccl::{
    CftBarrierHandle, GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle,
    ResourceHandle,
};
pub use devcomm_types::{CftTeamMode, CounterRange, DataType, Element, SignalRange, Team};
pub use flag::{Epoch, Flag, Flags, is_last_block};
#[cfg(not(target_arch = "nvptx64"))]
pub use lamport::LamportMemoryArgs;
pub use lamport::{
    ANY_RANKS, EMPTY, Lamport, LamportMemory, LamportSlots, lamport_words, message, message_word,
};
pub use ll_a2a::{LlA2a, LlA2aBuffer};
pub use order::MemoryOrder;
pub use peer_owners::{Everyone, Owners, PeerMatrix, PeerPlace, RowOwners, TileOwners};
pub use peer_reg_tiles::PeerRegTiles;
pub use peer_tiles::{PeerColumn, PeerSums, PeerTiles};
pub use resource::ResourceBuffer;
pub use tile_exchange::TileExchange;
pub use wait::{Aborted, TimedOut, Timeout};
pub use window::{LsaPtr, SymPtr, Window};
