//! On GPUs.

use anyhow::Result;
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, KERNELS, Kernel, Kernels, LaunchConfig, Window,
    device, kernels,
};
use half::{bf16, f16};

use super::host::{ByHost, wrong_in};
use super::{AllReduce, MAX_BLOCKS, THREADS};
use crate::header::Header;
use crate::number::{Number, inputs};
use crate::options::{Dtype, LARGEST};
use crate::versus::gpus::Gpus;
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::variant::Variant;

type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// Measures every type and size.
pub fn run(options: &AllReduce, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
    let gpus = job.machine;
    gpus.comm.require_single_lsa_team()?;
    let compiled = gpus.kernels(&mut job.choice, &KERNELS, "lsa_allreduce")?;
    job.begin(Header::of(gpus.rank)?);
    run_type(options, job, Dtype::F32, &compiled, kernels::lsa_allreduce::<f32>)?;
    run_type(options, job, Dtype::F16, &compiled, kernels::lsa_allreduce::<f16>)?;
    run_type(options, job, Dtype::Bf16, &compiled, kernels::lsa_allreduce::<bf16>)
}

fn run_type<T, K>(
    options: &AllReduce,
    job: &mut Job<'_, Gpus<'_>>,
    dtype: Dtype,
    compiled: &[(Variant, Kernels)],
    kernel: K,
) -> Result<()>
where
    T: Number,
    K: Kernel<Args = Args<T>>,
{
    if !options.dtype.wants(dtype) {
        return Ok(());
    }
    let gpus = job.machine;
    for count in options.sizes.counts(LARGEST, size_of::<T>())? {
        let case = options.case::<T>(count, gpus.rank.n_ranks());
        let (blocks, threads) =
            options.grid.grid(case.size.div_ceil(gpus.rank.n_ranks()), THREADS, MAX_BLOCKS);
        let shared = Shared {
            gpus,
            dev_comm: gpus.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            config: LaunchConfig::new(blocks, threads),
            send: gpus.comm.window(count)?,
            recv: gpus.comm.window(count)?,
        };
        shared.send.copy_from_host(&inputs::<T>(job.run.seed, gpus.rank.rank(), count))?;
        let mut ways: Ways<'_> = Vec::new();
        for (variant, kernels) in compiled {
            ways.push(Box::new(ByKernel { shared: &shared, variant: *variant, kernels, kernel }));
        }
        if job.choice.has(Variant::Nccl) {
            ways.push(Box::new(ByHost::<T>::unregistered(gpus, count)?));
        }
        if job.choice.has(Variant::NcclSym) {
            ways.push(Box::new(ByHost::on_windows(gpus, &shared.send, &shared.recv)?));
        }
        job.compare(case, &ways)?;
    }
    Ok(())
}

/// What the kernels share, and NCCL on windows.
struct Shared<'a, T: Number> {
    gpus: &'a Gpus<'a>,
    dev_comm: DevCommResource,
    config: LaunchConfig,
    send: Window<T>,
    recv: Window<T>,
}

struct ByKernel<'a, T: Number, K> {
    shared: &'a Shared<'a, T>,
    variant: Variant,
    kernels: &'a Kernels,
    kernel: K,
}

impl<T: Number, K: Kernel<Args = Args<T>>> Way for ByKernel<'_, T, K> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.shared.config.grid.x, self.shared.config.block.x))
    }

    fn enqueue(&self) -> Result<()> {
        let Shared { gpus, dev_comm, config, send, recv } = self.shared;
        let args = (dev_comm, send, recv, send.len());
        // SAFETY: both windows have as many elements in every rank; every rank launches the same, in one stream, whose work is
        // waited for before the windows go.
        unsafe { self.kernels.launch(&gpus.stream, self.kernel, *config, args)? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        // NaNs.
        Ok(self.shared.recv.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // Rounded once.
        let (wrong, sum) = wrong_in(self.shared.gpus, &self.shared.recv.device_slice(), 1)?;
        let sums = self.shared.gpus.rank.all_gather(&sum.to_le_bytes())?;
        // Every rank gets the same bits.
        Ok(wrong + usize::from(sums.iter().any(|sum| *sum != sums[0])))
    }
}
