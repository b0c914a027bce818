//! Collectives: `devcomm::Collectives` against NCCL's.

mod operation;

use anyhow::Result;
use clap::{Args, ValueEnum};
use devcomm::{
    Buffer, Collective, Collectives, Communicator, DeviceSlice, Element, F8E4M3, F8E5M2, Parts,
    ReduceOp, group,
};
use devcomm_testing::numbers::{Number, Reduced, count_wrong_from, input, inputs};
use half::{bf16, f16};

use super::benchmark::{Benchmark, SIMULATED_LARGEST};
use super::concurrent_product::ConcurrentProduct;
use super::job::Job;
use crate::base::options::{Dtype, LARGEST, SizeOptions, parse_bytes};
use crate::contenders::contender::{Contender, Outcome, Variant};
use crate::contenders::peers::PeerOptions;
use crate::contenders::selection::VariantInfo;
use crate::harness::{Harness, Nccl};
use crate::report::row::Case;
pub use operation::Operation;

/// The flags of the benchmarks of collectives. A size is that of the larger of the two buffers, and
/// a count is that of a rank's chunk.
#[derive(Args, Clone, Debug)]
pub struct Flags {
    #[command(flatten)]
    pub sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "f32")]
    pub dtype: Dtype,

    /// Reduction, of operations that reduce
    #[arg(short = 'o', long = "op", value_enum, default_value = "sum")]
    op: Op,

    /// Longest message in bytes that devcomm sends in one step (suffixes K, M, G) [default: 4M for
    /// 2 ranks]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    lamport_bytes: Option<usize>,

    /// Number of blocks by which devcomm sends long messages [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    push_blocks: Option<u32>,

    /// Run every variant during a matrix product in bf16 on another stream, of these extents, and
    /// the product alone: times are those of both
    #[arg(long, value_delimiter = ',', value_name = "M,N,K")]
    beside: Vec<usize>,

    #[command(flatten)]
    pub peers: PeerOptions,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    #[value(alias = "all")]
    Sum,
    Max,
    Min,
    Avg,
}

impl Op {
    fn parts(self) -> (&'static str, ReduceOp, Reduced) {
        match self {
            Self::Sum => ("sum", ReduceOp::Sum, Reduced::Sum),
            Self::Max => ("max", ReduceOp::Max, Reduced::Max),
            Self::Min => ("min", ReduceOp::Min, Reduced::Min),
            Self::Avg => ("avg", ReduceOp::Avg, Reduced::Avg),
        }
    }
}

/// Runs an expression for each of these types that is asked for, or of all types.
macro_rules! for_types {
    ($dtype:expr, $name:ident in [$($type:ty),*] => $body:expr) => { $(
        if $dtype.includes(<$type as devcomm::Element>::NAME) {
            type $name = $type;
            $body
        }
    )* };
    ($dtype:expr, $name:ident => $body:expr) => {
        for_types!($dtype, $name in [f32, f16, bf16, F8E4M3, F8E5M2, i32] => $body)
    };
}
pub(super) use for_types;

/// Declares a benchmark.
macro_rules! benchmarks {
    ($($operation:ident $name:literal, $method:literal, $nccl:literal, $program:literal;)*) => { $(
        #[doc = concat!("The flags of `", $name, "`.")]
        #[derive(Args, Clone, Debug)]
        pub struct $operation {
            #[command(flatten)]
            flags: Flags,
        }

        impl Benchmark for $operation {
            const NAME: &'static str = $name;
            const VARIANTS: &'static [VariantInfo] = &[
                (
                    Variant::RustOps,
                    concat!("devcomm::Collectives::", $method, " on symmetric windows"),
                ),
                (
                    Variant::RustOpsPlain,
                    "the same on memory of ncclMemAlloc that is not registered",
                ),
                (
                    Variant::Nccl,
                    concat!($nccl, " on memory of ncclMemAlloc that is not registered"),
                ),
                (Variant::NcclSym, concat!($nccl, " on the windows")),
                (Variant::RustGemm, "the product of --beside alone"),
            ];

            const NCCL_TESTS: Option<&'static str> = Some($program);

            fn validate(&self) -> Result<()> {
                self.flags.sizes.validate()
            }

            fn peers(&self) -> Option<&PeerOptions> {
                Some(&self.flags.peers)
            }

            fn run(&self, job: &mut Job<'_>) -> Result<()> {
                let means = self.flags.means(job)?;
                job.begin()?;
                let operation = Operation::$operation;
                for_types!(self.flags.dtype, T => {
                    self.flags.run_type::<T>(job, operation, &means, &|_| Ok(None))?
                });
                Ok(())
            }
        }
    )* };
}

benchmarks! {
    AllGather "all-gather", "all_gather", "ncclAllGather", "all_gather_perf";
    ReduceScatter "reduce-scatter", "reduce_scatter", "ncclReduceScatter", "reduce_scatter_perf";
    Broadcast "broadcast", "broadcast", "ncclBroadcast", "broadcast_perf";
    AllToAll "all-to-all", "all_to_all", "ncclAlltoAll", "alltoall_perf";
    AllToAllV "all-to-all-v", "all_to_all_v", "ncclSend and ncclRecv in a group", "alltoallv_perf";
}

