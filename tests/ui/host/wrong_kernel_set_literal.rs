//! Machine code of a set runs under the name of a kernel: a set has no literals.

use devcomm_host::{KernelSet, WITHOUT_PTX};

const KERNELS: KernelSet = KernelSet { modules: &[], ..WITHOUT_PTX };

fn main() {
    let _ = KERNELS;
}
