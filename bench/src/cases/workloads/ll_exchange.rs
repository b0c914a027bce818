//! All-to-all by the low-latency protocol.

use devcomm::{
    DevCommRequirements, DevCommResource, Kernels, LaunchConfig, LlA2a, ResourceKey, Window,
};
use devcomm_bench_kernels::ll_exchange;
use devcomm_testing::messages::{count_wrong, sent};
use devcomm_testing::simulated::read;

use super::workload::Workload;
use crate::cases::prelude::*;

const MAX_BLOCKS: usize = 64;
const THREADS: u32 = 128;

/// An exchange of `count` elements with every rank.
pub struct LlExchange<'a> {
    harness: &'a Harness<'a>,
    dev_comm: DevCommResource,
    exchange: ResourceKey<LlA2a>,
    send: Window<u64>,
    recv: Window<u64>,
    /// Elements for each rank.
    count: usize,
    config: LaunchConfig,
}

impl<'a> LlExchange<'a> {
    /// Creates an exchange of `bytes` bytes in total, at least one element per rank. *Collective*.
    pub fn new(harness: &'a Harness<'a>, grid: &GridOptions, bytes: usize) -> Result<Self> {
        let (comm, ranks, rank) = (harness.comm, harness.rank.n_ranks(), harness.rank.rank());
        let count = (bytes / ranks / size_of::<u64>()).max(1);
        let threads = grid.threads.unwrap_or(THREADS);
        let wanted = count.div_ceil(threads as usize).clamp(1, MAX_BLOCKS) as u32;
        let blocks = grid.blocks.unwrap_or(wanted);
        let mut requirements = DevCommRequirements::new();
        let (max_elements, element_size) = (ranks as u32 * threads, size_of::<u64>() as u32);
        let exchange = requirements.add(LlA2a { blocks, max_elements, element_size });
        let workload = Self {
            harness,
            dev_comm: comm.create_dev_comm(requirements)?,
            exchange,
            send: comm.window(ranks * count)?,
            recv: comm.window(ranks * count)?,
            count,
            config: LaunchConfig::new(blocks, threads),
        };
        workload.send.copy_from_host(&sent(harness.run.seed, rank, ranks, count))?;
        Ok(workload)
    }

    /// Returns the bytes of a rank's elements for all ranks.
    pub fn bytes(&self) -> usize {
        self.send.byte_len()
    }
}

impl Workload for LlExchange<'_> {
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>> {
        let Self { harness, dev_comm, exchange, send, recv, count, config } = self;
        let work = move || {
            let exchange = dev_comm.resource(*exchange)?;
            let all = ll_exchange::args(dev_comm, exchange, send, recv, *count);
            // SAFETY: both windows have `count` elements for every rank; every rank launches the
            // same, on one stream, which is synchronised before the windows are dropped.
            unsafe { all.config(*config).launch(&kernels.on(&harness.stream)) }
        };
        let contender = Contender::new(variant, work, self);
        Ok(contender.by_kernel(*config, kernels.info::<ll_exchange>()?))
    }
}

impl Outcome for LlExchange<'_> {
    fn poison(&self) -> Result<()> {
        Ok(self.recv.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Harness { rank, run, .. } = self.harness;
        let got = read(&self.recv)?;
        Ok(count_wrong(run.seed, rank.rank(), rank.n_ranks(), self.count, &got))
    }
}
