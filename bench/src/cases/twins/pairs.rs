//! The pairs of kernels in Rust and C++, with their sizes and grids.

use anyhow::{Result, ensure};
use devcomm::{GinType, Kernel, device, kernels};
use devcomm_bench_kernels as bench_kernels;
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::job::Job;
use crate::base::options::LARGEST;
use crate::cases::workloads::{AllReduce, Barrier, KernelInfo, LlExchange, Message, Put};
use crate::report::twin_row::Label;

/// A pair: the file stem of its modules, and the function that runs it.
pub type Pair = (&'static str, fn(&mut Job<'_>) -> Result<()>);

/// All pairs. To add one, add a line here and a function that creates its workloads.
pub const PAIRS: [Pair; 5] = [
    ("lsa_barrier", lsa_barrier),
    ("lsa_allreduce", lsa_allreduce),
    ("reduce_copy", reduce_copy),
    ("ll_exchange", ll_exchange),
    ("gin_put", gin_put),
];

/// Counts that divide neither into 16-byte vectors nor among two ranks: checked, not timed.
const UNEVEN_COUNTS: [usize; 6] = [1, 7, 17, 1023, 4099, 65537];
/// Bytes: the low-latency protocol is for short messages; longer puts measure only the network.
const LARGEST_MESSAGE: usize = 1 << 20;
/// Round trips per launch.
const ROUNDS: u32 = 50;

fn lsa_barrier(job: &mut Job<'_>) -> Result<()> {
    let grid = &job.options.grid;
    let blocks = grid.blocks.map_or(Barrier::BLOCKS.to_vec(), |blocks| vec![blocks]);
    let threads = grid.threads.map_or(vec![128, 512], |threads| vec![threads]);
    for threads in threads {
        for &blocks in &blocks {
            let label = Label { kernel: "lsa_barrier", dtype: "-", bytes: 0 };
            let workload = Barrier::new(job.harness, blocks, threads)?;
            job.row(label, &workload.with(job.compiled)?)?;
        }
    }
    Ok(())
}

fn lsa_allreduce(job: &mut Job<'_>) -> Result<()> {
    let info = KernelInfo { threads: 128, max_blocks: 128, rounds_partial_sums: false };
    all_reduce::<f32, kernels::lsa_allreduce<f32>>(job, "lsa_allreduce", info)?;
    all_reduce::<f16, kernels::lsa_allreduce<f16>>(job, "lsa_allreduce", info)?;
    all_reduce::<bf16, kernels::lsa_allreduce<bf16>>(job, "lsa_allreduce", info)
}

fn reduce_copy(job: &mut Job<'_>) -> Result<()> {
    let info = KernelInfo { threads: 256, max_blocks: 64, rounds_partial_sums: true };
    all_reduce::<f32, bench_kernels::reduce_copy<f32>>(job, "reduce_copy", info)?;
    all_reduce::<f16, bench_kernels::reduce_copy<f16>>(job, "reduce_copy", info)?;
    all_reduce::<bf16, bench_kernels::reduce_copy<bf16>>(job, "reduce_copy", info)
}

fn all_reduce<T, K>(job: &mut Job<'_>, name: &'static str, info: KernelInfo) -> Result<()>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    let Job { harness, compiled, options, .. } = *job;
    if !options.dtype.includes(T::NAME) {
        return Ok(());
    }
    let workload = |count| AllReduce::<T, K>::new(harness, &options.grid, info, count);
    for count in options.sizes.counts(LARGEST, size_of::<T>())? {
        let label = Label { kernel: name, dtype: T::NAME, bytes: count * size_of::<T>() };
        job.row(label, &workload(count)?.with(compiled)?)?;
    }
    for count in UNEVEN_COUNTS {
        let [rust, cpp] =
            job.check(&workload(count)?.with(compiled)?)?.map(Option::unwrap_or_default);
        ensure!(
            rust == 0 && cpp == 0,
            "{name} of {} with {count} elements: {rust} are wrong in Rust's result, {cpp} in C++'s",
            T::NAME
        );
    }
    Ok(())
}

fn ll_exchange(job: &mut Job<'_>) -> Result<()> {
    for size in sizes(job) {
        let workload = LlExchange::new(job.harness, &job.options.grid, size)?;
        let label = Label { kernel: "ll_exchange", dtype: "u64", bytes: workload.bytes() };
        job.row(label, &workload.with(job.compiled)?)?;
    }
    Ok(())
}

/// Left out without GIN PROXY or with one rank.
fn gin_put(job: &mut Job<'_>) -> Result<()> {
    let harness = job.harness;
    if !harness.comm.properties()?.gin_types.contains(GinType::Proxy) {
        job.omit("gin_put", "NCCL offers no GIN of type PROXY here");
        return Ok(());
    }
    if harness.rank.n_ranks() < 2 {
        job.omit("gin_put", "it needs two ranks");
        return Ok(());
    }
    for bytes in [8].into_iter().chain(sizes(job)) {
        let windows = [harness.comm.window(bytes)?, harness.comm.window(bytes)?];
        let message = Message::new(harness, &windows[0], &windows[1])?;
        let label = Label { kernel: "gin_put", dtype: "u8", bytes };
        job.row(label, &Put::over_gin(&message, &windows, ROUNDS)?.with(job.compiled)?)?;
    }
    Ok(())
}

/// The message sizes of low-latency exchanges and puts.
fn sizes(job: &Job<'_>) -> Vec<usize> {
    let sizes = job.options.sizes.sizes(LARGEST_MESSAGE);
    sizes.take_while(|size| *size <= LARGEST_MESSAGE).collect()
}
