//! The crate's error, and its mapping to NCCL's codes.

use crate::abi;

/// An error of the plugin. An error of an operation fails the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver cannot be used.
    #[error("no CUDA driver: {0}; install NVIDIA's driver, or run where there is one")]
    NoDriver(String),
    /// An environment variable has an invalid value.
    #[error("{variable}={value}: expected {expected}")]
    Variable {
        /// The name.
        variable: &'static str,
        /// The value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A driver call failed.
    #[error("{call} failed with {name} ({code}) {purpose}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The return code.
        code: i32,
        /// The code's name.
        name: String,
        /// The purpose of the call.
        purpose: String,
    },
    /// A system call failed.
    #[error("{what}: {reason}")]
    System {
        /// The operation.
        what: String,
        /// The system's message.
        reason: String,
    },
    /// An invalid argument.
    #[error("{0}")]
    Argument(String),
    /// The plugin does not support this configuration.
    #[error("{0}")]
    Unsupported(String),
    /// Ranks did not connect, or operations did not end, in time.
    #[error("{0}")]
    Timeout(String),
    /// Another rank ended or failed.
    #[error("{0}")]
    Remote(String),
    /// A bug in the plugin, or invalid counts in memory that another process shares.
    #[error("{0}")]
    Internal(String),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn system(what: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::System { what: what.into(), reason: reason.to_string() }
    }

    /// Returns the code that NCCL gets. NCCL: `ncclResult_t`.
    #[must_use]
    pub fn status(&self) -> abi::Status {
        match self {
            Self::NoDriver(_) | Self::System { .. } => abi::SYSTEM_ERROR,
            Self::Driver { .. } => abi::UNHANDLED_CUDA_ERROR,
            Self::Argument(_) => abi::INVALID_ARGUMENT,
            Self::Variable { .. } | Self::Unsupported(_) => abi::INVALID_USAGE,
            Self::Timeout(_) => abi::TIMEOUT,
            Self::Remote(_) => abi::REMOTE_ERROR,
            Self::Internal(_) => abi::INTERNAL_ERROR,
        }
    }
}
