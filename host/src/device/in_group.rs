//! Whether a group is open on this thread; communicators set it.

use std::cell::Cell;

use crate::error::{Result, StateError};

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Whether a group is open on this thread.
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
