//! Grids, blocks and threads of the simulated GPUs.
//!
//! # Safety
//!
//! A thread points to its block and to the GPUs. The scheduler sets both pointers when a block
//! starts, and accesses a thread only while its block runs. The scheduler owns the block in an `Rc`
//! until the last thread has ended; the GPUs outlive it.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};

use corosensei::Yielder;
use corosensei::trap::CoroutineTrapHandler;
use cuda_std::arch::ThreadCtx;
use nccl_device::raw::host::CoopCall;

use crate::base::arguments::Arguments;
use crate::base::error::{Error, Site, ThreadId};
use crate::base::ids::GridId;
use crate::gpu::barrier::{BARRIERS, BlockBarrier};
use crate::gpu::cluster::Cluster;
use crate::gpu::gpus::{Gpus, Launch};
use crate::gpu::hooks::OPS;
use crate::gpu::nccl::{CallDivergence, InboxWait};
use crate::gpu::polls::RepeatedLoads;
use crate::gpu::products::Products;
use crate::gpu::scheduler::Fiber;
use crate::gpu::shared::SharedMemory;
use crate::gpu::waits::WaitState;
use crate::gpu::warp::{WARP, Warp};
use crate::race::{GridClock, ThreadClock};

/// The condition that a thread waits for.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    /// No event: it can run.
    Ready,
    /// A barrier of its block, as part of an NCCL call, if any.
    Barrier { id: u32, at: Site, coop_call: Option<CoopCall> },
    /// The barrier of its cluster.
    Cluster { relaxed: bool, at: Site },
    /// The end of a phase of the `mbarrier` at this address.
    Phase { barrier: usize, parity: u32, at: Site },
    /// The number of registers for each thread of its warpgroup.
    Registers { count: u32, at: Site },
    /// The end of the grid during which its own grid began.
    Previous { at: Site },
    /// Other lanes of its warp.
    Warp { mask: u32, at: Site, coop_call: Option<CoopCall> },
    /// A peer's arrival in an LSA barrier.
    Inbox(InboxWait),
    /// The condition in [`Thread::state`].
    Network,
    /// A store by another thread: it polls, by plain loads or by atomic ones.
    Spin { at: Site, plain: bool },
    /// No event: it has exited the kernel.
    Exited,
    /// No event: it has failed, and all kernels end.
    Failed,
    /// No event: the watchdog stopped it while it computed.
    Running,
    /// No event: it has ended.
    Done,
}

/// One simulated thread.
#[repr(C)]
pub(crate) struct Thread {
    /// The context that cuda_std uses. It is the first field, so that its address is the thread's
    /// address.
    pub(crate) ctx: Cell<ThreadCtx>,
    pub(crate) gpus: Cell<*const Gpus>,
    pub(crate) block: Cell<*const Block>,
    /// Index in the block, x first.
    pub(crate) tid: Cell<u32>,
    /// The coroutine, until it has ended.
    pub(crate) fiber: RefCell<Option<Fiber>>,
    /// The coroutine's yielder, with which it suspends itself.
    pub(crate) yielder: Cell<*const Yielder<(), ()>>,
    pub(crate) wait: Cell<Wait>,
    /// Result of the last warp operation: a value, and whether a shuffle's source was in range.
    pub(crate) result: Cell<(u32, bool)>,
    /// Whether the last access is a read-modify-write that may have changed memory. (cuda_std calls
    /// the hook `spin` after one that has changed nothing, since a loop of these may be a poll.
    /// `spin` makes this false; so if it is true at the next access, memory has changed.)
    pub(crate) updating: Cell<bool>,
    /// Whether the thread is in a [named wait](crate::gpu::waits): [`state`](Self::state) describes
    /// it.
    pub(crate) in_named_wait: Cell<bool>,
    /// Whether the thread has panicked and is unwinding.
    pub(crate) unwinding: Cell<bool>,
    /// The cooperative call of `nccl_device` in which the thread is.
    pub(crate) coop_call: Cell<Option<CoopCall>>,
    /// Whether the thread has ended by returning from the kernel.
    pub(crate) returned: Cell<bool>,
    /// The last plain loads, each of which has ended a slice: a thread that has made
    /// [`SLICE`](crate::gpu::hooks::SLICE) accesses without a wait yields.
    pub(crate) repeated: Cell<RepeatedLoads>,
    /// The address and the number of bytes of each of the last two reads of a poll, the last one
    /// first.
    pub(crate) read: Cell<[(usize, usize); 2]>,
    /// The number of registers, if it has changed that (`setmaxnreg`); else 0.
    pub(crate) registers: Cell<u32>,
    /// The addresses that it has polled last. A loop that polls more addresses does not count as a
    /// poll.
    pub(crate) polled: Cell<[usize; 4]>,
    /// The handler that resumes the coroutine, after a fault, in a function that ends it.
    pub(crate) trap: Cell<Option<CoroutineTrapHandler<()>>>,
    /// The memory that an access reads or changes instead of its own: an access that a mutation
    /// removes, or an atomic load that sees an old value.
    pub(crate) scratch: Cell<u128>,
    /// The `wgmma`s in flight.
    pub(crate) products: RefCell<Products>,
    /// The thread's state in the detection of races.
    pub(crate) race: RefCell<ThreadClock>,
    /// The named wait. The last field, since it is seldom accessed.
    pub(crate) state: WaitState,
}

