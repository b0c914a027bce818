//! All-reduces: kernels that take a `DevComm`, two windows and a count.

use anyhow::Result;
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, DeviceSlice, Kernel, Kernels, LaunchConfig,
    Window, device,
};
use devcomm_testing::numbers::{Number, checksum, count_wrong, inputs};

use crate::contender::Workload;
use crate::harness::Harness;
use crate::options::GridOptions;

/// What suits a kernel.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Threads of a block.
    pub threads: u32,
    /// Blocks at most.
    pub max_blocks: u32,
    /// Whether partial sums are rounded to the type, and not the result alone.
    pub rounds_often: bool,
}

/// One all-reduce.
pub struct AllReduce<'a, T: Number, K> {
    harness: &'a Harness<'a>,
    kernel: K,
    rounds_often: bool,
    dev_comm: DevCommResource,
    pub send: Window<T>,
    pub recv: Window<T>,
    config: LaunchConfig,
}

impl<'a, T: Number, K> AllReduce<'a, T, K> {
    /// Of `count` elements, with this rank's input. *Collective*.
    pub fn new(
        harness: &'a Harness<'a>,
        grid: &GridOptions,
        shape: Shape,
        kernel: K,
        count: usize,
    ) -> Result<Self> {
        let (comm, share) =
            (harness.comm, (count * size_of::<T>()).div_ceil(harness.rank.n_ranks()));
        let (blocks, threads) = grid.grid(share, shape.threads, shape.max_blocks);
        let workload = Self {
            harness,
            kernel,
            rounds_often: shape.rounds_often,
            dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            send: comm.window(count)?,
            recv: comm.window(count)?,
            config: LaunchConfig::new(blocks, threads),
        };
        workload.send.copy_from_host(&inputs(harness.run.seed, harness.rank.rank(), count))?;
        Ok(workload)
    }
}

impl<T, K> Workload for AllReduce<'_, T, K>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    fn config(&self) -> LaunchConfig {
        self.config
    }

    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32> {
        Ok(kernels.info(self.kernel)?.registers)
    }

    fn launch(&self, kernels: &Kernels) -> devcomm::Result<()> {
        let args = (&self.dev_comm, &self.send, &self.recv, self.send.len());
        // SAFETY: both windows have as many elements in every rank; every rank launches the same,
        // in one stream, whose work is waited for before the windows go.
        unsafe { kernels.launch(&self.harness.stream, self.kernel, self.config, args) }
    }

    fn spoil(&self) -> Result<()> {
        // NaNs.
        Ok(self.recv.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let (wrong, sum) = wrong_in(self.harness, &self.recv, self.rounds_often)?;
        let sums = self.harness.rank.all_gather(&sum.to_le_bytes())?;
        // Every rank gets the same bits.
        Ok(wrong + usize::from(sums.iter().any(|sum| *sum != sums[0])))
    }
}

/// Wrong elements of this rank's sum, and its checksum.
pub fn wrong_in<T: Number>(
    harness: &Harness<'_>,
    recv: &impl Buffer<Element = T>,
    rounds_often: bool,
) -> Result<(usize, u64)> {
    let recv: DeviceSlice<T> = recv.device_slice();
    let (mut got, n_ranks) = (vec![T::nearest(0.0); recv.len()], harness.rank.n_ranks());
    recv.copy_to_host(&mut got)?;
    let roundings = if rounds_often { (n_ranks - 1).max(1) } else { 1 };
    Ok((count_wrong(harness.run.seed, n_ranks, roundings, &got), checksum(&got)))
}
