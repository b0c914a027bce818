//! devcomm's errors as exceptions of Python, whose classes are in `package/devcomm/errors.py`.

use devcomm::{Error, StateError};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The name of a class in `devcomm.errors`.
#[derive(Clone, Copy)]
pub struct Class(&'static str);

pub const INVALID_INPUT: Class = Class("InvalidInput");
pub const STATE_ERROR: Class = Class("StateError");
pub const CHECK_ERROR: Class = Class("CheckError");

/// Returns an exception of this class.
pub fn raise(Class(name): Class, message: impl Into<String>) -> PyErr {
    let message = message.into();
    Python::attach(|py| {
        let class = py.import("devcomm.errors").and_then(|errors| errors.getattr(name));
        match class.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, message),
            // Python ends, and imports nothing any more.
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// Returns a wrong argument.
pub fn invalid(message: impl Into<String>) -> PyErr {
    raise(INVALID_INPUT, message)
}

/// Returns the same as an error of devcomm's.
pub fn invalid_input(what: impl Into<String>) -> Error {
    Error::InvalidInput { what: what.into() }
}

/// Returns the exception of an error: its class is that of the variant, its text the error's.
pub fn exception(error: Error) -> PyErr {
    if let Error::State(StateError::Interrupted) = error {
        return PyKeyboardInterrupt::new_err(error.to_string());
    }
    let class = match error {
        Error::Driver(_) => Class("DriverError"),
        Error::Nccl(_) => Class("NcclError"),
        Error::Launch(_) => Class("LaunchError"),
        Error::DevComm(_) => Class("DevCommError"),
        Error::World(_) => Class("WorldError"),
        Error::State(_) => STATE_ERROR,
        Error::InvalidInput { .. } => INVALID_INPUT,
        _ => Class("Error"),
    };
    raise(class, error.to_string())
}
