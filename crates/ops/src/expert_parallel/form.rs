//! The forms of an [`ExpertParallel`]: for low latency, high throughput, and several LSA teams.

use devcomm_host::{KernelsOn, Turn};
use devcomm_kernels::expert_parallel::Steps;
use devcomm_kernels::expert_parallel::shape::TokensArgs;
use devcomm_kernels::expert_parallel::sums::ResultsArgs;

use super::ExpertParallel;
use super::steps::{Last, Place, Stage};
use crate::prelude::*;

/// The addresses of the output and of the residual, or 0 without it.
pub(super) type Outputs = [u64; 2];
/// The tokens that a rank sends, as an argument.
pub(super) type Tokens = TokensArgs<u64, u64, u64, u32>;
/// The results that a rank sends, and where their sums go, as an argument.
pub(super) type Results = ResultsArgs<u64, u32, u64, u64>;

/// Where rows are put in the order of the experts.
#[derive(Clone, Copy, Default)]
pub(super) struct RowsInOrder {
    pub(super) rows: u64,
    /// The address of the scales, or 0 without them.
    pub(super) scales: u64,
    /// The rows that there is room for.
    pub(super) capacity: u32,
    /// The tokens of this rank's dispatch.
    pub(super) tokens: u32,
}

/// The launch of a kernel that sends and receives.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) experts: &'a ExpertParallel,
    /// The halves of the operation: bits of [`Steps`].
    pub(super) steps: u32,
    pub(super) stream: &'a Stream,
    pub(super) place: Place,
}

impl<'a> Launch<'a> {
    pub(super) fn target(&self) -> KernelsOn<'a> {
        self.experts.compiled.on(self.stream)
    }

    pub(super) fn dispatch(self, tokens: Tokens) -> Result<()> {
        let _turn = self.begin("dispatch to experts")?;
        self.experts.form.dispatch(self, tokens)?;
        let last = match self.after() {
            sent @ Last { in_flight: true, .. } => sent,
            last => Last { stage: Stage::Received, tokens: tokens.count as usize, ..last },
        };
        self.experts.record(self.place, None, last);
        Ok(())
    }

    pub(super) fn combine(self, rows: u64, outputs: Outputs) -> Result<()> {
        let _turn = self.begin("results of experts")?;
        let ([output, residual], tokens) = (outputs, self.place.last.tokens as u32);
        self.experts.form.combine(self, ResultsArgs { rows, tokens, output, residual })?;
        self.experts.record(self.place, Some(Stage::Grouped), self.after());
        Ok(())
    }

    /// Returns the last step after the launch, as far as its halves determine it.
    fn after(&self) -> Last {
        Last { in_flight: self.steps & Steps::RECEIVE == 0, ..self.place.last }
    }

    /// Orders the launch after the others, once the stream is checked and, if no rank is absent,
    /// the operation compared with those of the other ranks.
    fn begin(&self, operation: &str) -> Result<Turn<'a>> {
        let Self { experts, steps, stream, place } = *self;
        require_context("the stream", stream.context(), experts.communicator.context())?;
        if experts.absent.get() == 0 {
            let terms = || format!("{operation}, steps {steps}");
            experts.communicator.compare_kernel(&experts.order, terms)?;
        }
        experts.begin(place, stream)
    }
}

/// A form: it launches its kernels, in order, with arguments that [`ExpertParallel`] has checked.
pub(super) trait Form: Send {
    fn dispatch(&self, launch: Launch<'_>, tokens: Tokens) -> Result<()>;

    /// Puts what was received in the order of the experts.
    fn group(&self, experts: &ExpertParallel, rows: RowsInOrder, stream: &Stream) -> Result<()>;

    fn combine(&self, launch: Launch<'_>, results: Results) -> Result<()>;

    /// Returns the word with a bit for each rank that is absent.
    fn absent(&self) -> Result<&SymmetricBuffer<u64>>;

    /// Returns the memory in which rows arrive in the order of the experts.
    fn arrivals(&self) -> Result<&Window<u8>> {
        refuse("rows arrive in no order: `throughput` gives the form in which they do")
    }

    fn describe(&self) -> String {
        String::new()
    }
}
