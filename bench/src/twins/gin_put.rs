//! Ping-pong of puts with a signal, by GIN's PROXY back end.

use anyhow::Result;
use devcomm::{
    DevCommRequirements, DevCommResource, GinConnectionType, GinType, Kernels, LaunchConfig,
    Stream, Window,
};
use devcomm_bench_kernels::gin_put;

use super::Job;
use super::measure::Case;
use super::row::Label;
use crate::number::word;

/// Times there and back in a launch.
const ROUNDS: u32 = 50;
/// Larger messages measure the network alone.
const LARGEST: usize = 1 << 20;
const WARP: u32 = 32;

struct PingPong {
    dev_comm: DevCommResource,
    send: Window<u8>,
    recv: Window<u8>,
    bytes: usize,
}

/// Measures the pair, where there is PROXY.
pub fn run(job: &mut Job<'_>) -> Result<()> {
    let properties = job.comm.properties()?;
    if !properties.gin_types.contains(GinType::Proxy) {
        job.leave_out("gin_put", "NCCL offers no GIN of type PROXY here");
        return Ok(());
    }
    if job.rank.n_ranks() < 2 {
        job.leave_out("gin_put", "it needs two ranks");
        return Ok(());
    }
    let options = &job.options.sizes;
    let sizes: Vec<usize> =
        [8].into_iter().chain(options.sizes(LARGEST).take_while(|&size| size <= LARGEST)).collect();
    for bytes in sizes {
        let requirements = DevCommRequirements::new()
            .lsa_barriers(1)
            .gin_connection(GinConnectionType::Full)
            .gin_type(GinType::Proxy)
            .gin_signals(1);
        let case = PingPong {
            dev_comm: job.comm.create_dev_comm(requirements)?,
            send: job.comm.window(bytes)?,
            recv: job.comm.window(bytes)?,
            bytes,
        };
        case.send.copy_from_host(&message(job, job.rank.rank(), bytes))?;
        job.row(&case)?;
    }
    Ok(())
}

/// What a rank sends.
fn message(job: &Job<'_>, rank: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| word(job.options.run.seed, rank, index) as u8).collect()
}

impl PingPong {
    fn launch_rounds(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        rounds: u32,
    ) -> devcomm::Result<()> {
        let args = (&self.dev_comm, &self.send, &self.recv, self.bytes, rounds);
        // SAFETY: both windows have `bytes` bytes; every rank launches the same, in one stream; the device communicator was
        // made with PROXY; the case outlives the launches, whose batches are waited for.
        unsafe { kernels.launch(stream, gin_put, LaunchConfig::new(1, WARP), args) }
    }
}

impl Case for PingPong {
    fn label(&self) -> Label {
        Label { kernel: "gin_put", dtype: "u8", bytes: self.bytes, blocks: 1, threads: WARP }
    }

    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32> {
        Ok(kernels.info(gin_put)?.registers)
    }

    fn launch(&self, kernels: &Kernels, stream: &Stream) -> devcomm::Result<()> {
        self.launch_rounds(kernels, stream, ROUNDS)
    }

    /// One way.
    fn operations(&self) -> u32 {
        2 * ROUNDS
    }

    fn count_wrong(&self, job: &Job<'_>, kernels: &Kernels) -> Result<usize> {
        self.recv.fill(0xff)?;
        job.rank.barrier()?;
        self.launch_rounds(kernels, &job.stream, 1)?;
        job.finish_batch()?;
        let peer = job.rank.rank() ^ 1;
        if peer >= job.rank.n_ranks() {
            return Ok(0);
        }
        let mut got = vec![0; self.bytes];
        self.recv.copy_to_host(&mut got)?;
        let wanted = message(job, peer, self.bytes);
        Ok(got.iter().zip(&wanted).filter(|(got, wanted)| got != wanted).count())
    }
}
