//! The simulator: all ranks in one thread. It simulates kernels, so that the variants of NCCL's host are not there, and its
//! times say nothing about GPUs.

use anyhow::Result;
use devcomm::sim::Simulator;

use super::machine::{Machine, Ways};
use super::row::Rounds;
use super::variant::{Choice, Variant};
use crate::stats::Shuffle;

/// Simulated ranks.
pub struct Simulated {
    pub sim: Simulator,
}

/// The largest message where none was named.
pub const LARGEST: usize = 64 << 10;
/// Blocks at most: a simulated block takes as long as all others together.
pub const MAX_BLOCKS: u32 = 4;

impl Simulated {
    /// `ranks` ranks that reach each other by load and store.
    pub fn new(ranks: usize) -> Result<Self> {
        Ok(Self { sim: Simulator::new(ranks)? })
    }

    /// Does something for each rank.
    pub fn each_rank(&self, body: impl FnMut(usize) -> Result<()>) -> Result<()> {
        (0..self.sim.ranks()).try_for_each(body)
    }

    /// Leaves out what is not simulated.
    pub fn leave_out(choice: &mut Choice) -> Result<()> {
        let rust_only = "the simulator runs nothing but kernels in Rust";
        choice.leave_out(Variant::Cpp, rust_only)?;
        choice.leave_out(Variant::Nccl, rust_only)?;
        choice.leave_out(Variant::NcclSym, rust_only)
    }
}

impl Machine for Simulated {
    fn meet(&self) -> Result<()> {
        Ok(())
    }

    fn run_once(&self, work: &dyn Fn() -> Result<()>) -> Result<()> {
        work()
    }

    fn total(&self, mine: usize) -> Result<usize> {
        Ok(mine)
    }

    fn time(&self, _ways: &Ways<'_>, _order: &mut Shuffle) -> Result<Option<Rounds>> {
        Ok(None)
    }

    fn is_root(&self) -> bool {
        true
    }
}
