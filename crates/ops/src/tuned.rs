//! Plans that this machine has measured: files in the cache folder.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::prelude::*;

/// The plans of an operation, and the file that keeps them for later processes, as lines of a
/// table: one for each kind of GPU, number of ranks and version of devcomm. Of two processes that
/// save at the same moment, one may lose its plan.
pub(crate) struct Tuned<P> {
    /// `None` on simulated GPUs, without a cache folder, and if `DEVCOMM_KEPT_PLANS` is 0.
    file: Option<PathBuf>,
    plans: RefCell<Plans<P>>,
}

/// Parses a line of a table: `m n k plan`, and a comment after `#`. `devcomm-bench tune gemm`
/// writes such lines too.
pub(crate) fn parse_entry<P: FromStr>(line: &str) -> Option<([u32; 3], P)> {
    let mut words = line.split('#').next()?.split_whitespace();
    let mut number = || words.next()?.parse().ok();
    let shape = [number()?, number()?, number()?];
    Some((shape, words.next()?.parse().ok()?))
}

impl<P: Copy + FromStr + Display> Tuned<P> {
    /// Returns the plans of an operation that `ranks` GPUs of this kind do together.
    pub(crate) fn new(context: &Context, operation: &str, ranks: usize) -> Result<Self> {
        let is_off = std::env::var_os("DEVCOMM_KEPT_PLANS").is_some_and(|value| value == "0");
        let cache = match is_off || context.is_simulated() {
            true => Ok(None),
            false => devcomm_locate::cache_dir_if_safe().or_else(|error| refuse(error.to_string())),
        };
        let folder = cache?.map(|cache| cache.join("plans"));
        Ok(Self::in_folder(folder.as_deref(), &context.device_name()?, operation, ranks))
    }

    /// Returns the plans that a folder has, or none without a folder.
    pub(crate) fn in_folder(
        folder: Option<&Path>,
        gpu: &str,
        operation: &str,
        ranks: usize,
    ) -> Self {
        const VERSION: &str = env!("CARGO_PKG_VERSION");
        let name = format!("{operation}-{ranks}-{gpu}-{VERSION}.txt").replace([' ', '/'], "_");
        let file = folder.map(|folder| folder.join(name));
        let plans = file.as_deref().map(read).unwrap_or_default();
        Self { file, plans: RefCell::new(plans) }
    }

    pub(crate) fn hash(&self) -> u64 {
        hash(text(&self.plans.borrow()))
    }

    /// Returns the plans that all ranks have: none, if their [hashes](Self::hash) differ.
    pub(crate) fn agreed(self, mut all: impl Iterator<Item = u64>) -> Self {
        let own = self.hash();
        if !all.all(|hash| hash == own) {
            self.plans.borrow_mut().clear();
        }
        self
    }

    pub(crate) fn all(&self) -> Vec<([u32; 3], P)> {
        self.plans.borrow().iter().map(|(shape, plan)| (*shape, *plan)).collect()
    }

    pub(crate) fn plan(&self, extents: Extents) -> Option<P> {
        self.plans.borrow().get(&extents.array()).copied()
    }

    /// Adds a plan, and writes it to the file, if there is a file. A failed write is ignored.
    pub(crate) fn save(&self, extents: Extents, plan: P) {
        let Some(file) = &self.file else { return };
        self.insert(extents, plan);
        // Read again, as other objects and processes have saved plans since.
        let mut kept = read(file);
        kept.insert(extents.array(), plan);
        // Another process or thread may read the file meanwhile: a renamed one is always whole.
        let (process, thread) = (std::process::id(), std::thread::current().id());
        let new = file.with_extension(format!("{process}-{thread:?}.new"));
        let written = file.parent().map_or(Ok(()), fs::create_dir_all);
        let written = written.and_then(|()| fs::write(&new, text(&kept)));
        let _ = written.and_then(|()| fs::rename(&new, file));
    }

    pub(crate) fn insert(&self, extents: Extents, plan: P) {
        self.plans.borrow_mut().insert(extents.array(), plan);
    }
}

type Plans<P> = BTreeMap<[u32; 3], P>;

/// Returns the plans of a file, or none if it cannot be read.
fn read<P: FromStr>(file: &Path) -> Plans<P> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().filter_map(parse_entry).collect()
}

fn text<P: Display>(plans: &Plans<P>) -> String {
    plans.iter().map(|([m, n, k], plan)| format!("{m} {n} {k} {plan}\n")).collect()
}

#[cfg(test)]
mod tests;
