//! A minimal simulator of one thread, which records the calls of its functions.

#![allow(dead_code, reason = "each test file uses only some items")]

use std::cell::RefCell;
use std::collections::HashMap;

use cuda_std::arch::{Access, CTX, MulticastParts, Ops, Order, Scope, Shuffle, ThreadCtx};

/// A recorded call.
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

/// The number of copies of a multicast address, which is the address of the first.
pub const COPIES: usize = 3;

/// The distance between copies in bytes.
pub const STRIDE: usize = 64;

static OPS: Ops = Ops {
    barrier: |_, id, count, at| {
        record(Event::Barrier { id, count, line: at.line() });
        true
    },
    sync_warp: |_, mask, _| record(Event::SyncWarp { mask }),
    // The source lane's value is the complement of the caller's.
    shuffle: |_, mask, mode, value, lane, width, _| {
        record(Event::Shuffle { mask, mode, lane, width });
        (!value, lane < width)
    },
    ballot: |_, mask, predicate, _| if predicate { mask } else { mask & !1 },
    exchange: |_, words, _| [words; 32],
    shared_static: |_, key, size, _| {
        SHARED.with_borrow_mut(|shared| {
            let slot = shared.entry(key).or_insert_with(|| vec![0; size.div_ceil(16)].into());
            slot.as_mut_ptr().cast()
        })
    },
    access: |_, address, bytes, access, at| {
        record(Event::Access { address, bytes, access, line: at.line() });
        address
    },
    keeps: |_, _, _, _| false,
    multimem: |_, address, bytes, access, at| {
        for copy in 0..COPIES {
            let address = address + copy * STRIDE;
            record(Event::Access { address, bytes, access, line: at.line() });
        }
        let first = std::ptr::with_exposed_provenance_mut(address);
        MulticastParts { first, stride: STRIDE, n: COPIES }
    },
    spin: |_, _| record(Event::Spin),
    wait_phase: |_, _, _, _| record(Event::Spin),
    set_registers: |_, _, _, _| {},
    cluster_rank: |_| 0,
    cluster_size: |_| 1,
    sums: |_, _, _, _| {},
    meet_warpgroup: |_, _| {},
    cluster_sync: |_, _, _| {},
    map_shared: |_, address, _, _| address,
    wait_for_previous: |_, _| {},
    launch_next: |_| {},
    fence: |_, order, scope, _| record(Event::Fence(order, scope)),
    event: |_, _, _| {},
    skips_wait: |_, _| false,
    exit: |_| panic!("the thread exits"),
    print: |_, text| record(Event::Print(text.to_owned())),
    clock: |_| 42,
};

/// Returns the only thread of a launch.
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

/// Runs `f` as the thread `context`. Returns its result and the recorded calls.
pub fn run_as<R>(context: ThreadCtx, f: impl FnOnce() -> R) -> (R, Vec<Event>) {
    /// Clears the current thread when `run_as` ends, also by a panic.
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
