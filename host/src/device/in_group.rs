//! Whether an NCCL group (`ncclGroupStart`) is open on this thread; the communicator module sets
//! it.

use std::cell::Cell;

use crate::error::{Result, StateError};

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn is_open() -> bool {
    OPEN.get()
}

pub(crate) fn set_open(open: bool) {
    OPEN.set(open);
}

/// Fails inside a group.
pub(crate) fn refuse_inside(what: &'static str) -> Result<()> {
    if is_open() { Err(StateError::InGroup { what }.into()) } else { Ok(()) }
}
