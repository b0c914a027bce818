//! All-reduce, residual add and RMSNorm: `devcomm::Collectives::all_reduce_rmsnorm` against
//! `ncclAllReduce` and then `kernels::rmsnorm`.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::kernels;
use devcomm::kernels::collectives::rmsnorm::{Quantised, QuantisedArgs};
use devcomm::{
    Buffer, Collectives, DeviceSlice, KERNELS, Kernel, Kernels, LaunchConfig, ReduceOp, Window,
};
use devcomm_testing::numbers::{Number, input, inputs};
use devcomm_testing::rmsnorm;
use half::{bf16, f16};

use super::all_reduce::bus;
use super::benchmark::Benchmark;
use super::job::Job;
use crate::base::options::Dtype;
use crate::contenders::contender::{Contender, Outcome, Variant};
use crate::contenders::selection::VariantInfo;
use crate::harness::Harness;
use crate::report::row::Case;

/// The flags of `rmsnorm-allreduce`.
#[derive(Args, Clone, Debug)]
pub struct RmsNormAllReduce {
    /// Tokens of a message, comma-separated [default: 1,2,4,8,16,32,64; 1,3 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    tokens: Vec<usize>,

    /// Elements of a token [default: 8192; 256 when simulated]
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "bf16")]
    dtype: Dtype,
}

const TOKENS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const HIDDEN: usize = 8192;
const SIMULATED_TOKENS: [usize; 2] = [1, 3];
const SIMULATED_HIDDEN: usize = 256;

const EPS: f32 = 1e-5;
const NOT_QUANTISED: QuantisedArgs<u64, u64> = QuantisedArgs { output: 0, scale: 0 };
/// Threads of a block, at most: each has a vector of a row.
const THREADS: usize = 256;
/// Blocks of a cluster, at most: a token has one.
const MAX_CLUSTER: usize = 8;

impl Benchmark for RmsNormAllReduce {
    const NAME: &'static str = "rmsnorm-allreduce";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::RustOps, "devcomm::Collectives::all_reduce_rmsnorm, from window to window"),
        (
            Variant::Nccl,
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, and then \
             kernels::rmsnorm",
        ),
        (Variant::NcclSym, "ncclAllReduce on the windows, and then kernels::rmsnorm"),
    ];

    fn validate(&self) -> Result<()> {
        ensure!(!self.tokens.contains(&0) && self.hidden != Some(0), "a message has a token");
        Ok(())
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let collectives = harness.collectives().build(harness.comm)?;
        let compiled = Kernels::load(harness.rank.context(), &KERNELS)?;
        job.begin()?;
        self.run_type::<f32, kernels::rmsnorm<f32>>(job, &compiled, &collectives)?;
        self.run_type::<f16, kernels::rmsnorm<f16>>(job, &compiled, &collectives)?;
        self.run_type::<bf16, kernels::rmsnorm<bf16>>(job, &compiled, &collectives)
    }
}

impl RmsNormAllReduce {
    fn run_type<T, K>(
        &self,
        job: &mut Job<'_>,
        compiled: &Kernels,
        collectives: &Collectives,
    ) -> Result<()>
    where
        T: Number,
        K: Kernel<Args = (*const T, *mut T, *const T, *mut T, Quantised, u32, u32, f32)>,
    {
        if !self.dtype.includes(T::NAME) {
            return Ok(());
        }
        let harness = job.harness;
        let hidden = self.hidden.unwrap_or(harness.choose(HIDDEN, SIMULATED_HIDDEN));
        let (row, most) = (hidden * size_of::<T>(), 16 * THREADS * MAX_CLUSTER);
        ensure!(
            row.is_multiple_of(16) && row <= most,
            "--hidden {hidden} of {}: a token has a multiple of 16 bytes, and at most {most}",
            T::NAME
        );
        let default = harness.choose(&TOKENS[..], &SIMULATED_TOKENS);
        for &tokens in if self.tokens.is_empty() { default } else { &self.tokens } {
            let count = tokens * hidden;
            let windows = [harness.comm.window(count)?, harness.comm.window(count)?];
            let norm = |variant| Norm::<T>::new(harness, variant, &windows, hidden);
            let mut contenders = Vec::new();
            if job.selection.has(Variant::RustOps) {
                contenders.push(norm(Variant::RustOps)?.by_collectives(collectives));
            }
            for variant in [Variant::Nccl, Variant::NcclSym] {
                if job.selection.has(variant) {
                    contenders.push(norm(variant)?.by_nccl::<K>(compiled));
                }
            }
            let case = Case {
                size: count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: "sum",
                bus: bus(harness.rank.n_ranks()),
                tokens: Some(tokens),
                hidden: Some(hidden),
                ..Case::NONE
            };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
}

/// The operation with a variant's buffers.
#[derive(Clone)]
struct Norm<'a, T> {
    harness: &'a Harness<'a>,
    variant: Variant,
    input: DeviceSlice<T>,
    output: DeviceSlice<T>,
    residual: DeviceSlice<T>,
    weight: DeviceSlice<T>,
}

impl<'a, T: Number> Norm<'a, T> {
    /// On the windows, or for `nccl` on memory that is not registered. Writes this rank's input.
    fn new(
        harness: &'a Harness<'a>,
        variant: Variant,
        windows: &[Window<T>; 2],
        hidden: usize,
    ) -> Result<Self> {
        let (comm, count) = (harness.comm, windows[0].len());
        let memory = |len| Ok::<_, devcomm::Error>(comm.mem_alloc(len)?.device_slice());
        let [input, output] = match variant {
            Variant::Nccl => [memory(count)?, memory(count)?],
            _ => windows.each_ref().map(Buffer::device_slice),
        };
        let (residual, weight) = (memory(count)?, memory(hidden)?);
        input.copy_from_host(&inputs(harness.run.seed, harness.rank.rank(), count))?;
        let norm = Self { harness, variant, input, output, residual, weight };
        norm.weight.copy_from_host(&norm.common(Self::WEIGHT, hidden))?;
        Ok(norm)
    }

