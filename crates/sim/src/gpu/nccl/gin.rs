//! GIN: contexts, signals, counters and signal shadows.
//!
//! # Safety
//!
//! A kernel's device communicator points to its [`GinComm`], which outlives the launch. A [`Gin`]
//! is recognised by its tag, which only [`init`] writes. Only one GPU thread runs at a time.

pub(super) mod barrier;
pub(super) mod hybrid;
pub(crate) mod network;
pub(super) mod post;
pub(super) mod shadow;
mod unflushed;
pub(super) mod wait;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use devcomm_types::nccl::{CoopAny, DevComm, Gin, Team};
use devcomm_types::{WaitFor, WaitKind};
use litemap::LiteMap;
use nccl_device::raw::host::CoopCall;

use self::network::{Network, QueueKey};
pub use self::unflushed::Unflushed;
use super::coop::{Coop, coop_rank};
use super::{caller, record_communicator};
use crate::base::error::Site;
use crate::gpu::gpus::Gpus;
use crate::gpu::ranks;
use crate::gpu::thread::Thread;
use crate::race::Releases;

/// The bit in NCCL's back-end mask of PROXY, the simulated back end.
const PROXY: u32 = 1 << 2;

/// A set of GIN barriers and its signals.
#[derive(Clone, Copy)]
pub(crate) struct BarrierSet {
    pub(crate) signal0: u32,
    pub(crate) signals: u32,
    /// Ranks of the team, if known. A barrier has one signal per rank.
    pub(crate) ranks: Option<u32>,
}

/// The kind of change of a signal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SignalOp {
    Inc,
    Add,
}

/// One rank's GIN state in a device communicator.
pub(crate) struct GinRank {
    /// The signals by context, then by signal; counters likewise.
    signals: Box<[Cell<u64>]>,
    counters: Box<[Cell<u64>]>,
    /// The kind of changes of each signal since its last reset.
    ops: Box<[Cell<Option<SignalOp>>]>,
    /// The kind of changes of each VA signal, by the window's id and the offset in it.
    va_ops: RefCell<LiteMap<(u32, usize), SignalOp>>,
    /// The signals' shadows, in memory that kernels can access.
    shadows: *mut u64,
}

impl GinRank {
    pub(crate) fn new((signals, counters): (u32, u32), shadows: *mut u64) -> Self {
        Self {
            signals: vec![Cell::new(0); signals as usize].into(),
            counters: vec![Cell::new(0); counters as usize].into(),
            ops: vec![Cell::new(None); signals as usize].into(),
            va_ops: RefCell::default(),
            shadows,
        }
    }
}

/// A device communicator's GIN state.
pub(crate) struct GinComm {
    /// The device communicator's id.
    pub(crate) id: u32,
    /// The GPU of each rank.
    pub(crate) gpus: Rc<[u32]>,
    /// Distance between connected ranks.
    pub(crate) stride: usize,
    pub(crate) contexts: u32,
    /// Signals and counters per context.
    pub(crate) signals: u32,
    pub(crate) counters: u32,
    /// Whether signals are strong by default.
    pub(crate) strong: bool,
    /// Depth of a queue, in operations.
    pub(crate) depth: usize,
    pub(crate) barriers: Vec<BarrierSet>,
    pub(crate) per_rank: Box<[GinRank]>,
    pub(crate) network: Rc<Network>,
}

impl GinComm {
    /// Records that `thread`, the first of its coop, opens or closes a session of a rank on the
    /// barrier with this index and first signal, on one context or on all.
    pub(super) fn session(
        &self,
        thread: &Thread,
        at: Site,
        (rank, context): (u32, Option<u32>),
        (index, signal): (u32, u32),
        open: bool,
    ) {
        let contexts = context.map_or(0..self.contexts, |context| context..context + 1);
        let barrier = ("GIN barrier", index);
        for context in contexts {
            let at_signal = (context * self.signals + signal) as usize;
            let word = self.per_rank[rank as usize].signals[at_signal].as_ptr().addr();
            if open {
                thread.gpus().session_opened(thread, word, barrier, at);
            } else {
                thread.gpus().session_closed(thread, word, barrier, at);
            }
        }
    }
}

