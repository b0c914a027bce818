//! Flags between ranks: words of a window that one rank sets and another waits for.
//!
//! A [`Flag`] is one 32-bit word in each rank's part of a window. Posting it signals one peer that
//! the coop's earlier writes are visible. The host can abort a wait for a flag, like every wait of
//! this crate, and then reports which thread waited for which flag. Post growing values (modulo
//! 2^32), so that a flag needs no reset: 1, 2, .., or the number of an [`Epoch`], which grows from
//! launch to launch. Post each flag at least once while the values grow by 2^31: a value that is
//! more than 2^31 below the awaited one counts as one above it, and the wait returns at once.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::{Coop, DevComm, Epoch, Flag, Window};
//!
//! /// Each rank stores `count` elements to the next rank. One block.
//! ///
//! /// # Safety
//! ///
//! /// `send` and `recv` have `count` elements, `flags` one. `epoch` points to two words of this
//! /// GPU's memory, 0 before the first launch.
//! #[kernel]
//! pub unsafe fn shift(
//!     comm: DevComm,
//!     send: Window<f32>,
//!     recv: Window<f32>,
//!     flags: Window<u32>,
//!     epoch: *mut u32,
//!     count: usize,
//! ) {
//!     let (team, coop) = (comm.lsa_team(), Coop::cta());
//!     // SAFETY: the kernel's contract.
//!     let (flag, epoch) = unsafe { (Flag::new(&comm, flags, 0), Epoch::begin(epoch)) };
//!     for i in coop.strided(count) {
//!         // SAFETY: the kernel's contract; the peer reads the element after the flag is set.
//!         unsafe { recv.lsa(team.next()).store(i, send.local().load(i)) };
//!     }
//!     flag.post(coop, team.next(), epoch.get());
//!     flag.wait_at_least(coop, epoch.get());
//!     // SAFETY: called once per launch.
//!     unsafe { epoch.end(coop) };
//! }
//! # fn main() {}
//! ```

use crate::prelude::*;
use cuda_std::atomic::AtomicU32;

use crate::wait::{has_reached, poll_by_first};

/// A range of [`Flag`]s of a window.
#[derive(Clone, Copy)]
pub struct Flags<'a> {
    comm: &'a DevComm,
    words: Window<u32>,
    first: usize,
    len: u32,
}

impl<'a> Flags<'a> {
    /// Returns the `len` words of `words` from element `first` on, in each rank of the LSA team.
    ///
    /// # Safety
    ///
    /// Every rank's part of the window has these words, and they are used only as flags.
    pub unsafe fn new(comm: &'a DevComm, words: Window<u32>, first: usize, len: u32) -> Self {
        Self { comm, words, first, len }
    }

    /// Returns the number of flags.
    pub fn count(&self) -> u32 {
        self.len
    }

    /// Returns flag `index`. Traps if it does not exist.
    ///
    /// Only one rank may post a flag to a given peer: use one flag per posting rank.
    #[track_caller]
    pub fn at(&self, index: u32) -> Flag<'a> {
        assert!(index < self.len, "there is no such flag");
        Flag { comm: self.comm, words: self.words, index: self.first + index as usize }
    }

    /// Waits until each of these flags of this rank for whose index `is_awaited` returns true is
    /// `value`, or less than 2^31 above it, modulo 2^32. The threads of the coop poll different
    /// flags at the same time. The posters' earlier writes are then visible to every thread of the
    /// coop.
    #[track_caller]
    pub fn wait_all_at_least(&self, coop: Coop, value: u32, is_awaited: impl Fn(u32) -> bool) {
        let mut outcome = Outcome::Done;
        for index in coop.strided(self.len) {
            if outcome == Outcome::Done && is_awaited(index) {
                outcome = self.at(index).wait(Coop::thread(), value, Deadline::NEVER);
            }
        }
        finish(coop, outcome, CoopCall::new("flags.wait_all_at_least").arg("value", value.into()));
    }
}

/// A 32-bit word in each rank of the LSA team by which one rank signals its progress to another.
#[derive(Clone, Copy)]
pub struct Flag<'a> {
    comm: &'a DevComm,
    words: Window<u32>,
    index: usize,
}

#[track_callers]
impl<'a> Flag<'a> {
    /// Returns the element `index` of `words`, in each rank of the LSA team.
    ///
    /// # Safety
    ///
    /// Every rank's part of the window has this element, and it is used only as a flag.
    pub unsafe fn new(comm: &'a DevComm, words: Window<u32>, index: usize) -> Self {
        Self { comm, words, index }
    }

    /// Sets the flag of LSA rank `peer` to `value` after every thread of the coop has arrived. A
    /// thread that reads the value sees the coop's earlier writes. Traps if there is no such rank.
    pub fn post(&self, coop: Coop, peer: i32, value: u32) {
        assert!((peer as u32) < self.comm.lsa_team().n_ranks as u32, "there is no such LSA rank");
        let call = CoopCall::new("flag.post").arg("peer", peer as u64);
        coop.sync_in(call.arg("value", value.into()));
        if coop.thread_rank() == 0 {
            // SAFETY: the constructor's contract: the word exists and has ordered accesses only.
            unsafe { self.words.lsa(peer).store_release(self.index, value) };
        }
    }

