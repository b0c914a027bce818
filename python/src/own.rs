//! Objects of devcomm's, each of which stays on the thread that made it, and calls without the GIL.
//!
//! Python may drop its handle of an object on any thread, and long after a world has ended. So the
//! handle is a number, and the objects are in a table of their thread.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::{INVALID_INPUT, STATE_ERROR, raise};
use crate::signals::interrupted_by_signals;
use crate::stream::captures_current;

/// A handle of an object in the table of the thread that made it.
pub struct Own<T> {
    id: u64,
    thread: Arc<Returned>,
    object: PhantomData<fn() -> T>,
}

/// The ids of objects whose handles were dropped on another thread.
type Returned = Mutex<Vec<u64>>;

/// The objects of a thread.
struct Table {
    objects: BTreeMap<u64, Rc<dyn Any>>,
    /// The objects that no [`Scope`] drops.
    lasting: BTreeMap<u64, Rc<dyn Any>>,
    made: u64,
    returned: Arc<Returned>,
}

thread_local! {
    static TABLE: RefCell<Table> = RefCell::new(Table {
        objects: BTreeMap::new(),
        lasting: BTreeMap::new(),
        made: 0,
        returned: Arc::default(),
    });
}

/// What nobody has closed when the thread ends is never freed: Python may have ended before.
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
    TABLE.with_borrow_mut(Table::forget);
}

impl<T: 'static> Own<T> {
    /// Returns a handle of a new object of this thread.
    pub fn new(object: T) -> Self {
        free_returned();
        Self::made(object, |table| &mut table.objects)
    }

    /// Returns a handle of an object of this thread that lasts as long as the handle, also after
    /// the end of a [`Scope`]. [`get`](Self::get) does not find it.
    pub fn lasting(object: T) -> Self {
        Self::made(object, |table| &mut table.lasting)
    }

    fn made(object: T, of: impl FnOnce(&mut Table) -> &mut BTreeMap<u64, Rc<dyn Any>>) -> Self {
        TABLE.with_borrow_mut(|table| {
            let id = table.made;
            table.made += 1;
            of(table).insert(id, Rc::new(object));
            Self { id, thread: Arc::clone(&table.returned), object: PhantomData }
        })
    }

    /// Returns the object.
    ///
    /// # Errors
    ///
    /// On another thread than that which made it, and after it was closed or its world has ended.
    pub fn get(&self) -> PyResult<Rc<T>> {
        self.require_here()?;
        free_returned();
        let object = TABLE.with_borrow(|table| table.objects.get(&self.id).cloned());
        let object = object.and_then(|object| object.downcast().ok());
        object.ok_or_else(|| raise(STATE_ERROR, "it is closed, or its world has ended"))
    }

    /// Drops the object, if it is not dropped yet.
    ///
    /// # Errors
    ///
    /// On another thread than that which made it.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.require_here()?;
        let object = TABLE.with_borrow_mut(|table| table.objects.remove(&self.id));
        interrupted_by_signals(py, || drop(object))
    }

    fn require_here(&self) -> PyResult<()> {
        match TABLE.with_borrow(|table| Arc::ptr_eq(&self.thread, &table.returned)) {
            true => Ok(()),
            false => Err(raise(
                INVALID_INPUT,
                "it was made by another thread; what a rank makes stays on the rank's thread",
            )),
        }
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        let mut returned = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        returned.push(self.id);
        drop(returned);
        free_returned();
    }
}

/// Drops the objects of this thread whose handles were dropped, later if torch captures its stream:
/// their destructors wait for the GPU, which would invalidate the capture.
fn free_returned() {
    // Fails while the thread ends, which forgets its objects.
    let any = TABLE.try_with(|table| {
        let table = table.try_borrow_mut().ok()?;
        Some(!table.returned.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
    });
    if any != Ok(Some(true)) {
        return;
    }
    // SAFETY: may always be called.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        return std::mem::forget(take_returned());
    }
    // Torch frees a tensor of a window without the GIL, which pyo3 does not know: it counts its own
    // calls only.
    // SAFETY: Python is initialised; the release is on this thread, after all else.
    let held = unsafe { ffi::PyGILState_Ensure() };
    let freed = Python::try_attach(|py| {
        let _exception = Exception::set_aside(py);
        if !captures_current(py).unwrap_or(false) {
            detached(py, || drop(take_returned()));
        }
    });
    // While Python ends, nothing waits.
    if freed.is_none() {
        std::mem::forget(take_returned());
    }
    // SAFETY: this thread holds the interpreter's lock by `held`, which nothing else releases.
    unsafe { ffi::PyGILState_Release(held) };
}

/// The exception that Python raises while it drops a handle, such as the argument of a call that
/// has failed. What is called meanwhile would lose it.
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

/// Takes the objects of this thread whose handles were dropped out of its table.
fn take_returned() -> Vec<Rc<dyn Any>> {
    TABLE.with_borrow_mut(|table| {
        let mut returned = table.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let ids = std::mem::take(&mut *returned);
        drop(returned);
        let mut take = |id| table.objects.remove(id).or_else(|| table.lasting.remove(id));
        ids.iter().filter_map(&mut take).collect()
    })
}

/// While it lives, it collects what this thread makes. Its end drops that, the latest first.
pub struct Scope {
    first: u64,
}

impl Scope {
    pub fn enter() -> Self {
        Self { first: TABLE.with_borrow(|table| table.made) }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let mut objects = TABLE.with_borrow_mut(|table| table.objects.split_off(&self.first));
        while let Some((_, object)) = objects.pop_last() {
            drop(object);
        }
        drop(take_returned());
    }
}

/// Calls `f` without the GIL, for which other threads may then wait in Python: simulated ranks are
/// threads of which one runs at a time, and that one must get the GIL.
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
