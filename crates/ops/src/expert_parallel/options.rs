//! The sizes of an [`ExpertParallel`], and the memory that it takes.

use devcomm_kernels::expert_parallel::{
    Counted, Faults, RANKS, Received, SCALED, Shape, ep_combine, ep_combine_hybrid, ep_dispatch,
    ep_layout, numbered_words,
};
use nccl_device::{Epoch, Lamport, lamport_words};

use super::hybrid::Division;
use super::{ExpertParallel, NAME};
use crate::prelude::*;

/// The sizes of an [`ExpertParallel`], the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing before `build`"]
pub struct ExpertParallelOptions {
    pub(super) hidden: usize,
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) alignment: usize,
    pub(super) f8: bool,
    /// The most rows of a rank in the form for high throughput.
    pub(super) rows: Option<usize>,
    pub(super) blocks: Option<u32>,
    pub(super) threads: Option<u32>,
}

const MOST_HIDDEN: usize = 8192;

impl ExpertParallelOptions {
    /// Returns the options for at most `tokens` tokens of each rank, of `hidden` elements, which
    /// have `top_k` of `experts` experts each.
    pub const fn new(hidden: usize, tokens: usize, experts: usize, top_k: usize) -> Self {
        Self {
            hidden,
            tokens,
            experts,
            top_k,
            alignment: 1,
            f8: false,
            rows: None,
            blocks: None,
            threads: None,
        }
    }

    /// Sets the number of rows of which an expert's first row is a multiple, for products whose
    /// tiles do not have rows of several experts. Default: 1.
    pub const fn alignment(self, rows: usize) -> Self {
        Self { alignment: rows, ..self }
    }

    /// Sends tokens to the experts as `F8E4M3` with an `f32` scale for each 128 elements, of which
    /// `hidden` is a multiple; [`ExpertParallel::group_f8`] puts them in order. Results return in
    /// `bf16`.
    ///
    /// The scale is the least power of two, at least `2^-126`, such that 448 times it is no less
    /// than the magnitude of each of the 128 elements. So elements are rounded once: to nearest,
    /// ties to even. Infinities become 448 times the scale, and finite numbers above `1.75 * 2^127`
    /// that number; NaN stays, and does not count for the scale.
    pub const fn f8(self) -> Self {
        Self { f8: true, ..self }
    }

    /// Takes the form for high throughput, of many tokens (prefill, training): ranks first tell
    /// each other how many rows there are, which then arrive one after the other in the order of
    /// the experts ([`ExpertParallel::rows`]). A rank has room for `rows` of them from all ranks
    /// together, including what alignment leaves free, but never for more than there can be. If a
    /// rank needs more, rows are left out, and [`ExpertParallel::check`] fails in every rank.
    ///
    /// By default the form is that for low latency, in which no rank waits before it sends, and
    /// which has memory for the most tokens of each rank. Several LSA teams have no other form.
    pub const fn throughput(self, rows: usize) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Sets the most blocks of a kernel; those that send and receive are also at most the GPU's
    /// multiprocessors. Default: the number that there is work for; in several LSA teams, where
    /// each block sends messages of its own, at most 32.
    pub const fn blocks(self, blocks: u32) -> Self {
        Self { blocks: Some(blocks), ..self }
    }

    /// Sets the threads of a block: a multiple of 32 up to 512. Default: 256, or 512 where there is
    /// more work and in several LSA teams.
    pub const fn threads(self, threads: u32) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// Creates the operation. *Collective*. It allocates what [`memory`](Self::memory) says, and
    /// [`most_rows`](ExpertParallel::most_rows) words. Errors are those of
    /// [`memory`](Self::memory) and of [`Collectives::new`](crate::Collectives::new).
    pub fn build(self, comm: &Communicator) -> Result<ExpertParallel> {
        let made = comm.together(NAME, || ExpertParallel::new(comm, self))?;
        comm.name(&made.order, "ExpertParallel");
        Ok(made)
    }

