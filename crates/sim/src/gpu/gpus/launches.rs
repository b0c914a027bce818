//! Counts of the launches of kernels.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::gpu::thread::Grid;

/// The package of devcomm's own kernels.
const OWN_PACKAGE: &str = "devcomm-kernels";

/// The launches that have ended, by the kernel's name.
#[derive(Default)]
pub(crate) struct Launches(RefCell<BTreeMap<&'static str, KernelLaunches>>);

#[derive(Default)]
struct KernelLaunches {
    by_gpu: BTreeMap<usize, u64>,
    uses_peers: bool,
}

impl Launches {
    pub(crate) fn ended(&self, grid: &Grid) {
        if grid.launch.package == OWN_PACKAGE {
            return;
        }
        let mut all = self.0.borrow_mut();
        let kernel = all.entry(grid.launch.kernel).or_default();
        *kernel.by_gpu.entry(grid.launch.gpu).or_default() += 1;
        kernel.uses_peers |= grid.uses_peers.get();
    }

    /// Returns the kernels that use peers' memory, and that no GPU has launched twice.
    pub(crate) fn launched_once(&self) -> Vec<&'static str> {
        let all = self.0.borrow();
        let once = all.iter().filter(|(_, kernel)| {
            kernel.uses_peers && kernel.by_gpu.values().all(|launches| *launches == 1)
        });
        once.map(|(name, _)| *name).collect()
    }
}
