//! All-reduce, residual add and RMSNorm: `devcomm::Collectives::all_reduce_rmsnorm` against
//! `ncclAllReduce` and then `kernels::rmsnorm`.

use std::collections::BTreeMap;

use devcomm::kernels;
use devcomm::kernels::collectives::rmsnorm::{Quantised, QuantisedArgs};
use devcomm::{
    Buffer, Collectives, DeviceSlice, Element, F8E4M3, KERNELS, Kernel, Kernels, LaunchConfig,
    ReduceOp,
};
use devcomm_testing::numbers::{Number, input, inputs};
use devcomm_testing::rmsnorm;
use devcomm_testing::simulated::read;
use half::{bf16, f16};

use super::benchmark::Options;
use super::collectives::{Means, for_types};
use super::operation::{Operation, memory, nccl_variants};
use super::prelude::*;
use super::shapes::lists_or;
use crate::base::options::Dtype;
use crate::contenders::{PeerOptions, PeerWork};

/// The flags of `rmsnorm-allreduce`.
#[derive(Args, Clone, Debug)]
pub struct RmsNormAllReduce {
    /// Tokens of a message, comma-separated [default: 1,2,4,8,16,32,64,65,128,512,2048,4096; 1,3
    /// when simulated]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    tokens: Vec<usize>,

    /// Elements of a token, comma-separated [default: 4096,7168,8192; 256 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    hidden: Vec<usize>,

    /// Quantise the output to 8-bit floats (e4m3) with one scale
    #[arg(long)]
    quantised: bool,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "bf16")]
    dtype: Dtype,

    #[command(flatten)]
    peers: PeerOptions,
}

const TOKENS: [usize; 12] = [1, 2, 4, 8, 16, 32, 64, 65, 128, 512, 2048, 4096];
const HIDDEN: [usize; 3] = [4096, 7168, 8192];
const SIMULATED_TOKENS: [usize; 2] = [1, 3];
const SIMULATED_HIDDEN: [usize; 1] = [256];

const EPS: f32 = 1e-5;
/// The divisor of a quantised output: all elements are then below 448, the largest of e4m3.
const SCALE: f32 = 0.0625;
/// The most rows of a message that are checked.
const MOST_CHECKED: usize = 512;
/// Threads of a block, at most: each has a vector of 16 bytes of a row.
const THREADS: usize = 256;
/// Blocks of a cluster, at most: a token has one.
const MAX_CLUSTER: usize = 8;

impl Benchmark for RmsNormAllReduce {
    const NAME: &'static str = "rmsnorm-allreduce";

    fn validate(&self) -> Result<()> {
        let has_none = self.tokens.contains(&0) || self.hidden.contains(&0);
        ensure!(!has_none, "a message has a token");
        if self.quantised {
            // FlashInfer has another operation for quantised output, which is not measured.
            self.peers.refuse_with("--quantised")?;
        }
        self.dtype.require_float(Self::NAME)
    }

    fn peers(&self) -> Option<&PeerOptions> {
        Some(&self.peers)
    }

    fn work(&self, options: &Options, _: usize) -> Result<PeerWork> {
        let is_simulated = options.simulate.is_some();
        let [tokens, hidden] = self.lists(is_simulated);
        let messages =
            |hidden: &usize| tokens.iter().map(|tokens| [*tokens, *hidden]).collect::<Vec<_>>();
        let mut all = BTreeMap::new();
        for_types!(self.dtype, T in [f32, f16, bf16] => {
            all.insert(T::NAME, hidden.iter().flat_map(messages).collect());
        });
        Ok(PeerWork::RmsNorm(all))
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let collectives = harness.collectives().build(harness.comm)?;
        let means = Means { collectives, nccl: job.nccl()?, product: None };
        let compiled = Kernels::load(harness.rank.context(), &KERNELS)?;
        job.begin()?;
        for &hidden in self.lists(harness.rank.is_simulated())[1] {
            for_types!(self.dtype, T in [f32, f16, bf16] => {
                self.run_type::<T, kernels::rmsnorm<T>>(job, hidden, &compiled, &means)?;
            });
        }
        Ok(())
    }
}

