//! The interface to a simulator: the context of the running simulated thread.
//!
//! A simulator (the `devcomm-sim` crate) sets [`CTX`] to a [`ThreadCtx`] before it runs a thread's
//! code; the context has the thread's indices and the simulator's table of functions ([`Ops`]).
//! Without a context, a device function called on the host panics.
//!
//! The functions take a `*const ThreadCtx`: a simulator embeds the context in a larger struct and
//! casts back, which the provenance of a reference would not allow.

use std::cell::Cell;
use std::panic::Location;

pub use crate::atomic::{Order, Scope};
pub use crate::warp::Shuffle;

use super::Piece;

/// A thread's indices and its simulator.
#[repr(C)]
pub struct ThreadCtx {
    /// `threadIdx`.
    pub thread_idx: [u32; 3],
    /// `blockIdx`.
    pub block_idx: [u32; 3],
    /// `blockDim`.
    pub block_dim: [u32; 3],
    /// `gridDim`.
    pub grid_dim: [u32; 3],
    /// Dynamic shared memory of the block: address and length in bytes.
    pub dynamic_shared: (*mut u8, usize),
    /// Whether every memory access is reported through [`Ops::access`].
    pub watch: bool,
    /// The simulator's functions.
    pub ops: &'static Ops,
}

/// A kind of memory access. Loads and stores by plain Rust code are not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain load.
    Read,
    /// A load of a warpgroup's operand, which another thread of the warpgroup reports as
    /// [`Read`](Self::Read).
    ReadByOther,
    /// A plain store.
    Write,
    /// An atomic or ordered load.
    AtomicRead(Order, Scope),
    /// An atomic or ordered store.
    AtomicWrite(Order, Scope),
    /// An atomic read-modify-write.
    AtomicRmw(Order, Scope),
    /// A test of an `mbarrier`.
    BarrierTest,
    /// A change of an `mbarrier`.
    BarrierChange,
}

/// The unit that makes the accesses of a thread's operation, and what their end is tied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The thread itself.
    Thread,
    /// A TMA load, which ends with a phase of the `mbarrier` at this address.
    Load(usize),
    /// `st.async`, which ends with a phase of the `mbarrier` at this address.
    Send(usize),
    /// A copy that ends with the thread's bulk group: TMA stores.
    Bulk,
    /// A copy that ends with the thread's `cp.async` group.
    CpAsync,
    /// `wgmma`, which ends with the warpgroup's group of products.
    Wgmma,
}

/// A step of the synchronisation of asynchronous operations, which orders memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The thread's next accesses are made by this unit.
    Uses(Engine),
    /// The `mbarrier` at this address is initialised.
    BarrierInit(usize),
    /// `fence.mbarrier_init`: TMA and other blocks see what the thread has initialised.
    BarrierFence,
    /// The thread arrives at an `mbarrier`; its last arrival `ends` the phase.
    BarrierArrive {
        /// Address of the barrier.
        barrier: usize,
        /// Whether the phase has ended with this arrival.
        ends: bool,
    },
    /// Bytes of a copy have arrived at an `mbarrier`.
    BarrierTransaction {
        /// Address of the barrier.
        barrier: usize,
        /// Whether the phase has ended with these bytes.
        ends: bool,
    },
    /// The thread has seen the end of a phase of the `mbarrier` at this address.
    BarrierWaited(usize),
    /// The thread's operations of this kind since the last commit form a group.
    Commit(Engine),
    /// A wait until at most `pending` of the thread's groups of this kind have not ended.
    Wait {
        /// The kind of the groups.
        engine: Engine,
        /// Groups that may still be in flight.
        pending: u32,
        /// Whether the groups have only read their sources.
        reads_only: bool,
    },
    /// `fence.proxy.async`: asynchronous operations after it see ordinary writes before it, to
    /// memory of this kind.
    ProxyFence(Space),
    /// `wgmma.fence`: products after it see what is in the registers.
    RegisterFence,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The shared memory of the block and its cluster.
    Shared,
    /// All other memory.
    Global,
}

/// A step of the sums of `wgmma`, which are in the thread's registers only after a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumsStep {
    /// A product begins, which may add to them.
    Begin,
    /// The end of an addition, which the thread does not see.
    End,
    /// `fence_operand`: the thread may read them if it has waited for their products.
    Fence,
}

/// The copies of a multicast address: the memory of each GPU of the multicast team.
#[derive(Clone, Copy, Debug)]
pub struct MulticastParts {
    /// The address of the first copy.
    pub first: *mut u8,
    /// Distance between copies in bytes.
    pub stride: usize,
    /// The number of copies.
    pub n: usize,
}

