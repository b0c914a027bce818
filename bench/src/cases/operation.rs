//! A collective, with its buffers, and the libraries that perform it.

use anyhow::Result;
use clap::ValueEnum;
use devcomm::{
    Buffer, Collective, Collectives, Communicator, DeviceSlice, Element, Parts, ReduceOp, group,
};
use devcomm_testing::numbers::{Number, Reduced, count_wrong_from, input, inputs};
use devcomm_testing::simulated::read;

use super::job::Job;
use crate::contenders::{Contender, Outcome, Selection, Variant};
use crate::harness::{Harness, Nccl};

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    Sum,
    Max,
    Min,
    Avg,
}

impl Op {
    /// Returns its name, its operator for the libraries, and its operator for the check.
    pub fn parts(self) -> (&'static str, ReduceOp, Reduced) {
        match self {
            Self::Sum => ("sum", ReduceOp::Sum, Reduced::Sum),
            Self::Max => ("max", ReduceOp::Max, Reduced::Max),
            Self::Min => ("min", ReduceOp::Min, Reduced::Min),
            Self::Avg => ("avg", ReduceOp::Avg, Reduced::Avg),
        }
    }
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    /// An all-to-all with half a chunk for every second peer, and one and a half for the others.
    AllToAllV,
}

/// The rank that broadcasts.
const ROOT: usize = 0;

impl Operation {
    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::AllToAllV => "all-to-all-v",
        }
    }

    /// Returns whether it reduces, so that its speed depends on the type.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// Returns how many chunks the buffers to send and to receive in have. A chunk has the elements
    /// of [`Case::count`](crate::report::row::Case::count).
    pub fn chunks(self, ranks: usize) -> [usize; 2] {
        match self {
            Self::AllReduce | Self::Broadcast => [1, 1],
            Self::AllGather => [1, ranks],
            Self::ReduceScatter => [ranks, 1],
            Self::AllToAll => [ranks, ranks],
            // An odd number of ranks has one long part more than short ones, or one less: up to
            // half a chunk more than a chunk for each rank.
            Self::AllToAllV => [ranks.next_multiple_of(2); 2],
        }
    }

    /// Returns the bus bandwidth over the algorithm bandwidth, as nccl-tests defines them.
    pub fn bus(self, ranks: usize) -> f64 {
        match self {
            Self::AllReduce => 2.0 * (ranks - 1) as f64 / ranks as f64,
            Self::Broadcast => 1.0,
            _ => (ranks - 1) as f64 / ranks as f64,
        }
    }
}

/// The library that performs a collective.
#[derive(Clone, Copy)]
pub enum CollectiveLibrary<'a> {
    Devcomm(&'a Collectives),
    Nccl(&'a Communicator),
}

impl Operation {
    /// Enqueues it on the harness's stream.
    pub fn enqueue<T: Number>(
        self,
        by: CollectiveLibrary<'_>,
        [send, recv]: [&DeviceSlice<T>; 2],
        op: ReduceOp,
        Harness { stream, rank, .. }: &Harness<'_>,
    ) -> devcomm::Result<()> {
        // The methods of both have the same names and parameters.
        macro_rules! call {
            ($name:ident($($argument:expr),*)) => {
                match by {
                    CollectiveLibrary::Devcomm(by) => by.$name($($argument),*),
                    CollectiveLibrary::Nccl(by) => by.$name($($argument),*),
                }
            };
        }
        match self {
            Self::AllReduce => call!(all_reduce(send, recv, op, stream)),
            Self::AllGather => call!(all_gather(send, recv, stream)),
            Self::ReduceScatter => call!(reduce_scatter(send, recv, op, stream)),
            Self::AllToAll => call!(all_to_all(send, recv, stream)),
            Self::Broadcast => {
                let send = (rank.rank() == ROOT).then(|| send.clone());
                call!(broadcast(send, recv, ROOT, stream))
            }
            Self::AllToAllV => {
                let [counts, offsets] = &parts(rank.n_ranks(), rank.rank(), recv.len());
                let parts = Parts { counts, offsets };
                let comm = match by {
                    CollectiveLibrary::Devcomm(by) => {
                        return by.all_to_all_v(send, parts, recv, parts, stream);
                    }
                    CollectiveLibrary::Nccl(comm) => comm,
                };
                group(|_| {
                    for (peer, (count, first)) in counts.iter().zip(offsets).enumerate() {
                        comm.send(&send.slice(*first..first + count)?, peer, stream)?;
                        comm.recv(&recv.slice(*first..first + count)?, peer, stream)?;
                    }
                    Ok(())
                })
            }
        }
    }
}

/// The variants of NCCL.
pub const NCCL: [Variant; 2] = [Variant::Nccl, Variant::NcclSym];

/// Returns NCCL's selected variants, each with the configurations that may matter to it and their
/// indices in `all`.
pub fn nccl_variants<'a, 'b>(
    selection: &Selection,
    all: &'a [Nccl<'b>],
    reduces: bool,
) -> impl Iterator<Item = (Variant, (usize, &'a Nccl<'b>))> {
    let selected = NCCL.into_iter().filter(|variant| selection.has(*variant));
    selected.flat_map(move |variant| {
        let matters = move |(_, nccl): &(usize, &Nccl<'_>)| nccl.matters(variant, reduces);
        all.iter().enumerate().filter(matters).map(move |nccl| (variant, nccl))
    })
}

/// Returns NCCL's calls, with chunks of this number of elements.
pub fn calls_of_nccl<'a>(
    job: &Job<'a>,
    nccl: &'a [Nccl<'_>],
    operation: Operation,
    count: usize,
) -> Result<Vec<Contender<'a>>> {
    let chunks = operation.chunks(job.harness.rank.n_ranks());
    let call = |(variant, (_, nccl)): (Variant, (usize, &'a Nccl<'_>))| {
        let lens = chunks.map(|chunks| chunks * count);
        let buffers = memory::<f32>(nccl.comm(), variant, lens)?;
        Ok(Call::new(job.harness, operation, false, buffers)?.by_nccl(variant, nccl))
    };
    nccl_variants(&job.selection, nccl, operation.reduces()).map(call).collect()
}

