//! The host's side of the seam: every question goes to the simulated thread that runs now.
//!
//! A simulator (the `devcomm-sim` crate) sets [`CTX`] to a [`ThreadCtx`] before it runs a thread's
//! code; the context carries the thread's indices and a table of what the simulator does for it
//! ([`Ops`]). Without one, a device function called on the host panics with a sentence that says
//! so.
//!
//! The hooks take `*const ThreadCtx`, not a reference: a simulator embeds the context in a larger
//! object and casts back, which a reference's provenance would not allow.

use std::cell::Cell;
use std::panic::Location;

pub use crate::atomic::{Order, Scope};
pub use crate::warp::Shuffle;

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
    /// What the simulator does.
    pub ops: &'static Ops,
}

/// How memory is touched; loads and stores made by plain Rust code are not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain load.
    Read,
    /// A plain store.
    Write,
    /// An atomic or ordered load.
    AtomicRead(Order, Scope),
    /// An atomic or ordered store.
    AtomicWrite(Order, Scope),
    /// An atomic read-modify-write.
    AtomicRmw(Order, Scope),
}

/// The copies behind a multicast address.
#[derive(Clone, Copy, Debug)]
pub struct MulticastParts {
    /// The first member's copy of the bytes at the address.
    pub first: *mut u8,
    /// Distance between the members' copies in bytes.
    pub stride: usize,
    /// Members.
    pub n: usize,
}

/// What a simulator provides to its threads. Hooks get the pointer that [`CTX`] holds.
#[expect(clippy::type_complexity, reason = "a table of functions; each type is used once")]
pub struct Ops {
    /// `barrier.sync id, count`: all `count` threads of a block (0: every thread of it) meet. `id`
    /// 0 is `__syncthreads`.
    pub barrier: fn(*const ThreadCtx, id: u32, count: u32, at: &'static Location<'static>),
    /// `bar.warp.sync`: the lanes of `mask` meet.
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
    /// The predicates of the lanes of `mask`, one bit a lane.
    pub ballot: fn(*const ThreadCtx, mask: u32, bool, at: &'static Location<'static>) -> u32,
    /// The block's copy of a shared static: `key` is the static's address. 16-byte aligned,
    /// contents undefined at first.
    pub shared_static: fn(*const ThreadCtx, key: usize, size: usize) -> *mut u8,
    /// A memory access about to happen (only while [`ThreadCtx::watch`]); the simulator may run
    /// other threads first.
    pub access:
        fn(*const ThreadCtx, address: usize, bytes: usize, Access, at: &'static Location<'static>),
    /// A `multimem` instruction about to happen: the copies of the bytes at a multicast address.
    /// Any other address is reported, and the call does not come back.
    pub multimem: fn(
        *const ThreadCtx,
        address: usize,
        bytes: usize,
        at: &'static Location<'static>,
    ) -> MulticastParts,
    /// The thread spins: run others. Every atomic load and `nanosleep` calls it.
    pub spin: fn(*const ThreadCtx, at: &'static Location<'static>),
    /// A fence.
    pub fence: fn(*const ThreadCtx, Order, Scope),
    /// `exit`: the thread leaves the kernel. It does not come back.
    pub exit: fn(*const ThreadCtx) -> !,
    /// Text printed by the kernel.
    pub print: fn(*const ThreadCtx, &str),
    /// `%clock64` / `%globaltimer`: a number that never falls.
    pub clock: fn(*const ThreadCtx) -> u64,
}

thread_local! {
    /// The simulated thread that runs now on this OS thread; null outside a simulator.
    pub static CTX: Cell<*const ThreadCtx> = const { Cell::new(std::ptr::null()) };
}
