//! Rows that have been sent and are to be received.

use devcomm_kernels::expert_parallel::Steps;
use devcomm_kernels::expert_parallel::shape::TokensArgs;

use super::ExpertParallel;
use super::form::{Launch, Outputs};
use super::steps::Last;
use crate::prelude::*;

/// What has been sent and not been received.
pub(super) struct InFlight {
    /// The number of the [`Sent`] or [`Returning`] that receives it.
    number: u64,
    stream: Stream,
    sent: Halves,
    /// The capture to which the first half went, if one, so that graphs send it.
    capture: Option<u64>,
    is_dropped: bool,
}

/// What the halves of an operation share.
#[derive(Clone)]
pub(super) enum Halves {
    Tokens(usize),
    /// The rows of results, which the second half of a combine reads too.
    Results(DeviceSlice<bf16>),
}

impl InFlight {
    /// Fails unless both halves go to one graph, which then receives what it sends, or to none.
    fn require_capture(&self) -> Result<()> {
        let now = self.stream.capture_id()?;
        refuse_if!(
            now != self.capture,
            "both halves of an operation are in one capture, or in none: {}",
            match self.capture {
                None => "what was sent is in none",
                Some(_) => "the capture of what was sent has ended",
            }
        );
        if now.is_none() {
            self.stream.context().refuse_capturing("what was sent is received")?;
        }
        Ok(())
    }
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

/// Tokens on their way, which [`ExpertParallel::start_dispatch`] has sent. If it is dropped before
/// they are received, the next operation of the [`ExpertParallel`] receives them first. If they
/// were sent in a capture, they are received in the same one, or the capture fails when it ends;
/// otherwise no graph with operations of the object is launched before they are received.
#[derive(Debug)]
#[must_use = "tokens that are not received keep the next step from beginning"]
pub struct Sent<'a>(pub(super) Flight<'a>);

impl Sent<'_> {
    /// Receives the tokens of all ranks, on the stream on which they were sent. After an error it
    /// can be called again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if they were received, or sent in another capture or outside of the
    /// one in progress; those of the launch.
    pub fn receive(&self) -> Result<()> {
        self.0.experts.receive(self.0.number, |_, _| Ok([0; 2]))
    }
}

/// Results on their way, which [`ExpertParallel::start_combine`] has sent. What [`Sent`] says holds
/// for them; if it is dropped, the next operation receives them in memory that it allocates, which
/// cannot be captured.
#[derive(Debug)]
#[must_use = "results that are not received keep the next step from beginning"]
pub struct Returning<'a>(pub(super) Flight<'a>);

impl Returning<'_> {
    /// Adds up the results, as [`ExpertParallel::combine`] does, on the stream on which they were
    /// sent. After an error, such as for an output that is too short, it can be called again.
    /// Errors are those of [`Sent::receive`] and of [`ExpertParallel::combine`].
    pub fn receive(
        &self,
        output: &impl Buffer<Element = bf16>,
        residual: Option<&DeviceSlice<bf16>>,
    ) -> Result<()> {
        let Flight { experts, number } = &self.0;
        experts.receive(*number, |last, rows| experts.check_outputs(last, rows, output, residual))
    }
}

impl ExpertParallel {
    /// Calls `send`, which sends the first half of an operation.
    pub(super) fn begin_flight(
        &self,
        stream: &Stream,
        sent: Halves,
        send: impl FnOnce() -> Result<()>,
    ) -> Result<Flight<'_>> {
        let (number, capture) = (self.flights.get() + 1, stream.capture_id()?);
        send()?;
        self.flights.set(number);
        let in_flight =
            InFlight { number, stream: stream.clone(), sent, capture, is_dropped: false };
        *self.in_flight.borrow_mut() = Some(in_flight);
        Ok(Flight { experts: self, number })
    }

    /// Receives what was sent, if its [`Sent`] or [`Returning`] was dropped, and fails while that
    /// exists. Every operation begins with it.
    pub(super) fn end_flight(&self) -> Result<()> {
        let (number, results_of, is_over) = match &*self.in_flight.borrow() {
            None => return Ok(()),
            Some(InFlight { is_dropped: false, sent, .. }) => {
                let what = if matches!(sent, Halves::Tokens(_)) { "tokens" } else { "results" };
                return refuse(format!("the {what} that were sent are not received yet"));
            }
            Some(InFlight { number, stream, sent, capture, .. }) => {
                let is_over = capture.is_some() && stream.capture_id()? != *capture;
                let tokens = self.place(stream)?.last.tokens;
                (*number, matches!(sent, Halves::Results(_)).then_some(tokens), is_over)
            }
        };
        if is_over {
            // The capture has ended without the other half: nothing was sent.
            *self.in_flight.borrow_mut() = None;
            self.last.lock().in_flight = false;
            return Ok(());
        }
        let Some(tokens) = results_of else { return self.receive(number, |_, _| Ok([0; 2])) };
        let elements = tokens.max(1) * self.options.hidden;
        // Freed when the stream is idle. At least one element: an allocation is not empty.
        let discarded = self.communicator.context().alloc::<bf16>(elements)?;
        self.receive(number, |_, _| Ok([discarded.device_address(), 0]))
    }

    /// Receives tokens, or results to the outputs that `outputs` returns for their rows, on the
    /// stream on which they were sent.
    fn receive(
        &self,
        number: u64,
        outputs: impl FnOnce(Last, &DeviceSlice<bf16>) -> Result<Outputs>,
    ) -> Result<()> {
        let (stream, sent) = match &*self.in_flight.borrow() {
            Some(one) if one.number == number => {
                one.require_capture()?;
                (one.stream.clone(), one.sent.clone())
            }
            _ => return refuse("what was sent has been received already"),
        };
        let place = self.place(&stream)?;
        let launch = Launch { experts: self, steps: Steps::RECEIVE, stream: &stream, place };
        match sent {
            Halves::Results(rows) => {
                launch.combine(rows.device_address(), outputs(place.last, &rows)?)?;
            }
            Halves::Tokens(count) => {
                // The second half reads no tokens of this rank.
                let none = TokensArgs { input: 0, ids: 0, weights: 0, count: count as u32 };
                launch.dispatch(none)?;
            }
        }
        *self.in_flight.borrow_mut() = None;
        Ok(())
    }
}