/// Returns buffers to send and to receive in, in the kind of memory that NCCL's variant uses.
pub fn memory<T: Element>(
    comm: &Communicator,
    variant: Variant,
    lens: [usize; 2],
) -> Result<[DeviceSlice<T>; 2]> {
    let [send, recv] = lens.map(|len| buffer(comm, variant, len));
    Ok([send?, recv?])
}

/// Returns one such buffer.
pub fn buffer<T: Element>(
    comm: &Communicator,
    variant: Variant,
    len: usize,
) -> devcomm::Result<DeviceSlice<T>> {
    Ok(match variant {
        Variant::Nccl => comm.mem_alloc(len)?.device_slice(),
        _ => comm.window(len)?.device_slice(),
    })
}

/// An operation with its buffers.
#[derive(Clone)]
pub struct Call<'a, T> {
    harness: &'a Harness<'a>,
    operation: Operation,
    op: Op,
    in_place: bool,
    pub send: DeviceSlice<T>,
    pub recv: DeviceSlice<T>,
}

/// Returns the lengths and the offsets of the parts that a rank sends to each peer in an uneven
/// all-to-all between buffers of this length. It receives parts of the same lengths.
fn parts(ranks: usize, rank: usize, len: usize) -> [Vec<usize>; 2] {
    let count = len / Operation::AllToAllV.chunks(ranks)[1];
    let [less, more] = [count / 2, 2 * count - count / 2];
    let sent_to = |peer: usize| if (rank + peer).is_multiple_of(2) { less } else { more };
    let counts: Vec<usize> = (0..ranks).map(sent_to).collect();
    let offsets = (0..ranks).map(|peer| counts[..peer].iter().sum()).collect();
    [counts, offsets]
}

impl<'a, T: Number> Call<'a, T> {
    /// Returns the operation between these buffers, or in place within one of them. Writes this
    /// rank's input.
    pub fn new(
        harness: &'a Harness<'a>,
        operation: Operation,
        in_place: bool,
        [mut send, mut recv]: [DeviceSlice<T>; 2],
    ) -> Result<Self> {
        let rank = harness.rank.rank();
        if in_place {
            let chunk = send.len().min(recv.len());
            let own = rank * chunk..(rank + 1) * chunk;
            match operation {
                Operation::AllGather => send = recv.slice(own)?,
                Operation::ReduceScatter => recv = send.slice(own)?,
                _ => send = recv.clone(),
            }
        }
        let call = Self { harness, operation, op: Op::Sum, in_place, send, recv };
        call.write_input()?;
        Ok(call)
    }

    fn write_input(&self) -> Result<()> {
        let Harness { rank, run, .. } = self.harness;
        // In place, only the root of a broadcast sends.
        if self.in_place && self.operation == Operation::Broadcast && rank.rank() != ROOT {
            return Ok(());
        }
        Ok(self.send.copy_from_host(&inputs(run.seed, rank.rank(), self.send.len()))?)
    }

