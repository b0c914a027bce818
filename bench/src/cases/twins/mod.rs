//! Compares kernels in Rust with their twins in CUDA C++: same work, grid, block and memory,
//! assembled by the same ptxas.
//!
//! Three modules are timed: the Rust kernels, the C++ kernels, and the C++ kernels loaded a second
//! time, whose distance from the first is the measurement noise.

mod pairs;
mod run;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use devcomm::Kernels;

use super::benchmark::Benchmark;
use super::job::Job;
use crate::base::files::TwinFiles;
use crate::contenders::{Variant, VariantInfo};
use pairs::{PAIRS, Pair};
use run::Run;
pub use run::Twins;

impl Benchmark for Twins {
    const NAME: &'static str = "twins";
    const NEEDS_TWINS: bool = true;
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "a kernel in Rust, named in the column of reductions"),
        (Variant::Cpp, "the same kernel in C++"),
        (Variant::CppAgain, "this one loaded a second time"),
    ];

    fn validate(&self) -> Result<()> {
        for name in &self.kernels {
            ensure!(
                PAIRS.iter().any(|(known, _)| known == name),
                "there is no pair `{name}`; there are: {}",
                PAIRS.map(|(known, _)| known).join(", ")
            );
        }
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        harness.comm.require_single_lsa_team()?;
        let files = TwinFiles::find(job.twins)?;
        let wanted = |name: &str| self.kernels.is_empty() || self.kernels.iter().any(|k| k == name);
        let (present, missing): (Vec<Pair>, Vec<Pair>) = PAIRS
            .into_iter()
            .filter(|(name, _)| wanted(name))
            .partition(|(name, _)| files.has(name));
        let names = |pairs: &[Pair]| pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        let folder = files.folder().display();
        if present.is_empty() {
            bail!("{folder} has none of the pairs {}", names(&missing).join(", "));
        }
        // SAFETY: `cargo xtask twins` has made them of the kernels of these names.
        let load = |paths: Vec<PathBuf>| unsafe {
            Kernels::load_files(harness.rank.context(), &paths).context("the twins do not load")
        };
        let (rust, cpp) = (files.rust(&names(&present)), || files.cpp(&names(&present)));
        let compiled = [
            (Variant::Rust, load(rust)?),
            (Variant::Cpp, load(cpp())?),
            (Variant::CppAgain, load(cpp())?),
        ];
        job.begin()?;
        let mut run = Run { job, twins: self, compiled: &compiled };
        missing.iter().for_each(|(name, _)| run.omit(name, &format!("it is not in {folder}")));
        present.iter().try_for_each(|(_, pair)| pair(&mut run))
    }
}
