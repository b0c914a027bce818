//! What is under way between the ranks, and its delivery.
//!
//! Every context of a rank has a queue to each peer. An operation is posted, then taken (its source
//! is read; for a put, that completes it in its own rank and counts), then it lands at its target,
//! and last comes its signal. Queues know nothing of each other, and nothing is delivered when it
//! is posted, so that a kernel that does not wait shows.
//!
//! In order, a delivery lands all that was taken and takes all that was posted. In random order
//! each step does one of that for one operation; and a weak signal, which promises no more than its
//! own put, may come before operations that were posted earlier and have no signal.
//!
//! # Safety
//!
//! The addresses in an operation lie in windows, signals and counters, as its poster checked. It
//! may be delivered when the kernel has ended: signals and counters end with their device
//! communicator, which takes its queues away, and what is in windows is looked up again. There are
//! no references to memory of kernels.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use fastrand::Rng;
use litemap::LiteMap;

use crate::error::{Error, Result, Site, ThreadId};
use crate::memory::Memory;

/// A queue's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct QueueKey {
    /// Which device communicator.
    pub(crate) comm: u32,
    pub(crate) rank: u32,
    pub(crate) context: u32,
    /// World rank of the peer.
    pub(crate) peer: u32,
}

/// The bytes that an operation moves.
pub(super) enum Transfer {
    Nothing,
    Put { from: *const u8, to: *mut u8, bytes: usize },
    Value { value: [u8; 8], to: *mut u8, bytes: usize },
    Get { from: *const u8, to: *mut u8, bytes: usize },
}

/// What is added to a word of the target when the bytes are there.
#[derive(Clone, Copy)]
pub(super) struct Add {
    pub(super) word: *mut u64,
    pub(super) value: u64,
    pub(super) strong: bool,
    /// Whether the word is in a window.
    pub(super) in_window: bool,
}

/// Who posted an operation.
#[derive(Clone, Copy)]
pub(super) struct Poster {
    pub(super) kernel: &'static str,
    pub(super) thread: ThreadId,
    pub(super) at: Site,
}

/// An operation.
pub(super) struct Operation {
    pub(super) transfer: Transfer,
    pub(super) signal: Option<Add>,
    pub(super) counter: Option<*mut u64>,
    pub(super) by: Poster,
}

/// An operation on its way.
struct Flight {
    number: u64,
    operation: Operation,
    /// What was read of its source.
    payload: Vec<u8>,
}

#[derive(Default)]
struct Queue {
    posted: VecDeque<Flight>,
    taken: VecDeque<Flight>,
    /// Number of the next operation.
    next: u64,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.posted.is_empty() && self.taken.is_empty()
    }

    /// Takes the first posted operation.
    fn take(&mut self, memory: &Memory) -> Result<()> {
        let Some(mut flight) = self.posted.pop_front() else { return Ok(()) };
        match flight.operation.transfer {
            Transfer::Put { from, bytes, .. } => {
                flight.operation.by.check(memory, from.addr(), bytes)?;
                flight.payload.reserve_exact(bytes);
                // SAFETY: the module's; the vector has the room.
                unsafe {
                    from.copy_to_nonoverlapping(flight.payload.as_mut_ptr(), bytes);
                    flight.payload.set_len(bytes);
                }
            }
            Transfer::Value { value, bytes, .. } => flight.payload.extend(&value[..bytes]),
            Transfer::Get { .. } | Transfer::Nothing => {}
        }
        if let Some(counter) = flight.operation.counter {
            // SAFETY: the module's.
            unsafe { *counter = (*counter).wrapping_add(1) };
        }
        self.taken.push_back(flight);
        Ok(())
    }

    /// Lands a taken operation.
    fn land(&mut self, index: usize, memory: &Memory) -> Result<()> {
        let Some(Flight { operation, payload, .. }) = self.taken.remove(index) else {
            return Ok(());
        };
        let by = operation.by;
        match operation.transfer {
            Transfer::Put { to, .. } | Transfer::Value { to, .. } => {
                by.check(memory, to.addr(), payload.len())?;
                // SAFETY: the module's; the payload has as many bytes as the operation.
                unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
            }
            Transfer::Get { from, to, bytes } => {
                by.check(memory, from.addr(), bytes)?;
                by.check(memory, to.addr(), bytes)?;
                // SAFETY: the module's; both ends may be one place.
                unsafe { to.copy_from(from, bytes) };
            }
            Transfer::Nothing => {}
        }
        if let Some(Add { word, value, in_window, .. }) = operation.signal {
            if in_window {
                by.check(memory, word.addr(), size_of::<u64>())?;
            }
            // SAFETY: the module's. A word in a window is aligned, as its poster checked.
            unsafe { *word = (*word).wrapping_add(value) };
        }
        Ok(())
    }

    /// The taken operations that may land now: the first, and weak signals with nothing before them
    /// but operations without signal.
    fn may_land(&self) -> Vec<usize> {
        let silent = self.taken.iter().take_while(|f| f.operation.signal.is_none()).count();
        let weak =
            self.taken.get(silent).and_then(|f| f.operation.signal).is_some_and(|s| !s.strong);
        let mut may = vec![0];
        if weak && silent > 0 {
            may.push(silent);
        }
        may
    }
}

