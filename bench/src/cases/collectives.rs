//! All-gather, reduce-scatter, broadcast and all-to-all: `devcomm::Collectives` against NCCL's. And
//! what launches take.

use anyhow::{Context, Result};
use clap::Args;
use devcomm::kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm::kernels::push_exchange;
use devcomm::{
    Buffer, Collectives, DevCommRequirements, DeviceSlice, KERNELS, LaunchConfig, ReduceOp, Window,
};
use devcomm_testing::numbers::{Number, count_wrong_from, input, inputs};
use half::{bf16, f16};

use super::benchmark::{Benchmark, SIMULATED_LARGEST};
use super::job::Job;
use crate::base::options::{Dtype, LARGEST, SizeOptions, parse_bytes};
use crate::contenders::contender::{Contender, Outcome, Variant};
use crate::contenders::selection::VariantInfo;
use crate::harness::Harness;
use crate::report::row::Case;

/// The flags of each of these benchmarks. A size is that of the larger buffer, and a count that of
/// a rank's chunk.
#[derive(Args, Clone, Debug)]
struct Flags {
    #[command(flatten)]
    sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "f32")]
    dtype: Dtype,

    /// Longest message in bytes that devcomm sends in one step (suffixes K, M, G) [default: 4M for
    /// 2 ranks]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    lamport_bytes: Option<usize>,

    /// Blocks by which devcomm sends long messages [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    push_blocks: Option<u32>,
}

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
            ];

            const NCCL_TESTS: Option<&'static str> = Some($program);

            fn validate(&self) -> Result<()> {
                self.flags.sizes.validate()
            }

            fn run(&self, job: &mut Job<'_>) -> Result<()> {
                self.flags.run(job, Operation::$operation)
            }
        }
    )* };
}

benchmarks! {
    AllGather "all-gather", "all_gather", "ncclAllGather", "all_gather_perf";
    ReduceScatter "reduce-scatter", "reduce_scatter", "ncclReduceScatter", "reduce_scatter_perf";
    Broadcast "broadcast", "broadcast", "ncclBroadcast", "broadcast_perf";
    AllToAll "all-to-all", "all_to_all", "ncclAlltoAll", "alltoall_perf";
}

/// The flags of `launch`.
#[derive(Args, Clone, Debug)]
pub struct Launch {}

impl Benchmark for Launch {
    const NAME: &'static str = "launch";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "kernels::push_exchange, one block, with each set of launch attributes"),
        (Variant::RustOps, "devcomm::Collectives::all_to_all, which chooses a kernel"),
        (Variant::Nccl, "ncclAlltoAll on memory of ncclMemAlloc that is not registered"),
        (Variant::NcclSym, "ncclAlltoAll on the windows"),
    ];

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        // A vector for each rank.
        const COUNT: usize = 4;
        let (harness, ranks) = (job.harness, job.harness.rank.n_ranks());
        let compiled = job.kernels(&KERNELS, "push_exchange")?;
        let collectives = harness.collectives().build(harness.comm)?;
        let dev_comm = harness.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        job.begin()?;
        let windows = [harness.comm.window(ranks * COUNT)?, harness.comm.window(ranks * COUNT)?];
        let [send, recv] = windows.each_ref().map(Buffer::device_slice);
        let call = Call::<f32>::new(harness, Operation::AllToAll, false, [send, recv])?;
        let bytes = COUNT * size_of::<f32>();
        let messages = MessagesArgs {
            bytes,
            input_stride: bytes,
            output_bytes: ranks * bytes,
            sender: Messages::ALL,
        };
        let config = LaunchConfig::new(1, 128);
        let mut contenders = Vec::new();
        for (_, kernels) in &compiled {
            for (attributes, config) in [
                ("no attributes", config.without_cooperation()),
                ("cooperative", config),
                ("dependent", config.without_cooperation().with_dependent()),
                ("cooperative, dependent", config.with_dependent()),
            ] {
                let (dev_comm, input) = (&dev_comm, call.send.device_address());
                let (output, first) = Window::<u8>::containing(&call.recv).context("no window")?;
                let work = move || {
                    let launch = push_exchange::args(dev_comm, input, &output, first, messages);
                    // SAFETY: the windows have a vector for each rank, and outlive the launches,
                    // which are on one stream.
                    unsafe { launch.config(config).launch(&kernels.on(&harness.stream)) }
                };
                let info = kernels.info::<push_exchange>()?;
                let contender = Contender::new(Variant::Rust, work, call.clone());
                let contender = contender.by_kernel(config, info);
                contenders.push(contender.by_algorithm(attributes.to_owned()));
            }
        }
        if job.selection.has(Variant::RustOps) {
            contenders.push(call.clone().by_collectives(Variant::RustOps, &collectives)?);
        }
        if job.selection.has(Variant::Nccl) {
            let [send, recv] = [(); 2].map(|()| harness.comm.mem_alloc::<f32>(ranks * COUNT));
            let (send, recv) = (send?.device_slice(), recv?.device_slice());
            let call = Call::new(harness, Operation::AllToAll, false, [send, recv])?;
            contenders.push(call.by_nccl(Variant::Nccl));
        }
        if job.selection.has(Variant::NcclSym) {
            contenders.push(call.by_nccl(Variant::NcclSym));
        }
        let case = Case {
            size: ranks * bytes,
            count: COUNT,
            dtype: "f32",
            bus: Operation::AllToAll.bus(ranks),
            ..Case::NONE
        };
        job.compare(case, &contenders)
    }
}