    /// Returns what an [`ExpertParallel`] allocates on each GPU for `ranks` ranks in one LSA team.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for sizes that the kernels do not support.
    pub fn memory(self, ranks: usize) -> Result<ExpertParallelMemory> {
        let shape = self.shape(ranks, 1)?;
        if self.rows.is_some() {
            return Ok(self.memory_for_throughput(shape, ranks));
        }
        let word = size_of::<u32>();
        let sent = self.sent(shape);
        let slots = |slots: u32| word * lamport_words(ranks, slots as usize);
        let numbered = ep_dispatch::numbered_slots(shape) + ep_combine::NUMBERED_SLOTS;
        // In words: experts, weights and returns of each token, counts, and the common ones.
        let of_tokens = ranks * self.tokens * (2 * self.top_k + ep_layout::RETURN_WORDS);
        let routing = of_tokens + ranks + 2 * Lamport::<1>::STATE + self.common_words(ranks);
        Ok(ExpertParallelMemory {
            dispatch_slots: slots(self.sent_slots(sent)),
            combine_slots: slots(shape.slots()),
            messages: word * numbered_words(ranks, numbered as usize),
            rows: 16 * (self.sent_slots(sent) as usize) * ranks,
            routing: word * routing,
        })
    }

    /// Returns the words of targets and absent ranks, two of each, offsets, sizes and faults.
    fn common_words(self, ranks: usize) -> usize {
        2 * (self.tokens + 1) + 2 * self.local(ranks) + 1 + Faults::WORDS
    }

    fn memory_for_throughput(self, shape: Shape, ranks: usize) -> ExpertParallelMemory {
        let (word, sent, rows) = (size_of::<u32>(), self.sent(shape), self.most_rows(ranks));
        let scales = if self.f8 { rows * sent.scale_vectors() as usize } else { 1 };
        let firsts = ranks + 1;
        let routing =
            Counted::token_words(rows) + Counted::STATE + firsts + self.common_words(ranks);
        ExpertParallelMemory {
            dispatch_slots: 0,
            combine_slots: 2 * self.tokens * self.hidden * Counted::results(shape, ranks),
            messages: word * (Counted::flag_words(ranks) + Counted::count_words(shape, ranks)),
            rows: 16 * (rows * sent.vectors as usize + scales),
            routing: word * routing,
        }
    }

