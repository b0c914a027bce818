//! Put: ping-pong with a neighbouring rank, each message with a signal, by kernels over the network
//! (GIN) and over NVLink, against NCCL's host sends and puts.

use devcomm::{GinType, Kernels, Signal, WaitSignalDesc};

use super::benchmark::{SIMULATED_BLOCKS, SIMULATED_LARGEST};
use super::operation::nccl_variants;
use super::prelude::*;
use crate::base::KERNELS;
use crate::cases::workloads::{self, Message, Workload};

/// The flags of `put`.
#[derive(Args, Clone, Debug)]
pub struct Put {
    #[command(flatten)]
    sizes: SizeOptions,

    #[command(flatten)]
    grid: GridOptions,
}

/// The message in bytes that is measured first if all of the command line's sizes are larger.
const SMALLEST: usize = 8;
/// Default largest message on GPUs.
const LARGEST: usize = 4 << 20;
/// Threads per block and maximum blocks of the kernel that stores over NVLink.
const THREADS: u32 = 512;
const MAX_BLOCKS: u32 = 32;

impl Benchmark for Put {
    const NAME: &'static str = "put";

    fn validate(&self) -> Result<()> {
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() >= 2, "a put needs two ranks, and there is one");
        omit(job)?;
        let over_gin = job.kernels(&KERNELS, "gin_put")?;
        let nccl = job.nccl()?;
        let load = || Ok(Kernels::load(harness.rank.context(), &KERNELS)?);
        let over_nvlink = job.selection.make(Variant::RustLsa, load)?;
        job.begin()?;
        let max_blocks = harness.choose(MAX_BLOCKS, SIMULATED_BLOCKS);
        let smallest = (self.sizes.min > SMALLEST).then_some(SMALLEST);
        let sizes = self.sizes.sizes(harness.choose(LARGEST, SIMULATED_LARGEST));
        for bytes in smallest.into_iter().chain(sizes) {
            let windows = &[harness.comm.window(bytes)?, harness.comm.window(bytes)?];
            let message = Message::new(harness, &windows[0], &windows[1])?;
            let rounds = rounds(bytes);
            let gin = (!over_gin.is_empty())
                .then(|| workloads::Put::over_gin(&message, windows, rounds))
                .transpose()?;
            let grid = self.grid.grid(bytes, THREADS, max_blocks);
            let nvlink = (over_nvlink.is_some())
                .then(|| workloads::Put::over_nvlink(&message, windows, rounds, grid))
                .transpose()?;
            let mut contenders = Vec::new();
            if let Some(put) = &gin {
                contenders.extend(put.contenders(&over_gin)?);
            }
            if let (Some(put), Some(kernels)) = (&nvlink, &over_nvlink) {
                contenders.push(put.contender(Variant::RustLsa, kernels)?);
            }
            for (variant, (_, nccl)) in nccl_variants(&job.selection, &nccl, false) {
                contenders.push(match variant {
                    Variant::Nccl => by_nccl(harness, nccl, bytes)?,
                    _ => by_nccl_sym(harness, nccl, bytes)?,
                });
            }
            let (size, count) = (bytes, bytes);
            let case = Case { size, count, dtype: "u8", ..Case::NONE };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
}

/// Returns the round trips per timed launch: enough to hide the launch, within a limit of bytes.
fn rounds(bytes: usize) -> u32 {
    ((16 << 20) / bytes).clamp(2, 50) as u32
}

/// Omits variants that cannot run here.
pub fn omit(job: &mut Job<'_>) -> Result<()> {
    let properties = job.harness.comm.properties()?;
    if !properties.gin_types.contains(GinType::Proxy) {
        for variant in [Variant::Rust, Variant::Cpp] {
            let why = "NCCL offers no GIN of type PROXY here; --gin-loopback enables it between \
                       the GPUs of one host";
            job.selection.omit(variant, why)?;
        }
    }
    if properties.n_lsa_teams > 1 {
        let why = "the ranks do not all reach each other by load and store";
        job.selection.omit(Variant::RustLsa, why)?;
    }
    if !properties.host_rma {
        let why = "NCCL offers no host one-sided operations here";
        job.selection.omit(Variant::NcclSym, why)?;
    }
    Ok(())
}

/// Returns NCCL's host sends, on memory of `ncclMemAlloc`.
pub fn by_nccl<'a>(
    harness: &'a Harness<'a>,
    nccl: &'a Nccl<'_>,
    bytes: usize,
) -> Result<Contender<'a>> {
    let (comm, stream) = (nccl.comm(), &harness.stream);
    let (send, recv) = (comm.mem_alloc(bytes)?, comm.mem_alloc(bytes)?);
    let message = Message::new(harness, &send, &recv)?;
    let send = move |peer| comm.send(&send, peer, stream);
    let receive = move |peer| comm.recv(&recv, peer, stream);
    Ok(by_host(Variant::Nccl, message, send, receive).configured(nccl.name.as_ref()))
}

/// Returns NCCL's host puts of a whole window, to the beginning of the peer's.
fn by_nccl_sym<'a>(
    harness: &'a Harness<'a>,
    nccl: &'a Nccl<'_>,
    bytes: usize,
) -> Result<Contender<'a>> {
    let (comm, stream) = (nccl.comm(), &harness.stream);
    let (send, recv) = (comm.window::<u8>(bytes)?, comm.window(bytes)?);
    let message = Message::new(harness, &send, &recv)?;
    let send = move |peer| comm.put_signal(&send, &recv, 0, Signal::to(peer), stream);
    let receive = move |peer| comm.wait_signal(&[WaitSignalDesc::from(peer)], stream);
    Ok(by_host(Variant::NcclSym, message, send, receive).configured(nccl.name.as_ref()))
}

/// Returns a contender that makes one round trip: the lower rank of a pair sends first. A rank
/// without a neighbour does nothing.
pub fn by_host<'a>(
    variant: Variant,
    message: Message<'a>,
    send: impl Fn(usize) -> devcomm::Result<()> + 'a,
    receive: impl Fn(usize) -> devcomm::Result<()> + 'a,
) -> Contender<'a> {
    let (rank, peer) = (message.harness.rank.rank(), message.peer());
    let work = move || {
        match peer {
            None => {}
            Some(peer) if rank < peer => {
                send(peer)?;
                receive(peer)?;
            }
            Some(peer) => {
                receive(peer)?;
                send(peer)?;
            }
        }
        Ok(())
    };
    // A row reports the one-way time.
    Contender { operations: 2, ..Contender::new(variant, work, message) }
}
