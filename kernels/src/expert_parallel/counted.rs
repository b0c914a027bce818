//! The memory that the kernels for high throughput (`ep_dispatch_counted`, `ep_combine_counted`)
//! share, and the flags by which ranks tell each other how far they are.

use nccl_device::is_last_block;

use super::prelude::*;

/// Words for a received token, after the [`RETURN_WORDS`] of all tokens: its index among the tokens
/// of all ranks, and the place of its result among its rank's `arrivals`.
const ORIGIN_WORDS: usize = 2;

/// The memory of the kernels for high throughput.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Counted {
    /// [`Counted::flag_words`] words, 0 before the first launch.
    pub flags: Window<u32>,
    /// [`Counted::count_words`] words.
    pub counts: Window<u32>,
    /// The tokens that are received, in the order of the ranks: [`Counted::token_words`] words.
    pub tokens: Window<u32>,
    /// Memory of this GPU: a bit for each rank that gets the row, for each token of this rank.
    pub targets: *mut u64,
    /// Memory of this GPU: the index of each rank's first received token, then the number of all.
    pub firsts: *mut u32,
    /// [`Counted::STATE`] words of this GPU, 0 before the first launch.
    pub state: *mut u32,
    /// The mask of [`Received::absent`], the same in all ranks that are not absent.
    pub absent: *const u64,
    /// How many rows, and how many received tokens, there is room for; the same in every rank.
    pub capacity: u32,
}

/// A step of a launch that a rank has reached, as its flags say.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// The rank has told its counts, and its memory for tokens may be written.
    Counted,
    /// All tokens of the rank have been sent.
    Sent,
    /// The rank's memory for results may be written.
    Ready,
    /// All results that the rank returns have been sent.
    Returned,
}

impl Counted {
    /// The words of an [`Epoch`], and one that counts blocks, for two kernels.
    pub const STATE: usize = 2 * Self::KERNEL_WORDS;
    const KERNEL_WORDS: usize = Epoch::WORDS + 1;

    /// Returns the number of words for the flags of `ranks` ranks.
    #[must_use]
    pub const fn flag_words(ranks: usize) -> usize {
        4 * ranks // One for each `Step`.
    }

    /// Returns how many counts a rank tells all others: how many rows each expert of all ranks gets
    /// from it, and how many tokens each rank gets.
    #[must_use]
    pub const fn counters(shape: Shape, ranks: usize) -> usize {
        (shape.experts as usize + 1) * ranks
    }

    /// Returns the number of words for the counts that `ranks` ranks tell.
    #[must_use]
    pub const fn count_words(shape: Shape, ranks: usize) -> usize {
        ranks * Self::counters(shape, ranks)
    }

    /// Returns the number of words for `capacity` received tokens.
    #[must_use]
    pub const fn token_words(capacity: usize) -> usize {
        capacity * (RETURN_WORDS + ORIGIN_WORDS)
    }

    /// Returns the most results of a token: one from each rank that gets it. Those of a rank's
    /// tokens are one after the other, with room for as many of each.
    #[must_use]
    pub const fn results(shape: Shape, ranks: usize) -> usize {
        if ranks < shape.top_k as usize { ranks } else { shape.top_k as usize }
    }

    /// Returns the words that say which rows a received token has, in the form of `ep_layout`.
    pub(super) fn returns(&self, tokens: *mut u32, token: usize) -> Words {
        Words(tokens.wrapping_add(RETURN_WORDS * token))
    }

    /// Returns the words that say where a received token comes from.
    pub(super) fn origin(&self, tokens: *mut u32, token: usize) -> Words {
        Words(tokens.wrapping_add(RETURN_WORDS * self.capacity as usize + ORIGIN_WORDS * token))
    }
}

/// The flags of a launch of one of the two kernels that use them.
pub(super) struct Progress<'a> {
    comm: &'a DevComm,
    pub(super) team: Team,
    flags: Window<u32>,
    /// A launch that receives ends it.
    pub(super) epoch: Epoch,
    /// The number of blocks that have sent.
    blocks: *mut u32,
    pub(super) absent: Ranks,
}

#[track_callers]
impl<'a> Progress<'a> {
    /// Begins a launch of kernel 0 (dispatch) or 1 (combine). The memory is as [`Counted`] says,
    /// and one launch at a time of this kernel uses it.
    pub(super) unsafe fn new(comm: &'a DevComm, memory: &Counted, kernel: usize) -> Self {
        let state = memory.state.wrapping_add(kernel * Counted::KERNEL_WORDS);
        // SAFETY: the caller guarantees `Counted`'s memory, which no other launch uses.
        unsafe {
            Self {
                comm,
                team: comm.lsa_team(),
                flags: memory.flags,
                epoch: Epoch::begin(state),
                blocks: state.wrapping_add(Epoch::WORDS),
                absent: Ranks(mem::load(memory.absent)),
            }
        }
    }

    /// Returns the flags by which each rank tells each rank that it has reached `step`.
    fn flags(&self, step: Step) -> Flags<'a> {
        let ranks = self.team.n_ranks as u32;
        // SAFETY: the caller of `new` guarantees the memory of the flags of all steps.
        unsafe { Flags::new(self.comm, self.flags, step as usize * ranks as usize, ranks) }
    }

    /// Tells all ranks, also this one, that this rank has reached `step`. One whole block calls
    /// this, after a barrier: the other ranks see what these threads had written by then.
    pub(super) fn tell(&self, step: Step) {
        for peer in Coop::cta().strided(self.team.n_ranks as u32) {
            if !self.absent.contains(peer as usize) {
                let flag = self.flags(step).at(self.team.rank as u32);
                flag.post(Coop::thread(), peer as i32, self.epoch.get());
            }
        }
    }

    /// Tells as [`tell`](Self::tell) does, by the block that is the last one to call this. The
    /// whole grid calls this, once in a launch.
    pub(super) unsafe fn tell_by_last_block(&self, step: Step) {
        thread::sync_threads();
        // The last block acquires what the others have written, which its flags then release.
        // SAFETY: the word is one of the state, and all blocks call this once.
        let is_last =
            thread::thread_idx_x() == 0 && unsafe { is_last_block(self.blocks, Order::AcqRel) };
        if Coop::cta().any(is_last) {
            self.tell(step);
        }
    }

    /// Waits until all ranks have reached `step`, and sees what they had written by then. The whole
    /// block calls this.
    pub(super) fn wait(&self, step: Step) {
        let is_there = |peer| !self.absent.contains(peer as usize);
        self.flags(step).wait_all_at_least(Coop::cta(), self.epoch.get(), is_there);
    }
}
