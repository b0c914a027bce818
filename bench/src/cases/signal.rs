//! Signal: ping-pong without data with a neighbouring rank, by kernels over the network (GIN) and
//! over NVLink, against NCCL's host sends and signals.

use anyhow::{Context, Result, ensure};
use clap::Args;
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, DeviceSlice, GinConnectionType, GinType, Kernels,
    LaunchConfig, WaitSignalDesc, Window,
};
use devcomm_bench_kernels::{gin_signal, lsa_signal};

use super::benchmark::Benchmark;
use super::job::Job;
use super::put::{by_host, by_nccl, omit};
use crate::cases::workloads::Message;
use crate::contenders::contender::{Contender, Outcome, Variant};
use crate::contenders::selection::VariantInfo;
use crate::harness::Harness;
use crate::report::row::Case;

/// The flags of `signal`: none of its own.
#[derive(Args, Clone, Debug)]
pub struct Signal {}

/// Round trips per timed launch: enough to hide the launch.
const ROUNDS: u32 = 1000;
/// Round trips per checked launch, and on simulated GPUs.
const CHECKED_ROUNDS: u32 = 100;
const SIMULATED_ROUNDS: u32 = 3;

impl Benchmark for Signal {
    const NAME: &'static str = "signal";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "signals over GIN (PROXY) by one warp, 1000 round trips per launch"),
        (Variant::RustLsa, "flags over NVLink by one warp, 1000 round trips per launch"),
        (
            Variant::Nccl,
            "ncclSend and ncclRecv of a byte that is not registered, two launches per round trip",
        ),
        (Variant::NcclSym, "ncclSignal and ncclWaitSignal"),
    ];

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() >= 2, "a signal needs two ranks, and there is one");
        omit(job)?;
        let compiled = Kernels::load(harness.rank.context(), &crate::base::kernels::KERNELS)?;
        job.begin()?;
        let mut pairs = Vec::new();
        for variant in [Variant::Rust, Variant::RustLsa] {
            if job.selection.has(variant) {
                pairs.push(Pair::new(harness, &compiled, variant)?);
            }
        }
        let windows = [harness.comm.window(1)?, harness.comm.window(1)?];
        let mut contenders = pairs.iter().map(Pair::contender).collect::<Result<Vec<_>>>()?;
        if job.selection.has(Variant::Nccl) {
            contenders.push(by_nccl(harness, 1)?);
        }
        if job.selection.has(Variant::NcclSym) {
            contenders.push(by_nccl_sym(harness, &windows)?);
        }
        job.compare(Case::NONE, &contenders)
    }
}

/// The two ranks' ping-pong by a kernel.
struct Pair<'a> {
    harness: &'a Harness<'a>,
    compiled: &'a Kernels,
    variant: Variant,
    dev_comm: DevCommResource,
    words: Window<u32>,
    config: LaunchConfig,
}

impl<'a> Pair<'a> {
    /// *Collective*.
    fn new(harness: &'a Harness<'a>, compiled: &'a Kernels, variant: Variant) -> Result<Self> {
        let requirements = match variant {
            Variant::Rust => DevCommRequirements::new()
                .gin_connection(GinConnectionType::Full)
                .gin_type(GinType::Proxy)
                .gin_signals(1),
            _ => DevCommRequirements::new(),
        };
        let dev_comm = harness.comm.create_dev_comm(requirements)?;
        let words = harness.comm.window(3)?;
        words.fill_bytes(0)?;
        let config = LaunchConfig::new(1, 32);
        Ok(Self { harness, compiled, variant, dev_comm, words, config })
    }

    fn ping_pong(&self, rounds: u32) -> devcomm::Result<()> {
        let Self { harness, compiled, dev_comm, words, config, .. } = self;
        let target = compiled.on(&harness.stream);
        // SAFETY: the window has three elements on every rank, initially 0; every rank launches the
        // same, on one stream, which is synchronised before the window is dropped; the device
        // communicator has PROXY for GIN, and all ranks are in one LSA team for NVLink.
        unsafe {
            match self.variant {
                Variant::Rust => {
                    let signal = gin_signal::args(dev_comm, words, rounds);
                    signal.config(*config).launch(&target)
                }
                _ => lsa_signal::args(dev_comm, words, rounds).config(*config).launch(&target),
            }
        }
    }

    fn contender(&self) -> Result<Contender<'_>> {
        let rounds = self.harness.choose(CHECKED_ROUNDS, SIMULATED_ROUNDS);
        let info = match self.variant {
            Variant::Rust => self.compiled.info::<gin_signal>()?,
            _ => self.compiled.info::<lsa_signal>()?,
        };
        let received = Received { pair: self, rounds, words: self.words.slice(..1)? };
        let contender = Contender::new(self.variant, move || self.ping_pong(rounds), received);
        // A round trip has two signals.
        Ok(contender.timed(2 * ROUNDS, || self.ping_pong(ROUNDS)).by_kernel(self.config, info))
    }
}

/// The number of signals that a launch received.
struct Received<'a> {
    pair: &'a Pair<'a>,
    rounds: u32,
    words: DeviceSlice<u32>,
}

impl Outcome for Received<'_> {
    fn poison(&self) -> Result<()> {
        Ok(self.words.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let rank = self.pair.harness.rank;
        let mut got = [0];
        self.words.copy_to_host(&mut got)?;
        let has_peer = rank.rank() ^ 1 < rank.n_ranks();
        Ok(usize::from(has_peer && got != [self.rounds]))
    }
}

/// Returns NCCL's host signals. In the check each follows a byte, which its receiver must see.
fn by_nccl_sym<'a>(
    harness: &'a Harness<'a>,
    [send, recv]: &'a [Window<u8>; 2],
) -> Result<Contender<'a>> {
    let Harness { comm, stream, .. } = harness;
    let seen = comm.mem_alloc(1)?.device_slice();
    let message = Message::new(harness, &send.device_slice(), &seen)?;
    let theirs = message.peer().map(|peer| peer_slice(harness, recv, peer)).transpose()?;
    let signal = move |peer| comm.signal(devcomm::Signal::to(peer), stream);
    let wait = move |peer| comm.wait_signal(&[WaitSignalDesc::from(peer)], stream);
    let put = move |peer| {
        theirs.iter().try_for_each(|theirs| stream.copy(send, theirs))?;
        signal(peer)
    };
    let see = move |peer| {
        wait(peer)?;
        stream.copy(recv, &seen)
    };
    let timed = by_host(Variant::NcclSym, Message::new(harness, send, recv)?, signal, wait).timed;
    Ok(Contender { timed, ..by_host(Variant::NcclSym, message, put, see) })
}

/// Returns a window of a rank that this one reaches by load and store. The window outlives its
/// uses: every rank drops it only after all ranks have synchronised their streams.
pub fn peer_slice(
    harness: &Harness<'_>,
    window: &Window<u8>,
    peer: usize,
) -> Result<DeviceSlice<u8>> {
    let address = window.peer_pointer(peer, 0)?.context("the peer is not reached by load")?;
    // SAFETY: the window has this length on the peer, and the address maps it on this GPU.
    Ok(unsafe { DeviceSlice::from_raw_parts(harness.rank.context(), address, window.len()) })
}
