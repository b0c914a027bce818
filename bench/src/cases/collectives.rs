//! Collectives: `devcomm::Collectives` against NCCL's.

use devcomm::{Buffer, Collectives, DeviceSlice, F8E4M3, F8E5M2, Kernels};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::benchmark::SIMULATED_LARGEST;
use super::concurrent_product::ConcurrentProduct;
use super::operation::{Call, Op, Operation, memory, nccl_variants};
use super::prelude::*;
use super::workloads::Workload;
use crate::base::options::{Dtype, LARGEST, parse_bytes};
use crate::contenders::PeerOptions;

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
    /// 2 ranks, 1M for 4, 512K for 8]
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

/// Runs an expression for each of these types, or of all types, that is asked for.
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
    ($($operation:ident $name:literal, $program:literal;)*) => { $(
        #[doc = concat!("The flags of `", $name, "`.")]
        #[derive(Args, Clone, Debug)]
        pub struct $operation {
            #[command(flatten)]
            flags: Flags,
        }

        impl Benchmark for $operation {
            const NAME: &'static str = $name;
            const NCCL_TESTS: Option<&'static str> = Some($program);

            fn validate(&self) -> Result<()> {
                self.flags.validate()
            }

            fn peers(&self) -> Option<&PeerOptions> {
                Some(&self.flags.peers)
            }

            fn run(&self, job: &mut Job<'_>) -> Result<()> {
                let means = self.flags.means(job)?;
                job.begin()?;
                let operation = Operation::$operation;
                for_types!(self.flags.dtype, T => {
                    self.flags.run_type::<T>(job, operation, &means, None)?
                });
                Ok(())
            }
        }
    )* };
}

benchmarks! {
    AllGather "all-gather", "all_gather_perf";
    ReduceScatter "reduce-scatter", "reduce_scatter_perf";
    Broadcast "broadcast", "broadcast_perf";
    AllToAll "all-to-all", "alltoall_perf";
    AllToAllV "all-to-all-v", "alltoallv_perf";
}

/// The libraries and kernels that perform collectives.
pub struct Means<'a> {
    pub collectives: Collectives,
    pub nccl: Vec<Nccl<'a>>,
    pub product: Option<ConcurrentProduct<'a>>,
}

/// A function that makes a workload for a number of elements, and its compiled kernels by variant.
type ByKernels<'a> =
    (&'a dyn Fn(usize) -> Result<Box<dyn Workload + 'a>>, &'a [(Variant, Kernels)]);

impl Flags {
    /// Refuses invalid values, and peers that would do other work.
    pub fn validate(&self) -> Result<()> {
        self.sizes.validate()?;
        for (differs, flag) in [
            (!self.sums(), "another -o than sum"),
            (!self.dtype.is_float(), "another -d than f32, f16 and bf16"),
            (!self.beside.is_empty(), "--beside"),
        ] {
            if differs {
                self.peers.refuse_with(flag)?;
            }
        }
        Ok(())
    }

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
        let has_product = !self.beside.is_empty();
        if !has_product {
            job.selection.omit(Variant::RustGemm, "--beside M,N,K runs it")?;
        }
        let product =
            has_product.then(|| ConcurrentProduct::new(job.harness, &self.beside)).transpose()?;
        Ok(Means { collectives, nccl: job.nccl()?, product })
    }

    pub fn run_type<T: Number>(
        &self,
        job: &mut Job<'_>,
        operation: Operation,
        Means { collectives, nccl, product }: &Means<'_>,
        by_kernels: Option<ByKernels<'_>>,
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
        // Windows of each configuration's communicator. `nccl_variants` leaves out configurations
        // that cannot matter, so that any buffers may stand for their windows.
        let windows_of = |nccl: &Nccl<'_>| match nccl.matters(Variant::NcclSym, reduces) {
            true => memory::<T>(nccl.comm(), Variant::NcclSym, lens),
            false => Ok(plain.clone()),
        };
        let nccl_windows = nccl.iter().map(windows_of).collect::<Result<Vec<_>>>()?;
        for count in counts {
            let workload = by_kernels.map(|(make, _)| make(count)).transpose()?;
            let mut contenders = Vec::new();
            if let (Some(workload), Some((_, compiled))) = (&workload, by_kernels) {
                contenders.extend(workload.contenders(compiled)?);
            }
            for &in_place in job.places() {
                // An all-to-all is not in place.
                if in_place && matches!(operation, Operation::AllToAll | Operation::AllToAllV) {
                    continue;
                }
                let call = |[send, recv]: &[DeviceSlice<T>; 2]| -> Result<_> {
                    let buffers =
                        [send.slice(..to_send * count)?, recv.slice(..to_receive * count)?];
                    Ok(Call::new(harness, operation, in_place, buffers)?.reducing_by(self.op))
                };
                for (variant, buffers) in
                    [(Variant::RustOps, &windows), (Variant::RustOpsPlain, &plain)]
                {
                    contenders.extend(
                        job.selection.make(variant, || {
                            call(buffers)?.by_collectives(variant, collectives)
                        })?,
                    );
                }
                for (variant, (i, nccl)) in nccl_variants(&job.selection, nccl, reduces) {
                    let buffers = if variant == Variant::Nccl { &plain } else { &nccl_windows[i] };
                    contenders.push(call(buffers)?.by_nccl(variant, nccl));
                }
            }
            if let Some(product) = product {
                contenders = contenders.into_iter().map(|c| product.join(c)).collect();
                contenders.extend(job.selection.has(Variant::RustGemm).then(|| product.alone()));
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
