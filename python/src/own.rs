//! Objects of devcomm's, in tables of the threads that made them, and calls without the GIL.
//!
//! Python may drop its handle of an object on any thread, and long after a world has ended. So the
//! handle is a number, and the object is in the table of a thread: that which made the object's
//! communicator.
//!
//! On GPUs any thread may use the objects, such as that of torch's autograd, which calls backward
//! functions. The types of the host crate allow it: they are `Send` and `Sync`, each call makes the
//! CUDA context current on its thread, and calls of NCCL on one communicator are made one after the
//! other. Operations (`Collectives`, the products) are `Send` alone: they are in a mutex, which a
//! call holds. It is a [`ReentrantMutex`](parking_lot::ReentrantMutex), since Python may call a
//! signal's handler, which may use the same object, on the thread that waits in the call.
//!
//! On simulated GPUs only the thread that has made an object may use it. Of the threads that use a
//! machine one runs at a time, and another one runs only while the first is in a call of devcomm's:
//! if the first waited for another one in any other way, as for a mutex, both would wait for ever.
//! Autograd needs no other thread here: torch calls the backward functions of tensors on the CPU on
//! the thread that has called `backward`.

use std::any::Any;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyAssertionError, PyAttributeError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::{INVALID_INPUT, STATE_ERROR, raise};
use crate::signals::interrupted_by_signals;
use crate::stream::captures_current;

/// A handle of an object in the table of its home.
pub struct Own<T> {
    id: u64,
    home: Home,
    object: PhantomData<fn() -> T>,
}

/// The table of a thread, and who may use what is in it.
#[derive(Clone)]
pub struct Home {
    table: Arc<Mutex<Table>>,
    /// Whether other threads may.
    is_shared: bool,
}

type Object = Arc<dyn Any + Send + Sync>;

/// The objects that a thread has made, or others for it.
#[derive(Default)]
struct Table {
    objects: BTreeMap<u64, Object>,
    /// The objects that no [`Scope`] drops.
    lasting: BTreeMap<u64, Object>,
    /// The number of objects made so far, and so the id of the next.
    made: u64,
    /// The ids of objects whose handles were dropped.
    returned: Vec<u64>,
}

thread_local! {
    static TABLE: Arc<Mutex<Table>> = Arc::default();
}

/// What nobody has closed when the thread and all handles are gone is never freed: Python may have
/// ended before.
impl Drop for Table {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Table {
    fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.objects));
        std::mem::forget(std::mem::take(&mut self.lasting));
    }
}

/// Forgets, without freeing it, what this thread has made and not closed. Python calls it at its
/// end, when another library may have ended a communicator that some of it uses.
#[pyfunction(name = "_forget")]
pub fn forget() {
    Home::here(true).table().forget();
}

