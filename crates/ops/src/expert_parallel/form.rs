//! The forms of an [`ExpertParallel`], which differ in how rows reach other ranks: for low latency,
//! for high throughput, and for several LSA teams.

use devcomm_host::KernelsOn;
use devcomm_kernels::expert_parallel::shape::TokensArgs;
use devcomm_kernels::expert_parallel::sums::ResultsArgs;

use super::ExpertParallel;
use crate::prelude::*;

/// The addresses of tokens, of their experts and of their weights.
pub(super) type Source = [u64; 3];

/// The addresses of the output and of the residual, or 0 without it.
pub(super) type Outputs = [u64; 2];

/// Where rows are put in the order of the experts.
#[derive(Clone, Copy)]
pub(super) struct RowsInOrder {
    pub(super) rows: u64,
    /// The address of the scales, or 0 without them.
    pub(super) scales: u64,
    /// The rows that there is room for.
    pub(super) capacity: u32,
}

impl RowsInOrder {
    /// No memory, for a kernel that stores elsewhere.
    pub(super) const NONE: Self = Self { rows: 0, scales: 0, capacity: 0 };
}

/// The launch of a kernel that sends and receives.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) experts: &'a ExpertParallel,
    /// The halves of the operation: bits of [`Steps`](devcomm_kernels::expert_parallel::Steps).
    pub(super) steps: u32,
    pub(super) stream: &'a Stream,
}

impl<'a> Launch<'a> {
    pub(super) fn target(&self) -> KernelsOn<'a> {
        self.experts.compiled.on(self.stream)
    }
}

/// A form, which has the memory of its kernels, and launches them with arguments that
/// [`ExpertParallel`] has checked, in order.
pub(super) trait Form: Send {
    /// Sends and receives `count` tokens.
    fn dispatch(&self, launch: Launch<'_>, source: Source, count: u32) -> Result<()>;

    /// Puts what was received in the order of the experts.
    fn group(&self, experts: &ExpertParallel, rows: RowsInOrder, stream: &Stream) -> Result<()>;

    /// Sends and receives the results `rows`.
    fn combine(&self, launch: Launch<'_>, rows: u64, outputs: Outputs) -> Result<()>;

    /// Returns the word with a bit for each rank that is absent.
    fn absent(&self) -> Result<&SymmetricBuffer<u64>>;

    /// Returns the memory in which rows arrive in the order of the experts.
    fn arrivals(&self) -> Result<&Window<u8>> {
        refuse("rows arrive in no order: `throughput` gives the form in which they do")
    }

    /// Returns what `Debug` says after the number of ranks.
    fn describe(&self) -> String {
        String::new()
    }
}

pub(super) fn tokens_args(source: Source, count: u32) -> TokensArgs<u64, u64, u64, u32> {
    let [input, ids, weights] = source;
    TokensArgs { input, ids, weights, count }
}

impl ExpertParallel {
    /// Returns the results `rows` and where their sums go, as an argument.
    pub(super) fn results_args(
        &self,
        rows: u64,
        [output, residual]: Outputs,
    ) -> ResultsArgs<u64, u32, u64, u64> {
        ResultsArgs { rows, tokens: self.tokens.get() as u32, output, residual }
    }
}
