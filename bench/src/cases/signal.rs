//! Signal: ping-pong without data with a neighbouring rank, by kernels over the network (GIN) and
//! over NVLink, against NCCL's host sends and signals.

use devcomm::{
    Buffer, DevCommRequirements, DeviceSlice, Kernels, LaunchConfig, WaitSignalDesc, Window,
};
use devcomm_bench_kernels::{gin_signal, lsa_signal};
use devcomm_testing::simulated::read;

use super::operation::nccl_variants;
use super::prelude::*;
use super::put::{by_host, by_nccl, omit};
use crate::cases::workloads::{Message, gin_requirements};

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

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() >= 2, "a signal needs two ranks, and there is one");
        omit(job)?;
        let compiled = Kernels::load(harness.rank.context(), &crate::base::KERNELS)?;
        let nccl = job.nccl()?;
        job.begin()?;
        let (selection, mut contenders) = (&job.selection, Vec::new());
        for variant in [Variant::Rust, Variant::RustLsa] {
            contenders.extend(selection.make(variant, || by_kernel(harness, &compiled, variant))?);
        }
        for (variant, (_, nccl)) in nccl_variants(selection, &nccl, false) {
            contenders.push(match variant {
                Variant::Nccl => by_nccl(harness, nccl, 1)?,
                _ => by_nccl_sym(harness, nccl)?,
            });
        }
        job.compare(Case::NONE, &contenders)
    }
}

/// Returns the two ranks' ping-pong by a kernel. *Collective*.
fn by_kernel<'a>(
    harness: &'a Harness<'a>,
    compiled: &'a Kernels,
    variant: Variant,
) -> Result<Contender<'a>> {
    let (requirements, info) = match variant {
        Variant::Rust => (gin_requirements(), compiled.info::<gin_signal>()?),
        _ => (DevCommRequirements::new(), compiled.info::<lsa_signal>()?),
    };
    let dev_comm = harness.comm.create_dev_comm(requirements)?;
    // The received signals of a launch, and two words in which `lsa_signal` keeps its state.
    let words = harness.comm.window(3)?;
    words.fill_bytes(0)?;
    let config = LaunchConfig::new(1, 32);
    let rounds = harness.choose(CHECKED_ROUNDS, SIMULATED_ROUNDS);
    let received = Received { harness, rounds, words: words.slice(..1)? };
    let ping_pong = move |rounds| {
        let target = compiled.on(&harness.stream);
        // SAFETY: the window has three elements on every rank, initially 0; every rank launches the
        // same, on one stream, which is synchronised before the window is dropped; the device
        // communicator has PROXY for GIN, and all ranks are in one LSA team for NVLink.
        unsafe {
            match variant {
                Variant::Rust => {
                    gin_signal::args(&dev_comm, &words, rounds).config(config).launch(&target)
                }
                _ => lsa_signal::args(&dev_comm, &words, rounds).config(config).launch(&target),
            }
        }
    };
    // A round trip has two signals.
    let contender = Contender::in_rounds(variant, ping_pong, [rounds, ROUNDS], 2, received);
    Ok(contender.by_kernel(config, info))
}

/// The number of signals that a launch received.
struct Received<'a> {
    harness: &'a Harness<'a>,
    rounds: u32,
    words: DeviceSlice<u32>,
}

impl Outcome for Received<'_> {
    fn poison(&self) -> Result<()> {
        Ok(self.words.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let rank = self.harness.rank;
        let has_peer = rank.rank() ^ 1 < rank.n_ranks();
        Ok(usize::from(has_peer && read(&self.words)? != [self.rounds]))
    }
}

/// Returns NCCL's host signals. In the check each follows a byte, which its receiver must see.
fn by_nccl_sym<'a>(harness: &'a Harness<'a>, nccl: &'a Nccl<'_>) -> Result<Contender<'a>> {
    let (comm, stream) = (nccl.comm(), &harness.stream);
    let (send, recv) = (comm.window::<u8>(1)?, comm.window(1)?);
    let seen = comm.mem_alloc(1)?.device_slice();
    let message = Message::new(harness, &send.device_slice(), &seen)?;
    let theirs = message.peer().map(|peer| peer_slice(harness, &recv, peer)).transpose()?;
    let timed = Message::new(harness, &send, &recv)?;
    let signal = move |peer| comm.signal(devcomm::Signal::to(peer), stream);
    let wait = move |peer| comm.wait_signal(&[WaitSignalDesc::from(peer)], stream);
    let put = move |peer| {
        theirs.iter().try_for_each(|theirs| stream.copy(&send, theirs))?;
        signal(peer)
    };
    let see = move |peer| {
        wait(peer)?;
        stream.copy(&recv, &seen)
    };
    let timed = by_host(Variant::NcclSym, timed, signal, wait).timed;
    let checked = by_host(Variant::NcclSym, message, put, see).configured(nccl.name.as_ref());
    Ok(Contender { timed, ..checked })
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
