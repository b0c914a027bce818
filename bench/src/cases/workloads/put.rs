//! Ping-pong of messages between two neighbouring ranks: over the network (GIN), and over NVLink.

use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, DeviceSlice, GinConnectionType, GinType, Kernels,
    LaunchConfig, Window,
};
use devcomm_bench_kernels::{gin_put, lsa_put};
use devcomm_testing::messages::datum;
use devcomm_testing::simulated::read;

use super::workload::Workload;
use crate::cases::prelude::*;

/// Threads of the block that puts over GIN.
const WARP: u32 = 32;

/// Returns what a ping-pong over GIN's PROXY back end needs.
pub fn gin_requirements() -> DevCommRequirements {
    DevCommRequirements::new()
        .gin_connection(GinConnectionType::Full)
        .gin_type(GinType::Proxy)
        .gin_signals(1)
}

/// A rank's buffers for messages with its neighbour.
pub struct Message<'a> {
    pub harness: &'a Harness<'a>,
    recv: DeviceSlice<u8>,
    /// Whether this rank receives.
    receives: bool,
}

impl<'a> Message<'a> {
    /// Writes this rank's message to `send`.
    pub fn new<B: Buffer<Element = u8>>(
        harness: &'a Harness<'a>,
        send: &B,
        recv: &B,
    ) -> Result<Self> {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let mine = (0..send.len()).map(|i| datum(harness.run.seed, harness.rank.rank(), i));
        send.copy_from_host(&mine.collect::<Vec<_>>())?;
        Ok(Self { harness, recv, receives: true })
    }

    /// Returns the message, received by this rank or only sent by it.
    pub fn received(self, receives: bool) -> Self {
        Self { receives, ..self }
    }

    /// Returns the rank's neighbour, if any.
    pub fn peer(&self) -> Option<usize> {
        Some(self.harness.rank.rank() ^ 1).filter(|peer| *peer < self.harness.rank.n_ranks())
    }
}

impl Outcome for Message<'_> {
    fn poison(&self) -> Result<()> {
        // `datum` never returns a byte of all ones.
        Ok(self.recv.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // A rank whose own work has ended may still receive.
        self.harness.rank.barrier()?;
        let Some(peer) = self.peer().filter(|_| self.receives) else { return Ok(0) };
        let (seed, got) = (self.harness.run.seed, read(&self.recv)?);
        Ok((0..got.len()).filter(|&i| got[i] != datum::<u8>(seed, peer, i)).count())
    }
}

/// A kernel's puts: one block of one warp over GIN, or any grid over NVLink.
pub struct Put<'a> {
    message: &'a Message<'a>,
    send: &'a Window<u8>,
    recv: &'a Window<u8>,
    /// Round trips per timed launch.
    rounds: u32,
    config: LaunchConfig,
    dev_comm: DevCommResource,
    /// The flag and the state of each block, as `lsa_put` describes them; `None` over GIN.
    flags: Option<Window<u32>>,
}

impl<'a> Put<'a> {
    /// Puts `message` over GIN's PROXY back end, with a signal. *Collective*.
    pub fn over_gin(
        message: &'a Message<'a>,
        [send, recv]: &'a [Window<u8>; 2],
        rounds: u32,
    ) -> Result<Self> {
        let dev_comm = message.harness.comm.create_dev_comm(gin_requirements())?;
        let config = LaunchConfig::new(1, WARP);
        Ok(Self { message, send, recv, rounds, config, dev_comm, flags: None })
    }

    /// Stores `message` over NVLink, and then a flag. *Collective*; all ranks are in one LSA team.
    pub fn over_nvlink(
        message: &'a Message<'a>,
        [send, recv]: &'a [Window<u8>; 2],
        rounds: u32,
        (blocks, threads): (u32, u32),
    ) -> Result<Self> {
        let comm = message.harness.comm;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
        let flags = comm.window(2 * blocks as usize)?;
        flags.fill_bytes(0)?;
        let config = LaunchConfig::new(blocks, threads);
        Ok(Self { message, send, recv, rounds, config, dev_comm, flags: Some(flags) })
    }

    fn ping_pong(&self, kernels: &Kernels, rounds: u32) -> devcomm::Result<()> {
        let Self { message, send, recv, config, dev_comm, .. } = self;
        let (stream, bytes) = (&message.harness.stream, send.len());
        // SAFETY: both windows have the same size on every rank, and the flags two elements for
        // each block, initially 0; every rank launches the same, on one stream, which is
        // synchronised before the windows are dropped; the device communicator has PROXY for GIN,
        // and all ranks are in one LSA team for NVLink.
        unsafe {
            match &self.flags {
                None => {
                    let put = gin_put::args(dev_comm, *send, *recv, bytes, rounds);
                    put.config(*config).launch(&kernels.on(stream))
                }
                Some(flags) => {
                    let put = lsa_put::args(dev_comm, *send, *recv, flags, bytes, rounds);
                    put.config(*config).launch(&kernels.on(stream))
                }
            }
        }
    }
}

impl Workload for Put<'_> {
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>> {
        let info = match self.flags {
            None => kernels.info::<gin_put>()?,
            Some(_) => kernels.info::<lsa_put>()?,
        };
        let ping_pong = |rounds| self.ping_pong(kernels, rounds);
        let rounds = [self.message.harness.choose(1, 3), self.rounds];
        // A round trip has two messages.
        let contender = Contender::in_rounds(variant, ping_pong, rounds, 2, self.message);
        Ok(contender.by_kernel(self.config, info))
    }
}
