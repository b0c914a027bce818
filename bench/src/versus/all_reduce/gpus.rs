//! On GPUs.

use anyhow::Result;
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, DeviceSlice, KERNELS, Kernel, Kernels,
    LaunchConfig, ReduceOp, Window, device, kernels,
};
use half::{bf16, f16};

use super::{MAX_BLOCKS, THREADS, case};
use crate::header::Header;
use crate::number::{Number, checksum, count_wrong, inputs};
use crate::options::{Dtype, LARGEST};
use crate::versus::gpus::Gpus;
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::variant::Variant;

type Args<T> = (device::DevComm, device::Window<T>, device::Window<T>, usize);

/// Measures every type and size.
pub fn run(job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
    let gpus = job.machine;
    gpus.comm.require_single_lsa_team()?;
    let mut compiled = Vec::new();
    if job.choice.has(Variant::Rust) {
        compiled.push((Variant::Rust, gpus.rust(&KERNELS)?));
    }
    if job.choice.has(Variant::Cpp) {
        match gpus.cpp("lsa_allreduce")? {
            Ok(kernels) => compiled.push((Variant::Cpp, kernels)),
            Err(why) => job.choice.leave_out(Variant::Cpp, why)?,
        }
    }
    job.begin(Header::of(gpus.rank)?);
    run_type(job, Dtype::F32, &compiled, kernels::lsa_allreduce::<f32>)?;
    run_type(job, Dtype::F16, &compiled, kernels::lsa_allreduce::<f16>)?;
    run_type(job, Dtype::Bf16, &compiled, kernels::lsa_allreduce::<bf16>)
}

fn run_type<T, K>(
    job: &mut Job<'_, Gpus<'_>>,
    dtype: Dtype,
    compiled: &[(Variant, Kernels)],
    kernel: K,
) -> Result<()>
where
    T: Number,
    K: Kernel<Args = Args<T>>,
{
    if !job.run.wants(dtype) {
        return Ok(());
    }
    let gpus = job.machine;
    for count in job.run.counts(LARGEST, size_of::<T>())? {
        let case = case::<T>(count, gpus.rank.n_ranks());
        let (blocks, threads) =
            job.run.grid(case.size.div_ceil(gpus.rank.n_ranks()), THREADS, MAX_BLOCKS);
        let requirements = DevCommRequirements::new().lsa_barriers(blocks);
        let (send, recv) = (gpus.comm.window(count)?, gpus.comm.window(count)?);
        let on_windows = Shared {
            gpus,
            dev_comm: gpus.comm.create_dev_comm(requirements)?,
            config: LaunchConfig::new(blocks, threads),
            send,
            recv,
        };
        let input = inputs::<T>(job.run.seed, gpus.rank.rank(), count);
        on_windows.send.copy_from_host(&input)?;
        let of_kernel = |(variant, kernels)| ByKernel { on: &on_windows, variant, kernels, kernel };
        let mut ways: Ways<'_> = Vec::new();
        for (variant, kernels) in compiled {
            ways.push(Box::new(of_kernel((*variant, kernels))));
        }
        if job.choice.has(Variant::Nccl) {
            let (send, recv) = (gpus.comm.mem_alloc(count)?, gpus.comm.mem_alloc(count)?);
            send.copy_from_host(&input)?;
            let (send, recv) = (send.device_slice(), recv.device_slice());
            ways.push(Box::new(ByHost { gpus, variant: Variant::Nccl, send, recv }));
        }
        if job.choice.has(Variant::NcclSym) {
            let (send, recv) = (on_windows.send.device_slice(), on_windows.recv.device_slice());
            ways.push(Box::new(ByHost { gpus, variant: Variant::NcclSym, send, recv }));
        }
        drop(input);
        job.compare(case, &ways)?;
    }
    Ok(())
}

/// What the kernels share.
struct Shared<'a, T: Number> {
    gpus: &'a Gpus<'a>,
    dev_comm: DevCommResource,
    config: LaunchConfig,
    send: Window<T>,
    recv: Window<T>,
}

struct ByKernel<'a, T: Number, K> {
    on: &'a Shared<'a, T>,
    variant: Variant,
    kernels: &'a Kernels,
    kernel: K,
}

impl<T: Number, K: Kernel<Args = Args<T>>> Way for ByKernel<'_, T, K> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.on.config.grid.x, self.on.config.block.x))
    }

    fn enqueue(&self) -> Result<()> {
        let Shared { gpus, dev_comm, config, send, recv } = self.on;
        let args = (dev_comm, send, recv, send.len());
        // SAFETY: both windows have as many elements in every rank; every rank launches the same, in one stream, whose work is
        // waited for before the windows go.
        unsafe { self.kernels.launch(&gpus.stream, self.kernel, *config, args)? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        // NaNs.
        Ok(self.on.recv.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // Rounded once.
        let (wrong, sum) = wrong_in(self.on.gpus, &self.on.recv.device_slice(), 1)?;
        let sums = self.on.gpus.rank.all_gather(&sum.to_le_bytes())?;
        // Every rank gets the same bits.
        Ok(wrong + usize::from(sums.iter().any(|sum| *sum != sums[0])))
    }
}

struct ByHost<'a, T> {
    gpus: &'a Gpus<'a>,
    variant: Variant,
    send: DeviceSlice<T>,
    recv: DeviceSlice<T>,
}

impl<T: Number> Way for ByHost<'_, T> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn enqueue(&self) -> Result<()> {
        let Self { gpus, send, recv, .. } = self;
        Ok(gpus.comm.all_reduce(send, recv, ReduceOp::Sum, &gpus.stream)?)
    }

    fn spoil(&self) -> Result<()> {
        Ok(self.recv.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // A ring rounds each partial sum.
        let roundings = (self.gpus.rank.n_ranks() - 1).max(1);
        Ok(wrong_in(self.gpus, &self.recv, roundings)?.0)
    }
}

/// Wrong elements, and a checksum.
fn wrong_in<T: Number>(
    gpus: &Gpus<'_>,
    recv: &DeviceSlice<T>,
    roundings: usize,
) -> Result<(usize, u64)> {
    let mut got = vec![T::nearest(0.0); recv.len()];
    recv.copy_to_host(&mut got)?;
    let wrong = count_wrong(gpus.options.run.seed, gpus.rank.n_ranks(), roundings, &got);
    Ok((wrong, checksum(&got)))
}