impl Drop for GinComm {
    fn drop(&mut self) {
        let words = self.per_rank.iter().flat_map(|rank| [&rank.signals, &rank.counters]);
        let words = words.map(|words| std::ptr::from_ref(&**words));
        self.network.forget(self.id, words);
    }
}

/// The simulator's representation of an `ncclGin_C`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    tag: *const u8,
    gin: *const GinComm,
    comm: *const DevComm,
    rank: u32,
    context: u32,
}

const _: () = assert!(size_of::<Handle>() <= size_of::<Gin>());

/// The address is the tag of handles.
static GIN: u8 = 0;

impl Handle {
    /// Returns a handle for `context` of a device communicator.
    ///
    /// # Safety
    ///
    /// `comm` is a device communicator.
    unsafe fn new(comm: *const DevComm, context: u32, thread: &Thread, at: Site) -> Self {
        // SAFETY: the kernel passes what NCCL's functions initialised.
        let dev = unsafe { &*comm };
        let gin: *const GinComm = dev.gin_handles[0].cast();
        if gin.is_null() {
            thread.misuse(at, "GIN, but the device communicator was made without a gin_connection");
        }
        if context >= dev.gin_context_count {
            let contexts = dev.gin_context_count;
            let what = format!("GIN context {context}: the device communicator has {contexts}");
            thread.misuse(at, what);
        }
        Self { tag: &raw const GIN, gin, comm, rank: dev.rank as u32, context }
    }

    /// Decodes a handle; fails the kernel if `init` did not write it.
    ///
    /// # Safety
    ///
    /// `net` points to an `ncclGin_C`.
    unsafe fn of(net: *const Gin, thread: &Thread, at: Site) -> Self {
        // SAFETY: the caller's contract; any bits are a valid `Handle`, and it is used only if the
        // tag is right.
        let handle = unsafe { *net.cast::<Self>() };
        if !std::ptr::eq(handle.tag, &raw const GIN) {
            thread.misuse(at, "the GIN handle was not made by ncclGin_C_init");
        }
        handle
    }
}

pub(super) unsafe extern "C-unwind" fn init(
    net: *mut Gin,
    backend_mask: u32,
    comm: *const DevComm,
    context: i32,
) {
    let (thread, at) = caller();
    // SAFETY: the kernel passes a device communicator.
    let handle = unsafe { Handle::new(comm, context as u32, thread, at) };
    if backend_mask & PROXY == 0 {
        let what = format!(
            "the back-end mask {backend_mask:#x} lacks PROXY, the device communicator's back end: \
            on a GPU that corrupts memory"
        );
        thread.misuse(at, what);
    }
    // SAFETY: the kernel passes memory for an `ncclGin_C`, which is at least as large.
    unsafe { net.cast::<Handle>().write(handle) };
}

pub(super) unsafe extern "C-unwind" fn init_with_sharing(
    net: *mut Gin,
    backend_mask: u32,
    comm: *const DevComm,
    context: i32,
    sharing: u8,
) {
    if sharing > 2 {
        let (thread, at) = caller();
        thread.misuse(at, format!("{sharing} is not a resource sharing mode: use 0, 1 or 2"));
    }
    // SAFETY: the kernel passes what NCCL's functions initialised.
    unsafe { init(net, backend_mask, comm, context) }
}

/// A thread's call of a GIN function on a context.
#[derive(Clone, Copy)]
struct Call<'a> {
    thread: &'a Thread,
    gpus: &'a Gpus,
    at: Site,
    gin: &'a GinComm,
    handle: Handle,
    /// What NCCL releases before it posts an operation.
    releases: Releases,
}

impl<'a> Call<'a> {
    /// Returns a call with handle `net` by the running thread.
    ///
    /// # Safety
    ///
    /// `net` is a handle that `init` wrote.
    unsafe fn on(net: *const Gin) -> Self {
        let (thread, at) = caller();
        // SAFETY: the kernel passes what NCCL's functions initialised.
        let handle = unsafe { Handle::of(net, thread, at) };
        Self::with(handle, thread, at)
    }

