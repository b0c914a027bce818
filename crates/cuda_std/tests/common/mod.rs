//! The smallest simulator: one thread at a time, which records what it is told.

#![allow(dead_code, reason = "each test file uses a part")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::Location;

use cuda_std::arch::{Access, CTX, MulticastParts, Ops, Order, Scope, Shuffle, ThreadCtx};

/// What a hook was told.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Barrier { id: u32, count: u32, line: u32 },
    SyncWarp { mask: u32 },
    Shuffle { mask: u32, mode: Shuffle, lane: u32, width: u32 },
    Access { address: usize, bytes: usize, access: Access, line: u32 },
    Spin,
    Fence(Order, Scope),
    Print(String),
}

thread_local! {
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(vec![]) };
    static SHARED: RefCell<HashMap<usize, Box<[u128]>>> = RefCell::new(HashMap::new());
}

fn record(event: Event) {
    EVENTS.with_borrow_mut(|events| events.push(event));
}

fn barrier(_: *const ThreadCtx, id: u32, count: u32, at: &'static Location<'static>) {
    record(Event::Barrier { id, count, line: at.line() });
}

fn sync_warp(_: *const ThreadCtx, mask: u32, _: &'static Location<'static>) {
    record(Event::SyncWarp { mask });
}

/// The source lane holds the complement of every word.
fn shuffle(
    _: *const ThreadCtx,
    mask: u32,
    mode: Shuffle,
    value: u32,
    lane: u32,
    width: u32,
    _: &'static Location<'static>,
) -> (u32, bool) {
    record(Event::Shuffle { mask, mode, lane, width });
    (!value, lane < width)
}

fn ballot(_: *const ThreadCtx, mask: u32, predicate: bool, _: &'static Location<'static>) -> u32 {
    if predicate { mask } else { mask & !1 }
}

fn shared_static(_: *const ThreadCtx, key: usize, size: usize) -> *mut u8 {
    SHARED.with_borrow_mut(|shared| {
        let slot = shared.entry(key).or_insert_with(|| vec![0; size.div_ceil(16)].into());
        slot.as_mut_ptr().cast()
    })
}

fn access(
    _: *const ThreadCtx,
    address: usize,
    bytes: usize,
    access: Access,
    at: &'static Location<'static>,
) {
    record(Event::Access { address, bytes, access, line: at.line() });
}

fn spin(_: *const ThreadCtx, _: &'static Location<'static>) {
    record(Event::Spin);
}

fn fence(_: *const ThreadCtx, order: Order, scope: Scope) {
    record(Event::Fence(order, scope));
}

fn print(_: *const ThreadCtx, text: &str) {
    record(Event::Print(text.to_owned()));
}

fn clock(_: *const ThreadCtx) -> u64 {
    42
}

fn exit(_: *const ThreadCtx) -> ! {
    panic!("the thread leaves")
}

/// Multicast addresses are the first of [`COPIES`] copies, [`STRIDE`] bytes apart.
fn multimem(
    _: *const ThreadCtx,
    address: usize,
    _: usize,
    _: &'static Location<'static>,
) -> MulticastParts {
    MulticastParts {
        first: std::ptr::with_exposed_provenance_mut(address),
        stride: STRIDE,
        n: COPIES,
    }
}

/// Copies behind a multicast address.
pub const COPIES: usize = 3;

/// Bytes between them.
pub const STRIDE: usize = 64;

static OPS: Ops = Ops {
    barrier,
    sync_warp,
    shuffle,
    ballot,
    shared_static,
    access,
    multimem,
    spin,
    fence,
    exit,
    print,
    clock,
};

/// The first thread of a launch of one.
pub fn thread() -> ThreadCtx {
    ThreadCtx {
        thread_idx: [0; 3],
        block_idx: [0; 3],
        block_dim: [1; 3],
        grid_dim: [1; 3],
        dynamic_shared: (std::ptr::null_mut(), 0),
        watch: true,
        ops: &OPS,
    }
}

/// Runs `f` as the thread `context`; its result and what it told.
pub fn run_as<R>(context: ThreadCtx, f: impl FnOnce() -> R) -> (R, Vec<Event>) {
    /// No thread is current behind `run_as`, also when a test panics.
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            CTX.set(std::ptr::null());
        }
    }
    EVENTS.take();
    let _reset = Reset;
    CTX.set(&raw const context);
    let result = f();
    (result, EVENTS.take())
}

/// Runs `f` as [`thread`].
pub fn run<R>(f: impl FnOnce() -> R) -> (R, Vec<Event>) {
    run_as(thread(), f)
}