    /// The first of the residual's and of the weight's random elements, equal on all ranks.
    const RESIDUAL: usize = 1 << 40;
    const WEIGHT: usize = 2 << 40;

    fn common(&self, first: usize, len: usize) -> Vec<T> {
        (first..first + len).map(|i| input(self.harness.run.seed, 0, i)).collect()
    }

    fn by_collectives(self, collectives: &'a Collectives) -> Contender<'a> {
        let outcome = self.clone();
        let work = move || {
            let Self { harness, input, output, residual, weight, .. } = &self;
            collectives.all_reduce_rmsnorm(input, residual, weight, output, EPS, &harness.stream)
        };
        Contender::new(Variant::RustOps, work, outcome)
    }

    fn by_nccl<K>(self, compiled: &'a Kernels) -> Contender<'a>
    where
        K: Kernel<Args = (*const T, *mut T, *const T, *mut T, Quantised, u32, u32, f32)>,
    {
        let (variant, outcome) = (self.variant, self.clone());
        let Self { harness: Harness { comm, stream, .. }, input, output, residual, weight, .. } =
            self;
        let (hidden, tokens) = (weight.len() as u32, (input.len() / weight.len()) as u32);
        let vectors = weight.byte_len() / 16;
        let cluster = vectors.div_ceil(THREADS).next_power_of_two();
        let threads = vectors.div_ceil(cluster).next_multiple_of(32) as u32;
        let cluster = cluster as u32;
        let config = LaunchConfig::new(cluster * tokens, threads);
        let config = config.with_cluster(cluster).with_dependent();
        let work = move || {
            comm.all_reduce(&input, &output, ReduceOp::Sum, stream)?;
            let [sum, residual, weight] =
                [&output, &residual, &weight].map(|slice| slice.device_address());
            let norm =
                K::with_args((sum, residual, weight, sum, NOT_QUANTISED, tokens, hidden, EPS));
            // SAFETY: the buffers have the elements, aligned; dropping one waits for the stream.
            unsafe { norm.config(config).launch(&compiled.on(stream)) }
        };
        Contender::new(variant, work, outcome)
    }
}

impl<T: Number> Outcome for Norm<'_, T> {
    fn poison(&self) -> Result<()> {
        self.residual.copy_from_host(&self.common(Self::RESIDUAL, self.residual.len()))?;
        Ok(self.output.fill_bytes(0xff)?)
    }

    /// An element is wrong if its error exceeds what rounding allows: f32 roundings of the sum,
    /// roundings to `T` of NCCL's partial sums, and those of RMSNorm.
    fn count_wrong(&self) -> Result<usize> {
        let Harness { rank, run, .. } = self.harness;
        let (ranks, hidden) = (rank.n_ranks(), self.weight.len());
        let zeros = || vec![T::nearest(0.0); self.output.len()];
        let mut got = [zeros(), zeros()];
        self.output.copy_to_host(&mut got[0])?;
        self.residual.copy_to_host(&mut got[1])?;
        let residual = self.common(Self::RESIDUAL, self.residual.len());
        let weight = self.common(Self::WEIGHT, hidden);
        let (single, half_ulp) = (f64::from(f32::EPSILON), T::EPSILON / 2.0);
        let mut wrong = 0;
        for (row, residual) in residual.chunks(hidden).enumerate() {
            let term = |rank, i| input::<T>(run.seed, rank, row * hidden + i).value();
            // Each sum, and the error that it may have before it is rounded.
            let sums: Vec<(f64, f64)> = (0..hidden)
                .map(|i| {
                    let terms = (0..ranks).map(|rank| term(rank, i)).chain([residual[i].value()]);
                    let (sum, magnitude) =
                        terms.fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x.abs()));
                    let partial = (ranks - 1) as f64 * half_ulp;
                    (sum, magnitude * (partial + (ranks + 1) as f64 * single / 2.0))
                })
                .collect();
            let got = got.each_ref().map(|got| &got[row * hidden..][..hidden]);
            wrong += rmsnorm::count_wrong(&sums, &weight, EPS, got);
        }
        Ok(wrong)
    }
}
