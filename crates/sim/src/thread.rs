//! What runs on the simulated GPUs: grids, their blocks, and these blocks' threads.
//!
//! # Safety
//!
//! A thread points to its block and to the GPUs. The scheduler sets both when a block starts, and
//! runs a thread, or looks at it, only while its block is on a GPU. Blocks lie in an `Rc` until
//! their last thread has ended, GPUs in one that outlives them.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use corosensei::Yielder;
use corosensei::trap::CoroutineTrapHandler;
use cuda_std::arch::ThreadCtx;

use crate::barrier::BlockBarrier;
use crate::error::{Error, Site, ThreadId};
use crate::gpus::{Gpus, GridId, Launch};
use crate::hooks::OPS;
use crate::nccl::InboxWait;
use crate::scheduler::Fiber;
use crate::shared::SharedMemory;
use crate::waits::WaitState;
use crate::warp::{WARP, Warp};

/// What a thread waits for.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    /// Nothing.
    Ready,
    /// A barrier of its block; as part of a call of NCCL, if any.
    Barrier { id: u32, at: Site, within: Option<Within> },
    /// Lanes of its warp.
    Warp { mask: u32, at: Site },
    /// A word that a peer stores.
    Inbox(InboxWait),
    /// What [`Thread::state`] says.
    Network,
    /// Anything that another thread does: it polls.
    Spin { at: Site },
    /// Nothing any more: it left the kernel.
    Exited,
    /// Nothing any more: it broke a rule, and all kernels end.
    Failed,
    /// Nothing: it computes, and was stopped.
    Running,
    /// It has ended.
    Done,
}