    /// Returns the counts and the offsets of a rank's parts.
    fn parts_of(&self, rank: usize) -> [Vec<usize>; 2] {
        parts(self.harness.rank.n_ranks(), rank, self.recv.len())
    }

    pub fn by_collectives(
        self,
        variant: Variant,
        collectives: &'a Collectives,
    ) -> Result<Contender<'a>> {
        let (outcome, in_place) = (self.clone(), self.in_place);
        let plan = self.ask(|call| collectives.explain(call))?.plan;
        let work = move || self.launch(CollectiveLibrary::Devcomm(collectives));
        Ok(Contender { in_place, ..Contender::new(variant, work, outcome) }.by_plan(plan))
    }

    /// Returns the operation with another reduction.
    pub fn reducing_by(self, op: Op) -> Self {
        Self { op, ..self }
    }

    pub fn launch(&self, by: CollectiveLibrary<'_>) -> devcomm::Result<()> {
        self.operation.enqueue(by, [&self.send, &self.recv], self.op.parts().1, self.harness)
    }

    /// Calls `about` with this call's description, as [`Collectives::explain`] takes it.
    pub fn ask<R>(&self, about: impl FnOnce(&Collective<'_>) -> R) -> R {
        let Self { send, recv, harness: Harness { rank, .. }, .. } = self;
        let (_, op, _) = self.op.parts();
        match self.operation {
            Operation::AllReduce => about(&Collective::all_reduce(send, recv, op)),
            Operation::AllGather => about(&Collective::all_gather(send, recv)),
            Operation::ReduceScatter => about(&Collective::reduce_scatter(send, recv, op)),
            Operation::Broadcast => {
                let send = (rank.rank() == ROOT).then(|| send.clone());
                about(&Collective::broadcast(send, recv, ROOT))
            }
            Operation::AllToAll => about(&Collective::all_to_all(send, recv)),
            Operation::AllToAllV => {
                let [counts, offsets] = &self.parts_of(rank.rank());
                let parts = Parts { counts, offsets };
                about(&Collective::all_to_all_v(send, parts, recv, parts))
            }
        }
    }

    /// Returns NCCL's host call, on a communicator of this configuration.
    pub fn by_nccl(self, variant: Variant, nccl: &'a Nccl<'_>) -> Contender<'a> {
        let (outcome, in_place) = (self.clone(), self.in_place);
        let work = move || self.launch(CollectiveLibrary::Nccl(nccl.comm()));
        let contender = Contender { in_place, ..Contender::new(variant, work, outcome) };
        contender.configured(nccl.name.as_ref())
    }
}

impl<T: Number> Outcome for Call<'_, T> {
    fn poison(&self) -> Result<()> {
        self.recv.fill_bytes(0xff)?;
        if self.in_place { self.write_input() } else { Ok(()) }
    }

    fn count_wrong(&self) -> Result<usize> {
        let Harness { rank, run, .. } = self.harness;
        let got = read(&self.recv)?;
        let (me, ranks) = (rank.rank(), rank.n_ranks());
        let chunk = got.len() / self.operation.chunks(ranks)[1];
        let expected = |i: usize| match self.operation {
            Operation::AllToAll => input::<T>(run.seed, i / chunk, me * chunk + i % chunk),
            Operation::Broadcast => input(run.seed, ROOT, i),
            _ => input(run.seed, i / chunk, i % chunk),
        };
        Ok(match self.operation {
            // NCCL's ring rounds each partial sum.
            Operation::AllReduce | Operation::ReduceScatter => {
                let first = if self.operation == Operation::AllReduce { 0 } else { me * chunk };
                let (roundings, (.., reduced)) = ((ranks - 1).max(1), self.op.parts());
                count_wrong_from(reduced, run.seed, ranks, roundings, first, &got)
            }
            Operation::AllToAllV => {
                let [counts, offsets] = self.parts_of(me);
                let wrong_of = |peer: usize| {
                    let first = self.parts_of(peer)[1][me];
                    let is_wrong = |i: &usize| {
                        let sent = input::<T>(run.seed, peer, first + i);
                        got[offsets[peer] + i].bits() != sent.bits()
                    };
                    (0..counts[peer]).filter(is_wrong).count()
                };
                (0..ranks).map(wrong_of).sum()
            }
            _ => (0..got.len()).filter(|&i| got[i].bits() != expected(i).bits()).count(),
        })
    }
}
