//! What cuda_std asks of the simulator: the [`Ops`] table.
//!
//! # Safety
//!
//! The scheduler sets [`CTX`](cuda_std::arch::CTX) only to the address of a [`Thread`] of a live
//! [`Gpus`](crate::gpus::Gpus), with the provenance of the whole object, and hooks run only on that
//! thread's coroutine while it is current. So the cast of the context's address back to the thread
//! is sound, and so is its pointer to the GPUs, which outlive all coroutines. Everything behind
//! both is in cells: no reference here excludes another.

use corosensei::Yielder;
use cuda_std::arch::{Access, MulticastParts, Ops, ThreadCtx};

use crate::barrier;
use crate::error::{Error, Site};
use crate::multicast;
use crate::nccl;
use crate::shared::MAX_STATIC;
use crate::thread::{Thread, Wait};
use crate::warp::{self, Lane, Op};

/// Accesses that a thread makes before others run: a thread that polls without saying so must not
/// stop the world.
pub(crate) const SLICE: u64 = 1 << 16;

impl Thread {
    /// The thread of a context.
    #[inline(always)]
    pub(crate) fn of<'a>(ctx: *const ThreadCtx) -> &'a Thread {
        // SAFETY: the module's: a context is the start of a thread that runs.
        unsafe { &*ctx.cast::<Thread>() }
    }

    /// The thread that runs now. Only for code that runs on a coroutine.
    pub(crate) fn current<'a>() -> &'a Thread {
        Self::of(cuda_std::arch::CTX.get())
    }

    /// Stops this thread until the scheduler resumes it.
    #[inline]
    pub(crate) fn give_way(&self, wait: Wait) {
        if self.unwinding.get() && !matches!(wait, Wait::Failed | Wait::Exited) {
            // The kernel has panicked and unwinds: nothing that it waits for matters any more.
            return;
        }
        self.wait.set(wait);
        // SAFETY: the yielder is this coroutine's own, set when it started, and lives as long as
        // its stack.
        unsafe { Yielder::suspend(&*self.yielder.get(), ()) };
    }
}

fn exit(ctx: *const ThreadCtx) -> ! {
    let thread = Thread::of(ctx);
    loop {
        thread.give_way(Wait::Exited);
    }
}

fn shared_static(ctx: *const ThreadCtx, key: usize, size: usize) -> *mut u8 {
    let thread = Thread::of(ctx);
    thread.gpus().called();
    let found = thread.block().shared.borrow_mut().of_static(key, size);
    found.unwrap_or_else(|| {
        let (kernel, who) = (thread.kernel(), thread.who());
        thread.fail(Error::SharedMemory { kernel, thread: who, bytes: size, limit: MAX_STATIC })
    })
}

impl Thread {
    /// An access about to happen: refuses it where the memory is not the thread's, and lets others
    /// run.
    #[inline(always)]
    pub(crate) fn touch(&self, address: usize, bytes: usize, access: Access, at: Site) {
        let gpus = self.gpus();
        let accesses = gpus.accesses.get() + 1;
        gpus.accesses.set(accesses);
        let gpu = self.block().gpu as u32;
        if !gpus.memory.contains(gpu, address, bytes) && !self.owns(address, bytes) {
            out_of_bounds(self, address, bytes, access, at);
        }
        if self.updating.replace(false) {
            gpus.progress();
        }
        match access {
            Access::Read => {}
            Access::Write | Access::AtomicWrite(..) => gpus.progress(),
            Access::AtomicRmw(..) => self.updating.set(true),
            Access::AtomicRead(..) => {
                // A thread that goes on to other addresses does not poll, unless it says so. (It
                // gives way by itself, so not here.)
                let [a, b, c, d] = self.polled.get();
                if ![a, b, c, d].contains(&address) && !self.waits.get() {
                    self.polled.set([address, a, b, c]);
                    gpus.progress();
                }
                return;
            }
        }
        if gpus.settings.preempt || accesses >= gpus.slice_end.get() {
            self.give_way(Wait::Ready);
        }
    }

