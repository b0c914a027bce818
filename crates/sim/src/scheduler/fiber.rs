//! The coroutine of a simulated thread.

use std::panic::{AssertUnwindSafe, catch_unwind};

use corosensei::trap::CoroutineTrapHandler;
use corosensei::{Coroutine, CoroutineResult};

use crate::panics;
use crate::stack::SlabStack;
use crate::thread::Thread;

/// A coroutine, abandoned when dropped: a thread that never ends has nothing to clean up.
pub(crate) struct Fiber(Coroutine<(), (), (), SlabStack>);

impl Fiber {
    /// One that runs the kernel of `thread`, which has a block and no other coroutine.
    pub(super) fn new(thread: &Thread) -> Self {
        // SAFETY: the thread's own stack, of which its warp has one a lane; its last coroutine has
        // ended, or there was none. The warp holds the stacks as long as the thread, and the thread
        // holds the coroutine.
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

    /// Runs it until it gives way; says whether it has ended.
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
        // SAFETY: the frames given up hold kernel code only, which owns nothing outside its stack
        // but what may leak; no scoped borrow of the host reaches into them.
        unsafe { self.0.force_reset() };
    }
}