/// A collective.
#[derive(Clone, Copy, PartialEq)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

/// The rank that broadcasts.
const ROOT: usize = 0;

impl Operation {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
        }
    }

    /// Whether its speed depends on the type.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// The chunks of the buffers to send and to receive in.
    pub fn chunks(self, ranks: usize) -> [usize; 2] {
        match self {
            Self::AllReduce | Self::Broadcast => [1, 1],
            Self::AllGather => [1, ranks],
            Self::ReduceScatter => [ranks, 1],
            Self::AllToAll => [ranks, ranks],
        }
    }

    /// The bus bandwidth over the algorithm bandwidth, as nccl-tests defines them.
    fn bus(self, ranks: usize) -> f64 {
        match self {
            Self::AllReduce => 2.0 * (ranks - 1) as f64 / ranks as f64,
            Self::Broadcast => 1.0,
            _ => (ranks - 1) as f64 / ranks as f64,
        }
    }
}

impl Flags {
    fn run(&self, job: &mut Job<'_>, operation: Operation) -> Result<()> {
        let mut options = job.harness.collectives();
        if let Some(bytes) = self.lamport_bytes {
            options = options.lamport_bytes(bytes);
        }
        if let Some(blocks) = self.push_blocks {
            options = options.push_blocks(blocks);
        }
        let collectives = options.build(job.harness.comm)?;
        job.begin()?;
        self.run_type::<f32>(job, operation, &collectives)?;
        self.run_type::<f16>(job, operation, &collectives)?;
        self.run_type::<bf16>(job, operation, &collectives)
    }