impl Poster {
    /// Refuses memory that was freed since the operation was posted.
    fn check(self, memory: &Memory, address: usize, bytes: usize) -> Result<()> {
        if memory.is_live(address, bytes) {
            return Ok(());
        }
        let Self { kernel, thread, at } = self;
        let what = format!(
            "the operation that it posted was under way when {bytes} bytes of it at {address:#x} were freed: flush, and wait for what it signals, before the memory goes"
        );
        Err(Error::Misuse { kernel, thread, what, at })
    }
}

/// Everything under way.
pub(crate) struct Network {
    memory: Rc<Memory>,
    queues: RefCell<LiteMap<QueueKey, Queue>>,
    /// The queues that are not empty, in the order in which they came to be so.
    busy: RefCell<Vec<QueueKey>>,
}

impl Network {
    /// Nothing under way, between windows in `memory`.
    pub(crate) fn new(memory: Rc<Memory>) -> Self {
        Self { memory, queues: RefCell::default(), busy: RefCell::default() }
    }

    /// Drops what is under way.
    pub(crate) fn clear(&self) {
        self.queues.borrow_mut().clear();
        self.busy.borrow_mut().clear();
    }

    /// Drops what is under way for a device communicator, which ends.
    pub(super) fn forget(&self, comm: u32) {
        self.queues.borrow_mut().retain(|key, _| key.comm != comm);
        self.busy.borrow_mut().retain(|key| key.comm != comm);
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.borrow().is_empty()
    }

    /// Posts an operation.
    pub(super) fn post(&self, key: QueueKey, operation: Operation) {
        let mut queues = self.queues.borrow_mut();
        let queue = queues.entry(key).or_default();
        if queue.is_empty() {
            self.busy.borrow_mut().push(key);
        }
        queue.posted.push_back(Flight { number: queue.next, operation, payload: Vec::new() });
        queue.next += 1;
    }

    /// Operations posted and not taken.
    pub(crate) fn posted(&self, key: QueueKey) -> usize {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.posted.len())
    }

    /// Number of the next operation of a queue.
    pub(super) fn next(&self, key: QueueKey) -> u64 {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.next)
    }

    /// All operations with numbers below this are complete in their own rank; without `gets`, gets
    /// count when they are taken.
    pub(crate) fn complete(&self, key: QueueKey, gets: bool) -> u64 {
        let queues = self.queues.borrow();
        let Some(queue) = queues.get(&key) else { return 0 };
        let is_get = |f: &&Flight| matches!(f.operation.transfer, Transfer::Get { .. });
        let first_get = queue.taken.iter().find(is_get).filter(|_| gets);
        first_get.or(queue.posted.front()).map_or(queue.next, |flight| flight.number)
    }

    /// Whether an operation under way will change this signal or counter.
    pub(super) fn will_change(&self, word: *const u64) -> bool {
        let queues = self.queues.borrow();
        let changes = |flight: &Flight| {
            let Operation { signal, .. } = flight.operation;
            signal.is_some_and(|add| std::ptr::eq(add.word, word))
        };
        let counts = |flight: &Flight| {
            flight.operation.counter.is_some_and(|counter| std::ptr::eq(counter, word))
        };
        queues.values().any(|queue| {
            queue.posted.iter().any(|f| changes(f) || counts(f)) || queue.taken.iter().any(changes)
        })
    }

    /// Lands all that was taken, and takes all that was posted.
    pub(crate) fn deliver(&self) -> Result<()> {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        for key in std::mem::take(&mut *busy) {
            let Some(queue) = queues.get_mut(&key) else { continue };
            while !queue.taken.is_empty() {
                queue.land(0, &self.memory)?;
            }
            while !queue.posted.is_empty() {
                queue.take(&self.memory)?;
            }
            if !queue.is_empty() {
                busy.push(key);
            }
        }
        Ok(())
    }

    /// Takes or lands one operation, by chance.
    pub(crate) fn step(&self, rng: &mut Rng) -> Result<()> {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        if busy.is_empty() {
            return Ok(());
        }
        let chosen = rng.usize(..busy.len());
        let Some(queue) = queues.get_mut(&busy[chosen]) else { return Ok(()) };
        if queue.taken.is_empty() || !queue.posted.is_empty() && rng.bool() {
            queue.take(&self.memory)?;
        } else {
            let may = queue.may_land();
            queue.land(may[rng.usize(..may.len())], &self.memory)?;
        }
        if queue.is_empty() {
            busy.swap_remove(chosen);
        }
        Ok(())
    }
}
