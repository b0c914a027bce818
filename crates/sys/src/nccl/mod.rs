//! NCCL's host API: structs, constants and functions.

#[expect(missing_docs, reason = "the fields are NCCL's, documented in its headers")]
#[expect(clippy::new_without_default, reason = "NCCL's initial values, not plain ones")]
mod abi;
mod functions;

pub use abi::*;
pub use functions::{Functions, PROTOTYPES};
