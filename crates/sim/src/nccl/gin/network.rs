//! What is under way between the ranks, and its delivery.
//!
//! Every context of a rank has a queue to each peer. An operation is posted, then taken (its source is read; for a put, that
//! completes it in its own rank and counts), then it lands at its target, and last comes its signal. Queues know nothing of
//! each other, and nothing is delivered when it is posted, so that a kernel that does not wait shows.
//!
//! In order, a delivery lands all that was taken and takes all that was posted. In random order each step does one of that
//! for one operation; and a weak signal, which promises no more than its own put, may come before operations that
//! were posted earlier and have no signal.
//!
//! # Safety
//!
//! The addresses in an operation lie in windows, signals and counters of this launch, as its poster checked. It is
//! delivered before the launch returns, and never while a reference to kernel memory exists: there are none.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

use crate::scheduler::Rng;

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
}

/// An operation.
pub(super) struct Operation {
    pub(super) transfer: Transfer,
    pub(super) signal: Option<Add>,
    pub(super) counter: Option<*mut u64>,
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
    fn take(&mut self) {
        let Some(mut flight) = self.posted.pop_front() else { return };
        match flight.operation.transfer {
            Transfer::Put { from, bytes, .. } => {
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
    }

    /// Lands a taken operation.
    fn land(&mut self, index: usize) {
        let Some(Flight { operation, payload, .. }) = self.taken.remove(index) else { return };
        match operation.transfer {
            Transfer::Put { to, .. } | Transfer::Value { to, .. } => {
                // SAFETY: the module's; the payload has as many bytes as the operation.
                unsafe { to.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
            }
            // SAFETY: the module's; both ends may be one place.
            Transfer::Get { from, to, bytes } => unsafe { to.copy_from(from, bytes) },
            Transfer::Nothing => {}
        }
        if let Some(Add { word, value, .. }) = operation.signal {
            // SAFETY: the module's. A word in a window is aligned, as its poster checked.
            unsafe { *word = (*word).wrapping_add(value) };
        }
    }

    /// The taken operations that may land now: the first, and weak signals with nothing before them but operations
    /// without signal.
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

/// Everything under way.
#[derive(Default)]
pub(crate) struct Network {
    queues: RefCell<BTreeMap<QueueKey, Queue>>,
    /// The queues that are not empty, in the order in which they came to be so.
    busy: RefCell<Vec<QueueKey>>,
}

impl Network {
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

    /// All operations with numbers below this are complete in their own rank; without `gets`, gets count when they are taken.
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
    pub(crate) fn deliver(&self) {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        busy.retain(|key| {
            let Some(queue) = queues.get_mut(key) else { return false };
            while !queue.taken.is_empty() {
                queue.land(0);
            }
            while !queue.posted.is_empty() {
                queue.take();
            }
            !queue.is_empty()
        });
    }

    /// Takes or lands one operation, by chance.
    pub(crate) fn step(&self, rng: &mut Rng) {
        let (mut queues, mut busy) = (self.queues.borrow_mut(), self.busy.borrow_mut());
        if busy.is_empty() {
            return;
        }
        let chosen = rng.below(busy.len());
        let Some(queue) = queues.get_mut(&busy[chosen]) else { return };
        if queue.taken.is_empty() || !queue.posted.is_empty() && rng.below(2) == 0 {
            queue.take();
        } else {
            let may = queue.may_land();
            queue.land(may[rng.below(may.len())]);
        }
        if queue.is_empty() {
            busy.swap_remove(chosen);
        }
    }

    /// Delivers everything: the network goes on when a kernel has ended.
    pub(crate) fn drain(&self, mut rng: Option<&mut Rng>) {
        while !self.is_idle() {
            match &mut rng {
                Some(rng) => self.step(rng),
                None => self.deliver(),
            }
        }
    }
}
