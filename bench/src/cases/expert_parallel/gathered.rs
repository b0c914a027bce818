//! Dispatch and combine by collectives: an all-gather of all ranks' tokens; the sums of what this
//! rank's experts return for each of them, and a reduce-scatter of these sums.

use std::rc::Rc;

use devcomm::{Collectives, Communicator, DeviceSlice, Kernels, ReduceOp, group};
use devcomm_testing::simulated::read;
use half::bf16;

use super::layer::{Layer, Operation, count_different, routing};
use super::sums::Sums;
use crate::cases::operation::memory;
use crate::cases::prelude::*;

/// Buffers of one kind of memory: this rank's rows and routing, those of all ranks, this rank's
/// contributions to all tokens, and the results.
struct Buffers {
    rows: DeviceSlice<bf16>,
    routing: DeviceSlice<u32>,
    all_rows: DeviceSlice<bf16>,
    all_routing: DeviceSlice<u32>,
    partials: DeviceSlice<bf16>,
    results: DeviceSlice<bf16>,
}

/// An all-gather and a reduce-scatter of a layer, with buffers of each kind of memory. All ranks
/// have the same number of tokens.
pub struct Gathered<'a> {
    layer: Rc<Layer<'a>>,
    collectives: &'a Collectives,
    nccl: &'a Nccl<'a>,
    /// What this rank's experts contribute to the tokens of all ranks.
    partials: Sums<'a>,
    /// Memory that is not registered, for [`Variant::Nccl`].
    plain: Buffers,
    /// Windows of the world's communicator, for [`Variant::RustAllGather`].
    in_windows: Buffers,
    /// Windows of `nccl`'s communicator, for [`Variant::NcclSym`].
    in_windows_of_nccl: Buffers,
}

impl<'a> Gathered<'a> {
    pub fn new(
        layer: &Rc<Layer<'a>>,
        collectives: &'a Collectives,
        nccl: &'a Nccl<'a>,
        kernels: &'a Kernels,
    ) -> Result<Rc<Self>> {
        let (harness, batch) = (layer.harness, Rc::clone(&layer.batch));
        let (comm, ranks, me) = (harness.comm, harness.rank.n_ranks(), harness.rank.rank());
        let (len, words) = (batch.inputs[me].len(), 2 * batch.ids[me].len());
        let buffers = |comm: &Communicator, variant: Variant| -> Result<Buffers> {
            let [rows, all_rows] = memory(comm, variant, [len, ranks * len])?;
            let [routing, all_routing] = memory(comm, variant, [words, ranks * words])?;
            let [partials, results] = memory(comm, variant, [ranks * len, len])?;
            Ok(Buffers { rows, routing, all_rows, all_routing, partials, results })
        };
        let plain = buffers(comm, Variant::Nccl)?;
        let in_windows = buffers(comm, Variant::NcclSym)?;
        let in_windows_of_nccl = buffers(nccl.comm(), Variant::NcclSym)?;
        let layer = Rc::clone(layer);
        let sums: Vec<_> = (0..).zip(batch.terms(me, &layer.layout)).collect();
        let partials = Sums::new(harness, kernels, &sums, batch.hidden)?;
        let gathered =
            Self { layer, collectives, nccl, partials, plain, in_windows, in_windows_of_nccl };
        for buffers in [&gathered.plain, &gathered.in_windows, &gathered.in_windows_of_nccl] {
            buffers.rows.copy_from_host(&batch.inputs[me])?;
            buffers.routing.copy_from_host(&routing(&batch, me, 0..batch.ids[me].len()))?;
        }
        Ok(Rc::new(gathered))
    }

    fn buffers(&self, variant: Variant) -> &Buffers {
        match variant {
            Variant::Nccl => &self.plain,
            Variant::NcclSym => &self.in_windows_of_nccl,
            _ => &self.in_windows,
        }
    }

    fn launch(&self, operation: Operation, variant: Variant) -> devcomm::Result<()> {
        let Buffers { rows, routing, all_rows, all_routing, partials, results } =
            self.buffers(variant);
        let (stream, comm) = (&self.layer.harness.stream, self.nccl.comm());
        let collectives = self.collectives;
        let by_rust = variant == Variant::RustAllGather;
        if operation.dispatches() && by_rust {
            collectives.all_gather(rows, all_rows, stream)?;
            collectives.all_gather(routing, all_routing, stream)?;
        } else if operation.dispatches() {
            group(|_| {
                comm.all_gather(rows, all_rows, stream)?;
                comm.all_gather(routing, all_routing, stream)
            })?;
        }
        if !operation.combines() {
            return Ok(());
        }
        self.partials.launch(&self.layer.rows, partials, self.layer.harness)?;
        match by_rust {
            true => collectives.reduce_scatter(partials, results, ReduceOp::Sum, stream),
            false => comm.reduce_scatter(partials, results, ReduceOp::Sum, stream),
        }
    }

    pub fn contender(self: &Rc<Self>, operation: Operation, variant: Variant) -> Contender<'a> {
        let (gathered, outcome) =
            (Rc::clone(self), ByCollectives(Rc::clone(self), operation, variant));
        let contender =
            Contender::new(variant, move || gathered.launch(operation, variant), outcome);
        match variant {
            Variant::RustAllGather => contender,
            _ => contender.configured(self.nccl.name.as_ref()),
        }
    }
}

/// The result of an operation of a [`Gathered`].
struct ByCollectives<'a>(Rc<Gathered<'a>>, Operation, Variant);

impl Outcome for ByCollectives<'_> {
    fn poison(&self) -> Result<()> {
        let Self(gathered, _, variant) = self;
        let Buffers { all_rows, all_routing, partials, results, .. } = gathered.buffers(*variant);
        all_rows.fill_bytes(0xff)?;
        partials.fill_bytes(0xff)?;
        all_routing.fill_bytes(0xff)?;
        Ok(results.fill_bytes(0xff)?)
    }

    /// Counts a sum as wrong if its error exceeds one rounding for each rank.
    fn count_wrong(&self) -> Result<usize> {
        let Self(gathered, operation, variant) = self;
        let buffers = gathered.buffers(*variant);
        let layer = &gathered.layer;
        // A rank whose own work has ended may still receive.
        layer.harness.rank.barrier()?;
        let (batch, mut wrong) = (&layer.batch, 0);
        if operation.dispatches() {
            wrong += count_different(&read(&buffers.all_rows)?, &batch.inputs.concat());
            let routed = |rank: usize| routing(batch, rank, 0..batch.ids[rank].len());
            let all: Vec<u32> = (0..batch.tokens.len()).flat_map(routed).collect();
            wrong += count_different(&read(&buffers.all_routing)?, &all);
        }
        if operation.combines() {
            let ranks = batch.tokens.len() as f32;
            // Weights are at most 1, and elements at most 2; a rounding to bf16 loses 1/256.
            let most = 2.0 * batch.top_k as f32 * ranks / 256.0;
            let differs = |got: &bf16, want: &bf16| {
                let off = (got.to_f32() - want.to_f32()).abs();
                off.is_nan() || off > most
            };
            let got = read(&buffers.results)?;
            let pairs = got.iter().zip(&layer.expected);
            wrong += pairs.filter(|(got, want)| differs(got, want)).count();
        }
        Ok(wrong)
    }
}
