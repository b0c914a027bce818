//! The coroutine of a simulated thread.

use std::panic::{AssertUnwindSafe, catch_unwind};

use corosensei::trap::CoroutineTrapHandler;
use corosensei::{Coroutine, CoroutineResult};

use crate::panics;
use crate::stack::SlabStack;
use crate::thread::Thread;

/// A coroutine, abandoned when dropped: an unfinished thread owns nothing that needs cleanup.
pub(crate) struct Fiber(Coroutine<(), (), (), SlabStack>);

impl Fiber {
    /// A coroutine that runs the kernel of `thread`, which has a block and no other coroutine.
    pub(super) fn new(thread: &Thread) -> Self {
        // SAFETY: the thread's own stack, one per lane of its warp; its last coroutine, if any, has
        // ended. The warp owns the stacks as long as the thread, and the thread owns the coroutine.
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

    /// Runs it until it suspends; returns whether it has ended.
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
        // SAFETY: the abandoned frames are kernel code, which owns nothing outside its stack but
        // what may leak; no scoped borrow of the host extends into them.
        unsafe { self.0.force_reset() };
    }
}