/// The functions that a simulator provides to its threads. They get the pointer in [`CTX`].
#[expect(clippy::type_complexity, reason = "a table of functions; each type is used once")]
pub struct Ops {
    /// `barrier.sync id, count`: a barrier of `count` threads of the block (0: all threads). `id` 0
    /// is `__syncthreads`. Returns false if a planted bug removes it.
    pub barrier: fn(*const ThreadCtx, id: u32, count: u32, at: &'static Location<'static>) -> bool,
    /// `bar.warp.sync`: a barrier of the lanes of `mask`.
    pub sync_warp: fn(*const ThreadCtx, mask: u32, at: &'static Location<'static>),
    /// A shuffle among the lanes of `mask`: the value read (32 bits), and whether the source lane
    /// was in range.
    pub shuffle: fn(
        *const ThreadCtx,
        mask: u32,
        Shuffle,
        value: u32,
        lane: u32,
        width: u32,
        at: &'static Location<'static>,
    ) -> (u32, bool),
    /// The predicates of the lanes of `mask`, one bit per lane.
    pub ballot: fn(*const ThreadCtx, mask: u32, bool, at: &'static Location<'static>) -> u32,
    /// Exchanges words among all lanes of the warp, and returns those of each lane: what tensor
    /// cores and `ldmatrix` read of the other lanes' registers, at most the six words of the
    /// factors of `mma`. It orders no memory accesses.
    pub exchange:
        fn(*const ThreadCtx, words: [u32; 6], at: &'static Location<'static>) -> [[u32; 6]; 32],
    /// The block's copy of a shared static, 16-byte aligned, initially undefined: `key` is the
    /// static's address.
    pub shared_static:
        fn(*const ThreadCtx, key: usize, size: usize, at: &'static Location<'static>) -> *mut u8,
    /// Called before a memory access (only while [`ThreadCtx::watch`]); the simulator may run other
    /// threads first. Returns the address to access, which is another one if the simulator has the
    /// access see an old value or removes it.
    pub access: fn(
        *const ThreadCtx,
        address: usize,
        bytes: usize,
        Access,
        at: &'static Location<'static>,
    ) -> usize,
    /// Called for each piece of an asynchronous copy, after its accesses have been reported.
    /// Returns whether the simulator reads and writes the piece later, before a wait for the
    /// engine's operations returns.
    pub keeps: fn(*const ThreadCtx, Engine, Piece, at: &'static Location<'static>) -> bool,
    /// Called before a `multimem` instruction, an access of this kind: returns the copies of the
    /// bytes at a multicast address. For any other address it reports an error and does not return.
    pub multimem: fn(
        *const ThreadCtx,
        address: usize,
        bytes: usize,
        Access,
        at: &'static Location<'static>,
    ) -> MulticastParts,
    /// The thread may be polling: runs other threads. Every atomic load and `nanosleep` calls it.
    pub spin: fn(*const ThreadCtx, at: &'static Location<'static>),
    /// Runs other threads until the phase of this parity of the `mbarrier` at this address ends.
    pub wait_phase:
        fn(*const ThreadCtx, barrier: usize, parity: u32, at: &'static Location<'static>),
    /// Sets the thread's registers to `count`. To `raise` them it waits until the block has enough
    /// registers left.
    pub set_registers:
        fn(*const ThreadCtx, count: u32, raise: bool, at: &'static Location<'static>),
    /// The block's rank in its cluster, 0 in a launch without clusters.
    pub cluster_rank: fn(*const ThreadCtx) -> u32,
    /// The number of blocks of the cluster, 1 in a launch without clusters.
    pub cluster_size: fn(*const ThreadCtx) -> u32,
    /// A step of the sums of `wgmma`: the simulator changes them to what the thread would find.
    pub sums: fn(*const ThreadCtx, &mut [f32], SumsStep, at: &'static Location<'static>),
    /// The threads of the warpgroup wait for each other, as for the end of a `wgmma`. It orders no
    /// memory accesses.
    pub meet_warpgroup: fn(*const ThreadCtx, at: &'static Location<'static>),
    /// A barrier of all threads of the cluster; a `relaxed` one orders no memory accesses.
    pub cluster_sync: fn(*const ThreadCtx, relaxed: bool, at: &'static Location<'static>),
    /// The address that corresponds to `address`, in the block's shared memory, in the shared
    /// memory of the cluster's block `rank`. For any other address, or for a rank that the cluster
    /// does not have, it reports an error and does not return.
    pub map_shared:
        fn(*const ThreadCtx, address: usize, rank: u32, at: &'static Location<'static>) -> usize,
    /// Waits until the kernel that a dependent launch follows has ended; else does nothing.
    pub wait_for_previous: fn(*const ThreadCtx, at: &'static Location<'static>),
    /// The block lets the dependent launch that follows its kernel begin.
    pub launch_next: fn(*const ThreadCtx),
    /// A fence.
    pub fence: fn(*const ThreadCtx, Order, Scope, at: &'static Location<'static>),
    /// A step of asynchronous operations.
    pub event: fn(*const ThreadCtx, Event, at: &'static Location<'static>),
    /// Whether a wait at this place ends at once, since the simulator removes it or the thread has
    /// panicked.
    pub skips_wait: fn(*const ThreadCtx, at: &'static Location<'static>) -> bool,
    /// `exit`: ends the thread. Does not return.
    pub exit: fn(*const ThreadCtx) -> !,
    /// Text printed by the kernel.
    pub print: fn(*const ThreadCtx, &str),
    /// `%clock64` / `%globaltimer`: a number that never decreases.
    pub clock: fn(*const ThreadCtx) -> u64,
}

thread_local! {
    /// The simulated thread that runs on this OS thread; null outside a simulator.
    pub static CTX: Cell<*const ThreadCtx> = const { Cell::new(std::ptr::null()) };
}