/// The rank that broadcasts.
const ROOT: usize = 0;

/// The variants of NCCL.
pub const NCCL: [Variant; 2] = [Variant::Nccl, Variant::NcclSym];

/// Returns buffers to send and to receive in, in the kind of memory that NCCL's variant uses.
pub fn memory<T: Element>(
    comm: &Communicator,
    variant: Variant,
    lens: [usize; 2],
) -> Result<[DeviceSlice<T>; 2]> {
    let [send, recv] = lens.map(|len| match variant {
        Variant::Nccl => comm.mem_alloc(len).map(|buffer| buffer.device_slice()),
        _ => comm.window(len).map(|window| window.device_slice()),
    });
    Ok([send?, recv?])
}

/// The libraries and kernels that perform collectives.
pub struct Means<'a> {
    pub collectives: Collectives,
    pub nccl: Vec<Nccl<'a>>,
    pub beside: Option<ConcurrentProduct<'a>>,
}

/// Further contenders of a case, with their buffers.
pub trait Workload {
    fn contenders(&self) -> Result<Vec<Contender<'_>>>;
}

/// Returns further contenders for an operation of a number of elements.
type More<'a> = &'a dyn Fn(usize) -> Result<Option<Box<dyn Workload + 'a>>>;

impl Flags {
    /// Returns whether a reduction is a sum.
    pub fn sums(&self) -> bool {
        self.op == Op::Sum
    }