impl RmsNormAllReduce {
    /// Returns the tokens and the elements of each.
    fn lists(&self, is_simulated: bool) -> [&[usize]; 2] {
        let default: [&[usize]; 2] = match is_simulated {
            true => [&SIMULATED_TOKENS, &SIMULATED_HIDDEN],
            false => [&TOKENS, &HIDDEN],
        };
        lists_or([&self.tokens, &self.hidden], default)
    }

    fn run_type<T, K>(
        &self,
        job: &mut Job<'_>,
        hidden: usize,
        compiled: &Kernels,
        Means { collectives, nccl, .. }: &Means<'_>,
    ) -> Result<()>
    where
        T: Number,
        K: Kernel<Args = (*const T, *mut T, *const T, *mut T, Quantised, u32, u32, f32)>,
    {
        let harness = job.harness;
        let (row, most) = (hidden * size_of::<T>(), 16 * THREADS * MAX_CLUSTER);
        ensure!(
            row.is_multiple_of(16) && row <= most,
            "--hidden {hidden} of {}: a token has a multiple of 16 bytes, and at most {most}",
            T::NAME
        );
        for &tokens in self.lists(harness.rank.is_simulated())[0] {
            let count = tokens * hidden;
            let norm = |comm, variant| {
                let buffers = memory(comm, variant, [count; 2])?;
                Norm::<T>::new(harness, variant, buffers, (hidden, self.quantised))
            };
            let mut contenders = Vec::new();
            if job.selection.has(Variant::RustOps) {
                contenders.push(norm(harness.comm, Variant::RustOps)?.by_collectives(collectives));
            }
            for (variant, (_, nccl)) in nccl_variants(&job.selection, nccl, true) {
                contenders.push(norm(nccl.comm(), variant)?.by_nccl::<K>(compiled, nccl));
            }
            let case = Case {
                size: count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: if self.quantised { "quantised" } else { "sum" },
                bus: Operation::AllReduce.bus(harness.rank.n_ranks()),
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
    quantised: Option<(DeviceSlice<F8E4M3>, DeviceSlice<f32>)>,
}

impl<'a, T: Number> Norm<'a, T> {
    /// Makes the operation with these buffers to send and to receive in.
    fn new(
        harness: &'a Harness<'a>,
        variant: Variant,
        [input, output]: [DeviceSlice<T>; 2],
        (hidden, quantised): (usize, bool),
    ) -> Result<Self> {
        let (comm, count) = (harness.comm, input.len());
        let memory = |len| Ok::<_, devcomm::Error>(comm.mem_alloc(len)?.device_slice());
        let (residual, weight) = (memory(count)?, memory(hidden)?);
        let quantise = || -> Result<_> {
            let scale = harness.filled(&[SCALE])?.device_slice();
            Ok((comm.mem_alloc(count)?.device_slice(), scale))
        };
        let quantised = quantised.then(quantise).transpose()?;
        let norm = Self { harness, variant, input, output, residual, weight, quantised };
        norm.write_input()?;
        norm.weight.copy_from_host(&norm.common(Self::WEIGHT, hidden))?;
        Ok(norm)
    }

    fn write_input(&self) -> Result<()> {
        let Harness { rank, run, .. } = self.harness;
        Ok(self.input.copy_from_host(&inputs(run.seed, rank.rank(), self.input.len()))?)
    }

    /// The indices of the residual's and of the weight's first random elements, beyond those of
    /// inputs. The elements are equal on all ranks.
    const RESIDUAL: usize = 1 << 40;
    const WEIGHT: usize = 2 << 40;

    fn common(&self, first: usize, len: usize) -> Vec<T> {
        (first..first + len).map(|i| input(self.harness.run.seed, 0, i)).collect()
    }

    fn by_collectives(self, collectives: &'a Collectives) -> Contender<'a> {
        let outcome = self.clone();
        let work = move || {
            let Self { harness, input, output, residual, weight, quantised, .. } = &self;
            let stream = &harness.stream;
            match quantised {
                None => {
                    collectives.all_reduce_rmsnorm(input, residual, weight, output, EPS, stream)
                }
                Some((output, scale)) => collectives.all_reduce_rmsnorm_quantised(
                    input,
                    residual,
                    weight,
                    (output, scale),
                    EPS,
                    stream,
                ),
            }
        };
        Contender::new(Variant::RustOps, work, outcome)
    }

    fn by_nccl<K>(self, compiled: &'a Kernels, nccl: &'a Nccl<'_>) -> Contender<'a>
    where
        K: Kernel<Args = (*const T, *mut T, *const T, *mut T, Quantised, u32, u32, f32)>,
    {
        let (variant, outcome, comm) = (self.variant, self.clone(), nccl.comm());
        let Self { harness, input, output, residual, weight, quantised, .. } = self;
        let stream = &harness.stream;
        let quantised = quantised.as_ref();
        // Zeros mean that the output is not quantised.
        let quantised = QuantisedArgs {
            output: quantised.map_or(0, |(output, _)| output.device_address()),
            scale: quantised.map_or(0, |(_, scale)| scale.device_address()),
        };
        let (hidden, tokens) = (weight.len() as u32, (input.len() / weight.len()) as u32);
        let vectors = weight.byte_len() / 16;
        // `run_type` has refused rows that need more than `MAX_CLUSTER`.
        let cluster = vectors.div_ceil(THREADS).next_power_of_two();
        let threads = vectors.div_ceil(cluster).next_multiple_of(32) as u32;
        let cluster = cluster as u32;
        let config = LaunchConfig::new(cluster * tokens, threads);
        let config = config.with_cluster(cluster).with_dependent();
        let work = move || {
            comm.all_reduce(&input, &output, ReduceOp::Sum, stream)?;
            let [sum, residual, weight] =
                [&output, &residual, &weight].map(|slice| slice.device_address());
            let norm = K::with_args((sum, residual, weight, sum, quantised, tokens, hidden, EPS));
            // SAFETY: the buffers have aligned rows of this size; a drop waits for the stream.
            unsafe { norm.config(config).launch(&compiled.on(stream)) }
        };
        Contender::new(variant, work, outcome).configured(nccl.name.as_ref())
    }
}

impl<T: Number> Outcome for Norm<'_, T> {
    fn poison(&self) -> Result<()> {
        self.residual.copy_from_host(&self.common(Self::RESIDUAL, self.residual.len()))?;
        if let Some((output, _)) = &self.quantised {
            output.fill_bytes(0xff)?;
            // The quantised operation may overwrite its input, where it has no other place for the
            // sum.
            self.write_input()?;
        }
        Ok(self.output.fill_bytes(0xff)?)
    }

    /// Counts an element as wrong if its error exceeds what rounding allows: f32 roundings of the
    /// sum, roundings to `T` of NCCL's partial sums, and those of RMSNorm.
    fn count_wrong(&self) -> Result<usize> {
        let Harness { rank, run, .. } = self.harness;
        let (ranks, hidden) = (rank.n_ranks(), self.weight.len());
        let (out, sum) = (read(&self.output)?, read(&self.residual)?);
        // Empty if the output is not quantised.
        let small = self.quantised.as_ref().map_or(Ok(Vec::new()), |(output, _)| read(output))?;
        let residual = self.common(Self::RESIDUAL, self.residual.len());
        let weight = self.common(Self::WEIGHT, hidden);
        let (single, half_ulp) = (f64::from(f32::EPSILON), T::EPSILON / 2.0);
        let mut wrong = 0;
        // If there are many rows, some are checked: the host takes long for all of them.
        let step = (residual.len() / hidden).div_ceil(MOST_CHECKED).max(1);
        for (row, residual) in residual.chunks(hidden).enumerate().step_by(step) {
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
            let (at, scale) = (row * hidden..(row + 1) * hidden, f64::from(SCALE));
            let sum = &sum[at.clone()];
            wrong += match small.get(at.clone()) {
                Some(small) => rmsnorm::count_wrong(&sums, &weight, EPS, (small, scale), sum),
                None => rmsnorm::count_wrong(&sums, &weight, EPS, (&out[at], 1.0), sum),
            };
        }
        Ok(wrong)
    }
}
