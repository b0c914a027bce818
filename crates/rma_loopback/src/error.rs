//! The one error of this crate, and how NCCL hears of it.

use crate::abi;

/// Why the plugin cannot go on. An error of an operation, whatever it is, ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver cannot be used.
    #[error("no CUDA driver: {0}; install NVIDIA's driver, or run where there is one")]
    NoDriver(String),
    /// A variable has a value that it cannot have.
    #[error("{variable}={value}: {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// What it is set to.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call} failed with {name} ({code}) {place}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its result.
        code: i32,
        /// The result's name.
        name: String,
        /// What it was called for.
        place: String,
    },
    /// The operating system refused something.
    #[error("{what}: {reason}")]
    System {
        /// What was tried.
        what: String,
        /// What the system says.
        reason: String,
    },
    /// A call has an argument that it cannot have.
    #[error("{0}")]
    Argument(String),
    /// The job is spread in a way that this plugin does not serve.
    #[error("{0}")]
    Unserved(String),
    /// Not all ranks came.
    #[error("{0}")]
    Timeout(String),
    /// Another rank ended or failed.
    #[error("{0}")]
    Remote(String),
    /// The plugin broke a promise of its own.
    #[error("{0}")]
    Internal(String),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn system(what: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::System { what: what.into(), reason: reason.to_string() }
    }

    /// What NCCL gets. NCCL: `ncclResult_t`.
    #[must_use]
    pub fn status(&self) -> abi::Status {
        match self {
            Self::NoDriver(_) | Self::System { .. } => abi::SYSTEM_ERROR,
            Self::Driver { .. } => abi::UNHANDLED_CUDA_ERROR,
            Self::Argument(_) => abi::INVALID_ARGUMENT,
            Self::Variable { .. } | Self::Unserved(_) => abi::INVALID_USAGE,
            Self::Timeout(_) => abi::TIMEOUT,
            Self::Remote(_) => abi::REMOTE_ERROR,
            Self::Internal(_) => abi::INTERNAL_ERROR,
        }
    }
}