/// A launched grid.
pub(crate) struct Grid {
    pub(crate) id: GridId,
    pub(crate) launch: Launch,
    /// The number of blocks.
    pub(crate) blocks: u32,
    /// The first block that has not started.
    pub(crate) next: Cell<u32>,
    /// Blocks that have ended.
    pub(crate) ended: Cell<u32>,
    /// Blocks that have ended or let the next grid begin.
    pub(crate) triggered_blocks: Cell<u32>,
    /// The grid during which this grid began, and its clock.
    pub(crate) previous: Weak<Grid>,
    pub(crate) previous_clock: Option<GridClock>,
    pub(crate) clock: GridClock,
    /// The GPU of each rank of the first communicator that the kernel used, for reports.
    pub(crate) communicator: OnceCell<Rc<[u32]>>,
    /// Whether the kernel has asked for peers' memory, or posted an operation to a peer.
    pub(crate) uses_peers: Cell<bool>,
}

/// A running block.
pub(crate) struct Block {
    pub(crate) grid: Rc<Grid>,
    pub(crate) gpu: usize,
    /// Index in the grid, x first.
    pub(crate) index: u32,
    /// Index in the scheduler's `blocks`.
    pub(crate) slot: u32,
    pub(crate) multiprocessor: usize,
    /// The number of threads.
    pub(crate) size: u32,
    /// Threads that have not ended.
    pub(crate) live: Cell<u32>,
    /// Threads to run in the next round.
    pub(crate) next: RefCell<Vec<u32>>,
    /// Whether the block is in [`Gpus::queue`].
    pub(crate) queued: Cell<bool>,
    /// Whether the block has let the next grid begin.
    pub(crate) has_triggered: Cell<bool>,
    pub(crate) barriers: [BlockBarrier; BARRIERS],
    pub(crate) cluster: Rc<Cluster>,
    pub(crate) warps: Vec<Box<Warp>>,
    pub(crate) shared: RefCell<SharedMemory>,
    /// The time at which the block began, for the timeline.
    pub(crate) began: u64,
    /// The wait in which all its threads are: the time at which it began, its text and its line.
    pub(crate) waits: RefCell<Option<(u64, String, Option<Site>)>>,
    /// The first read of memory that nothing had written.
    pub(crate) unwritten: RefCell<Option<Error>>,
    /// The calls of coops whose threads do not wait for each other in the call: the arguments of
    /// the threads are compared.
    pub(crate) calls: RefCell<CallDivergence>,
    /// `mbarrier`s initialised so far.
    pub(crate) mbarriers: Cell<usize>,
    /// The registers that its threads have given back.
    pub(crate) spare_registers: Cell<u32>,
}

impl Grid {
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.get() == self.blocks
    }

    /// Returns whether the grid during which this grid began still runs.
    pub(crate) fn follows_running(&self) -> bool {
        self.previous.upgrade().is_some_and(|previous| !previous.has_ended())
    }
}

impl Block {
    /// Records that the block does not keep the next grid from beginning any more: the block has
    /// ended, or a thread of it has called `grid::launch_next`.
    pub(crate) fn trigger_next(&self) {
        if !self.has_triggered.replace(true) {
            self.grid.triggered_blocks.set(self.grid.triggered_blocks.get() + 1);
        }
    }

    #[inline]
    pub(crate) fn thread(&self, tid: u32) -> &Thread {
        &self.warps[(tid / WARP) as usize].threads[(tid % WARP) as usize]
    }

    pub(crate) fn threads(&self) -> impl Iterator<Item = &Thread> {
        let all = self.warps.iter().flat_map(|warp| &warp.threads);
        all.take(self.size as usize)
    }
}

