//! The coroutine of a simulated thread.

use std::panic::{AssertUnwindSafe, catch_unwind};

use corosensei::trap::CoroutineTrapHandler;
use corosensei::{Coroutine, CoroutineResult};

use crate::gpu::panics;
use crate::gpu::stack::SlabStack;
use crate::gpu::thread::Thread;

/// A coroutine. Dropping an unfinished one abandons its frames: their destructors do not run.
pub(crate) struct Fiber(Coroutine<(), (), (), SlabStack>);

impl Fiber {
    /// Returns a coroutine that runs the kernel of `thread`, which has a block and no other
    /// coroutine.
    pub(super) fn new(thread: &Thread) -> Self {
        // SAFETY: each lane of a warp has its own stack; the thread's previous coroutine has ended.
        // The warp owns the stacks and the threads, and the thread owns the coroutine.
        let stack = unsafe { thread.warp().stacks.stack(thread.lane() as usize) };
        Self(Coroutine::with_stack(stack, |yielder, ()| {
            let thread = Thread::current();
            thread.yielder.set(std::ptr::from_ref(yielder));
            let body = &thread.block().grid.launch.body;
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body())) {
                panics::report(thread, &*payload);
            }
        }))
    }

    /// Returns whether it has run.
    pub(super) fn has_begun(&self) -> bool {
        self.0.started()
    }

    /// Runs the coroutine until it suspends; returns whether it has ended.
    #[inline]
    pub(super) fn resume(&mut self) -> bool {
        matches!(self.0.resume(()), CoroutineResult::Return(()))
    }

    pub(super) fn trap_handler(&self) -> CoroutineTrapHandler<()> {
        self.0.trap_handler()
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        // SAFETY: the abandoned frames are kernel code. What they own outside the stack may leak,
        // and the host has no scoped borrow into them.
        unsafe { self.0.force_reset() };
    }
}
