//! All-reduce kernels, with a `DevComm`, two windows and a count as parameters.

use std::marker::PhantomData;

use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, DeviceSlice, Kernel, Kernels, LaunchConfig,
    Window, device,
};
use devcomm_testing::numbers::{Number, checksum, count_wrong, inputs};
use devcomm_testing::simulated::read;

use super::workload::Workload;
use crate::cases::prelude::*;

/// A kernel's default grid and rounding.
#[derive(Clone, Copy)]
pub struct KernelInfo {
    /// Threads per block.
    pub threads: u32,
    /// Maximum blocks.
    pub max_blocks: u32,
    /// Whether partial sums are rounded to the type, not only the result.
    pub rounds_partial_sums: bool,
}

/// An all-reduce of one size by kernels.
pub struct AllReduce<'a, T: Number, K> {
    harness: &'a Harness<'a>,
    dev_comm: DevCommResource,
    send: Window<T>,
    recv: Window<T>,
    config: LaunchConfig,
    sum: Sum<'a, T>,
    kernel: PhantomData<K>,
}

impl<'a, T, K> AllReduce<'a, T, K>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    /// Creates an all-reduce of `count` elements, with this rank's input. *Collective*.
    pub fn new(
        harness: &'a Harness<'a>,
        grid: &GridOptions,
        info: KernelInfo,
        count: usize,
    ) -> Result<Self> {
        // Each rank reduces a part of the elements.
        let part_bytes = (count * size_of::<T>()).div_ceil(harness.rank.n_ranks());
        let (blocks, threads) = grid.grid(part_bytes, info.threads, info.max_blocks);
        let requirements = DevCommRequirements::new().lsa_barriers(blocks);
        let dev_comm = harness.comm.create_dev_comm(requirements)?;
        let (send, recv) = (harness.comm.window(count)?, harness.comm.window(count)?);
        send.copy_from_host(&inputs(harness.run.seed, harness.rank.rank(), count))?;
        let rounds_partial_sums = info.rounds_partial_sums;
        let sum = Sum { harness, recv: recv.device_slice(), rounds_partial_sums };
        let config = LaunchConfig::new(blocks, threads);
        Ok(Self { harness, dev_comm, send, recv, config, sum, kernel: PhantomData })
    }
}

impl<T, K> Workload for AllReduce<'_, T, K>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>> {
        let Self { harness, dev_comm, send, recv, config, sum, .. } = self;
        let work = move || {
            let args = (dev_comm, send, recv, send.len());
            // SAFETY: both windows have `count` elements on every rank; every rank launches the
            // same, on one stream, which is synchronised before the windows are dropped.
            unsafe { K::with_args(args).config(*config).launch(&kernels.on(&harness.stream)) }
        };
        Ok(Contender::new(variant, work, sum).by_kernel(*config, kernels.info::<K>()?))
    }
}

/// The sum of all ranks' inputs, on this rank; every rank gets the same bits.
struct Sum<'a, T> {
    harness: &'a Harness<'a>,
    recv: DeviceSlice<T>,
    /// Whether partial sums are rounded to the type, not only the result.
    rounds_partial_sums: bool,
}

impl<T: Number> Outcome for Sum<'_, T> {
    fn poison(&self) -> Result<()> {
        // Every element is a NaN.
        Ok(self.recv.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Harness { rank, run, .. } = self.harness;
        let got = read(&self.recv)?;
        let roundings = if self.rounds_partial_sums { (rank.n_ranks() - 1).max(1) } else { 1 };
        let wrong = count_wrong(run.seed, rank.n_ranks(), roundings, &got);
        let sums = rank.all_gather(&[checksum(&got)])?;
        Ok(wrong + usize::from(sums.iter().any(|sum| *sum != sums[0])))
    }
}
