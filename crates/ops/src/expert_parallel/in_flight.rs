//! Rows that have been sent and are to be received.

use devcomm_kernels::expert_parallel::Steps;
use devcomm_kernels::expert_parallel::shape::TokensArgs;

use super::form::{Launch, Outputs};
use super::{ExpertParallel, Stage};
use crate::prelude::*;

/// What has been sent and not been received.
pub(super) struct InFlight {
    /// The number of the [`Sent`] or [`Returning`] that receives it.
    number: u64,
    stream: Stream,
    /// The rows of results, which the second half reads too; `None` for tokens.
    results: Option<DeviceSlice<bf16>>,
    /// Whether the stream was captured, so that graphs send it.
    is_captured: bool,
    /// Whether the [`Sent`] or [`Returning`] was dropped.
    is_dropped: bool,
}

/// One half of an operation, which waits for the other.
#[derive(Debug)]
pub(super) struct Flight<'a> {
    experts: &'a ExpertParallel,
    number: u64,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.experts.in_flight.borrow_mut();
        if let Some(in_flight) = in_flight.as_mut().filter(|one| one.number == self.number) {
            in_flight.is_dropped = true;
        }
    }
}

/// Tokens on their way, which [`ExpertParallel::start_dispatch`] has sent.
///
/// If it is dropped before they are received, the next operation of the [`ExpertParallel`] receives
/// them first.
#[derive(Debug)]
#[must_use = "tokens that are not received keep the next step from beginning"]
pub struct Sent<'a>(pub(super) Flight<'a>);

impl Sent<'_> {
    /// Receives the tokens of all ranks, on the stream on which they were sent. After an error it
    /// can be called again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if they were received; those of the launch.
    pub fn receive(&self) -> Result<()> {
        self.0.experts.receive(self.0.number, [0; 2])
    }
}

/// Results on their way, which [`ExpertParallel::start_combine`] has sent.
///
/// If it is dropped before they are received, the next operation of the [`ExpertParallel`] receives
/// them first and discards them, in memory that it allocates: this cannot be captured.
#[derive(Debug)]
#[must_use = "results that are not received keep the next step from beginning"]
pub struct Returning<'a>(pub(super) Flight<'a>);

impl Returning<'_> {
    /// Adds up the results, as [`ExpertParallel::combine`] does, on the stream on which they were
    /// sent. After an error, such as for an output that is too short, it can be called again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if they were received; the errors of [`ExpertParallel::combine`].
    pub fn receive(
        &self,
        output: &impl Buffer<Element = bf16>,
        residual: Option<&DeviceSlice<bf16>>,
    ) -> Result<()> {
        let outputs = self.0.experts.check_outputs(output, residual)?;
        self.0.experts.receive(self.0.number, outputs)
    }
}

impl ExpertParallel {
    /// Records what has been sent: `results`, or tokens.
    pub(super) fn begin_flight(
        &self,
        stream: &Stream,
        results: Option<DeviceSlice<bf16>>,
    ) -> Result<Flight<'_>> {
        let number = self.flights.get() + 1;
        self.flights.set(number);
        let (is_captured, stream) = (stream.is_capturing()?, stream.clone());
        let in_flight = InFlight { number, stream, results, is_captured, is_dropped: false };
        *self.in_flight.borrow_mut() = Some(in_flight);
        Ok(Flight { experts: self, number })
    }

    /// Receives what was sent, if its [`Sent`] or [`Returning`] was dropped.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] while that exists; those of the launch, and of the memory for
    /// results.
    pub(super) fn end_flight(&self) -> Result<()> {
        let (number, is_results, is_over) = match &*self.in_flight.borrow() {
            None => return Ok(()),
            Some(in_flight) if !in_flight.is_dropped => {
                let what = if in_flight.results.is_some() { "results" } else { "tokens" };
                return refuse(format!("the {what} that were sent are not received yet"));
            }
            Some(InFlight { number, stream, results, is_captured, .. }) => {
                (*number, results.is_some(), *is_captured && !stream.is_capturing()?)
            }
        };
        if is_over {
            // The capture has ended without the other half: nothing was sent yet.
            *self.in_flight.borrow_mut() = None;
            return Ok(());
        }
        if !is_results {
            return self.receive(number, [0; 2]);
        }
        let elements = self.tokens.get().max(1) * self.options.hidden;
        // Freed when the stream is idle. At least one element: an allocation is not empty.
        let discarded = self.communicator.context().alloc::<bf16>(elements)?;
        self.receive(number, [discarded.device_address(), 0])
    }

    /// Receives tokens, or results to these outputs, on the stream on which they were sent.
    fn receive(&self, number: u64, outputs: Outputs) -> Result<()> {
        let (stream, results) = match &*self.in_flight.borrow() {
            Some(one) if one.number == number => (one.stream.clone(), one.results.clone()),
            _ => return refuse("what was sent has been received already"),
        };
        let launch = Launch { experts: self, steps: Steps::RECEIVE, stream: &stream };
        match results {
            Some(rows) => launch.combine(rows.device_address(), outputs)?,
            None => {
                // The second half reads no tokens of this rank.
                let count = self.tokens.get() as u32;
                launch.dispatch(TokensArgs { input: 0, ids: 0, weights: 0, count })?;
                self.stage.set(Stage::Received);
            }
        }
        *self.in_flight.borrow_mut() = None;
        Ok(())
    }
}
