//! In the simulator.

use anyhow::Result;
use devcomm::sim::{self, DevCommConfig, LaunchConfig};
use devcomm::{HostKernel, device, kernels};
use half::{bf16, f16};

use super::{AllReduce, THREADS};
use crate::number::{Number, checksum, count_wrong, inputs};
use crate::options::Dtype;
use crate::versus::machine::{Job, Way};
use crate::versus::simulated::{LARGEST, MAX_BLOCKS, Simulated};
use crate::versus::variant::Variant;

type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// Checks every type and size.
pub fn run(options: &AllReduce, job: &mut Job<'_, Simulated>) -> Result<()> {
    run_type(options, job, Dtype::F32, kernels::lsa_allreduce::<f32>)?;
    run_type(options, job, Dtype::F16, kernels::lsa_allreduce::<f16>)?;
    run_type(options, job, Dtype::Bf16, kernels::lsa_allreduce::<bf16>)
}

fn run_type<T, K>(
    options: &AllReduce,
    job: &mut Job<'_, Simulated>,
    dtype: Dtype,
    kernel: K,
) -> Result<()>
where
    T: Number,
    K: HostKernel<Args = Args<T>>,
{
    if !options.dtype.wants(dtype) {
        return Ok(());
    }
    let (sim, seed) = (&job.machine.sim, job.run.seed);
    for count in options.sizes.counts(LARGEST, size_of::<T>())? {
        let case = options.case::<T>(count, sim.ranks());
        let (blocks, threads) =
            options.grid.grid(case.size.div_ceil(sim.ranks()), THREADS, MAX_BLOCKS);
        let dev_comm = DevCommConfig { lsa_barriers: blocks, ..Default::default() };
        let way = ByKernel {
            machine: job.machine,
            kernel,
            dev_comm: sim.dev_comm(dev_comm)?,
            send: sim.window(count)?,
            recv: sim.window(count)?,
            config: LaunchConfig::new(blocks, threads),
            seed,
        };
        for rank in 0..sim.ranks() {
            way.send.write(rank, &inputs(seed, rank, count))?;
        }
        job.compare(case, &vec![Box::new(way)])?;
    }
    Ok(())
}

struct ByKernel<'a, T, K> {
    machine: &'a Simulated,
    kernel: K,
    dev_comm: sim::DevComm,
    send: sim::Window<T>,
    recv: sim::Window<T>,
    config: LaunchConfig,
    seed: u64,
}

impl<T: Number, K: HostKernel<Args = Args<T>>> Way for ByKernel<'_, T, K> {
    fn variant(&self) -> Variant {
        Variant::Rust
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.config.grid, self.config.block))
    }

    fn enqueue(&self) -> Result<()> {
        let Self { dev_comm, send, recv, .. } = self;
        let args = |rank| (dev_comm.rank(rank), send.rank(rank), recv.rank(rank), send.len());
        // SAFETY: both windows have as many elements in every rank, and nothing else uses them.
        unsafe { self.machine.sim.launch(self.kernel, self.config, args)? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        let nans = vec![T::nearest(f32::NAN); self.recv.len()];
        self.machine.each_rank(|rank| Ok(self.recv.write(rank, &nans)?))
    }

    fn count_wrong(&self) -> Result<usize> {
        let ranks = self.machine.sim.ranks();
        let results: Vec<Vec<T>> = (0..ranks).map(|rank| self.recv.read(rank)).collect();
        let wrong: usize = results.iter().map(|got| count_wrong(self.seed, ranks, 1, got)).sum();
        let first = checksum(&results[0]);
        Ok(wrong + results.iter().filter(|got| checksum(got) != first).count())
    }
}