impl Thread {
    /// Returns a thread without a block.
    pub(crate) fn new() -> Self {
        Self {
            ctx: Cell::new(ThreadCtx {
                thread_idx: [0; 3],
                block_idx: [0; 3],
                block_dim: [0; 3],
                grid_dim: [0; 3],
                dynamic_shared: (std::ptr::null_mut(), 0),
                watch: false,
                ops: &OPS,
            }),
            gpus: Cell::new(std::ptr::null()),
            block: Cell::new(std::ptr::null()),
            tid: Cell::new(0),
            fiber: RefCell::new(None),
            yielder: Cell::new(std::ptr::null()),
            wait: Cell::new(Wait::Done),
            result: Cell::new((0, false)),
            updating: Cell::new(false),
            in_named_wait: Cell::new(false),
            unwinding: Cell::new(false),
            coop_call: Cell::new(None),
            returned: Cell::new(false),
            repeated: Cell::default(),
            read: Cell::default(),
            registers: Cell::new(0),
            polled: Cell::new([0; 4]),
            trap: Cell::new(None),
            scratch: Cell::new(0),
            products: RefCell::default(),
            race: RefCell::default(),
            state: WaitState::default(),
        }
    }

    /// Returns the GPUs of the machine.
    #[inline(always)]
    pub(crate) fn gpus(&self) -> &Gpus {
        // SAFETY: the pointer is valid, as the module explains.
        unsafe { &*self.gpus.get() }
    }

    /// Returns the thread's block, which must be running.
    #[inline(always)]
    pub(crate) fn block(&self) -> &Block {
        // SAFETY: the pointer is valid, as the module explains.
        unsafe { &*self.block.get() }
    }

    /// Returns the memory that the kernel's arguments refer to.
    pub(crate) fn arguments(&self) -> &Arguments {
        &self.block().grid.launch.arguments
    }

    /// Returns the name of the thread's kernel.
    pub(crate) fn kernel(&self) -> &'static str {
        self.block().grid.launch.kernel
    }

    /// Returns the thread's identity in reports.
    pub(crate) fn id(&self) -> ThreadId {
        let block = self.block();
        ThreadId { rank: block.gpu, block: block.index, thread: self.tid.get() }
    }

    /// Makes a waiting thread ready.
    pub(crate) fn wake(&self) {
        self.wait.set(Wait::Ready);
        self.gpus().progress();
        self.enqueue();
    }

    /// Queues the thread for its block's next round.
    pub(crate) fn enqueue(&self) {
        let block = self.block();
        block.next.borrow_mut().push(self.tid.get());
        if !block.queued.replace(true) {
            self.gpus().queue.borrow_mut().push(block.slot);
        }
    }

    /// Fails the kernels with a report of misuse.
    pub(crate) fn misuse(&self, at: Site, what: impl Into<String>) -> ! {
        self.fail(self.misuse_error(at, what.into()))
    }

    pub(crate) fn misuse_error(&self, at: Site, what: String) -> Error {
        Error::Misuse { kernel: self.kernel(), thread: self.id(), what, at }
    }

    /// Fails the kernels with an error, or with the block's first read of memory that nothing has
    /// written, which may have caused it. (A race says more than that.) Does not return.
    pub(crate) fn fail(&self, error: Error) -> ! {
        let cause = self.block().unwritten.take().filter(|_| !matches!(error, Error::Race(_)));
        self.gpus().fail(cause.unwrap_or(error));
        loop {
            self.suspend(Wait::Failed);
        }
    }

    /// Returns the thread's warp.
    pub(crate) fn warp(&self) -> &Warp {
        &self.block().warps[(self.tid.get() / WARP) as usize]
    }

    /// Returns the thread's lane in its warp.
    pub(crate) fn lane(&self) -> u32 {
        self.tid.get() % WARP
    }

    /// Returns the lowest address and the end of the thread's stack.
    pub(crate) fn stack(&self) -> (usize, usize) {
        self.warp().stacks.bounds(self.lane() as usize)
    }

    /// Returns whether `address` lies in the guard page of the thread's stack.
    pub(crate) fn in_guard(&self, address: usize) -> bool {
        self.warp().stacks.in_guard(self.lane() as usize, address)
    }

    /// Returns whether the thread's stack overflowed, as far as can be detected.
    pub(crate) fn overflowed(&self) -> bool {
        self.warp().stacks.overflowed(self.lane() as usize)
    }

    /// Returns the error for an overflow of the thread's stack.
    pub(crate) fn overflow_error(&self) -> Error {
        let (low, high) = self.stack();
        Error::StackOverflow { kernel: self.kernel(), thread: self.id(), stack: high - low }
    }
}

/// An LSA barrier session that a kernel opened and did not close.
#[derive(Clone, Copy, Debug)]
pub struct OpenSession {
    /// Rank in the world.
    pub rank: usize,
    /// Index of the coop's block in its grid.
    pub block: u32,
    /// Index of the barrier.
    pub index: u32,
    /// Where it was opened.
    pub at: Site,
}