    fn run_type<T: Number>(
        &self,
        job: &mut Job<'_>,
        operation: Operation,
        collectives: &Collectives,
    ) -> Result<()> {
        if !self.dtype.includes(T::NAME) {
            return Ok(());
        }
        let (harness, ranks) = (job.harness, job.harness.rank.n_ranks());
        let [to_send, to_receive] = operation.chunks(ranks);
        let chunks = to_send.max(to_receive);
        let largest = harness.choose(LARGEST, SIMULATED_LARGEST);
        let counts = self.sizes.counts(largest, chunks * size_of::<T>())?;
        // As in nccl-tests, all sizes use the same memory.
        let most = counts.iter().copied().max().unwrap_or(0);
        let lens = [to_send, to_receive].map(|chunks| chunks * most);
        let windows = [harness.comm.window(lens[0])?, harness.comm.window(lens[1])?];
        let memory = [harness.comm.mem_alloc(lens[0])?, harness.comm.mem_alloc(lens[1])?];
        for count in counts {
            let [sent, received] = [to_send * count, to_receive * count];
            let in_windows = [windows[0].slice(..sent)?, windows[1].slice(..received)?];
            let plain = [memory[0].slice(..sent)?, memory[1].slice(..received)?];
            let mut contenders = Vec::new();
            for &in_place in job.places() {
                // An all-to-all is not in place.
                if in_place && operation == Operation::AllToAll {
                    continue;
                }
                let call = |buffers: &[DeviceSlice<T>; 2]| {
                    Call::new(harness, operation, in_place, buffers.clone())
                };
                for (variant, buffers) in
                    [(Variant::RustOps, &in_windows), (Variant::RustOpsPlain, &plain)]
                {
                    if job.selection.has(variant) {
                        contenders.push(call(buffers)?.by_collectives(variant, collectives)?);
                    }
                }
                for (variant, buffers) in [(Variant::Nccl, &plain), (Variant::NcclSym, &in_windows)]
                {
                    if job.selection.has(variant) {
                        contenders.push(call(buffers)?.by_nccl(variant));
                    }
                }
            }
            let case = Case {
                size: chunks * count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: if operation.reduces() { "sum" } else { "-" },
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
    in_place: bool,
    send: DeviceSlice<T>,
    recv: DeviceSlice<T>,
}

impl<'a, T: Number> Call<'a, T> {
    /// Between these buffers, or in place within one of them. Writes this rank's input.
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
        let call = Self { harness, operation, in_place, send, recv };
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

    /// What a broadcast sends from this rank.
    fn of_root(&self) -> Option<DeviceSlice<T>> {
        (self.harness.rank.rank() == ROOT).then(|| self.send.clone())
    }

    fn by_collectives(
        self,
        variant: Variant,
        collectives: &'a Collectives,
    ) -> Result<Contender<'a>> {
        let (outcome, in_place) = (self.clone(), self.in_place);
        let plan = collectives.explain(|collectives| self.launch(collectives))?.plan;
        let work = move || self.launch(collectives);
        let contender = Contender::new(variant, work, outcome).in_place(in_place);
        Ok(contender.by_plan(plan))
    }

    pub fn launch(&self, collectives: &Collectives) -> devcomm::Result<()> {
        let Self { send, recv, harness: Harness { stream, .. }, .. } = self;
        match self.operation {
            Operation::AllReduce => collectives.all_reduce(send, recv, ReduceOp::Sum, stream),
            Operation::AllGather => collectives.all_gather(send, recv, stream),
            Operation::ReduceScatter => {
                collectives.reduce_scatter(send, recv, ReduceOp::Sum, stream)
            }
            Operation::Broadcast => collectives.broadcast(self.of_root(), recv, ROOT, stream),
            Operation::AllToAll => collectives.all_to_all(send, recv, stream),
        }
    }

    fn by_nccl(self, variant: Variant) -> Contender<'a> {
        let (outcome, in_place) = (self.clone(), self.in_place);
        let work = move || {
            let Self { send, recv, harness: Harness { comm, stream, .. }, .. } = &self;
            match self.operation {
                Operation::AllReduce => comm.all_reduce(send, recv, ReduceOp::Sum, stream),
                Operation::AllGather => comm.all_gather(send, recv, stream),
                Operation::ReduceScatter => comm.reduce_scatter(send, recv, ReduceOp::Sum, stream),
                Operation::Broadcast => comm.broadcast(self.of_root(), recv, ROOT, stream),
                Operation::AllToAll => comm.all_to_all(send, recv, stream),
            }
        };
        Contender::new(variant, work, outcome).in_place(in_place)
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
                count_wrong_from(run.seed, ranks, (ranks - 1).max(1), first, &got)
            }
            _ => (0..got.len()).filter(|&i| got[i].bits() != expected(i).bits()).count(),
        })
    }
}
