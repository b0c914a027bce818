//! In the simulator.

use anyhow::Result;
use devcomm::GinConnectionType;
use devcomm::sim::{self, DevCommConfig, LaunchConfig};
use devcomm_bench_kernels::{gin_put, lsa_put};

use super::{Put, THREADS, WARP, case, ensure_two, message, peer_of, sizes, spoilt, wrong_in};
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::simulated::{LARGEST, MAX_BLOCKS, Simulated};
use crate::versus::variant::Variant;

/// Round trips.
const ROUNDS: u32 = 3;

/// Checks every size.
pub fn run(options: &Put, job: &mut Job<'_, Simulated>) -> Result<()> {
    let machine = job.machine;
    let sim = &machine.sim;
    ensure_two(sim.ranks())?;
    for bytes in sizes(&options.sizes, LARGEST) {
        let (send, recv) = (sim.window::<u8>(bytes)?, sim.window::<u8>(bytes)?);
        machine.each_rank(|rank| Ok(send.write(rank, &message(job.run.seed, rank, bytes))?))?;
        let way = |variant, config: LaunchConfig| PingPong {
            machine,
            variant,
            config,
            recv: &recv,
            seed: job.run.seed,
            play: Box::new(|| Ok(())),
        };
        let mut ways: Ways<'_> = Vec::new();
        if job.choice.has(Variant::Rust) {
            let gin_connection = GinConnectionType::Full;
            let config = DevCommConfig { gin_connection, gin_signals: 1, ..Default::default() };
            let (dev_comm, config) = (sim.dev_comm(config)?, LaunchConfig::new(1, WARP));
            let (send, recv) = (&send, &recv);
            let play = move || {
                let args =
                    |rank| (dev_comm.rank(rank), send.rank(rank), recv.rank(rank), bytes, ROUNDS);
                // SAFETY: both windows have `bytes` bytes; the device communicator has GIN.
                unsafe { sim.launch(gin_put, config, args) }.map(drop)
            };
            ways.push(Box::new(PingPong { play: Box::new(play), ..way(Variant::Rust, config) }));
        }
        if job.choice.has(Variant::RustLsa) {
            let (blocks, threads) = options.grid.grid(bytes, THREADS, MAX_BLOCKS);
            let config = LaunchConfig::new(blocks, threads);
            let dev_comm = sim.dev_comm(DevCommConfig::default())?;
            let flags = sim.window::<u32>(2 * blocks as usize)?;
            let zeros = vec![0; flags.len()];
            machine.each_rank(|rank| Ok(flags.write(rank, &zeros)?))?;
            let (send, recv) = (&send, &recv);
            let play = move || {
                let windows = |rank| (send.rank(rank), recv.rank(rank), flags.rank(rank));
                let args = |rank| {
                    let (send, recv, flags) = windows(rank);
                    (dev_comm.rank(rank), send, recv, flags, bytes, ROUNDS)
                };
                // SAFETY: both windows have `bytes` bytes and the flags two elements for every block, 0 at first.
                unsafe { sim.launch(lsa_put, config, args) }.map(drop)
            };
            let way = way(Variant::RustLsa, config);
            ways.push(Box::new(PingPong { play: Box::new(play), ..way }));
        }
        job.compare(case(bytes), &ways)?;
    }
    Ok(())
}

struct PingPong<'a> {
    machine: &'a Simulated,
    variant: Variant,
    config: LaunchConfig,
    recv: &'a sim::Window<u8>,
    seed: u64,
    play: Box<dyn Fn() -> sim::Result<()> + 'a>,
}

impl PingPong<'_> {
    fn peer(&self, rank: usize) -> Option<usize> {
        peer_of(rank, self.machine.sim.ranks())
    }
}

impl Way for PingPong<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.config.grid, self.config.block))
    }

    fn enqueue(&self) -> Result<()> {
        Ok((self.play)()?)
    }

    fn spoil(&self) -> Result<()> {
        self.machine.each_rank(|rank| match self.peer(rank) {
            Some(peer) => Ok(self.recv.write(rank, &spoilt(self.seed, peer, self.recv.len()))?),
            None => Ok(()),
        })
    }

    fn count_wrong(&self) -> Result<usize> {
        let wrong = |rank| {
            let peer = self.peer(rank)?;
            Some(wrong_in(&self.recv.read(rank), self.seed, peer))
        };
        Ok((0..self.machine.sim.ranks()).filter_map(wrong).sum())
    }
}
