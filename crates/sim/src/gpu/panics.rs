//! Turns kernels' panics into errors with the panics' locations, instead of printing them.
//!
//! A process-wide panic hook keeps the location of a panic in a simulated thread, and calls the
//! previous hook for other panics. (Printing a backtrace, as the standard hook may, needs more
//! stack than a simulated thread has.)

use std::any::Any;
use std::cell::RefCell;
use std::sync::Once;

use cuda_std::arch::CTX;

use crate::base::error::Error;
use crate::gpu::thread::Thread;

thread_local! {
    static LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs the hook, once per process.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CTX.get().is_null() {
                return before(info);
            }
            Thread::current().unwinding.set(true);
            LOCATION.set(info.location().map(ToString::to_string));
        }));
    });
}

/// Records the panic of `thread`.
pub(crate) fn report(thread: &Thread, payload: &(dyn Any + Send)) {
    let at = LOCATION.take().unwrap_or_else(|| "an unknown location".to_owned());
    let (gpus, kernel, thread) = (thread.gpus(), thread.kernel(), thread.id());
    gpus.fail(Error::Panic { kernel, thread, at, message: message(payload) });
}

/// Returns the message of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
