//! Threads that work for a rank, and that a simulated machine knows.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, ScopedJoinHandle};

use super::context::Context;
use crate::error::{Error, Result};

/// Starts threads that work for a rank, in [`Context::scope`].
#[derive(Clone, Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    threads: &'scope std::thread::Scope<'scope, 'env>,
    context: Context,
    /// How many of the threads run.
    running: Arc<AtomicUsize>,
}

/// A thread of a [`Scope`].
#[derive(Debug)]
pub struct ScopeThread<'scope, T> {
    thread: ScopedJoinHandle<'scope, T>,
    context: Context,
    has_ended: Arc<AtomicBool>,
}

/// Guard of a running thread, whose drop records that the thread has ended.
struct Running(Arc<AtomicUsize>, Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Release);
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Context {
    /// Does the same as [`std::thread::scope`]: runs `f`, which can start threads that use what
    /// they borrow, and returns when all have ended. Their current CUDA context is this one.
    ///
    /// A simulated machine knows these threads: a run with them is determined by its seed, and a
    /// deadlock is found. Threads of the standard library work there too. But the machine takes a
    /// tenth of a second to see that a rank waits for one, and from then on the operating system
    /// decides the order of threads, and a deadlock is not found.
    ///
    /// ```no_run
    /// # use devcomm_host::{Communicator, Rank, ReduceOp, Result, SymmetricBuffer};
    /// # type Memory = SymmetricBuffer<f32>;
    /// # fn f(
    /// #     rank: &Rank, one: &Communicator, other: &Communicator, a: &Memory, b: &Memory,
    /// # ) -> Result<()> {
    /// let reduce = |comm: &Communicator, memory: &Memory| {
    ///     let stream = comm.context().stream()?;
    ///     comm.all_reduce(memory, memory, ReduceOp::Sum, &stream)?;
    ///     stream.synchronize()
    /// };
    /// rank.context().scope(|scope| {
    ///     let thread = scope.spawn("other", || reduce(other, b))?;
    ///     reduce(one, a)?;
    ///     thread.join()
    /// })
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If `f` panics, or a thread that was not [joined](ScopeThread::join).
    pub fn scope<'env, T>(&self, f: impl for<'scope> FnOnce(&Scope<'scope, 'env>) -> T) -> T {
        std::thread::scope(|threads| {
            let (context, running) = (self.clone(), Arc::new(AtomicUsize::new(0)));
            let scope = Scope { threads, context, running };
            let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
            self.machine().wait_for_threads(|| scope.running.load(Ordering::Acquire) == 0);
            result.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}

impl<'scope> Scope<'scope, '_> {
    /// Starts a thread of this name.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] when the system cannot.
    pub fn spawn<T: Send + 'scope>(
        &self,
        name: &str,
        f: impl FnOnce() -> T + Send + 'scope,
    ) -> Result<ScopeThread<'scope, T>> {
        let (context, has_ended) = (self.context.clone(), Arc::<AtomicBool>::default());
        self.running.fetch_add(1, Ordering::AcqRel);
        let running = Running(Arc::clone(&self.running), Arc::clone(&has_ended));
        let (ticket, binder) = (context.machine().ticket(name), context.cuda().binder());
        let thread = move || {
            let _entered = ticket.enter();
            // This is dropped before `_entered`, whose drop wakes the threads that wait for this
            // one.
            let _running = running;
            // A context that cannot be made current fails again at the first call.
            let _ = binder.bind();
            f()
        };
        // If it cannot be started, the drop of `running` ends it.
        let started = Builder::new().name(name.to_owned()).spawn_scoped(self.threads, thread);
        let thread = started.map_err(|error| {
            Error::invalid(format!("the thread {name} cannot be started: {error}"))
        })?;
        Ok(ScopeThread { thread, context, has_ended })
    }
}

impl<T> ScopeThread<'_, T> {
    /// Waits until the thread has ended, and returns its result.
    ///
    /// # Panics
    ///
    /// If the thread has panicked.
    pub fn join(self) -> T {
        self.context.machine().wait_for_threads(|| self.has_ended.load(Ordering::Acquire));
        self.thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}
