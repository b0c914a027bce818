//! The implementation on the host: operations act on the running simulated thread, through the
//! simulator's table [`Ops`].

/// Defines functions that call the simulator's functions, with the running thread, arguments and
/// the caller's line.
macro_rules! hooks {
    ($(
        $(#[$meta:meta])*
        $name:ident($($arg:ident: $type:ty),*) $(-> $returns:ty)? = $op:ident($($value:expr),*);
    )*) => { $(
        $(#[$meta])*
        #[inline]
        #[track_caller]
        pub(crate) fn $name($($arg: $type),*) $(-> $returns)? {
            let (thread, context) = $crate::arch::current();
            (context.ops.$op)(thread, $($value,)* std::panic::Location::caller())
        }
    )* };
}

/// Defines functions that report a step of asynchronous operations to the simulator.
macro_rules! events {
    ($($name:ident $(<const $n:ident: u32>)? = $event:expr;)*) => { $(
        #[track_caller]
        pub(crate) fn $name$(<const $n: u32>)?() {
            $crate::arch::event($event);
        }
    )* };
}

mod atomics;
mod bulk;
mod copies;
mod hooks;
mod memory;
mod multimem;
mod numbers;
mod tensor;
mod threads;

pub use hooks::{
    Access, CTX, Engine, Event, MulticastParts, Ops, Order, Scope, Shuffle, Space, SumsStep,
    ThreadCtx,
};

pub(crate) use atomics::fence;
pub use bulk::pending_of_mbarrier;
pub(crate) use bulk::*;
pub use copies::{Piece, Source};
pub(crate) use memory::*;
pub(crate) use numbers::*;
pub(crate) use tensor::*;
pub use tensor::{Factor, Sums};
pub(crate) use threads::*;

/// Returns the running simulated thread: the pointer that the simulator's functions take, and its
/// context.
#[track_caller]
fn current() -> (*const ThreadCtx, &'static ThreadCtx) {
    let pointer = CTX.get();
    if pointer.is_null() {
        no_simulator();
    }
    // SAFETY: the simulator keeps the context alive and unchanged while its thread runs, and only
    // that thread's code uses the reference.
    (pointer, unsafe { &*pointer })
}

#[cold]
#[track_caller]
fn no_simulator() -> ! {
    panic!("a device function was called on the host: run this kernel in the simulator or on a GPU")
}
