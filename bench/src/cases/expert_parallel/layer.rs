//! The operations of `devcomm::ExpertParallel`, as benchmarks measure them.

use std::ops::Range;
use std::rc::Rc;

use clap::ValueEnum;
use devcomm::{
    Buffer, DeviceSlice, ExpertParallel, ExpertParallelOptions, SymmetricBuffer, Tokens,
};
use devcomm_testing::experts::{Batch, Layout};
use devcomm_testing::simulated::read;
use half::bf16;

use crate::cases::prelude::*;

/// A part of the communication of a layer of experts, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Operation {
    /// Rows are sent to the ranks of their experts
    Dispatch,
    /// Received rows are put in the order of the experts
    Group,
    /// Results return, and are added up
    Combine,
    /// These three operations
    Layer,
}

impl Operation {
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::Group, Self::Combine, Self::Layer];

    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Group => "group",
            Self::Combine => "combine",
            Self::Layer => "layer",
        }
    }

    pub fn dispatches(self) -> bool {
        matches!(self, Self::Dispatch | Self::Layer)
    }

    pub fn groups(self) -> bool {
        matches!(self, Self::Group | Self::Layer)
    }

    pub fn combines(self) -> bool {
        matches!(self, Self::Combine | Self::Layer)
    }
}

/// An [`ExpertParallel`], a batch of tokens for it, and their memory.
pub struct Layer<'a> {
    pub harness: &'a Harness<'a>,
    pub variant: Variant,
    experts: Rc<ExpertParallel>,
    pub batch: Rc<Batch>,
    /// The order of `rows`.
    pub layout: Layout,
    /// The combined results of this rank's tokens, if experts return their rows.
    pub expected: Vec<bf16>,
    input: SymmetricBuffer<bf16>,
    ids: SymmetricBuffer<i32>,
    weights: SymmetricBuffer<f32>,
    /// What experts return.
    pub rows: DeviceSlice<bf16>,
    output: SymmetricBuffer<bf16>,
}

impl<'a> Layer<'a> {
    pub fn new(
        harness: &'a Harness<'a>,
        variant: Variant,
        options: ExpertParallelOptions,
        batch: &Rc<Batch>,
    ) -> Result<Rc<Self>> {
        let (comm, me) = (harness.comm, harness.rank.rank());
        let experts = options.build(comm)?;
        let layer = Self {
            harness,
            variant,
            layout: batch.layout(me),
            expected: batch.combined(me, None, |_| 1.0),
            input: harness.filled(&batch.inputs[me])?,
            ids: harness.filled(&batch.ids[me])?,
            weights: harness.filled(&batch.weights[me])?,
            rows: match variant {
                Variant::RustThroughput => experts.rows()?,
                _ => comm.mem_alloc(experts.most_rows() * batch.hidden)?.device_slice(),
            },
            output: comm.mem_alloc(batch.inputs[me].len())?,
            batch: Rc::clone(batch),
            experts: Rc::new(experts),
        };
        // A group and a combine need the rows of a dispatch: after these, any operation can run.
        layer.launch(Operation::Dispatch)?;
        layer.launch(Operation::Group)?;
        Ok(Rc::new(layer))
    }

    fn dispatch(&self, count: usize) -> devcomm::Result<()> {
        let Self { input, ids, weights, .. } = self;
        self.experts.dispatch(Tokens { count, input, ids, weights }, &self.harness.stream)
    }

    fn tokens(&self) -> usize {
        self.batch.tokens[self.harness.rank.rank()]
    }

    fn launch(&self, operation: Operation) -> devcomm::Result<()> {
        let Self { experts, rows, output, harness: Harness { stream, .. }, .. } = self;
        if operation.dispatches() {
            self.dispatch(self.tokens())?;
        }
        if operation.groups() {
            experts.group(rows, stream)?;
        }
        if operation.combines() {
            experts.combine(rows, output, None, stream)?;
        }
        Ok(())
    }

    pub fn contender(self: &Rc<Self>, operation: Operation) -> Contender<'a> {
        let (layer, outcome) = (Rc::clone(self), LayerOutcome(Rc::clone(self), operation));
        Contender::new(self.variant, move || layer.launch(operation), outcome)
    }

    fn count_wrong_rows(&self) -> Result<usize> {
        let used = self.layout.offsets.last().map_or(0, |rows| *rows as usize);
        let got = read(&self.rows.slice(..used * self.batch.hidden)?)?;
        let wrong = count_different(&read(&self.experts.groups().offsets)?, &self.layout.offsets);
        Ok(wrong + self.batch.count_wrong_rows(&self.layout, &got))
    }
}

/// The result of an operation of a [`Layer`].
struct LayerOutcome<'a>(Rc<Layer<'a>>, Operation);

impl Outcome for LayerOutcome<'_> {
    /// Does the operations that come before the measured one, and overwrites its result.
    fn poison(&self) -> Result<()> {
        let Self(layer, operation) = self;
        // A dispatch of no tokens removes the rows of earlier ones.
        layer.dispatch(0)?;
        layer.rows.fill_bytes(0xff)?;
        if !operation.dispatches() {
            layer.dispatch(layer.tokens())?;
        }
        if *operation == Operation::Combine {
            layer.experts.group(&layer.rows, &layer.harness.stream)?;
        }
        Ok(layer.output.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Self(layer, operation) = self;
        if *operation == Operation::Dispatch {
            layer.experts.group(&layer.rows, &layer.harness.stream)?;
        }
        let mut wrong = layer.count_wrong_rows()?;
        if operation.combines() {
            wrong += count_different(&read(&layer.output)?, &layer.expected);
        }
        layer.experts.check()?;
        Ok(wrong)
    }
}

/// Returns how many elements differ, up to the end of the shorter slice. `got` is at least as long
/// as `want`: a buffer may have unused room.
pub fn count_different<T: PartialEq>(got: &[T], want: &[T]) -> usize {
    got.iter().zip(want).filter(|(got, want)| got != want).count()
}

/// Returns the experts and weights of these pairs of token and expert of a rank, as words.
pub fn routing(batch: &Batch, rank: usize, pairs: Range<usize>) -> Vec<u32> {
    let ids = batch.ids[rank][pairs.clone()].iter().map(|id| *id as u32);
    ids.chain(batch.weights[rank][pairs].iter().map(|weight| weight.to_bits())).collect()
}
