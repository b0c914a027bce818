//! The objects of a running kernel: threads, blocks, and the run that holds them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use corosensei::Yielder;
use corosensei::trap::CoroutineTrapHandler;
use cuda_std::arch::ThreadCtx;

use crate::barrier::BlockBarrier;
use crate::error::{Error, Site, ThreadId};
use crate::memory::Memory;
use crate::nccl::{InboxWait, Network};
use crate::shared::SharedMemory;
use crate::stack::Slab;
use crate::waits::WaitState;
use crate::warp::Warp;

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
    /// What [`Run::waits`] says.
    Network,
    /// Anything that another thread does: it polls.
    Spin { at: Site },
    /// Nothing any more: it left the kernel.
    Exited,
    /// Nothing any more: it broke a rule, and the kernel ends.
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
    pub(crate) run: Cell<*const Run>,
    pub(crate) yielder: Cell<*const Yielder<(), ()>>,
    pub(crate) wait: Cell<Wait>,
    /// What its last warp operation gave.
    pub(crate) result: Cell<(u32, bool)>,
    /// Whether it has begun a read-modify-write that may have changed memory.
    pub(crate) updating: Cell<bool>,
    /// Whether it is in a wait with a name, which [`Run::waits`] has.
    pub(crate) waits: Cell<bool>,
    /// Whether it has panicked, and unwinds.
    pub(crate) unwinding: Cell<bool>,
    /// Addresses that it polled lately.
    pub(crate) polled: Cell<[usize; 4]>,
    /// The way out of its coroutine after a fault.
    pub(crate) trap: Cell<Option<CoroutineTrapHandler<()>>>,
    /// Index in [`Run::threads`].
    pub(crate) id: u32,
    /// `threadIdx.x`.
    pub(crate) tid: u32,
    /// Index in [`Run::blocks`].
    pub(crate) slot: u32,
}

/// The blocks that are on the simulated devices at one time each have a slot.
pub(crate) struct Block {
    pub(crate) rank: usize,
    /// `blockIdx.x` of the block in the slot.
    pub(crate) index: Cell<u32>,
    /// First thread of the slot in [`Run::threads`].
    pub(crate) first: u32,
    /// Threads that have not ended.
    pub(crate) live: Cell<u32>,
    /// Threads to run in the next round.
    pub(crate) next: RefCell<Vec<u32>>,
    /// Whether the block is in [`Run::queue`].
    pub(crate) queued: Cell<bool>,
    pub(crate) barriers: [BlockBarrier; 16],
    pub(crate) warps: Box<[Warp]>,
    pub(crate) shared: RefCell<SharedMemory>,
}

/// How a launch runs.
#[derive(Clone, Copy)]
pub(crate) struct Mode {
    pub(crate) kernel: &'static str,
    /// Threads of a block.
    pub(crate) block: u32,
    pub(crate) grid: u32,
    pub(crate) ranks: usize,
    /// Look at every access.
    pub(crate) watch: bool,
    /// Run others at every access.
    pub(crate) preempt: bool,
    /// Run in random order.
    pub(crate) random: bool,
}

/// An LSA barrier session that a kernel opened and did not close.
#[derive(Clone, Copy, Debug)]
pub struct OpenSession {
    /// Rank in the world.
    pub rank: usize,
    /// `blockIdx.x` of the coop that opened it.
    pub block: u32,
    /// Index of the barrier.
    pub index: u32,
    /// Where it was opened.
    pub at: Site,
}