    /// Returns the value of this rank's flag. The poster's earlier writes are visible to this
    /// thread.
    pub fn get(&self) -> u32 {
        // SAFETY: the constructor's contract: the word exists and has ordered accesses only.
        unsafe { self.words.local().load_acquire(self.index) }
    }

    /// Returns whether this rank's flag is `value`, or less than 2^31 above it, modulo 2^32. The
    /// poster's earlier writes are then visible to this thread.
    pub fn is_at_least(&self, value: u32) -> bool {
        has_reached(self.get(), value)
    }

    /// Waits until this rank's flag is `value`, or less than 2^31 above it, modulo 2^32. The
    /// poster's earlier writes are then visible to every thread of the coop.
    pub fn wait_at_least(&self, coop: Coop, value: u32) {
        let outcome = self.wait(coop, value, Deadline::NEVER);
        let call = CoopCall::new("flag.wait_at_least").arg("value", value.into());
        finish(coop, outcome, call);
    }

    /// Does the same as [`wait_at_least`](Self::wait_at_least), with a timeout.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn wait_at_least_timeout(
        &self,
        coop: Coop,
        value: u32,
        timeout: Timeout,
    ) -> Result<(), TimedOut> {
        let outcome = self.wait(coop, value, Deadline::after(timeout));
        let call = CoopCall::new("flag.wait_at_least_timeout").arg("value", value.into());
        finish_timed(coop, outcome, call)
    }

    fn wait(&self, coop: Coop, value: u32, deadline: Deadline) -> Outcome {
        let what = || WaitFor {
            index: self.index as u32,
            wanted: value.into(),
            seen: self.get().into(),
            ..WaitFor::of(WaitKind::Flag)
        };
        poll_by_first(self.comm, coop, deadline, || self.is_at_least(value), what)
    }
}

/// The number of a launch: 1, 2, .., 2^32 - 1, then 2. So odd and even numbers always take turns,
/// and it is never 0, the value of a flag that no rank has set.
///
/// The count is in this GPU's memory, so that the number also changes when a CUDA graph replays the
/// launch with the same parameters. Ranks that launch equally often have the same number.
pub struct Epoch {
    words: *mut u32,
    number: u32,
}

/// Offsets of an epoch's words: the number of blocks of this launch that have ended the epoch, and
/// the number of the last launch.
const ENDED: usize = 0;
const LAST: usize = 1;

impl Epoch {
    /// The number of words that an epoch uses.
    pub const WORDS: usize = 2;

    /// Reads the number of this launch.
    ///
    /// # Safety
    ///
    /// `words` points to [`WORDS`](Self::WORDS) words of this GPU's memory, 0 before the first
    /// launch. All blocks of a launch end the epoch, and one launch at a time uses the words.
    #[track_caller]
    pub unsafe fn begin(words: *mut u32) -> Self {
        // SAFETY: the caller's contract; the word changes only after all blocks ended the epoch.
        let last = unsafe { mem::load_ordered(words.add(LAST), Order::Relaxed, Scope::Gpu) };
        // 2^32 - 1 is odd, so the next number is 2, which is even, and not 1.
        Self { words, number: if last == u32::MAX { 2 } else { last + 1 } }
    }

    /// Returns the number of this launch.
    pub fn get(&self) -> u32 {
        self.number
    }

    /// Ends the epoch for this block; when all blocks have ended it, the number increases.
    ///
    /// # Safety
    ///
    /// One coop of each block calls this, once per launch, after a barrier that follows the
    /// [`begin`](Self::begin) of all threads of the block that use the number.
    #[track_caller]
    pub unsafe fn end(&self, coop: Coop) {
        // SAFETY: the caller's contract. The last block writes the number: all have read it then.
        unsafe {
            if coop.thread_rank() == 0 && is_last_block(self.words.add(ENDED), Order::AcqRel) {
                mem::store_ordered(self.words.add(LAST), self.number, Order::Relaxed, Scope::Gpu);
            }
        }
    }
}

/// Returns whether all other blocks of the grid have called this. Then `word` is 0 again. With
/// [`Order::AcqRel`] this thread sees what the threads of the other blocks that called this had
/// written, and may tell another rank by a [`Flag`].
///
/// # Safety
///
/// One thread of each block of a one-dimensional grid calls this, once per launch, with a word that
/// was 0 before the first launch.
#[track_caller]
pub unsafe fn is_last_block(word: *mut u32, order: Order) -> bool {
    let blocks = thread::grid_dim_x();
    if blocks == 1 {
        return true;
    }
    // SAFETY: the caller passes a word that only calls of this function access.
    let called = unsafe { AtomicU32::from_ptr(word) };
    let is_last = called.fetch_add(1, order, Scope::Gpu) + 1 == blocks;
    if is_last {
        called.store(0, Order::Relaxed, Scope::Gpu);
    }
    is_last
}
