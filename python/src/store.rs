//! Torch's store of keys and values as the channel between the ranks of a communicator.

use std::io;
use std::time::Duration;

use devcomm::SideChannel;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::signals::{attached, end_waits};

/// An object with the methods of `torch.distributed.Store`.
pub struct Store(Py<PyAny>);

impl Store {
    pub fn new(store: Bound<'_, PyAny>) -> Self {
        Self(store.unbind())
    }

    /// Calls `f` with the store; fails once Python ends.
    fn with<R>(&self, f: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>) -> io::Result<R> {
        let called = attached(|py| {
            f(self.0.bind(py)).inspect_err(|error| {
                // Such as KeyboardInterrupt, in a store of Python's.
                if !error.is_instance_of::<PyException>(py) {
                    end_waits(error.clone_ref(py));
                }
            })
        });
        called.ok_or_else(|| io::Error::other("Python ends"))?.map_err(io::Error::other)
    }
}

impl SideChannel for Store {
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()> {
        self.with(|store| {
            store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        // A wait that times out is an exception, of several classes. So it polls.
        let start = std::time::Instant::now();
        loop {
            let found = self.with(|store| {
                let is_there: bool = store.call_method1("check", ([key],))?.extract()?;
                match is_there {
                    true => store.call_method1("get", (key,))?.extract().map(Some),
                    false => Ok(None),
                }
            })?;
            if found.is_some() || start.elapsed() >= timeout {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn remove(&self, key: &str) -> io::Result<()> {
        self.with(|store| store.call_method1("delete_key", (key,)).map(drop))
    }

    // A rank in a long call of C, which has the GIL, is busy until the deadline.
    fn longest_silence(&self) -> Duration {
        Duration::MAX
    }
}