impl Home {
    /// Returns the table of this thread; `is_shared`: whether other threads may use its objects.
    pub fn here(is_shared: bool) -> Self {
        Self { table: TABLE.with(Arc::clone), is_shared }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the table is that of this thread; a thread that ends has none any more.
    fn is_here(&self) -> bool {
        TABLE.try_with(|table| Arc::ptr_eq(table, &self.table)).unwrap_or(false)
    }

    fn require(&self) -> PyResult<()> {
        match self.is_shared || self.is_here() {
            true => Ok(()),
            false => Err(raise(
                INVALID_INPUT,
                "it was made by another thread; a rank, and what one makes on simulated GPUs, stay \
                 on the rank's thread",
            )),
        }
    }

    /// Drops the objects whose handles were dropped, later if torch captures its stream: their
    /// destructors wait for the GPU, which would invalidate the capture.
    ///
    /// Python may call a signal's handler as it calls torch. `failed` gets the exception of the
    /// handler, unless torch raises its class too ([`is_of_torch`]), while this thread has the GIL
    /// and the exception that Python raises already is set aside.
    ///
    /// # Errors
    ///
    /// That of `failed`.
    fn free_returned(
        &self,
        failed: impl FnOnce(Python<'_>, PyErr) -> PyResult<()>,
    ) -> PyResult<()> {
        if self.table().returned.is_empty() {
            return Ok(());
        }
        // SAFETY: may always be called.
        if unsafe { ffi::Py_IsInitialized() } == 0 {
            std::mem::forget(self.take_returned());
            return Ok(());
        }
        // Torch may free a tensor of a window after it has released the GIL. If a call by pyo3 led
        // to torch, pyo3 still takes this thread to have the GIL, since it counts only its own
        // attaches and detaches. So Python itself is asked for the GIL.
        // SAFETY: Python is initialised; the release is on this thread, after all else.
        let held = unsafe { ffi::PyGILState_Ensure() };
        let freed = Python::try_attach(|py| {
            let _exception = Exception::set_aside(py);
            let captures = match captures_current(py) {
                Ok(captures) => captures,
                // Torch does not know whether it captures: then it does not.
                Err(error) if is_of_torch(py, &error) => false,
                Err(error) => return failed(py, error),
            };
            if !captures {
                detached(py, || drop(self.take_returned()));
            }
            Ok(())
        });
        // While Python ends, it attaches no thread. The objects are then not freed, since their
        // destructors may wait for a GPU, or for other threads, which Python has ended.
        let freed = freed.unwrap_or_else(|| {
            std::mem::forget(self.take_returned());
            Ok(())
        });
        // SAFETY: this thread holds the interpreter's lock by `held`, which nothing else releases.
        unsafe { ffi::PyGILState_Release(held) };
        freed
    }

    /// Takes the objects whose handles were dropped out of the table.
    fn take_returned(&self) -> Vec<Object> {
        let table = &mut *self.table();
        let ids = std::mem::take(&mut table.returned);
        let mut take = |id| table.objects.remove(id).or_else(|| table.lasting.remove(id));
        ids.iter().filter_map(&mut take).collect()
    }
}

/// Returns whether an exception is of a class that torch raises when it is asked for its capture:
/// for a GPU that has failed, without CUDA, or while it is being imported. An exception of another
/// class is that of a signal's handler, such as KeyboardInterrupt or TimeoutError. (One of these
/// classes that a handler raises here cannot be told apart, and is lost.)
fn is_of_torch(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyRuntimeError>(py)
        || error.is_instance_of::<PyAssertionError>(py)
        || error.is_instance_of::<PyAttributeError>(py)
}

impl<T: Send + Sync + 'static> Own<T> {
    /// Returns a handle of a new object.
    pub fn new(home: &Home, object: T) -> Self {
        Self::made(home, object, |table| &mut table.objects)
    }

    /// Returns a handle of an object that lasts as long as the handle, also after the end of a
    /// [`Scope`]. [`get`](Self::get) does not find it.
    pub fn lasting(home: &Home, object: T) -> Self {
        Self::made(home, object, |table| &mut table.lasting)
    }

    fn made(
        home: &Home,
        object: T,
        of: impl FnOnce(&mut Table) -> &mut BTreeMap<u64, Object>,
    ) -> Self {
        let mut table = home.table();
        let id = table.made;
        table.made += 1;
        of(&mut table).insert(id, Arc::new(object));
        Self { id, home: home.clone(), object: PhantomData }
    }

    /// Returns the object.
    ///
    /// # Errors
    ///
    /// On another thread than its home's, unless they share it; after it was closed or its world
    /// has ended; the exception of a signal's handler.
    pub fn get(&self) -> PyResult<Arc<T>> {
        self.home.require()?;
        self.home.free_returned(|_, error| Err(error))?;
        let object = self.home.table().objects.get(&self.id).cloned();
        let object = object.and_then(|object| object.downcast().ok());
        object.ok_or_else(|| raise(STATE_ERROR, "it is closed, or its world has ended"))
    }

    /// Returns whether it is there, neither closed nor ended with its world.
    pub fn is_open(&self) -> bool {
        self.home.table().objects.contains_key(&self.id)
    }

    /// Drops the object, if it is not dropped yet.
    ///
    /// # Errors
    ///
    /// On another thread than its home's, unless they share it.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.require()?;
        let object = self.home.table().objects.remove(&self.id);
        interrupted_by_signals(py, || drop(object))
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        self.home.table().returned.push(self.id);
        // Elsewhere the next call of one of the objects does that.
        if self.home.is_here() {
            let _ = self.home.free_returned(|py, error| {
                // As Python does with an exception in a destructor.
                error.write_unraisable(py, None);
                Ok(())
            });
        }
    }
}

/// The exception that Python raises while it drops a handle, such as the argument of a call that
/// has failed. The functions of Python that the drop calls would clear or replace the exception, so
/// this keeps it, and raises it again at its own drop.
struct Exception<'py> {
    parts: [*mut ffi::PyObject; 3],
    _py: Python<'py>,
}

impl<'py> Exception<'py> {
    fn set_aside(py: Python<'py>) -> Self {
        let mut parts = [std::ptr::null_mut(); 3];
        let [class, value, traceback] = &mut parts;
        // SAFETY: this thread has the GIL; the pointers are to places for the parts.
        unsafe { ffi::PyErr_Fetch(class, value, traceback) };
        Self { parts, _py: py }
    }
}

impl Drop for Exception<'_> {
    fn drop(&mut self) {
        let [class, value, traceback] = self.parts;
        // SAFETY: this thread has the GIL; the parts, or NULL for no exception, are those of
        // `PyErr_Fetch`, whose references this gives back.
        unsafe { ffi::PyErr_Restore(class, value, traceback) };
    }
}

/// While it lives, it collects what this thread makes, and others make for it. Its end drops that,
/// the latest first.
pub struct Scope {
    first: u64,
    home: Home,
}

impl Scope {
    pub fn enter() -> Self {
        let home = Home::here(false);
        let first = home.table().made;
        Self { first, home }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let mut objects = self.home.table().objects.split_off(&self.first);
        while let Some((_, object)) = objects.pop_last() {
            drop(object);
        }
        drop(self.home.take_returned());
    }
}

/// Calls `f` without the GIL, so that other threads of Python can run while `f` waits. Simulated
/// ranks cannot do without this: they are threads of which one runs at a time, and if a rank that
/// waits in `f` kept the GIL, the one whose turn it is could not run.
///
/// `f` uses no object of Python.
pub fn detached<R>(py: Python<'_>, f: impl FnOnce() -> R) -> R {
    struct SameThread<T>(T);
    // SAFETY: `detach` calls the closure on this thread, and returns its result here.
    unsafe impl<T> Send for SameThread<T> {}
    impl<T> SameThread<T> {
        fn into_inner(self) -> T {
            self.0
        }
    }
    let f = SameThread(f);
    py.detach(move || SameThread(f.into_inner()())).into_inner()
}