/// A call of NCCL in which the threads of a coop wait for each other.
#[derive(Clone, Copy)]
pub(crate) enum Within {
    /// One on the LSA barrier of this index.
    LsaBarrier(u32),
    /// One of this name.
    Call(&'static str),
}

/// One simulated thread.
#[repr(C)]
pub(crate) struct Thread {
    /// What cuda_std sees. First, so that the address of the context is the address of the thread.
    pub(crate) ctx: Cell<ThreadCtx>,
    pub(crate) gpus: Cell<*const Gpus>,
    pub(crate) block: Cell<*const Block>,
    /// Its number in the block, as CUDA counts: x first.
    pub(crate) tid: Cell<u32>,
    pub(crate) fiber: RefCell<Option<Fiber>>,
    pub(crate) yielder: Cell<*const Yielder<(), ()>>,
    pub(crate) wait: Cell<Wait>,
    /// What its last warp operation gave.
    pub(crate) result: Cell<(u32, bool)>,
    /// Whether it has begun a read-modify-write that may have changed memory.
    pub(crate) updating: Cell<bool>,
    /// Whether it is in a wait with a name, which [`state`](Self::state) has.
    pub(crate) waits: Cell<bool>,
    /// Whether it has panicked, and unwinds.
    pub(crate) unwinding: Cell<bool>,
    /// Addresses that it polled lately.
    pub(crate) polled: Cell<[usize; 4]>,
    /// The way out of its coroutine after a fault.
    pub(crate) trap: Cell<Option<CoroutineTrapHandler<()>>>,
    /// Its wait with a name. Last: it is seldom looked at.
    pub(crate) state: WaitState,
}

/// A grid that was launched.
pub(crate) struct Grid {
    pub(crate) id: GridId,
    pub(crate) launch: Launch,
    /// Number of its blocks.
    pub(crate) blocks: u32,
    /// The first block that has not started.
    pub(crate) next: Cell<u32>,
    /// Blocks that have ended.
    pub(crate) ended: Cell<u32>,
    /// The communicator whose ranks it counts, if any: the GPU of each rank, for reports.
    pub(crate) communicator: OnceCell<Rc<[u32]>>,
}

/// A block that is on a multiprocessor.
pub(crate) struct Block {
    pub(crate) grid: Rc<Grid>,
    pub(crate) gpu: usize,
    /// Its number in the grid, as CUDA counts: x first.
    pub(crate) index: u32,
    /// Where the scheduler has it.
    pub(crate) slot: u32,
    pub(crate) multiprocessor: usize,
    /// Number of its threads.
    pub(crate) size: u32,
    /// Threads that have not ended.
    pub(crate) live: Cell<u32>,
    /// Threads to run in the next round.
    pub(crate) next: RefCell<Vec<u32>>,
    /// Whether the block is in [`Gpus::queue`].
    pub(crate) queued: Cell<bool>,
    pub(crate) barriers: [BlockBarrier; 16],
    pub(crate) warps: Vec<Box<Warp>>,
    pub(crate) shared: RefCell<SharedMemory>,
}

impl Block {
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
    /// One that has no block yet.
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
            waits: Cell::new(false),
            unwinding: Cell::new(false),
            polled: Cell::new([0; 4]),
            trap: Cell::new(None),
            state: WaitState::default(),
        }
    }

    /// The GPUs on which it runs.
    #[inline(always)]
    pub(crate) fn gpus(&self) -> &Gpus {
        // SAFETY: the module's.
        unsafe { &*self.gpus.get() }
    }

    /// Its block, while that is on a GPU.
    #[inline(always)]
    pub(crate) fn block(&self) -> &Block {
        // SAFETY: the module's.
        unsafe { &*self.block.get() }
    }

    /// Name of its kernel.
    pub(crate) fn kernel(&self) -> &'static str {
        self.block().grid.launch.kernel
    }

    /// Who this is, for reports.
    pub(crate) fn who(&self) -> ThreadId {
        let block = self.block();
        ThreadId { rank: block.gpu, block: block.index, thread: self.tid.get() }
    }

    /// Lets it run again when it waits.
    pub(crate) fn wake(&self) {
        self.wait.set(Wait::Ready);
        self.gpus().progress();
        self.enqueue();
    }

    /// Puts it into the next round of its block.
    pub(crate) fn enqueue(&self) {
        let block = self.block();
        block.next.borrow_mut().push(self.tid.get());
        if !block.queued.replace(true) {
            self.gpus().queue.borrow_mut().push(block.slot);
        }
    }

    /// Ends all kernels with a report of a broken contract.
    pub(crate) fn misuse(&self, at: Site, what: impl Into<String>) -> ! {
        let (kernel, thread, what) = (self.kernel(), self.who(), what.into());
        self.fail(Error::Misuse { kernel, thread, what, at })
    }

    /// Ends all kernels with an error: this thread does not run again.
    pub(crate) fn fail(&self, error: Error) -> ! {
        self.gpus().fail(error);
        loop {
            self.give_way(Wait::Failed);
        }
    }

    /// Its warp.
    pub(crate) fn warp(&self) -> &Warp {
        &self.block().warps[(self.tid.get() / WARP) as usize]
    }

    /// Its place in its warp.
    pub(crate) fn lane(&self) -> u32 {
        self.tid.get() % WARP
    }

    /// The addresses of its stack.
    pub(crate) fn stack(&self) -> (usize, usize) {
        self.warp().stacks.bounds(self.lane() as usize)
    }

    /// Whether `address` lies in its stack's guard page.
    pub(crate) fn guards(&self, address: usize) -> bool {
        self.warp().stacks.in_guard(self.lane() as usize, address)
    }

    /// Whether it used its stack beyond the end, as far as one can see.
    pub(crate) fn overflowed(&self) -> bool {
        self.warp().stacks.overflowed(self.lane() as usize)
    }

    /// The error of a thread that has used up its stack.
    pub(crate) fn overflow(&self) -> Error {
        let (low, high) = self.stack();
        Error::StackOverflow { kernel: self.kernel(), thread: self.who(), stack: high - low }
    }
}

/// An LSA barrier session that a kernel opened and did not close.
#[derive(Clone, Copy, Debug)]
pub struct OpenSession {
    /// Rank in the world.
    pub rank: usize,
    /// Number of the coop's block in its grid.
    pub block: u32,
    /// Index of the barrier.
    pub index: u32,
    /// Where it was opened.
    pub at: Site,
}
