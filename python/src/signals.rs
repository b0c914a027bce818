//! Ctrl-C, and other signals for which Python has handlers, during calls that wait.
//!
//! Python calls handlers on the main thread, between two of its instructions. A wait on the main
//! thread lets it call them, and ends if one raises an exception. The ranks of a world of threads
//! are told when that happens to the thread that waits for them.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use devcomm::interruptible;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::exception;
use crate::own::detached;

/// How often the thread that waits for a world of threads lets Python call handlers.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long the ranks of an interrupted world may take to end.
const GRACE: Duration = Duration::from_millis(600);

thread_local! {
    /// The exception that ends the waits of the call in progress.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The world of threads whose rank this thread is.
    static WORLD: RefCell<Option<Arc<Interrupt>>> = const { RefCell::new(None) };
}

/// Calls `f` without the GIL; its waits end when a handler raises an exception, which is then that
/// of the call.
pub fn interrupted_by_signals<R>(py: Python<'_>, f: impl FnOnce() -> R) -> PyResult<R> {
    detached(py, || {
        let result = interruptible(is_interrupted, f);
        // If there is an exception, what `f` has made is dropped here, without the GIL.
        RAISED.take().map_or(Ok(result), Err)
    })
}

/// Does the same as [`interrupted_by_signals`], and turns an error of `f` into its exception of
/// Python, which is KeyboardInterrupt on the thread of a rank whose world was interrupted.
pub fn waiting<R>(py: Python<'_>, f: impl FnOnce() -> devcomm::Result<R>) -> PyResult<R> {
    interrupted_by_signals(py, f)?.map_err(|error| {
        if !WORLD.with_borrow(|world| world.as_ref().is_some_and(|world| world.is_interrupted())) {
            return exception(error);
        }
        // The exception is raised here. That which `Interrupt::interrupt` has set for this thread
        // would be raised once more, at the next instruction, and is taken back.
        // SAFETY: this thread has the GIL, and the number is its own.
        unsafe { ffi::PyThreadState_SetAsyncExc(this_thread() as c_long, std::ptr::null_mut()) };
        PyKeyboardInterrupt::new_err(format!("the world was interrupted: {error}"))
    })
}

/// Python's number of this thread.
fn this_thread() -> c_ulong {
    // SAFETY: may always be called.
    unsafe { ffi::PyThread_get_thread_ident() }
}

fn is_interrupted() -> bool {
    if RAISED.with_borrow(Option::is_some) {
        return true;
    }
    if let Some(world) = WORLD.with_borrow(Clone::clone) {
        return world.is_interrupted();
    }
    // Fails when Python ends.
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_raised = raised.is_some();
    raised.into_iter().for_each(end_waits);
    is_raised
}

/// Ends the waits of this thread's call in progress, which raises the exception.
pub fn end_waits(raised: PyErr) {
    RAISED.set(Some(raised));
}

/// Whether a world of threads was interrupted, and the threads of its ranks.
#[derive(Default)]
pub struct Interrupt {
    is_interrupted: AtomicBool,
    /// The threads that run the ranks' function, by Python's numbers.
    threads: Mutex<Vec<c_ulong>>,
}

impl Interrupt {
    /// Calls `f`, the function of a rank on this thread.
    pub fn in_rank<R>(self: &Arc<Self>, _: Python<'_>, f: impl FnOnce() -> R) -> R {
        struct Running<'a>(&'a Interrupt, c_ulong);
        impl Drop for Running<'_> {
            fn drop(&mut self) {
                WORLD.set(None);
                self.0.with_threads(|threads| threads.retain(|thread| *thread != self.1));
            }
        }
        let thread = this_thread();
        WORLD.set(Some(Arc::clone(self)));
        self.with_threads(|threads| threads.push(thread));
        let _running = Running(self, thread);
        f()
    }

    /// Waits for what the world's thread sends when the ranks have ended. If a handler raises an
    /// exception meanwhile, ends the ranks and fails with it; a rank that does not end soon, since
    /// it waits elsewhere, is left to itself. Returns `None` if the world's thread has panicked.
    pub fn wait<T>(&self, py: Python<'_>, ended: &Receiver<T>) -> PyResult<Option<T>> {
        loop {
            match detached(py, || ended.recv_timeout(INTERVAL)) {
                // A signal may have come since: its exception is that of the call.
                Ok(result) => return py.check_signals().map(|()| Some(result)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(raised) = py.check_signals() {
                self.interrupt(py);
                let _ = detached(py, || ended.recv_timeout(GRACE).map(drop));
                return Err(raised);
            }
        }
    }

    fn is_interrupted(&self) -> bool {
        self.is_interrupted.load(Ordering::Acquire)
    }

    /// Ends the waits of the ranks, and raises KeyboardInterrupt where they run Python's code.
    fn interrupt(&self, _: Python<'_>) {
        self.is_interrupted.store(true, Ordering::Release);
        self.with_threads(|threads| {
            for thread in threads {
                // SAFETY: this thread has the GIL; a thread that has ended is not found.
                unsafe {
                    ffi::PyThreadState_SetAsyncExc(*thread as c_long, ffi::PyExc_KeyboardInterrupt);
                }
            }
        });
    }

    fn with_threads<R>(&self, f: impl FnOnce(&mut Vec<c_ulong>) -> R) -> R {
        f(&mut self.threads.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Calls `f` with the GIL, unless Python ends: on any thread, also one that Python has not made and
/// that may ask for the GIL while Python ends.
pub fn attached<R>(f: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    thread_local! {
        static SLEEPS: Cell<bool> = const { Cell::new(false) };
    }
    // SAFETY: may always be called.
    let is_pythons = unsafe { !ffi::PyGILState_GetThisThreadState().is_null() };
    if !is_pythons && !SLEEPS.replace(true) {
        // For as long as the thread lives.
        std::mem::forget(SleepsAfterPython::enter());
    }
    Python::try_attach(f)
}

/// Makes this thread, while it lives, sleep until the process ends instead of being ended by
/// Python.
///
/// Python ends other threads than its main one when they ask for the GIL after its own end, as a
/// rank of an interrupted world may that was left to itself: by `pthread_exit`, which unwinds. The
/// destructors on the way would call Python, which then ends the process. The thread's cleanup
/// handlers are called before. (As of Python 3.14 it lets threads sleep itself.)
pub struct SleepsAfterPython {
    /// Space for the C library's `struct _pthread_cleanup_buffer`, which has up to four words. An
    /// unwinding thread calls a handler when it leaves the frame that has the buffer. This one is
    /// on the heap, in no frame, and its handler is called before the first frame is left.
    buffer: NonNull<[usize; 4]>,
}

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut [usize; 4],
        routine: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut [usize; 4], execute: c_int);
}

impl SleepsAfterPython {
    pub fn enter() -> Self {
        extern "C" fn sleep(_: *mut c_void) {
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        let buffer = Box::leak(Box::new([0; 4]));
        // SAFETY: the buffer has the size and alignment of the C library's, and lives until the
        // handler is removed.
        unsafe { _pthread_cleanup_push(buffer, sleep, null_mut()) };
        Self { buffer: NonNull::from(buffer) }
    }
}

impl Drop for SleepsAfterPython {
    fn drop(&mut self) {
        // SAFETY: the latest handler of this thread, on which this was made, since it is not Send;
        // the buffer is from a Box, and nothing refers to it any more.
        unsafe {
            _pthread_cleanup_pop(self.buffer.as_ptr(), 0);
            drop(Box::from_raw(self.buffer.as_ptr()));
        }
    }
}
