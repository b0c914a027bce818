//! The sizes of an [`ExpertParallel`], and the memory that it takes.

use std::fmt;

use devcomm_host::{Communicator, Result};
use devcomm_kernels::expert_parallel::{
    Faults, Received, Shape, ep_combine, ep_combine_hybrid, ep_dispatch, ep_layout, numbered_words,
};
use nccl_device::{Epoch, Lamport};

use super::ExpertParallel;
use super::hybrid::Division;
use crate::check::refuse;
use crate::slots::slot_words;

/// The sizes of an [`ExpertParallel`], the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing before `build`"]
pub struct ExpertParallelOptions {
    /// Elements of a token.
    pub(super) hidden: usize,
    /// The most tokens of a rank.
    pub(super) tokens: usize,
    /// Experts of all ranks.
    pub(super) experts: usize,
    /// Experts of a token.
    pub(super) top_k: usize,
    pub(super) alignment: usize,
    pub(super) blocks: Option<u32>,
    pub(super) threads: Option<u32>,
}

/// The most elements of a token.
const HIDDEN: usize = 8192;

/// The most experts of all ranks.
const EXPERTS: usize = 1024;

impl ExpertParallelOptions {
    /// For at most `tokens` tokens of each rank, of `hidden` elements, which have `top_k` of
    /// `experts` experts each.
    pub const fn new(hidden: usize, tokens: usize, experts: usize, top_k: usize) -> Self {
        Self { hidden, tokens, experts, top_k, alignment: 1, blocks: None, threads: None }
    }

    /// An expert's rows begin at a multiple of this many rows, for products whose tiles do not have
    /// rows of several experts. Default: 1.
    pub const fn alignment(self, rows: usize) -> Self {
        Self { alignment: rows, ..self }
    }

    /// The blocks that send and receive, at most the GPU's multiprocessors. Default: as many as
    /// there is work for. In several LSA teams the same in every rank, and by default at most 32,
    /// as each sends messages of its own.
    pub const fn blocks(self, blocks: u32) -> Self {
        Self { blocks: Some(blocks), ..self }
    }