    /// Returns what it allocates for `ranks` ranks in `teams` LSA teams, at least two, on GPUs with
    /// a multiprocessor for each block. Errors are those of [`memory`](Self::memory).
    pub fn memory_in_teams(self, ranks: usize, teams: usize) -> Result<ExpertParallelMemory> {
        refuse_if!(teams < 2 || !ranks.is_multiple_of(teams), "{ranks} ranks in {teams} LSA teams");
        let shape = self.shape(ranks, teams)?;
        let division = Division::new(self, teams, ranks, u32::MAX)?;
        let (word, all) = (size_of::<u32>(), ranks * self.tokens);
        let sent = self.sent(shape);
        let [dispatch, combine] = division.words(sent, self.f8, shape);
        let [_, _, experts, .., end] = Received::offsets(sent, ranks, self.f8);
        // Words for each token of each rank of the rail, and of this rank.
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

    /// Adds the options, which are the same on all ranks.
    pub(super) fn call(self, call: CollectiveCall<'_>) -> CollectiveCall<'_> {
        let Self { hidden, tokens, experts, top_k, alignment, f8, rows, blocks, threads } = self;
        call.option("hidden", hidden)
            .option("tokens", tokens)
            .option("experts", experts)
            .option("top_k", top_k)
            .option("alignment", alignment)
            .option("f8", f8)
            .option("rows for high throughput", or_default(rows))
            .option("blocks", or_default(blocks))
            .option("threads", or_default(threads))
    }

    pub(super) fn row_type(self) -> DataType {
        if self.f8 { F8E4M3::DATA_TYPE } else { bf16::DATA_TYPE }
    }

    /// Returns the sizes of tokens on their way to the experts, given those of results.
    pub(super) fn sent(self, shape: Shape) -> Shape {
        let vectors = if self.f8 { shape.vectors / 2 } else { shape.vectors };
        Shape { vectors, ..shape }
    }

    /// Returns the slots that a rank has for tokens from each rank.
    pub(super) fn sent_slots(self, sent: Shape) -> u32 {
        if self.f8 { sent.scaled_slots() } else { sent.slots() }
    }

    pub(super) fn most_rows(self, ranks: usize) -> usize {
        let padding = self.local(ranks) * (self.alignment - 1);
        let all = ranks * self.tokens * self.top_k + padding;
        self.rows.map_or(all, |rows| rows.min(all))
    }

    pub(super) fn local(self, ranks: usize) -> usize {
        self.experts / ranks
    }

    /// Returns the shape of launches in these LSA teams, if the kernels support it.
    pub(super) fn shape(self, ranks: usize, teams: usize) -> Result<Shape> {
        refuse_if!(
            teams <= 1 && (ranks == 0 || ranks > RANKS),
            "expert parallelism among {ranks} ranks: it is for 1 to {RANKS} in an LSA team"
        );
        refuse_if!(
            teams > 1 && self.rows.is_some(),
            "the form for high throughput among several LSA teams: there it is that for low \
             latency, without `throughput`"
        );
        let Self { hidden, tokens, experts, top_k, alignment, f8, rows, blocks, threads } = self;
        refuse_if!(
            hidden == 0 || !hidden.is_multiple_of(8) || hidden > MOST_HIDDEN,
            "a token has {hidden} elements: they are a multiple of 8, up to {MOST_HIDDEN}"
        );
        refuse_if!(
            f8 && !hidden.is_multiple_of(SCALED),
            "a token has {hidden} elements: as 8-bit floats a multiple of {SCALED}, which \
             share a scale"
        );
        refuse_if!(
            experts == 0 || !experts.is_multiple_of(ranks) || experts > Shape::EXPERTS,
            "{experts} experts on {ranks} ranks: each rank has as many, and there are at most {}",
            Shape::EXPERTS
        );
        refuse_if!(
            top_k == 0 || top_k > Shape::TOP_K,
            "a token has {top_k} experts: it has 1 to {}",
            Shape::TOP_K
        );
        // Indices of vectors and of experts are 32-bit numbers, also for all ranks together.
        let most = (u32::MAX as usize / 2) / (ranks * (hidden / 8).max(top_k));
        refuse_if!(
            tokens == 0 || tokens > most,
            "a rank has up to {tokens} tokens: at least 1, at most {most}"
        );
        refuse_if!(
            alignment == 0 || alignment > 1 << 16,
            "experts' rows begin at multiples of {alignment} rows"
        );
        refuse_if!(rows == Some(0), "there is room for 0 rows of experts: at least 1");
        refuse_if!(blocks == Some(0), "no blocks send and receive");
        refuse_if!(
            threads.is_some_and(|n| n == 0 || !n.is_multiple_of(32) || n > 512),
            "a block has {} threads: a multiple of 32 up to 512",
            threads.unwrap_or(0)
        );
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
    /// each rank, this one included (with 2 ranks, of the other one only). In several LSA teams
    /// there is room for three times the most tokens of a rank of each team, with their experts and
    /// weights, once for what is sent. It is 0 for high throughput: rows arrive where they stay.
    pub dispatch_slots: usize,
    /// The same for results; in several LSA teams also the most tokens of each rank. For high
    /// throughput a token has a result of each of its experts, or of each rank if these are fewer.
    pub combine_slots: usize,
    /// Where numbers of tokens and experts with weights arrive: two banks of 16 bytes for each
    /// token and expert of each rank. For high throughput a word for each rank and expert.
    pub messages: usize,
    /// The rows that have been received, of the most tokens of all ranks, with their scales; for
    /// high throughput as many as that form has room for.
    pub rows: usize,
    /// Which rows these are, and where they are among those of the experts.
    pub routing: usize,
}

impl ExpertParallelMemory {
    /// Returns the bytes of all of it.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.dispatch_slots + self.combine_slots + self.messages + self.rows + self.routing
    }
}