    pub fn means<'a>(&self, job: &mut Job<'a>) -> Result<Means<'a>> {
        let mut options = job.harness.collectives();
        if let Some(bytes) = self.lamport_bytes {
            options = options.lamport_bytes(bytes);
        }
        if let Some(blocks) = self.push_blocks {
            options = options.push_blocks(blocks);
        }
        let collectives = options.build(job.harness.comm)?;
        let is_beside = !self.beside.is_empty();
        if !is_beside {
            job.selection.omit(Variant::RustGemm, "--beside M,N,K runs it")?;
        }
        let beside =
            is_beside.then(|| ConcurrentProduct::new(job.harness, &self.beside)).transpose()?;
        Ok(Means { collectives, nccl: job.nccl()?, beside })
    }

    pub fn run_type<T: Number>(
        &self,
        job: &mut Job<'_>,
        operation: Operation,
        Means { collectives, nccl, beside }: &Means<'_>,
        more: More<'_>,
    ) -> Result<()> {
        let (harness, ranks) = (job.harness, job.harness.rank.n_ranks());
        let [to_send, to_receive] = operation.chunks(ranks);
        let (chunks, reduces) = (to_send.max(to_receive), operation.reduces());
        let largest = harness.choose(LARGEST, SIMULATED_LARGEST);
        let counts = self.sizes.counts(largest, chunks * size_of::<T>())?;
        // As in nccl-tests, all sizes use the same memory.
        let most = counts.iter().copied().max().unwrap_or(0);
        let lens = [to_send, to_receive].map(|chunks| chunks * most);
        let plain = memory::<T>(harness.comm, Variant::Nccl, lens)?;
        let windows = memory::<T>(harness.comm, Variant::RustOps, lens)?;
        let own = |nccl: &Nccl<'_>| match nccl.matters(Variant::NcclSym, reduces) {
            true => memory::<T>(nccl.comm(), Variant::NcclSym, lens),
            false => Ok(plain.clone()),
        };
        let of_nccl = nccl.iter().map(own).collect::<Result<Vec<_>>>()?;
        for count in counts {
            let workload = more(count)?;
            let mut contenders = workload.as_ref().map_or(Ok(Vec::new()), |w| w.contenders())?;
            for &in_place in job.places() {
                // An all-to-all is not in place.
                if in_place && matches!(operation, Operation::AllToAll | Operation::AllToAllV) {
                    continue;
                }
                let call = |[send, recv]: &[DeviceSlice<T>; 2]| -> Result<_> {
                    let buffers =
                        [send.slice(..to_send * count)?, recv.slice(..to_receive * count)?];
                    let call = Call::new(harness, operation, in_place, buffers)?;
                    Ok(Call { op: self.op, ..call })
                };
                for (variant, buffers) in
                    [(Variant::RustOps, &windows), (Variant::RustOpsPlain, &plain)]
                {
                    if job.selection.has(variant) {
                        contenders.push(call(buffers)?.by_collectives(variant, collectives)?);
                    }
                }
                for variant in NCCL.into_iter().filter(|variant| job.selection.has(*variant)) {
                    let all = nccl.iter().zip(&of_nccl);
                    for (nccl, own) in all.filter(|(nccl, _)| nccl.matters(variant, reduces)) {
                        let buffers = if variant == Variant::Nccl { &plain } else { own };
                        contenders.push(call(buffers)?.by_nccl(variant, nccl));
                    }
                }
            }
            if let Some(beside) = beside {
                contenders = contenders.into_iter().map(|c| beside.join(c)).collect();
                contenders.extend(job.selection.has(Variant::RustGemm).then(|| beside.alone()));
            }
            let case = Case {
                size: chunks * count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: if reduces { self.op.parts().0 } else { "-" },
                bus: operation.bus(ranks),
                ..Case::NONE
            };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
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
/// all-to-all. It receives parts of the same lengths.
fn parts(ranks: usize, rank: usize, count: usize) -> [Vec<usize>; 2] {
    let [less, more] = [count / 2, 2 * count - count / 2];
    let of = |peer: usize| if (rank + peer).is_multiple_of(2) { less } else { more };
    let counts: Vec<usize> = (0..ranks).map(of).collect();
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
        let ranks = self.harness.rank.n_ranks();
        parts(ranks, rank, self.recv.len() / self.operation.chunks(ranks)[1])
    }

    /// Returns the buffer that a broadcast sends from, on the root.
    fn of_root(&self) -> Option<DeviceSlice<T>> {
        (self.harness.rank.rank() == ROOT).then(|| self.send.clone())
    }

    pub fn by_collectives(
        self,
        variant: Variant,
        collectives: &'a Collectives,
    ) -> Result<Contender<'a>> {
        let (outcome, in_place) = (self.clone(), self.in_place);
        let plan = self.ask(|call| collectives.explain(call))?.plan;
        let work = move || self.launch(collectives);
        let contender = Contender::new(variant, work, outcome).in_place(in_place);
        Ok(contender.by_plan(plan))
    }

    pub fn launch(&self, collectives: &Collectives) -> devcomm::Result<()> {
        let Self { send, recv, harness: Harness { stream, rank, .. }, .. } = self;
        let (_, op, _) = self.op.parts();
        match self.operation {
            Operation::AllReduce => collectives.all_reduce(send, recv, op, stream),
            Operation::AllGather => collectives.all_gather(send, recv, stream),
            Operation::ReduceScatter => collectives.reduce_scatter(send, recv, op, stream),
            Operation::Broadcast => collectives.broadcast(self.of_root(), recv, ROOT, stream),
            Operation::AllToAll => collectives.all_to_all(send, recv, stream),
            Operation::AllToAllV => {
                let [counts, offsets] = &self.parts_of(rank.rank());
                let parts = Parts { counts, offsets };
                collectives.all_to_all_v(send, parts, recv, parts, stream)
            }
        }
    }

    /// Calls `about` with this call's description, as [`Collectives::explain`] takes it.
    pub fn ask<R>(&self, about: impl FnOnce(&Collective<'_>) -> R) -> R {
        let Self { send, recv, harness: Harness { rank, .. }, .. } = self;
        let (_, op, _) = self.op.parts();
        match self.operation {
            Operation::AllReduce => about(&Collective::all_reduce(send, recv, op)),
            Operation::AllGather => about(&Collective::all_gather(send, recv)),
            Operation::ReduceScatter => about(&Collective::reduce_scatter(send, recv, op)),
            Operation::Broadcast => about(&Collective::broadcast(self.of_root(), recv, ROOT)),
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
        let (outcome, in_place, comm) = (self.clone(), self.in_place, nccl.comm());
        let work = move || {
            let Self { send, recv, harness: Harness { stream, rank, .. }, .. } = &self;
            let (_, op, _) = self.op.parts();
            match self.operation {
                Operation::AllReduce => comm.all_reduce(send, recv, op, stream),
                Operation::AllGather => comm.all_gather(send, recv, stream),
                Operation::ReduceScatter => comm.reduce_scatter(send, recv, op, stream),
                Operation::Broadcast => comm.broadcast(self.of_root(), recv, ROOT, stream),
                Operation::AllToAll => comm.all_to_all(send, recv, stream),
                Operation::AllToAllV => group(|_| {
                    let [counts, offsets] = self.parts_of(rank.rank());
                    for (peer, (count, first)) in counts.into_iter().zip(offsets).enumerate() {
                        comm.send(&send.slice(first..first + count)?, peer, stream)?;
                        comm.recv(&recv.slice(first..first + count)?, peer, stream)?;
                    }
                    Ok(())
                }),
            }
        };
        let contender = Contender::new(variant, work, outcome).in_place(in_place);
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
        let mut got = vec![T::nearest(0.0); self.recv.len()];
        self.recv.copy_to_host(&mut got)?;
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
                    let sent = self.parts_of(peer)[1][me];
                    let is_wrong = |i: &usize| {
                        got[offsets[peer] + i].bits() != input::<T>(run.seed, peer, sent + i).bits()
                    };
                    (0..counts[peer]).filter(is_wrong).count()
                };
                (0..ranks).map(wrong_of).sum()
            }
            _ => (0..got.len()).filter(|&i| got[i].bits() != expected(i).bits()).count(),
        })
    }
}
