//! Warps: shuffles, votes, exchanges and `sync_warp`, each a barrier of the lanes in a mask. A lane
//! is one bit of a mask, and an index in arrays.

use std::cell::{Cell, RefCell};
use std::io;

use cuda_std::arch::Shuffle;
use nccl_device::raw::host::CoopCall;

use crate::base::error::{Error, Site};
use crate::base::layout::POISON;
use crate::gpu::barrier;
use crate::gpu::stack::Slab;
use crate::gpu::thread::{Thread, Wait};

pub(crate) const WARP: u32 = 32;

/// The warp operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Sync,
    Shuffle(Shuffle),
    Ballot,
    /// `mma`, `ldmatrix` or `stmatrix`: each lane reads the registers of all 32.
    Exchange,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync_warp",
            Self::Shuffle(_) => "a shuffle",
            Self::Ballot => "a vote",
            Self::Exchange => "an operation on matrices",
        }
    }
}

/// One lane's operands.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lane {
    pub(crate) value: u32,
    /// Source lane, distance or lane mask of a shuffle.
    pub(crate) operand: u32,
    /// Segment width of a shuffle, a power of two.
    pub(crate) width: u32,
}

/// A pending operation of the lanes in `mask`.
struct WarpBarrier {
    mask: u32,
    op: Op,
    /// The line of the first lane that has arrived, the cooperative call that it makes there, and
    /// its thread's number in the block.
    at: Site,
    coop_call: Option<CoopCall>,
    first: u32,
    /// The lanes that have arrived, and their operands.
    arrived: u32,
    lanes: [Lane; WARP as usize],
}

/// The threads of one warp and their stacks, which the scheduler reuses.
pub(crate) struct Warp {
    pub(crate) threads: [Thread; WARP as usize],
    pub(crate) stacks: Slab,
    /// Lanes that have not ended.
    live: Cell<u32>,
    barriers: RefCell<Vec<WarpBarrier>>,
    /// The words of the last complete exchange, which each lane reads before it takes part in the
    /// next one, and the words that lanes have given to the next one.
    exchanged: Cell<Words>,
    words: Cell<Words>,
}

/// The registers that each lane gives to an exchange: at most six, which `mma` needs.
type Words = [[u32; 6]; WARP as usize];

impl Warp {
    /// Returns a warp without a block, with `stack_size` bytes of stack per thread.
    pub(crate) fn new(stack_size: usize) -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            stacks: Slab::new(WARP as usize, stack_size)?,
            threads: std::array::from_fn(|_| Thread::new()),
            live: Cell::new(0),
            barriers: RefCell::default(),
            exchanged: Cell::default(),
            words: Cell::default(),
        }))
    }

    /// Returns the stacks of a warp that has no block any more.
    pub(crate) fn end(self) -> Slab {
        let Self { threads, stacks, .. } = self;
        drop(threads);
        stacks
    }

    /// Prepares the warp for a block, whose first `threads` threads from here on are its lanes: at
    /// most [`WARP`] of them, and at least one.
    pub(crate) fn reset(&self, threads: u32) {
        self.live.set(u32::MAX >> (WARP - threads.min(WARP)));
        self.barriers.borrow_mut().clear();
    }
}

/// Takes part in operation `op` of the lanes in `mask`: waits for the other lanes, and returns the
/// lane's result. It does not wait for lanes that have exited or that a partial warp lacks; if the
/// operation needs them, the thread fails.
pub(crate) fn converge(
    thread: &Thread,
    mask: u32,
    op: Op,
    mine: Lane,
    coop_call: Option<CoopCall>,
    at: Site,
) -> (u32, bool) {
    if op == Op::Sync && thread.gpus().removes(at) {
        return (0, true);
    }
    let lane = thread.lane();
    let warp = thread.warp();
    if mask >> lane & 1 == 0 {
        thread.misuse(at, format!("lane {lane} is not in its own mask {mask:#010x}"));
    }
    if matches!(op, Op::Shuffle(_)) && !(mine.width.is_power_of_two() && mine.width <= WARP) {
        let width = mine.width;
        thread.misuse(at, format!("shuffle width {width} is not 1, 2, 4, 8, 16 or 32"));
    }
    let coop_call = coop_call.or(thread.coop_call.get());
    let mut barriers = warp.barriers.borrow_mut();
    let found = barriers.iter().position(|barrier| barrier.mask == mask);
    let index = found.unwrap_or_else(|| {
        let (first, arrived, lanes) = (thread.tid.get(), 0, Default::default());
        barriers.push(WarpBarrier { mask, op, at, coop_call, first, arrived, lanes });
        barriers.len() - 1
    });
    let WarpBarrier { op: first_op, at: other, coop_call: first_call, first, .. } = barriers[index];
    // A thread that fails below never returns, so it must not hold the borrow.
    drop(barriers);
    // Optimised builds may merge calls from different call sites. Lanes may call `sync_warp` at
    // different places, as on a GPU.
    let elsewhere = cfg!(debug_assertions) && op != Op::Sync && other != at;
    if first_op != op || elsewhere {
        let (kernel, thread_id) = (thread.kernel(), thread.id());
        let what = op.name().to_owned();
        thread.fail(Error::Divergent { kernel, thread: thread_id, what, at, other });
    }
    if let Some(what) = lacks_lanes(thread, mask, op, coop_call) {
        thread.misuse(at, what);
    }
    barrier::check_arguments(thread, coop_call, (first_call, first, other), at);
    let mut barriers = warp.barriers.borrow_mut();
    let barrier = &mut barriers[index];
    barrier.arrived |= 1 << lane;
    barrier.lanes[lane as usize] = mine;
    if warp.live.get() & mask & !barrier.arrived == 0 {
        let barrier = barriers.swap_remove(index);
        drop(barriers);
        finish(warp, &barrier, Some(thread));
        thread.arrived_last();
    } else {
        drop(barriers);
        thread.suspend(Wait::Warp { mask, at, coop_call });
    }
    thread.result.get()
}

