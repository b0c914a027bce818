//! GIN operations in flight, and their delivery.
//!
//! Every context of a rank has a queue to each peer. An operation is posted, then taken (its source
//! is read; for a put, that completes it locally and increments its counter), then landed at its
//! target, and its signal is added last. Queues are independent, and nothing is delivered when it
//! is posted, so that a missing wait shows.
//!
//! In order, a delivery lands all taken operations and takes all posted ones. In random order each
//! step does one of these for one operation; a weak signal, which is ordered only after its own
//! put, may overtake earlier operations that have no signal.
//!
//! # Safety
//!
//! The addresses in an operation lie in windows, signals and counters, which were checked when it
//! was posted. It may be delivered after its kernel has ended: signals and counters end with their
//! device communicator, which removes its queues, and windows are checked again. There are no
//! references to memory of kernels.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use fastrand::Rng;
use litemap::LiteMap;

use crate::error::{Error, Result, Site, ThreadId};
use crate::memory::Memory;

/// Identifies a queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct QueueKey {
    /// The device communicator's id.
    pub(crate) comm: u32,
    pub(crate) rank: u32,
    pub(crate) context: u32,
    /// World rank of the peer.
    pub(crate) peer: u32,
}

/// The data movement of an operation.
pub(super) enum Transfer {
    Nothing,
    Put { from: *const u8, to: *mut u8, bytes: usize },
    Value { value: [u8; 8], to: *mut u8, bytes: usize },
    Get { from: *const u8, to: *mut u8, bytes: usize },
}

/// An addition to a word of the target once the data has landed.
#[derive(Clone, Copy)]
pub(super) struct Add {
    pub(super) word: *mut u64,
    pub(super) value: u64,
    pub(super) strong: bool,
    /// Whether the word is in a window.
    pub(super) in_window: bool,
}

/// The thread that posted an operation.
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

/// An operation in flight.
struct Flight {
    number: u64,
    operation: Operation,
    /// The data read from its source.
    payload: Vec<u8>,
}

#[derive(Default)]
struct Queue {
    posted: VecDeque<Flight>,
    taken: VecDeque<Flight>,
    /// Sequence number of the next operation.
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
                // SAFETY: the module's contract; the vector has the room.
                unsafe {
                    from.copy_to_nonoverlapping(flight.payload.as_mut_ptr(), bytes);
                    flight.payload.set_len(bytes);
                }
            }
            Transfer::Value { value, bytes, .. } => flight.payload.extend(&value[..bytes]),
            Transfer::Get { .. } | Transfer::Nothing => {}
        }
        if let Some(counter) = flight.operation.counter {
            // SAFETY: the module's contract.
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
                // SAFETY: the module's contract; the payload has as many bytes as the operation.
                unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
            }
            Transfer::Get { from, to, bytes } => {
                by.check(memory, from.addr(), bytes)?;
                by.check(memory, to.addr(), bytes)?;
                // SAFETY: the module's contract; source and target may overlap.
                unsafe { to.copy_from(from, bytes) };
            }
            Transfer::Nothing => {}
        }
        if let Some(Add { word, value, in_window, .. }) = operation.signal {
            if in_window {
                by.check(memory, word.addr(), size_of::<u64>())?;
            }
            // SAFETY: the module's contract. A word in a window is aligned, as its poster checked.
            unsafe { *word = (*word).wrapping_add(value) };
        }
        Ok(())
    }

    /// The taken operations that may land now: the first one, and weak signals preceded only by
    /// operations without a signal.
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
    /// Fails if memory was freed since the operation was posted.
    fn check(self, memory: &Memory, address: usize, bytes: usize) -> Result<()> {
        if memory.is_live(address, bytes) {
            return Ok(());
        }
        let Self { kernel, thread, at } = self;
        let what = format!(
            "the operation that it posted was under way when {bytes} bytes of it at {address:#x} \
            were freed: flush, and wait for what it signals, before the memory goes"
        );
        Err(Error::Misuse { kernel, thread, what, at })
    }
}

/// All operations in flight.
pub(crate) struct Network {
    memory: Rc<Memory>,
    queues: RefCell<LiteMap<QueueKey, Queue>>,
    /// The non-empty queues, in the order in which they became so.
    busy: RefCell<Vec<QueueKey>>,
}

impl Network {
    /// An idle network over `memory`.
    pub(crate) fn new(memory: Rc<Memory>) -> Self {
        Self { memory, queues: RefCell::default(), busy: RefCell::default() }
    }

    /// Drops all operations in flight.
    pub(crate) fn clear(&self) {
        self.queues.borrow_mut().clear();
        self.busy.borrow_mut().clear();
    }

    /// Drops the operations in flight of a device communicator, which ends.
    pub(super) fn forget(&self, comm: u32) {
        self.queues.borrow_mut().retain(|key, _| key.comm != comm);
        self.busy.borrow_mut().retain(|key| key.comm != comm);
    }

    /// Whether no operation is in flight.
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

    /// Number of operations posted and not taken.
    pub(crate) fn posted(&self, key: QueueKey) -> usize {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.posted.len())
    }

    /// Number of the next operation of a queue.
    pub(super) fn next(&self, key: QueueKey) -> u64 {
        self.queues.borrow().get(&key).map_or(0, |queue| queue.next)
    }

    /// All operations with sequence numbers below this are complete locally; without `gets`, a get
    /// counts once it is taken.
    pub(crate) fn complete(&self, key: QueueKey, gets: bool) -> u64 {
        let queues = self.queues.borrow();
        let Some(queue) = queues.get(&key) else { return 0 };
        let is_get = |f: &&Flight| matches!(f.operation.transfer, Transfer::Get { .. });
        let first_get = queue.taken.iter().find(is_get).filter(|_| gets);
        first_get.or(queue.posted.front()).map_or(queue.next, |flight| flight.number)
    }

    /// Whether an operation in flight will change this signal or counter.
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

    /// Takes or lands one operation, at random.
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
