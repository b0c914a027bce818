//! Fetches MPICH's launcher, by which tests start jobs of processes.

use std::path::PathBuf;

use anyhow::Result;
use devcomm_cli::wheels::{Wheel, fetch};
use devcomm_locate::{check_wheel, wheel_dir};

/// The environment variable with the path of the launcher, for tests.
pub const VARIABLE: &str = "DEVCOMM_TEST_MPIEXEC";

const MPICH: Wheel = Wheel {
    package: "mpich",
    version: "5.0.2",
    sha256: [
        "8fed465ebff269ea2ebac179a25de02671ddf8df476e0f115be089015015cfd4",
        "992ae6ebb0da97d49d7a67000ae8112da9a3825da1bb1e6f1d196428a0410f2d",
    ],
};

/// Returns the path of `mpiexec.hydra` in the cache, after a download if it is missing.
///
/// # Errors
///
/// If it cannot be downloaded.
pub fn mpiexec() -> Result<PathBuf> {
    let Wheel { package, version, .. } = MPICH;
    let wheel = wheel_dir(package, version)?;
    let is_cached = || check_wheel(&wheel).is_ok();
    if !is_cached() {
        fetch(package, version, &[MPICH], is_cached)?;
    }
    Ok(wheel.join(format!("{package}-{version}.data/data/bin/mpiexec.hydra")))
}