/// Gives `words` to all lanes of the warp, and returns those of each. Fails the thread if the warp
/// lacks lanes, as PTX leaves the result undefined then.
pub(crate) fn exchange(thread: &Thread, words: [u32; 6], at: Site) -> Words {
    let warp = thread.warp();
    warp.words.as_array_of_cells()[thread.lane() as usize].set(words);
    converge(thread, u32::MAX, Op::Exchange, Lane::default(), None, at);
    warp.exchanged.get()
}

/// Returns a report if an operation of the thread's warp lacks lanes: an exchange needs all 32, and
/// a cooperative call those of its mask that have returned from the kernel, while the last warp of
/// a block may have fewer lanes. Lanes that exit because the host aborts do not count as lacking.
fn lacks_lanes(thread: &Thread, mask: u32, op: Op, call: Option<CoopCall>) -> Option<String> {
    let warp = thread.warp();
    if warp.live.get() & mask == mask {
        return None;
    }
    let what = if op == Op::Exchange { op.name().to_owned() } else { call?.to_string() };
    let lanes = thread.block().size - thread.tid.get() / WARP * WARP;
    if op == Op::Exchange && lanes < WARP {
        return Some(format!(
            "{what} is for {WARP} threads, but the block's last warp has {lanes}"
        ));
    }
    let threads = warp.threads.iter().enumerate().take(lanes as usize);
    let of_call = threads.filter(|(lane, _)| mask >> lane & 1 == 1).map(|(_, thread)| thread);
    let returned = of_call.filter(|thread| thread.returned.get());
    let returned: Vec<u32> = returned.map(|thread| thread.tid.get()).collect();
    (!returned.is_empty()).then(|| barrier::lacks_threads(&what, mask.count_ones(), &returned))
}

/// Sets the result of every lane of a complete operation, and wakes all but `except`.
fn finish(warp: &Warp, barrier: &WarpBarrier, except: Option<&Thread>) {
    let lanes = || {
        let all = warp.threads.iter().enumerate();
        all.filter(|(lane, _)| barrier.arrived >> lane & 1 == 1).map(|(_, thread)| thread)
    };
    if let Some(thread) = lanes().next() {
        let races = &thread.gpus().memory.races;
        let threads = || lanes().map(|thread| &thread.race);
        match barrier.op {
            Op::Sync => races.barrier(threads, false),
            Op::Shuffle(_) | Op::Ballot | Op::Exchange => races.meet(threads),
        }
    }
    if barrier.op == Op::Exchange {
        warp.exchanged.set(warp.words.get());
    }
    let ballot = barrier
        .lanes
        .iter()
        .enumerate()
        .fold(0, |bits, (i, lane)| bits | ((lane.value & barrier.arrived >> i & 1) << i));
    for (i, thread) in warp.threads.iter().enumerate() {
        if barrier.arrived >> i & 1 == 0 {
            continue;
        }
        thread.result.set(match barrier.op {
            Op::Sync | Op::Exchange => (0, true),
            Op::Ballot => (ballot, true),
            Op::Shuffle(kind) => shuffled(barrier, kind, i as u32),
        });
        if !except.is_some_and(|other| std::ptr::eq(thread, other)) {
            thread.wake();
        }
    }
}

/// Returns what `lane` reads, as PTX defines `shfl.sync`: its own value if the source lane is out
/// of range, an undefined one ([`POISON`]) from a lane outside the mask.
fn shuffled(barrier: &WarpBarrier, kind: Shuffle, lane: u32) -> (u32, bool) {
    let Lane { value, operand, width } = barrier.lanes[lane as usize];
    let operand = operand % WARP;
    let first = lane & !(width - 1);
    let last = first + width - 1;
    let source = match kind {
        Shuffle::Index => Some(first | (operand & (width - 1))),
        Shuffle::Up => lane.checked_sub(operand).filter(|source| *source >= first),
        Shuffle::Down => Some(lane + operand).filter(|source| *source <= last),
        Shuffle::Xor => Some(lane ^ operand).filter(|source| *source <= last),
    };
    match source {
        None => (value, false),
        Some(source) if barrier.arrived >> source & 1 == 0 => (POISON, true),
        Some(source) => (barrier.lanes[source as usize].value, true),
    }
}

/// Completes operations of the warp that waited for the exited `thread` only.
pub(crate) fn thread_ended(thread: &Thread) {
    let warp = thread.warp();
    warp.live.set(warp.live.get() & !(1 << thread.lane()));
    loop {
        let mut barriers = warp.barriers.borrow_mut();
        let live = warp.live.get();
        let Some(i) = barriers.iter().position(|m| live & m.mask & !m.arrived == 0) else { return };
        let barrier = barriers.swap_remove(i);
        drop(barriers);
        let block = thread.block();
        let lacks = lacks_lanes(thread, barrier.mask, barrier.op, barrier.coop_call);
        if let Some(what) = lacks {
            let (kernel, waits) = (thread.kernel(), block.thread(barrier.first).id());
            thread.gpus().fail(Error::Misuse { kernel, thread: waits, what, at: barrier.at });
        }
        finish(warp, &barrier, None);
    }
}
