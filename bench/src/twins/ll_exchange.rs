//! All-to-all by the low-latency protocol.

use anyhow::Result;
use devcomm::{
    DevCommRequirements, DevCommResource, Kernels, LaunchConfig, LlA2a, ResourceKey, Stream, Window,
};
use devcomm_bench_kernels::ll_exchange;

use super::Job;
use super::measure::Case;
use super::row::Label;
use crate::number::word;

/// Larger messages are not what the protocol is for.
const LARGEST: usize = 1 << 20;
const MAX_BLOCKS: usize = 64;
const THREADS: u32 = 128;
const ELEMENT: usize = size_of::<u64>();

struct AllToAll {
    dev_comm: DevCommResource,
    exchange: ResourceKey<LlA2a>,
    send: Window<u64>,
    recv: Window<u64>,
    /// Elements for each rank.
    count: usize,
    config: LaunchConfig,
}

/// Measures the pair.
pub fn run(job: &mut Job<'_>) -> Result<()> {
    let ranks = job.rank.n_ranks();
    let sizes: Vec<usize> =
        job.options.sizes.sizes(LARGEST).take_while(|&size| size <= LARGEST).collect();
    for size in sizes {
        let case = AllToAll::new(job, (size / ranks / ELEMENT).max(1))?;
        job.row(&case)?;
    }
    Ok(())
}

impl AllToAll {
    fn new(job: &Job<'_>, count: usize) -> Result<Self> {
        let (options, ranks) = (&job.options.run, job.rank.n_ranks());
        let grid = &job.options.grid;
        let threads = grid.threads.unwrap_or(THREADS);
        let wanted = count.div_ceil(threads as usize).clamp(1, MAX_BLOCKS) as u32;
        let blocks = grid.blocks.unwrap_or(wanted);
        let mut requirements = DevCommRequirements::new().lsa_barriers(blocks);
        let (max_elements, element_size) = (ranks as u32 * threads, ELEMENT as u32);
        let exchange = requirements.add(LlA2a { blocks, max_elements, element_size });
        let case = Self {
            dev_comm: job.comm.create_dev_comm(requirements)?,
            exchange,
            send: job.comm.window(ranks * count)?,
            recv: job.comm.window(ranks * count)?,
            count,
            config: LaunchConfig::new(blocks, threads),
        };
        let mine = (0..ranks * count).map(|index| word(options.seed, job.rank.rank(), index));
        case.send.copy_from_host(&mine.collect::<Vec<_>>())?;
        Ok(case)
    }
}

impl Case for AllToAll {
    fn label(&self) -> Label {
        let (blocks, threads) = (self.config.grid.x, self.config.block.x);
        Label { kernel: "ll_exchange", dtype: "u64", bytes: self.send.byte_len(), blocks, threads }
    }

    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32> {
        Ok(kernels.info(ll_exchange)?.registers)
    }

    fn launch(&self, kernels: &Kernels, stream: &Stream) -> devcomm::Result<()> {
        let exchange = self.dev_comm.resource(self.exchange)?;
        let args = (&self.dev_comm, exchange, &self.send, &self.recv, self.count);
        // SAFETY: both windows have `count` elements for every rank; every rank launches the same, in one stream; the case
        // outlives the launches, whose batches are waited for.
        unsafe { kernels.launch(stream, ll_exchange, self.config, args) }
    }

    fn count_wrong(&self, job: &Job<'_>, kernels: &Kernels) -> Result<usize> {
        self.recv.fill(0xff)?;
        job.rank.barrier()?;
        self.launch(kernels, &job.stream)?;
        job.finish_batch()?;
        let mut got = vec![0; self.recv.len()];
        self.recv.copy_to_host(&mut got)?;
        let (seed, rank) = (job.options.run.seed, job.rank.rank());
        let wrong = |&(index, &element): &(usize, &u64)| {
            let (peer, i) = (index / self.count, index % self.count);
            element != word(seed, peer, rank * self.count + i)
        };
        Ok(got.iter().enumerate().filter(wrong).count())
    }
}