/// A running kernel. Threads and hooks share it, so that everything that changes is in a cell.
pub(crate) struct Run {
    pub(crate) mode: Mode,
    pub(crate) threads: Box<[Thread]>,
    pub(crate) blocks: Box<[Block]>,
    /// Blocks with a thread that can run.
    pub(crate) queue: RefCell<Vec<u32>>,
    pub(crate) failure: RefCell<Option<Error>>,
    pub(crate) printed: RefCell<String>,
    /// How often threads got their turn.
    pub(crate) switches: Cell<u64>,
    pub(crate) accesses: Cell<u64>,
    /// Calls that are neither.
    pub(crate) calls: Cell<u64>,
    /// Calls of all kinds when the watchdog last looked.
    pub(crate) last_activity: Cell<u64>,
    /// Whether the watchdog stopped a thread.
    pub(crate) interrupted: Cell<bool>,
    /// [`accesses`](Self::accesses) at which the running thread gives way.
    pub(crate) slice_end: Cell<u64>,
    pub(crate) clock: Cell<u64>,
    /// How often threads polled since something last happened.
    pub(crate) idle: Cell<u64>,
    /// Number of the present streak of passes in which threads only looked for what they wait for.
    pub(crate) streak: Cell<u64>,
    /// The waits of the threads, apart from them because they are seldom looked at.
    pub(crate) waits: Box<[WaitState]>,
    /// What is under way between the ranks.
    pub(crate) network: Network,
    /// Sessions by address of the barrier's epoch word, with the thread that opened each.
    pub(crate) sessions: RefCell<BTreeMap<usize, (u32, OpenSession)>>,
    /// Keeps the live ranges.
    pub(crate) memory: Rc<Memory>,
    pub(crate) slab: Slab,
}

impl Run {
    /// Something happened: whoever polls may find it.
    #[inline]
    pub(crate) fn progress(&self) {
        self.idle.set(0);
    }

    /// Lets a waiting thread run again.
    pub(crate) fn wake(&self, id: u32) {
        let thread = &self.threads[id as usize];
        thread.wait.set(Wait::Ready);
        self.progress();
        self.enqueue(thread);
    }

    /// Puts a thread into the next round of its block.
    pub(crate) fn enqueue(&self, thread: &Thread) {
        let block = &self.blocks[thread.slot as usize];
        block.next.borrow_mut().push(thread.id);
        if !block.queued.replace(true) {
            self.queue.borrow_mut().push(thread.slot);
        }
    }

    /// Records an error; the first one counts.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    /// The addresses of a thread's stack.
    pub(crate) fn stack_of(&self, id: u32) -> (usize, usize) {
        self.slab.bounds(id as usize)
    }

    /// A coop's first thread opens a session on the barrier whose epoch is at `word`.
    pub(crate) fn session_opened(&self, thread: &Thread, word: usize, index: u32, at: Site) {
        let mut sessions = self.sessions.borrow_mut();
        let other = sessions.get(&word).filter(|(owner, _)| *owner != thread.id);
        if let Some((_, OpenSession { block, at: there, .. })) = other {
            let what = format!("LSA barrier {index} is in use by block {block} ({there})");
            drop(sessions);
            thread.misuse(self, at, what);
        }
        let ThreadId { rank, block, .. } = thread.who(self);
        sessions.insert(word, (thread.id, OpenSession { rank, block, index, at }));
    }

    /// The session on the barrier whose epoch is at `word` is closed.
    pub(crate) fn session_closed(&self, word: usize) {
        self.sessions.borrow_mut().remove(&word);
    }

    /// Counts a call that is no access.
    pub(crate) fn called(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }
}

impl Block {
    /// The slot's threads.
    pub(crate) fn threads<'a>(&self, run: &'a Run) -> &'a [Thread] {
        &run.threads[self.first as usize..][..run.mode.block as usize]
    }
}

impl Thread {
    pub(crate) fn block<'a>(&self, run: &'a Run) -> &'a Block {
        &run.blocks[self.slot as usize]
    }

    /// Who this is, for reports.
    pub(crate) fn who(&self, run: &Run) -> ThreadId {
        let block = self.block(run);
        ThreadId { rank: block.rank, block: block.index.get(), thread: self.tid }
    }

    /// Ends the kernel with a report of a broken contract.
    pub(crate) fn misuse(&self, run: &Run, at: Site, what: impl Into<String>) -> ! {
        self.fail(
            run,
            Error::Misuse { kernel: run.mode.kernel, thread: self.who(run), what: what.into(), at },
        )
    }

    /// Ends the kernel with an error: this thread does not run again.
    pub(crate) fn fail(&self, run: &Run, error: Error) -> ! {
        run.fail(error);
        loop {
            self.give_way(Wait::Failed);
        }
    }
}
