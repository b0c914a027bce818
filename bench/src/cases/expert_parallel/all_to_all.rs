//! Dispatch and combine by `ncclAlltoAll`, as in a program that sends rows to experts by NCCL
//! alone.

use std::rc::Rc;

use devcomm::{Buffer, DeviceSlice, Kernels, group};
use devcomm_testing::experts::Batch;
use devcomm_testing::simulated::read;
use half::bf16;

use super::layer::{Layer, Operation, count_different, routing};
use super::sums::Sums;
use crate::cases::operation::memory;
use crate::cases::prelude::*;

/// Buffers of `ncclAlltoAll`, each with a chunk for each rank. All chunks have the same length,
/// since NCCL requires it: that of the pair of ranks with the most rows. For dispatch, the chunk of
/// a rank has the rows of this rank's tokens that have an expert there. They are put there once,
/// before anything is timed. For combine, the chunk of a rank has the sums of what this rank's
/// experts return for that rank's tokens, and those that arrive are added up. In each pair of
/// buffers the first one is sent, and the second one receives.
pub(super) struct AllToAll<'a> {
    layer: Rc<Layer<'a>>,
    nccl: &'a Nccl<'a>,
    /// Rows of a chunk, at least one: a buffer is not empty.
    chunk_rows: usize,
    rows: [DeviceSlice<bf16>; 2],
    /// Experts and weights of each row.
    routing: [DeviceSlice<u32>; 2],
    results: [DeviceSlice<bf16>; 2],
    output: DeviceSlice<bf16>,
    /// The sums that are sent, and those of what arrives.
    sums: [Sums<'a>; 2],
}

impl<'a> AllToAll<'a> {
    pub(super) fn new(
        layer: &Rc<Layer<'a>>,
        nccl: &'a Nccl<'a>,
        kernels: &'a Kernels,
    ) -> Result<Rc<Self>> {
        let (rank, batch) = (layer.harness.rank, &layer.batch);
        let (ranks, me) = (rank.n_ranks(), rank.rank());
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let chunk_rows =
            pairs.map(|(from, to)| batch.tokens_to(from, to).count()).fold(1, usize::max);
        let rows = ranks * chunk_rows;
        // The buffers are windows, with which NCCL is fastest.
        let row_memory = || memory(nccl.comm(), Variant::NcclSym, [rows * batch.hidden; 2]);
        let routing_of_all = memory(nccl.comm(), Variant::NcclSym, [rows * 2 * batch.top_k; 2])?;
        let terms = batch.terms(me, &layer.layout);
        let mut sent = Vec::new();
        let mut added: Vec<_> = (0..batch.tokens[me] as u32).map(|t| (t, Vec::new())).collect();
        for rank in 0..ranks {
            let first: usize = batch.tokens[..rank].iter().sum();
            for (at, token) in (rank * chunk_rows..).zip(batch.tokens_to(rank, me)) {
                sent.push((at as u32, terms[first + token].clone()));
            }
            for (at, token) in (rank * chunk_rows..).zip(batch.tokens_to(me, rank)) {
                added[token].1.push((at as u32, 1.0));
            }
        }
        let sums = |sums: &[_]| Sums::new(layer.harness, kernels, sums, batch.hidden);
        let output = nccl.comm().mem_alloc(batch.inputs[me].len())?.device_slice();
        let this = Self {
            layer: Rc::clone(layer),
            nccl,
            chunk_rows,
            rows: row_memory()?,
            routing: routing_of_all,
            results: row_memory()?,
            output,
            sums: [sums(&sent)?, sums(&added)?],
        };
        for rank in 0..ranks {
            for (at, token) in batch.tokens_to(me, rank).enumerate() {
                this.write(&this.rows[0], rank, at, batch.row(me, token))?;
                this.write(&this.routing[0], rank, at, &routing_of(batch, me, token))?;
            }
        }
        Ok(Rc::new(this))
    }

    /// Writes row `at` of a rank's chunk.
    fn write<T: devcomm::Element>(
        &self,
        buffer: &DeviceSlice<T>,
        rank: usize,
        at: usize,
        row: &[T],
    ) -> devcomm::Result<()> {
        let first = (rank * self.chunk_rows + at) * row.len();
        buffer.slice(first..first + row.len())?.copy_from_host(row)
    }

    fn launch(&self, operation: Operation) -> devcomm::Result<()> {
        let (stream, comm) = (&self.layer.harness.stream, self.nccl.comm());
        if operation.dispatches() {
            group(|_| {
                comm.all_to_all(&self.rows[0], &self.rows[1], stream)?;
                comm.all_to_all(&self.routing[0], &self.routing[1], stream)
            })?;
        }
        if operation.combines() {
            let ([sent, arrived], harness) = (&self.results, self.layer.harness);
            self.sums[0].launch(&self.layer.rows, sent, harness)?;
            comm.all_to_all(sent, arrived, stream)?;
            self.sums[1].launch(arrived, &self.output, harness)?;
        }
        Ok(())
    }

    pub(super) fn contender(self: &Rc<Self>, operation: Operation) -> Contender<'a> {
        let (this, outcome) = (Rc::clone(self), Received(Rc::clone(self), operation));
        let work = move || this.launch(operation);
        let contender = Contender::new(Variant::NcclAllToAll, work, outcome);
        contender.configured(self.nccl.name.as_ref())
    }

    /// Returns how many elements of the received rows are wrong: those of rank `r` are `want(r)`,
    /// in order.
    fn count_wrong<T: devcomm::Element + PartialEq>(
        &self,
        received: &DeviceSlice<T>,
        want: impl Fn(usize) -> Vec<Vec<T>>,
    ) -> Result<usize> {
        let ranks = self.layer.batch.tokens.len();
        let got = read(received)?;
        let chunks = got.chunks(got.len() / ranks).enumerate();
        Ok(chunks.map(|(rank, chunk)| count_different(chunk, &want(rank).concat())).sum())
    }
}

/// Returns a token's experts and weights, as words.
fn routing_of(batch: &Batch, rank: usize, token: usize) -> Vec<u32> {
    routing(batch, rank, token * batch.top_k..(token + 1) * batch.top_k)
}

/// The buffers into which an operation receives.
struct Received<'a>(Rc<AllToAll<'a>>, Operation);

impl Outcome for Received<'_> {
    fn poison(&self) -> Result<()> {
        let AllToAll { rows, routing, results, output, .. } = &*self.0;
        rows[1].fill_bytes(0xff)?;
        routing[1].fill_bytes(0xff)?;
        for buffer in [&results[0], &results[1], output] {
            buffer.fill_bytes(0xff)?;
        }
        Ok(())
    }

    fn count_wrong(&self) -> Result<usize> {
        let Self(all, operation) = self;
        let (batch, rank) = (&all.layer.batch, all.layer.harness.rank);
        let me = rank.rank();
        // A rank's buffers are complete when the others' work has ended too.
        rank.barrier()?;
        let mut wrong = 0;
        if operation.dispatches() {
            wrong += all.count_wrong(&all.rows[1], |from| {
                batch.tokens_to(from, me).map(|token| batch.row(from, token).to_vec()).collect()
            })?;
            wrong += all.count_wrong(&all.routing[1], |from| {
                batch.tokens_to(from, me).map(|token| routing_of(batch, from, token)).collect()
            })?;
        }
        if operation.combines() {
            wrong += count_different(&read(&all.output)?, &all.layer.expected);
        }
        Ok(wrong)
    }
}
