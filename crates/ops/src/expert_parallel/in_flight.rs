//! Rows that have been sent and are to be received.

use devcomm_host::{Buffer, DeviceSlice, Result, Stream};
use devcomm_kernels::expert_parallel::Steps;
use half::bf16;

use super::{ExpertParallel, Stage};

/// Tokens on their way: [`ExpertParallel::start_dispatch`].
#[derive(Debug)]
#[must_use = "tokens that are not received keep the next step from beginning"]
pub struct Sent<'a> {
    pub(super) experts: &'a ExpertParallel,
    pub(super) stream: Stream,
}

impl Sent<'_> {
    /// Receives the tokens of all ranks, on the stream on which they were sent.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn receive(self) -> Result<()> {
        let (experts, steps) = (self.experts, Steps::RECEIVE);
        experts.compare("dispatch to experts", steps)?;
        experts.enqueue_dispatch([0; 3], experts.tokens.get(), steps, &self.stream)?;
        experts.stage.set(Stage::Received);
        Ok(())
    }
}

/// Results on their way: [`ExpertParallel::start_combine`].
#[derive(Debug)]
#[must_use = "results that are not received keep the next step from beginning"]
pub struct Returning<'a> {
    pub(super) experts: &'a ExpertParallel,
    pub(super) rows: DeviceSlice<bf16>,
    pub(super) stream: Stream,
}

impl Returning<'_> {
    /// Adds up the results, as [`ExpertParallel::combine`] does, on the stream on which they were
    /// sent.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn receive<O>(self, output: &O, residual: Option<&DeviceSlice<bf16>>) -> Result<()>
    where
        O: Buffer<Element = bf16>,
    {
        let outputs = self.experts.check_outputs(output, residual)?;
        let rows = self.rows.device_address();
        self.experts.enqueue_combine(rows, outputs, Steps::RECEIVE, &self.stream)?;
        self.experts.stage.set(Stage::Grouped);
        Ok(())
    }
}
