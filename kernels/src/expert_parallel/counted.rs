//! What the kernels of the form for high throughput share: its memory, and the flags by which
//! ranks tell each other how far they are.

use cuda_std::atomic::Order;
use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm, Epoch, Flag, Window, is_last_block};

use super::ep_layout::RETURN_WORDS;
use super::ranks::Ranks;
use super::shape::Shape;

/// Words for a token that is received, behind [`RETURN_WORDS`] of each: its index among those of
/// all ranks, and the index of its result among those that return to its rank.
const ORIGIN_WORDS: usize = 2;

/// Words for a token of this rank: a bit for each rank that gets it, in two words, the index of
/// the first of its results, and one that is not used.
pub(super) const OWN_WORDS: usize = 4;

/// The memory of the form for high throughput.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Counted {
    /// [`Counted::flag_words`], 0 before the first launch.
    pub flags: Window<u32>,
    /// [`Counted::count_words`].
    pub counts: Window<u32>,
    /// The tokens that are received, in the order of the ranks: [`Counted::token_words`].
    pub tokens: Window<u32>,
    /// Of this GPU: [`Counted::own_words`], aligned to 16 bytes.
    pub own: *mut u32,
    /// Of this GPU: for each rank the index of its first token that is received, and the number
    /// of all.
    pub firsts: *mut u32,
    /// Of this GPU: [`Counted::STATE`] words, 0 before the first launch.
    pub state: *mut u32,
    /// A bit for each rank that is absent: nothing is sent to it, nothing awaited from it, and its
    /// experts count as none. The same during a launch, and in all ranks that are not.
    pub absent: *const u64,
    /// The rows and the received tokens that there is room for, the same in every rank.
    pub capacity: u32,
}

/// How far a rank has come, which its flags say.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// It has told its counts, and its memory for tokens may be written.
    Counted,
    /// All its tokens have been sent.
    Sent,
    /// Its memory for results may be written.
    Ready,
    /// All its results have been sent.
    Returned,
}

impl Counted {
    const STEPS: usize = 4;

    /// The words of an [`Epoch`], and one that counts blocks, for two kernels.
    pub const STATE: usize = 2 * Self::KERNEL;
    const KERNEL: usize = Epoch::WORDS + 1;

    /// The flags of so many ranks.
    #[must_use]
    pub const fn flag_words(ranks: usize) -> usize {
        Self::STEPS * ranks
    }

    /// What a rank tells all others: how many rows each expert of all ranks gets from it, and how
    /// many tokens each rank.
    #[must_use]
    pub const fn counters(shape: Shape, ranks: usize) -> usize {
        (shape.experts as usize + 1) * ranks
    }

    /// The words that so many ranks tell.
    #[must_use]
    pub const fn count_words(shape: Shape, ranks: usize) -> usize {
        ranks * Self::counters(shape, ranks)
    }

    /// The words of the tokens that are received.
    #[must_use]
    pub const fn token_words(capacity: usize) -> usize {
        capacity * (RETURN_WORDS + ORIGIN_WORDS)
    }

    /// The words of a rank's own tokens.
    #[must_use]
    pub const fn own_words(shape: Shape) -> usize {
        shape.tokens as usize * OWN_WORDS
    }

    /// The most results that return to a rank: one from each rank that gets a token.
    #[must_use]
    pub const fn results(shape: Shape, ranks: usize) -> usize {
        let top_k = shape.top_k as usize;
        shape.tokens as usize * if ranks < top_k { ranks } else { top_k }
    }

    /// What a rank keeps of a received token: which rows it has, as `ep_layout` says it.
    pub(super) fn returns(&self, tokens: *mut u32, token: usize) -> *mut u32 {
        tokens.wrapping_add(RETURN_WORDS * token)
    }

    /// And where it comes from.
    pub(super) fn origin(&self, tokens: *mut u32, token: usize) -> *mut u32 {
        tokens.wrapping_add(RETURN_WORDS * self.capacity as usize + ORIGIN_WORDS * token)
    }

    /// The words of a token of this rank.
    pub(super) fn own(&self, token: usize) -> *mut u32 {
        self.own.wrapping_add(OWN_WORDS * token)
    }
}

/// The flags of a launch of one of the two kernels that use them.
pub(super) struct Progress<'a> {
    comm: &'a DevComm,
    flags: Window<u32>,
    epoch: Epoch,
    /// Counts the blocks that have sent.
    blocks: *mut u32,
    pub(super) absent: Ranks,
}

impl<'a> Progress<'a> {
    /// Of the first kernel, or of the second.
    ///
    /// # Safety
    ///
    /// The memory is as [`Counted`] says, and one launch at a time of this kernel uses it.
    #[track_caller]
    pub(super) unsafe fn new(comm: &'a DevComm, memory: &Counted, kernel: usize) -> Self {
        let state = memory.state.wrapping_add(kernel * Counted::KERNEL);
        // SAFETY: the caller's contract.
        unsafe {
            Self {
                comm,
                flags: memory.flags,
                epoch: Epoch::begin(state),
                blocks: state.wrapping_add(Epoch::WORDS),
                absent: Ranks(mem::load(memory.absent)),
            }
        }
    }

    /// The flag of a rank, in each rank.
    fn flag(&self, step: Step, rank: i32) -> Flag<'a> {
        let index = step as usize * self.comm.lsa_team().n_ranks as usize + rank as usize;
        // SAFETY: the contract of `new`.
        unsafe { Flag::new(self.comm, self.flags, index) }
    }

    /// Tells all ranks, also this one, that this rank has come so far. All threads of one block of
    /// the grid call this together, behind a barrier: what they have written then, others see.
    #[track_caller]
    pub(super) fn tell(&self, step: Step) {
        let team = self.comm.lsa_team();
        for peer in Coop::cta().strided(team.n_ranks as u32) {
            if !self.absent.contains(peer as usize) {
                self.flag(step, team.rank).post(Coop::thread(), peer as i32, self.epoch.get());
            }
        }
    }

    /// [`tell`](Self::tell) by the block that is the last one to call this.
    ///
    /// # Safety
    ///
    /// All threads of the grid call this, once in a launch.
    #[track_caller]
    pub(super) unsafe fn tell_by_last_block(&self, step: Step) {
        thread::sync_threads();
        // SAFETY: the caller's contract.
        let is_last =
            thread::thread_idx_x() == 0 && unsafe { is_last_block(self.blocks, Order::AcqRel) };
        if Coop::cta().any(is_last) {
            self.tell(step);
        }
    }

    /// Waits until all ranks have come so far, and sees what they had written. All threads of the
    /// block call this together.
    #[track_caller]
    pub(super) fn wait(&self, step: Step) {
        for peer in self.comm.lsa_team().all_from_self() {
            if !self.absent.contains(peer as usize) {
                self.flag(step, peer).wait_at_least(Coop::cta(), self.epoch.get());
            }
        }
    }

    /// Ends the launch's epoch.
    ///
    /// # Safety
    ///
    /// The launch receives; all threads of the grid call this, once.
    #[track_caller]
    pub(super) unsafe fn end(&self) {
        // SAFETY: the caller's contract.
        unsafe { self.epoch.end(Coop::cta()) };
    }
}
