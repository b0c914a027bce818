//! Put: messages to a neighbouring rank and back, each with a signal, by kernels over the network (GIN) and over NVLink,
//! against NCCL's sends and puts on the host.

mod gpus;
mod simulated;

use anyhow::{Result, ensure};

use clap::Args;

use super::Benchmark;
use super::gpus::Gpus;
use super::machine::Job;
use super::row::Case;
use super::simulated::Simulated;
use super::variant::{Described, Variant};
use crate::number::word;
use crate::options::{GridOptions, SizeOptions};

/// The flags of `put`.
#[derive(Args, Clone, Debug)]
pub struct Put {
    #[command(flatten)]
    sizes: SizeOptions,

    #[command(flatten)]
    grid: GridOptions,
}

impl Benchmark for Put {
    const NAME: &'static str = "put";
    const VARIANTS: &'static [Described] = &[
        (Variant::Rust, "puts with a signal over GIN (PROXY) by one warp"),
        (
            Variant::RustLsa,
            "stores over NVLink and then a flag; each block plays by itself, so with many blocks both directions are busy at once",
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

    fn on_gpus(&self, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
        gpus::run(self, job)
    }

    fn simulated(&self, job: &mut Job<'_, Simulated>) -> Result<()> {
        simulated::run(self, job)
    }
}

/// The smallest message, beside those of the command line.
const SMALLEST: usize = 8;
/// The largest message where none was named, on GPUs.
const LARGEST: usize = 4 << 20;
/// Threads of a block that stores, and blocks at most.
const THREADS: u32 = 512;
const MAX_BLOCKS: u32 = 32;
/// A block that puts over the network.
const WARP: u32 = 32;

/// Message sizes, in bytes.
fn sizes(options: &SizeOptions, largest: usize) -> Vec<usize> {
    let smaller = (options.min > SMALLEST).then_some(SMALLEST);
    smaller.into_iter().chain(options.sizes(largest)).collect()
}

/// Round trips of a launch that is timed: so many that the launch does not count, but not more bytes than take some time.
fn rounds(bytes: usize) -> u32 {
    ((16 << 20) / bytes).clamp(2, 50) as u32
}

fn case(bytes: usize) -> Case {
    Case { size: bytes, count: bytes, dtype: "u8", redop: "-", bus: 1.0, shape: None }
}

/// The rank that a rank plays with, if there is one.
fn peer_of(rank: usize, ranks: usize) -> Option<usize> {
    Some(rank ^ 1).filter(|peer| *peer < ranks)
}

fn ensure_two(ranks: usize) -> Result<()> {
    ensure!(ranks >= 2, "a put needs two ranks, and there is one");
    Ok(())
}

/// What a rank sends.
fn message(seed: u64, rank: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| word(seed, rank, index) as u8).collect()
}

/// The bytes that are not what `peer` sends.
fn wrong_in(got: &[u8], seed: u64, peer: usize) -> usize {
    got.iter().zip(message(seed, peer, got.len())).filter(|(got, sent)| **got != *sent).count()
}

/// What a message is spoilt with: no byte of it stays right.
fn spoilt(seed: u64, peer: usize, bytes: usize) -> Vec<u8> {
    message(seed, peer, bytes).into_iter().map(|byte| !byte).collect()
}
