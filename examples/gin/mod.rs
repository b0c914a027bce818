//! What the examples of GIN share: options, who runs a kernel, random shapes and data.
#![allow(dead_code, reason = "each program uses a part of it")]

pub mod alltoall;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser};
use devcomm::sim::{self, Simulator};
use devcomm::{Element, Error, GinLoopback, Rank, Stream, World};
use half::{bf16, f16};

/// Options of every example of GIN.
#[derive(Clone, Copy, Debug, Parser)]
pub struct Options {
    /// Simulate N GPUs on the CPU instead
    #[arg(long, value_name = "N")]
    pub sim: Option<usize>,
    /// GPUs that reach each other by load and store, instead of all; simulated ones else half of them, where that is a number
    #[arg(long, value_name = "N")]
    pub team: Option<usize>,
    /// Random sizes, grids and blocks that are run
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub iterations: usize,
    /// Another number gives other random ones
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Simulated threads are switched at any access to memory, not only where they synchronise.
    #[arg(skip)]
    pub preempt: bool,
}

/// Simulated GPUs where there is none.
const SIMULATED: usize = 4;

/// What becomes an error that says who waits for what.
const LIMIT: Duration = Duration::from_secs(60);

/// The program: `on_gpus` in every rank, or `simulated` with numbers of GPUs and of those in a team.
pub fn run(
    about: &'static str,
    on_gpus: fn(&Rank, &Options) -> Result<()>,
    simulated: fn(usize, usize, &Options) -> Result<()>,
) -> ExitCode {
    let matches = Options::command().about(about).get_matches();
    let options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match run_with(&options, on_gpus, simulated) {
        Ok(verdict) => {
            println!("{verdict}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_with(
    options: &Options,
    on_gpus: fn(&Rank, &Options) -> Result<()>,
    simulated: fn(usize, usize, &Options) -> Result<()>,
) -> Result<&'static str> {
    let world = match options.sim {
        Some(_) => None,
        None => world(options)?,
    };
    let Some(world) = world else {
        let ranks = options.sim.unwrap_or(SIMULATED);
        let half = if ranks.is_multiple_of(2) { ranks / 2 } else { ranks };
        simulated(ranks, options.team.unwrap_or(half), options)?;
        return Ok("PASS, SIMULATED");
    };
    let roots = world.run(|rank| {
        on_gpus(rank, options)?;
        Ok::<_, anyhow::Error>(rank.is_root())
    })?;
    // After all ranks, and by one of them.
    Ok(if roots.contains(&true) { "PASS" } else { "" })
}

/// The ranks: those of a launcher, or every GPU of this machine as a thread. Where there is no RDMA card, devcomm's plugin carries what
/// GIN sends; that is said before anything else looks at the GPUs. `None` where there is none.
fn world(options: &Options) -> Result<Option<World>> {
    let mut loopback = GinLoopback::unless_rdma();
    if let Some(ranks) = options.team {
        loopback = loopback.lsa_team_size(ranks);
    }
    match World::builder().gin_loopback(loopback).from_env() {
        Ok(world) => Ok(Some(world)),
        Err(reason @ (Error::NoDriver { .. } | Error::NoGpu | Error::DriverTooOld { .. }))
            if !World::is_launched() =>
        {
            println!("no GPU: {reason}\nsimulating {SIMULATED} GPUs instead");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// `ranks` simulated GPUs in teams of `team`, with an order of threads and deliveries of iteration `i`'s own.
pub fn simulator(options: &Options, ranks: usize, team: usize, i: usize) -> sim::Result<Simulator> {
    let seed = options.seed.wrapping_add(i as u64);
    let builder = Simulator::builder().ranks(ranks).lsa_ranks(team).seed(seed);
    builder.preempt(options.preempt).build()
}

/// Waits for what was launched; a kernel that waits in vain becomes an error.
pub fn finish(stream: &Stream) -> devcomm::Result<()> {
    stream.synchronize_within(LIMIT)
}

/// Prints into how many LSA teams NCCL divides the ranks.
pub fn print_teams(rank: &Rank) -> devcomm::Result<()> {
    let properties = rank.communicator()?.properties()?;
    if rank.is_root() {
        let (teams, size) = (properties.n_lsa_teams, properties.lsa_size());
        println!("{} ranks: {teams} LSA teams of {size}", rank.n_ranks());
    }
    Ok(())
}

/// Random numbers: SplitMix64.
pub struct Random(u64);

impl Random {
    /// Those of iteration `i`, the same in every rank.
    pub fn new(seed: u64, i: usize) -> Self {
        Self(mix(seed ^ (i as u64) << 32))
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// One of `1..=most`, each as likely.
    pub fn up_to(&mut self, most: usize) -> usize {
        1 + (self.number() % most as u64) as usize
    }

    /// One of `1..=most`, each order of magnitude as likely: small and odd ones as well as large ones.
    pub fn size(&mut self, most: usize) -> usize {
        let bits = self.up_to(most.ilog2() as usize + 1);
        self.up_to(most.min(1 << bits))
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An element whose value says where it comes from.
pub trait Datum: Element {
    /// An element of random bits, but none whose bits are all 1: those are of what nobody has written.
    fn of(random: u64) -> Self;
    /// Its bits.
    fn bits(self) -> u64;
    /// The bits of what nobody has written, after a fill with 0xff.
    const UNTOUCHED: u64 = u64::MAX >> (64 - 8 * size_of::<Self>());
}

macro_rules! data {
    ($($type:ty, $random:ident => $of:expr, $x:ident => $bits:expr;)*) => { $(
        impl Datum for $type {
            fn of($random: u64) -> Self {
                $of
            }
            fn bits(self) -> u64 {
                let $x = self;
                $bits.into()
            }
        }
    )* };
}

data! {
    u8, random => (random % 255) as u8, x => x;
    f32, random => f32::from_bits((random % u64::from(u32::MAX)) as u32), x => x.to_bits();
    f16, random => f16::from_bits((random % 0xffff) as u16), x => x.to_bits();
    bf16, random => bf16::from_bits((random % 0xffff) as u16), x => x.to_bits();
}

/// What rank `from` sends as its `i`-th element.
pub fn datum<T: Datum>(salt: u64, from: usize, i: usize) -> T {
    T::of(mix(salt ^ mix((from as u64) << 48 ^ i as u64)))
}
