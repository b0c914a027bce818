//! On GPUs.

use anyhow::Result;
use devcomm::{
    Buffer, DevCommRequirements, DeviceSlice, GinConnectionType, GinType, LaunchConfig, Signal,
    WaitSignalDesc, Window,
};
use devcomm_bench_kernels::{gin_put, lsa_put};

use super::{
    LARGEST, MAX_BLOCKS, Put, THREADS, WARP, case, ensure_two, message, peer_of, rounds, sizes,
    spoilt, wrong_in,
};
use crate::header::Header;
use crate::versus::gpus::Gpus;
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::variant::{Choice, Variant};

/// Measures every size.
pub fn run(options: &Put, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
    let gpus = job.machine;
    ensure_two(gpus.rank.n_ranks())?;
    leave_out(&mut job.choice, gpus)?;
    let over_gin = gpus.kernels(&mut job.choice, &crate::KERNELS, "gin_put")?;
    let over_nvlink = match job.choice.has(Variant::RustLsa) {
        true => Some(gpus.rank.load(&crate::KERNELS)?),
        false => None,
    };
    job.begin(Header::of(gpus.rank)?);
    for bytes in sizes(&options.sizes, LARGEST) {
        let (send, recv) = (gpus.comm.window(bytes)?, gpus.comm.window(bytes)?);
        let mut ways: Ways<'_> = Vec::new();
        for (variant, kernels) in &over_gin {
            let requirements = DevCommRequirements::new()
                .gin_connection(GinConnectionType::Full)
                .gin_type(GinType::Proxy)
                .gin_signals(1);
            let dev_comm = gpus.comm.create_dev_comm(requirements)?;
            let config = LaunchConfig::new(1, WARP);
            let (send, recv) = (&send, &recv);
            let way = PingPong::new(gpus, *variant, &send.device_slice(), &recv.device_slice())?;
            ways.push(Box::new(way.by_kernel(config, bytes, move |rounds| {
                let args = (&dev_comm, send, recv, bytes, rounds);
                // SAFETY: both windows have `bytes` bytes; every rank launches the same, in one stream, whose work is waited for;
                // the device communicator was made with PROXY.
                unsafe { kernels.launch(&gpus.stream, gin_put, config, args) }
            })));
        }
        if let Some(kernels) = &over_nvlink {
            let (blocks, threads) = options.grid.grid(bytes, THREADS, MAX_BLOCKS);
            let config = LaunchConfig::new(blocks, threads);
            let dev_comm = gpus.comm.create_dev_comm(DevCommRequirements::new())?;
            let flags: Window<u32> = gpus.comm.window(2 * blocks as usize)?;
            flags.fill(0)?;
            let (send, recv) = (&send, &recv);
            let variant = Variant::RustLsa;
            let way = PingPong::new(gpus, variant, &send.device_slice(), &recv.device_slice())?;
            ways.push(Box::new(way.by_kernel(config, bytes, move |rounds| {
                let args = (&dev_comm, send, recv, &flags, bytes, rounds);
                // SAFETY: both windows have `bytes` bytes and the flags two elements for every block, 0 at first; every rank launches
                // the same, in one stream, whose work is waited for; all are in one LSA team.
                unsafe { kernels.launch(&gpus.stream, lsa_put, config, args) }
            })));
        }
        if job.choice.has(Variant::Nccl) {
            ways.push(Box::new(PingPong::of_nccl(gpus, bytes)?));
        }
        if job.choice.has(Variant::NcclSym) {
            ways.push(Box::new(PingPong::of_nccl_on_windows(gpus, &send, &recv)?));
        }
        job.compare(case(bytes), &ways)?;
    }
    Ok(())
}

/// Leaves out what NCCL does not offer here.
fn leave_out(choice: &mut Choice, gpus: &Gpus<'_>) -> Result<()> {
    let properties = gpus.comm.properties()?;
    if !properties.gin_types.contains(GinType::Proxy) {
        for variant in [Variant::Rust, Variant::Cpp] {
            let why = "NCCL offers no GIN of type PROXY here; --gin-loopback carries it between the GPUs of one host";
            choice.leave_out(variant, why)?;
        }
    }
    if properties.n_lsa_teams > 1 {
        let why = "the ranks do not all reach each other by load and store";
        choice.leave_out(Variant::RustLsa, why)?;
    }
    if !properties.host_rma {
        let why = "NCCL offers no one-sided operations of the host here";
        choice.leave_out(Variant::NcclSym, why)?;
    }
    Ok(())
}

