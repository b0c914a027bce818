//! The last step, which the operations of an [`ExpertParallel`] continue: on the GPU and in graphs.

use std::fmt;
use std::sync::Arc;

use devcomm_host::Turn;
use parking_lot::Mutex;

use super::ExpertParallel;
use crate::prelude::*;

/// The last step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Last {
    pub(super) stage: Stage,
    /// The tokens of the dispatch.
    pub(super) tokens: usize,
    /// The rows for which the last `group` had room.
    pub(super) grouped: usize,
    /// The fewest rows for which a `group` had room since the last check.
    pub(super) least_room: usize,
    /// Whether rows were sent that are not received.
    pub(super) in_flight: bool,
}

/// What has been done of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// No tokens were received yet.
    Begin,
    /// Tokens were received, and are in no order.
    Received,
    /// Tokens are in the order of the experts: their results can return.
    Grouped,
}

/// Where an operation goes, and the last step there.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The capture, if the operation goes to its graph.
    capture: Option<u64>,
    pub(super) last: Last,
}

/// The steps in a graph.
pub(super) struct GraphSteps {
    capture: u64,
    /// The last step before each launch, unless the graph begins with a dispatch.
    continued: Option<Last>,
    last: Mutex<Last>,
    /// The last step on the GPU.
    on_gpu: Arc<Mutex<Last>>,
}

impl Last {
    pub(super) const NONE: Self = Self {
        stage: Stage::Begin,
        tokens: 0,
        grouped: 0,
        least_room: usize::MAX,
        in_flight: false,
    };

    /// Returns whether what was captured after `earlier` can follow this step.
    fn is_like(self, earlier: Self) -> bool {
        let stage = match earlier.stage {
            Stage::Grouped => self.stage == Stage::Grouped && self.grouped == earlier.grouped,
            // Rows can be put in their order again.
            _ => self.stage != Stage::Begin,
        };
        stage && self.tokens == earlier.tokens
    }
}

impl fmt::Display for Last {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stage, tokens, grouped, .. } = self;
        match stage {
            Stage::Begin => f.write_str("none"),
            Stage::Received => write!(f, "a dispatch of {tokens} tokens"),
            Stage::Grouped => {
                write!(f, "a dispatch of {tokens} tokens and a group with room for {grouped} rows")
            }
        }
    }
}

impl GraphSteps {
    fn may_end(&self) -> Result<()> {
        refuse_if!(
            self.last.lock().in_flight,
            "what was sent in this capture is not received in it"
        );
        Ok(())
    }

    fn may_launch(&self) -> Result<()> {
        let last = *self.on_gpu.lock();
        refuse_if!(
            last.in_flight,
            "a graph has operations of an object whose rows are on their way"
        );
        let Some(continued) = self.continued else { return Ok(()) };
        refuse_if!(
            !last.is_like(continued),
            "a graph continues {continued}, and the last step is {last}"
        );
        Ok(())
    }

    fn is_launched(&self) {
        let (mut on_gpu, last) = (self.on_gpu.lock(), *self.last.lock());
        let least_room = on_gpu.least_room.min(last.least_room);
        *on_gpu = Last { least_room, ..last };
    }
}

impl ExpertParallel {
    /// Returns where an operation on the stream goes. Another library's captures count as the GPU.
    pub(super) fn place(&self, stream: &Stream) -> Result<Place> {
        let (capture, on_gpu) = (stream.own_capture_id()?, *self.last.lock());
        let Some(id) = capture else { return Ok(Place { capture, last: on_gpu }) };
        let last = match &*self.captured.borrow() {
            Some(graph) if graph.capture == id => *graph.last.lock(),
            _ => Last { least_room: usize::MAX, ..on_gpu },
        };
        Ok(Place { capture, last })
    }

    /// Orders a launch after the others, once its arguments are checked.
    pub(super) fn begin(&self, place: Place, stream: &Stream) -> Result<Turn<'_>> {
        require_context("the stream", stream.context(), self.communicator.context())?;
        let turn = self.order.begin(stream)?;
        refuse_if!(
            place.capture.is_none() && *self.last.lock() != place.last,
            "another thread has launched a graph of this object"
        );
        Ok(turn)
    }

    /// Records the last step after an operation, within its turn. `needs` is what must have been
    /// done before it, if it is no dispatch.
    pub(super) fn record(&self, place: Place, needs: Option<Stage>, last: Last) {
        let Some(capture) = place.capture else {
            *self.last.lock() = last;
            return;
        };
        let mut captured = self.captured.borrow_mut();
        if let Some(graph) = captured.as_ref().filter(|graph| graph.capture == capture) {
            *graph.last.lock() = last;
            return;
        }
        let continued = needs.map(|stage| Last { stage, ..place.last });
        let (last, on_gpu) = (Mutex::new(last), Arc::clone(&self.last));
        let graph = Arc::new(GraphSteps { capture, continued, last, on_gpu });
        let [ended, next, launched] = [(); 3].map(|()| Arc::clone(&graph));
        self.communicator.context().follow_capture(
            move || ended.may_end(),
            move || next.may_launch(),
            move || launched.is_launched(),
        );
        *captured = Some(graph);
    }
}
