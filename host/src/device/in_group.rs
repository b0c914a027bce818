//! Whether an NCCL group (`ncclGroupStart`) is open on this thread, and on which streams it has
//! deferred operations; the communicator module sets both.

use std::cell::{Cell, RefCell};

use super::context::Context;
use super::stream::Stream;
use crate::error::{Result, StateError};

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
    static DEFERRED: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn is_open() -> bool {
    OPEN.get()
}

pub(crate) fn set_open(open: bool) {
    OPEN.set(open);
}

/// Sets the streams of the operations that the open group has deferred.
pub(crate) fn set_deferred(streams: impl Iterator<Item = Stream>) {
    let before = DEFERRED.replace(streams.collect());
    // After the borrow: dropping a stream may wait for it.
    drop(before);
}

/// Adds the stream of a deferred operation.
pub(crate) fn add_deferred(stream: &Stream) {
    DEFERRED.with_borrow_mut(|deferred| deferred.push(stream.clone()));
}

/// Fails inside a group.
pub(crate) fn refuse_inside(what: &'static str) -> Result<()> {
    if is_open() { Err(StateError::InGroup { what }.into()) } else { Ok(()) }
}

/// Fails if the open group has deferred operations on `stream`, or without a stream, on any of the
/// context: what is enqueued now would run before them.
pub(crate) fn refuse_before_deferred(
    context: &Context,
    stream: Option<&Stream>,
    what: &'static str,
) -> Result<()> {
    if !is_open() {
        return Ok(());
    }
    let comes_before = DEFERRED.with_borrow(|deferred| {
        let mut own = deferred.iter().filter(|other| other.context().is(context));
        own.any(|other| stream.is_none_or(|stream| stream.is(other)))
    });
    if comes_before { Err(StateError::BeforeDeferred { what }.into()) } else { Ok(()) }
}