/// Messages there and back, `rounds` of them at once.
struct PingPong<'a> {
    gpus: &'a Gpus<'a>,
    variant: Variant,
    grid: Option<(u32, u32)>,
    recv: DeviceSlice<u8>,
    /// Round trips of what is timed.
    rounds: u32,
    play: Box<dyn Fn(u32) -> devcomm::Result<()> + 'a>,
}

impl<'a> PingPong<'a> {
    /// Nothing is played yet; `send` gets this rank's message.
    fn new(
        gpus: &'a Gpus<'a>,
        variant: Variant,
        send: &DeviceSlice<u8>,
        recv: &DeviceSlice<u8>,
    ) -> Result<Self> {
        send.copy_from_host(&message(gpus.options.run.seed, gpus.rank.rank(), send.len()))?;
        let (recv, play) = (recv.clone(), Box::new(|_| Ok(())));
        Ok(Self { gpus, variant, grid: None, recv, rounds: 1, play })
    }

    /// By a kernel that plays as many rounds as it is told.
    fn by_kernel(
        self,
        config: LaunchConfig,
        bytes: usize,
        play: impl Fn(u32) -> devcomm::Result<()> + 'a,
    ) -> Self {
        let grid = Some((config.grid.x, config.block.x));
        Self { grid, rounds: rounds(bytes), play: Box::new(play), ..self }
    }

    /// By calls on the host: of two ranks, the lower one sends first.
    fn by_host(
        self,
        send: impl Fn(usize) -> devcomm::Result<()> + 'a,
        receive: impl Fn(usize) -> devcomm::Result<()> + 'a,
    ) -> Self {
        let rank = self.gpus.rank.rank();
        let peer = peer_of(rank, self.gpus.rank.n_ranks());
        let play = move |rounds| {
            let Some(peer) = peer else { return Ok(()) };
            for _ in 0..rounds {
                if rank < peer {
                    send(peer)?;
                    receive(peer)?;
                } else {
                    receive(peer)?;
                    send(peer)?;
                }
            }
            Ok(())
        };
        Self { play: Box::new(play), ..self }
    }

    fn of_nccl(gpus: &'a Gpus<'a>, bytes: usize) -> Result<Self> {
        let (send, recv) = (gpus.comm.mem_alloc(bytes)?, gpus.comm.mem_alloc(bytes)?);
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let way = Self::new(gpus, Variant::Nccl, &send, &recv)?;
        Ok(way.by_host(
            move |peer| gpus.comm.send(&send, peer, &gpus.stream),
            move |peer| gpus.comm.recv(&recv, peer, &gpus.stream),
        ))
    }

    fn of_nccl_on_windows(
        gpus: &'a Gpus<'a>,
        send: &'a Window<u8>,
        recv: &'a Window<u8>,
    ) -> Result<Self> {
        let way = Self::new(gpus, Variant::NcclSym, &send.device_slice(), &recv.device_slice())?;
        Ok(way.by_host(
            move |peer| gpus.comm.put_signal(send, recv, 0, Signal::to(peer), &gpus.stream),
            move |peer| gpus.comm.wait_signal(&[WaitSignalDesc::from(peer)], &gpus.stream),
        ))
    }

    fn peer(&self) -> Option<usize> {
        peer_of(self.gpus.rank.rank(), self.gpus.rank.n_ranks())
    }

    fn seed(&self) -> u64 {
        self.gpus.options.run.seed
    }
}

impl Way for PingPong<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        self.grid
    }

    fn enqueue(&self) -> Result<()> {
        Ok((self.play)(self.rounds)?)
    }

    /// One way.
    fn operations(&self) -> u32 {
        2 * self.rounds
    }

    fn spoil(&self) -> Result<()> {
        if let Some(peer) = self.peer() {
            self.recv.copy_from_host(&spoilt(self.seed(), peer, self.recv.len()))?;
        }
        Ok(())
    }

    fn enqueue_checked(&self) -> Result<()> {
        Ok((self.play)(1)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Some(peer) = self.peer() else { return Ok(0) };
        let mut got = vec![0; self.recv.len()];
        self.recv.copy_to_host(&mut got)?;
        Ok(wrong_in(&got, self.seed(), peer))
    }
}