    /// Whether the bytes are the block's shared memory or the thread's own stack.
    #[cold]
    fn owns(&self, address: usize, bytes: usize) -> bool {
        let (low, high) = self.stack();
        (address >= low && address <= high && bytes <= high - address)
            || self.block().shared.borrow().contains(address, bytes)
    }
}

#[cold]
fn out_of_bounds(thread: &Thread, address: usize, bytes: usize, access: Access, at: Site) -> ! {
    let access = match access {
        Access::Read | Access::AtomicRead(..) => "loads",
        Access::Write | Access::AtomicWrite(..) => "stores",
        Access::AtomicRmw(..) => "updates",
    };
    if multicast::is_multicast(address) {
        thread.misuse(at, format!(
            "it {access} {bytes} bytes at {address:#x}, a multicast address, which is for multimem instructions only"
        ));
    }
    let where_to = nccl::describe(&thread.gpus().memory, address);
    let (kernel, who) = (thread.kernel(), thread.who());
    thread.fail(Error::OutOfBounds { kernel, thread: who, access, bytes, address, where_to, at })
}

impl Thread {
    /// The copies behind a multicast address that the thread is about to use.
    pub(crate) fn multimem(&self, address: usize, bytes: usize, at: Site) -> MulticastParts {
        let gpus = self.gpus();
        gpus.accesses.set(gpus.accesses.get() + 1);
        let gpu = self.block().gpu;
        let parts = match gpus.memory.multicast.parts(gpu, address, bytes) {
            Ok(parts) => parts,
            Err(why) => self.misuse(at, format!("a multimem instruction: {why}")),
        };
        gpus.progress();
        if gpus.settings.preempt || gpus.accesses.get() >= gpus.slice_end.get() {
            self.give_way(Wait::Ready);
        }
        parts
    }
}

fn spin(ctx: *const ThreadCtx, at: Site) {
    let thread = Thread::of(ctx);
    // An update that changed nothing.
    thread.updating.set(false);
    thread.give_way(Wait::Spin { at });
}

fn print(ctx: *const ThreadCtx, text: &str) {
    let gpus = Thread::of(ctx).gpus();
    gpus.called();
    gpus.printed.borrow_mut().push_str(text);
}

/// What one look at the clock takes. Much, so that a kernel that waits for a time soon sees it
/// pass.
const LOOK: u64 = 1000;

fn clock(ctx: *const ThreadCtx) -> u64 {
    let thread = Thread::of(ctx);
    // Whoever looks at the clock may be waiting for it, which is no livelock.
    let gpus = thread.gpus();
    gpus.progress();
    let now = gpus.clock.get();
    gpus.clock.set(now + LOOK);
    thread.give_way(Wait::Ready);
    now
}

/// The simulator behind cuda_std. Fences have nothing to do: threads take turns, so that all see
/// one memory.
pub(crate) static OPS: Ops = Ops {
    barrier: |ctx, id, count, at| barrier::arrive(Thread::of(ctx), id, count, None, at),
    sync_warp: |ctx, mask, at| {
        warp::meet(Thread::of(ctx), mask, Op::Sync, Lane::default(), at);
    },
    shuffle: |ctx, mask, kind, value, operand, width, at| {
        warp::meet(Thread::of(ctx), mask, Op::Shuffle(kind), Lane { value, operand, width }, at)
    },
    ballot: |ctx, mask, predicate, at| {
        let mine = Lane { value: predicate.into(), ..Lane::default() };
        warp::meet(Thread::of(ctx), mask, Op::Ballot, mine, at).0
    },
    shared_static,
    access: |ctx, address, bytes, access, at| Thread::of(ctx).touch(address, bytes, access, at),
    multimem: |ctx, address, bytes, at| Thread::of(ctx).multimem(address, bytes, at),
    spin,
    fence: |_, _, _| {},
    exit,
    print,
    clock,
};