    /// The threads of these blocks: a multiple of 32 up to 512. Default: 256, or 512 where results
    /// of many tokens return and in several LSA teams.
    pub const fn threads(self, threads: u32) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// Creates the operation, as [`ExpertParallel::new`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn build(self, comm: &Communicator) -> Result<ExpertParallel> {
        ExpertParallel::new(comm, self)
    }

    /// What an [`ExpertParallel`] allocates on each GPU for 2, 4 or 8 ranks in one LSA team.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for sizes that the kernels do not
    /// support.
    pub fn memory(self, ranks: usize) -> Result<ExpertParallelMemory> {
        let shape = self.shape(ranks)?;
        let word = size_of::<u32>();
        let slots = word * slot_words(ranks, shape.slots() as usize);
        let numbered = ep_dispatch::numbered_slots(shape) + ep_combine::NUMBERED_SLOTS;
        let all = ranks * self.tokens;
        let per_token = 2 * self.top_k + ep_layout::RETURN_WORDS;
        let states = 2 * Lamport::<1>::STATE + Faults::WORDS;
        let routing = all * per_token + ranks + self.tokens + states + 2 * self.local(ranks) + 1;
        Ok(ExpertParallelMemory {
            dispatch_slots: slots,
            combine_slots: slots,
            messages: word * numbered_words(ranks, numbered as usize),
            rows: 2 * self.hidden * all,
            routing: word * routing,
        })
    }

    /// What it allocates for so many ranks in `teams` LSA teams, at least two.
    ///
    /// # Errors
    ///
    /// As [`memory`](Self::memory).
    pub fn memory_in_teams(self, ranks: usize, teams: usize) -> Result<ExpertParallelMemory> {
        if teams < 2 || !ranks.is_multiple_of(teams) {
            return refuse(format!("{ranks} ranks in {teams} LSA teams"));
        }
        let shape = self.shape_of_any(ranks)?;
        let division = Division::new(self, teams, ranks, u32::MAX)?;
        let (word, all) = (size_of::<u32>(), ranks * self.tokens);
        let [dispatch, combine] = division.words(shape);
        let [_, experts, .., end] = Received::offsets(shape, ranks);
        let relayed = (teams + 1) * self.tokens;
        let words = 2 * Epoch::WORDS + Faults::WORDS + 2 * self.local(ranks) + 1;
        Ok(ExpertParallelMemory {
            dispatch_slots: word * dispatch,
            combine_slots: word * combine + 2 * ep_combine_hybrid::partials(shape, ranks),
            messages: 0,
            rows: word * experts,
            routing: word * (end - experts + all * ep_layout::RETURN_WORDS + relayed + words),
        })
    }

    /// Experts of a rank.
    pub(super) fn local(self, ranks: usize) -> usize {
        self.experts / ranks
    }

    /// The sizes for kernels, if these support them.
    pub(super) fn shape(self, ranks: usize) -> Result<Shape> {
        if !matches!(ranks, 2 | 4 | 8) {
            return refuse(format!("expert parallelism among {ranks} ranks: it needs 2, 4 or 8"));
        }
        self.shape_of_any(ranks)
    }

    /// The same, for any number of ranks.
    pub(super) fn shape_of_any(self, ranks: usize) -> Result<Shape> {
        let Self { hidden, tokens, experts, top_k, alignment, blocks, threads } = self;
        if hidden == 0 || !hidden.is_multiple_of(8) || hidden > HIDDEN {
            return refuse(format!(
                "a token has {hidden} elements: they are a multiple of 8, up to {HIDDEN}"
            ));
        }
        if experts == 0 || !experts.is_multiple_of(ranks) || experts > EXPERTS {
            return refuse(format!(
                "{experts} experts on {ranks} ranks: each rank has as many, and there are at most \
                 {EXPERTS}"
            ));
        }
        if top_k == 0 || top_k > Shape::TOP_K {
            return refuse(format!("a token has {top_k} experts: it has 1 to {}", Shape::TOP_K));
        }
        // Indices of vectors and of experts are 32-bit numbers, also for all ranks together.
        let most = (u32::MAX as usize / 2) / (ranks * (hidden / 8).max(top_k));
        if tokens == 0 || tokens > most {
            return refuse(format!("a rank has up to {tokens} tokens: at least 1, at most {most}"));
        }
        if alignment == 0 || alignment > 1 << 16 {
            return refuse(format!("experts' rows begin at multiples of {alignment} rows"));
        }
        if blocks == Some(0) {
            return refuse("no blocks send and receive".to_owned());
        }
        if threads.is_some_and(|n| n == 0 || !n.is_multiple_of(32) || n > 512) {
            return refuse(format!(
                "a block has {} threads: a multiple of 32 up to 512",
                threads.unwrap_or(0)
            ));
        }
        Ok(Shape {
            tokens: tokens as u32,
            vectors: (hidden / 8) as u32,
            top_k: top_k as u32,
            experts: self.local(ranks) as u32,
        })
    }
}

/// What an [`ExpertParallel`] allocates on each GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertParallelMemory {
    /// Where rows of tokens arrive: two banks, which take turns, with room for the most tokens of
    /// each other rank (with 4 and 8 ranks also of this one). Vectors are their own flags, so there
    /// is nothing else. In several LSA teams: three times the most tokens of a rank of each team,
    /// one of them for what is sent, with their experts and weights.
    pub dispatch_slots: usize,
    /// Where results arrive: likewise; in several LSA teams also the most tokens of each rank.
    pub combine_slots: usize,
    /// Where numbers of tokens and experts with weights arrive: two banks of 16 bytes for each
    /// token and expert of each rank.
    pub messages: usize,
    /// The rows that have been received, of the most tokens of all ranks.
    pub rows: usize,
    /// Which rows these are, and where they are among those of the experts.
    pub routing: usize,
}

impl ExpertParallelMemory {
    /// All of it.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.dispatch_slots + self.combine_slots + self.messages + self.rows + self.routing
    }
}

impl fmt::Display for ExpertParallelMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dispatch_slots, combine_slots, messages, rows, routing } = self;
        let total = self.total();
        write!(
            f,
            "{total} B: {dispatch_slots} for rows that arrive, {combine_slots} for results that \
             arrive, {messages} for messages, {rows} for rows, {routing} for routing"
        )
    }
}
