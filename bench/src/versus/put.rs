//! Put: messages to a neighbouring rank and back, each with a signal, by kernels over the network
//! (GIN) and over NVLink, against NCCL's sends and puts on the host.

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{GinType, Signal, WaitSignalDesc, Window};

use super::choice::Described;
use super::job::Job;
use super::row::Case;
use super::{Benchmark, SIMULATED_BLOCKS, SIMULATED_LARGEST};
use crate::contender::{Contender, Contenders, Variant, by_kernels};
use crate::harness::Harness;
use crate::options::{GridOptions, SizeOptions};
use crate::workloads::{self, Message};

/// The flags of `put`.
#[derive(Args, Clone, Debug)]
pub struct Put {
    #[command(flatten)]
    sizes: SizeOptions,

    #[command(flatten)]
    grid: GridOptions,
}

/// The smallest message, beside those of the command line.
const SMALLEST: usize = 8;
/// The largest message where none was named, on GPUs.
const LARGEST: usize = 4 << 20;
/// Threads of a block that stores, and blocks at most on GPUs.
const THREADS: u32 = 512;
const MAX_BLOCKS: u32 = 32;

impl Benchmark for Put {
    const NAME: &'static str = "put";
    const VARIANTS: &'static [Described] = &[
        (Variant::Rust, "puts with a signal over GIN (PROXY) by one warp"),
        (
            Variant::RustLsa,
            "stores over NVLink and then a flag; each block plays by itself, so with many blocks \
             both directions are busy at once",
        ),
        (Variant::Cpp, "rust's twin in C++"),
        (
            Variant::Nccl,
            "ncclSend and ncclRecv on memory that is not registered, two launches a round trip",
        ),
        (Variant::NcclSym, "ncclPutSignal and ncclWaitSignal on symmetric windows"),
    ];

    fn validate(&self) -> Result<()> {
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() >= 2, "a put needs two ranks, and there is one");
        leave_out(job)?;
        let over_gin = job.kernels(&crate::KERNELS, "gin_put")?;
        let over_nvlink = match job.choice.has(Variant::RustLsa) {
            true => vec![(Variant::RustLsa, harness.rank.load(&crate::KERNELS)?)],
            false => Vec::new(),
        };
        job.begin()?;
        let max_blocks = harness.here(MAX_BLOCKS, SIMULATED_BLOCKS);
        let smallest = (self.sizes.min > SMALLEST).then_some(SMALLEST);
        let sizes = self.sizes.sizes(harness.here(LARGEST, SIMULATED_LARGEST));
        for bytes in smallest.into_iter().chain(sizes) {
            let windows = &[harness.comm.window(bytes)?, harness.comm.window(bytes)?];
            let message = Message::new(harness, &windows[0], &windows[1])?;
            let rounds = rounds(bytes);
            let gin = (!over_gin.is_empty())
                .then(|| workloads::Put::over_gin(&message, windows, rounds))
                .transpose()?;
            let grid = self.grid.grid(bytes, THREADS, max_blocks);
            let nvlink = (!over_nvlink.is_empty())
                .then(|| workloads::Put::over_nvlink(&message, windows, rounds, grid))
                .transpose()?;
            let mut contenders: Contenders<'_> = Vec::new();
            contenders.extend(gin.iter().flat_map(|put| by_kernels(&over_gin, put)));
            contenders.extend(nvlink.iter().flat_map(|put| by_kernels(&over_nvlink, put)));
            if job.choice.has(Variant::Nccl) {
                contenders.push(Box::new(ByHost::unregistered(harness, bytes)?));
            }
            if job.choice.has(Variant::NcclSym) {
                contenders.push(Box::new(ByHost::on_windows(harness, windows)?));
            }
            let (size, count) = (bytes, bytes);
            let case = Case { size, count, dtype: "u8", redop: "-", bus: 1.0, shape: None };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
}

/// Round trips of a launch that is timed: so many that the launch does not count, but not more
/// bytes than take some time.
fn rounds(bytes: usize) -> u32 {
    ((16 << 20) / bytes).clamp(2, 50) as u32
}

/// Leaves out what NCCL does not offer here.
fn leave_out(job: &mut Job<'_>) -> Result<()> {
    let properties = job.harness.comm.properties()?;
    if !properties.gin_types.contains(GinType::Proxy) {
        for variant in [Variant::Rust, Variant::Cpp] {
            let why = "NCCL offers no GIN of type PROXY here; --gin-loopback carries it between \
                       the GPUs of one host";
            job.choice.leave_out(variant, why)?;
        }
    }
    if properties.n_lsa_teams > 1 {
        let why = "the ranks do not all reach each other by load and store";
        job.choice.leave_out(Variant::RustLsa, why)?;
    }
    if !properties.host_rma {
        let why = "NCCL offers no one-sided operations of the host here";
        job.choice.leave_out(Variant::NcclSym, why)?;
    }
    Ok(())
}

/// One message there and one back, by calls on the host.
struct ByHost<'a> {
    variant: Variant,
    message: Message<'a>,
    send: Box<dyn Fn(usize) -> devcomm::Result<()> + 'a>,
    receive: Box<dyn Fn(usize) -> devcomm::Result<()> + 'a>,
}

impl<'a> ByHost<'a> {
    /// By sends, from memory of its own as NCCL allocates it.
    fn unregistered(harness: &'a Harness<'a>, bytes: usize) -> Result<Self> {
        let Harness { comm, stream, .. } = harness;
        let (send, recv) = (comm.mem_alloc(bytes)?, comm.mem_alloc(bytes)?);
        Ok(Self {
            variant: Variant::Nccl,
            message: Message::new(harness, &send, &recv)?,
            send: Box::new(move |peer| comm.send(&send, peer, stream)),
            receive: Box::new(move |peer| comm.recv(&recv, peer, stream)),
        })
    }

    /// By puts, from window to window.
    fn on_windows(harness: &'a Harness<'a>, [send, recv]: &'a [Window<u8>; 2]) -> Result<Self> {
        let Harness { comm, stream, .. } = harness;
        Ok(Self {
            variant: Variant::NcclSym,
            message: Message::new(harness, send, recv)?,
            send: Box::new(move |peer| comm.put_signal(send, recv, 0, Signal::to(peer), stream)),
            receive: Box::new(move |peer| comm.wait_signal(&[WaitSignalDesc::from(peer)], stream)),
        })
    }
}

impl Contender for ByHost<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn enqueue(&self) -> Result<()> {
        let (rank, Some(peer)) = (self.message.harness.rank.rank(), self.message.peer()) else {
            return Ok(());
        };
        // Of two ranks, the lower one sends first.
        if rank < peer {
            (self.send)(peer)?;
            (self.receive)(peer)?;
        } else {
            (self.receive)(peer)?;
            (self.send)(peer)?;
        }
        Ok(())
    }

    /// One way.
    fn operations(&self) -> u32 {
        2
    }

    fn spoil(&self) -> Result<()> {
        self.message.spoil()
    }

    fn count_wrong(&self) -> Result<usize> {
        self.message.count_wrong()
    }
}
