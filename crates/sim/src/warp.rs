//! Warps: shuffles, votes and `sync_warp`, each a meeting of the lanes of a mask.

use std::cell::{Cell, RefCell};
use std::io;

use cuda_std::arch::Shuffle;

use crate::error::{Error, Site};
use crate::memory::POISON;
use crate::stack::Slab;
use crate::thread::{Thread, Wait};

pub(crate) const WARP: u32 = 32;

/// What the lanes meet for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Sync,
    Shuffle(Shuffle),
    Ballot,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync_warp",
            Self::Shuffle(_) => "a shuffle",
            Self::Ballot => "a vote",
        }
    }
}

/// What one lane brings.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lane {
    pub(crate) value: u32,
    /// Lane, distance or lane mask of a shuffle.
    pub(crate) operand: u32,
    /// Segment of a shuffle, a power of two.
    pub(crate) width: u32,
}

/// Lanes that wait for each other.
struct Meeting {
    mask: u32,
    op: Op,
    at: Site,
    arrived: u32,
    lanes: [Lane; WARP as usize],
}

/// One warp of a block, with the stacks of its threads: what the scheduler keeps when the block has
/// ended.
pub(crate) struct Warp {
    pub(crate) threads: [Thread; WARP as usize],
    pub(crate) stacks: Slab,
    /// Lanes that have not ended.
    live: Cell<u32>,
    meetings: RefCell<Vec<Meeting>>,
}

impl Warp {
    /// A warp that has no block yet, with `stack_size` bytes of stack a thread.
    pub(crate) fn new(stack_size: usize) -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            stacks: Slab::new(WARP as usize, stack_size)?,
            threads: std::array::from_fn(|_| Thread::new()),
            live: Cell::new(0),
            meetings: RefCell::default(),
        }))
    }

    /// Makes the warp ready for a block with `lanes` lanes in it.
    pub(crate) fn reset(&self, lanes: u32) {
        self.live.set(u32::MAX >> (WARP - lanes.clamp(1, WARP)));
        self.meetings.borrow_mut().clear();
    }
}

/// A lane comes to the meeting of `mask` and waits for the others. Lanes that have ended, or that a
/// partial warp lacks, are not waited for. The result is the lane's own.
pub(crate) fn meet(thread: &Thread, mask: u32, op: Op, mine: Lane, at: Site) -> (u32, bool) {
    let lane = thread.lane();
    let warp = thread.warp();
    if mask >> lane & 1 == 0 {
        thread.misuse(at, format!("lane {lane} is not in its own mask {mask:#010x}"));
    }
    if matches!(op, Op::Shuffle(_)) && !(mine.width.is_power_of_two() && mine.width <= WARP) {
        let width = mine.width;
        thread.misuse(at, format!("shuffle width {width} is not 1, 2, 4, 8, 16 or 32"));
    }
    let mut meetings = warp.meetings.borrow_mut();
    let found = meetings.iter().position(|m| m.mask == mask);
    let index = found.unwrap_or_else(|| {
        meetings.push(Meeting { mask, op, at, arrived: 0, lanes: Default::default() });
        meetings.len() - 1
    });
    let meeting = &mut meetings[index];
    let elsewhere = cfg!(debug_assertions) && op != Op::Sync && meeting.at != at;
    if meeting.op != op || elsewhere {
        let other = meeting.at;
        drop(meetings);
        let (kernel, thread_id) = (thread.kernel(), thread.who());
        let what = op.name().to_owned();
        thread.fail(Error::Divergent { kernel, thread: thread_id, what, at, other });
    }
    meeting.arrived |= 1 << lane;
    meeting.lanes[lane as usize] = mine;
    if warp.live.get() & mask & !meeting.arrived == 0 {
        let meeting = meetings.swap_remove(index);
        drop(meetings);
        finish(warp, &meeting, Some(thread));
        if thread.gpus().random() {
            thread.give_way(Wait::Ready);
        }
    } else {
        drop(meetings);
        thread.give_way(Wait::Warp { mask, at });
    }
    thread.result.get()
}

/// Gives every lane of a complete meeting its result and wakes it, but `except`.
fn finish(warp: &Warp, meeting: &Meeting, except: Option<&Thread>) {
    let ballot = meeting
        .lanes
        .iter()
        .enumerate()
        .fold(0, |bits, (i, lane)| bits | ((lane.value & meeting.arrived >> i & 1) << i));
    for (i, thread) in warp.threads.iter().enumerate() {
        if meeting.arrived >> i & 1 == 0 {
            continue;
        }
        thread.result.set(match meeting.op {
            Op::Sync => (0, true),
            Op::Ballot => (ballot, true),
            Op::Shuffle(kind) => shuffled(meeting, kind, i as u32),
        });
        if !except.is_some_and(|other| std::ptr::eq(thread, other)) {
            thread.wake();
        }
    }
}

/// What `lane` reads, as PTX defines `shfl.sync`: out of range gives its own value, a lane that
/// does not take part an undefined one.
fn shuffled(meeting: &Meeting, kind: Shuffle, lane: u32) -> (u32, bool) {
    let Lane { value, operand, width } = meeting.lanes[lane as usize];
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
        Some(source) if meeting.arrived >> source & 1 == 0 => (POISON, true),
        Some(source) => (meeting.lanes[source as usize].value, true),
    }
}

/// A thread ended: meetings of its warp may be complete without it.
pub(crate) fn thread_ended(thread: &Thread) {
    let warp = thread.warp();
    warp.live.set(warp.live.get() & !(1 << thread.lane()));
    loop {
        let mut meetings = warp.meetings.borrow_mut();
        let live = warp.live.get();
        let Some(i) = meetings.iter().position(|m| live & m.mask & !m.arrived == 0) else { return };
        let meeting = meetings.swap_remove(i);
        drop(meetings);
        finish(warp, &meeting, None);
    }
}