    fn with(handle: Handle, thread: &'a Thread, at: Site) -> Self {
        // SAFETY: the module's contract: the `GinComm` outlives the launch.
        let gin = unsafe { &*handle.gin };
        record_communicator(thread, &gin.gpus);
        Self { thread, gpus: thread.gpus(), at, gin, handle, releases: Releases::ToSystem }
    }

    /// Returns the same call on another context.
    fn on_context(self, context: u32) -> Self {
        Self { handle: Handle { context, ..self.handle }, ..self }
    }

    fn misuse(&self, what: impl Into<String>) -> ! {
        self.thread.misuse(self.at, what)
    }

    /// Returns the coop of a cooperative call, and the thread's rank in it.
    ///
    /// # Safety
    ///
    /// `coop` is a coop.
    unsafe fn coop(&self, coop: *const CoopAny) -> (Coop, u32) {
        // SAFETY: the kernel passes what NCCL's functions initialised.
        let coop = Coop::of(unsafe { &*coop }, self.thread, self.at);
        (coop, coop_rank(coop, self.thread, self.at))
    }

    fn sync(&self, coop: Coop, name: &'static str) {
        coop.sync(self.thread, Some(CoopCall::new(name)), self.at);
    }

    fn own_rank(&self) -> &'a GinRank {
        &self.gin.per_rank[self.handle.rank as usize]
    }

    /// Returns the world rank of a peer; fails the kernel if the peer does not exist or is not
    /// connected.
    fn peer(&self, team: Team, peer: i32) -> u32 {
        let (me, n) = (self.handle.rank as i32, team.n_ranks);
        if !(0..n).contains(&peer) {
            self.misuse(format!("peer {peer} of a team of {n} ranks"));
        }
        let world = team.to_world(me, peer);
        if !(0..self.gin.gpus.len() as i32).contains(&world) {
            self.misuse(format!(
                "peer {peer} of the team is world rank {world}, which does not exist"
            ));
        }
        let stride = self.gin.stride;
        if !((world - me).unsigned_abs() as usize).is_multiple_of(stride) {
            let [world, me] = [world, me].map(|rank| ranks::name(&self.gin.gpus, rank as u32));
            self.misuse(format!(
                "{world} is not connected to {me} over the network: only ranks {stride} apart are"
            ));
        }
        world as u32
    }

    /// Returns the queue to world rank `peer`.
    fn queue(&self, peer: u32) -> QueueKey {
        let Handle { rank, context, .. } = self.handle;
        QueueKey { comm: self.gin.id, rank, context, peer }
    }

    /// Returns a signal's index in [`GinRank`]'s arrays.
    fn signal(&self, id: u32) -> usize {
        let signals = self.gin.signals;
        if id >= signals {
            self.misuse(format!(
                "signal {id}: the device communicator has {signals} (with those of its barriers)"
            ));
        }
        (self.handle.context * signals + id) as usize
    }

    /// Returns a counter's index in [`GinRank`]'s arrays.
    fn counter(&self, id: u32) -> usize {
        let counters = self.gin.counters;
        if id >= counters {
            self.misuse(format!("counter {id}: the device communicator has {counters}"));
        }
        (self.handle.context * counters + id) as usize
    }

    /// Returns the shadow of a signal.
    fn shadow(&self, id: u32) -> *mut u64 {
        self.own_rank().shadows.wrapping_add(self.signal(id))
    }

    /// Describes a wait of this call.
    fn wait_for(&self, kind: WaitKind, index: u32, wanted: u64) -> WaitFor {
        WaitFor { kind, index, context: self.handle.context, peer: -1, wanted, seen: 0 }
    }

    /// Describes a wait of this call for rank `peer` of the communicator.
    fn wait_for_peer(&self, kind: WaitKind, index: u32, wanted: u64, peer: u32) -> WaitFor {
        WaitFor { peer: self.gin.gpus[peer as usize] as i32, ..self.wait_for(kind, index, wanted) }
    }
}
