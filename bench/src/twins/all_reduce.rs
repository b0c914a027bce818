//! All-reduces: those that take a `DevComm`, two windows and a count.

use anyhow::{Result, ensure};
use devcomm::{
    DevCommRequirements, DevCommResource, Kernel, Kernels, LaunchConfig, Stream, Window, device,
    kernels,
};
use devcomm_bench_kernels as bench_kernels;
use half::{bf16, f16};

use super::Job;
use super::measure::Case;
use super::row::Label;
use crate::number::{Number, checksum, count_wrong, inputs};
use crate::options::{Dtype, LARGEST};

/// Counts that divide neither by ranks nor by vectors: checked, not timed.
const ODD_COUNTS: [usize; 6] = [1, 7, 17, 1023, 4099, 65537];

type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// A kernel with what suits it.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    threads: u32,
    max_blocks: u32,
    /// Whether a sum is rounded to the type on the way.
    rounds_often: bool,
}

/// `kernels/src/lsa_allreduce.rs`.
pub fn lsa_allreduce(job: &mut Job<'_>) -> Result<()> {
    let shape = Shape { name: "lsa_allreduce", threads: 128, max_blocks: 128, rounds_often: false };
    run(job, Dtype::F32, shape, kernels::lsa_allreduce::<f32>)?;
    run(job, Dtype::F16, shape, kernels::lsa_allreduce::<f16>)?;
    run(job, Dtype::Bf16, shape, kernels::lsa_allreduce::<bf16>)
}

/// `bench/kernels/src/reduce_copy.rs`.
pub fn reduce_copy(job: &mut Job<'_>) -> Result<()> {
    let shape = Shape { name: "reduce_copy", threads: 256, max_blocks: 64, rounds_often: true };
    run(job, Dtype::F32, shape, bench_kernels::reduce_copy::<f32>)?;
    run(job, Dtype::F16, shape, bench_kernels::reduce_copy::<f16>)?;
    run(job, Dtype::Bf16, shape, bench_kernels::reduce_copy::<bf16>)
}

fn run<T, K>(job: &mut Job<'_>, dtype: Dtype, shape: Shape, kernel: K) -> Result<()>
where
    T: Number,
    K: Kernel<Args = Args<T>>,
{
    if !job.options.dtype.wants(dtype) {
        return Ok(());
    }
    for count in job.options.sizes.counts(LARGEST, size_of::<T>())? {
        let case = AllReduce::new(job, shape, kernel, count)?;
        job.row(&case)?;
    }
    for count in ODD_COUNTS {
        let case = AllReduce::new(job, shape, kernel, count)?;
        if let Some([rust, cpp]) = job.check(&case)? {
            ensure!(
                rust == 0 && cpp == 0,
                "{} of {} with {count} elements: {rust} are wrong in Rust's result, {cpp} in C++'s",
                shape.name,
                T::NAME
            );
        }
    }
    Ok(())
}

struct AllReduce<T: Number, K> {
    kernel: K,
    shape: Shape,
    dev_comm: DevCommResource,
    send: Window<T>,
    recv: Window<T>,
    count: usize,
    config: LaunchConfig,
}

impl<T: Number, K: Kernel<Args = Args<T>>> AllReduce<T, K> {
    fn new(job: &Job<'_>, shape: Shape, kernel: K, count: usize) -> Result<Self> {
        let options = &job.options.run;
        let share = (count * size_of::<T>()).div_ceil(job.rank.n_ranks());
        let (blocks, threads) = job.options.grid.grid(share, shape.threads, shape.max_blocks);
        let case = Self {
            kernel,
            shape,
            dev_comm: job.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            send: job.comm.window(count)?,
            recv: job.comm.window(count)?,
            count,
            config: LaunchConfig::new(blocks, threads),
        };
        case.send.copy_from_host(&inputs::<T>(options.seed, job.rank.rank(), count))?;
        Ok(case)
    }
}

impl<T: Number, K: Kernel<Args = Args<T>>> Case for AllReduce<T, K> {
    fn label(&self) -> Label {
        Label {
            kernel: self.shape.name,
            dtype: T::NAME,
            bytes: self.count * size_of::<T>(),
            blocks: self.config.grid.x,
            threads: self.config.block.x,
        }
    }

    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32> {
        Ok(kernels.info(self.kernel)?.registers)
    }

    fn launch(&self, kernels: &Kernels, stream: &Stream) -> devcomm::Result<()> {
        let args = (&self.dev_comm, &self.send, &self.recv, self.count);
        // SAFETY: both windows have `count` elements in every rank; every rank launches the same, in one stream; the case
        // outlives the launches, whose batches are waited for.
        unsafe { kernels.launch(stream, self.kernel, self.config, args) }
    }

    fn count_wrong(&self, job: &Job<'_>, kernels: &Kernels) -> Result<usize> {
        // An element that nobody writes stays a NaN. No rank's sum may come before another's fill.
        self.recv.fill(0xff)?;
        job.rank.barrier()?;
        self.launch(kernels, &job.stream)?;
        job.finish_batch()?;
        let mut got = vec![T::nearest(0.0); self.count];
        self.recv.copy_to_host(&mut got)?;
        let ranks = job.rank.n_ranks();
        let roundings = if self.shape.rounds_often { (ranks - 1).max(1) } else { 1 };
        let wrong = count_wrong(job.options.run.seed, ranks, roundings, &got);
        let sums = job.rank.all_gather(&checksum(&got).to_le_bytes())?;
        let differs = sums.iter().any(|sum| *sum != sums[0]);
        // Every rank gets the same bits.
        Ok(wrong + usize::from(differs))
    }
}
