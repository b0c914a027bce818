//! `cargo xtask run`: runs one example, on this system's GPUs or simulated.

use std::ffi::OsString;

use anyhow::{Context, Result, bail};
use devcomm_cli::cuda;
use devcomm_cli::setup::{Optional, setup};

use crate::project::{EXAMPLES_PACKAGE, Project, cargo, exit_code};

/// The environment variable that describes the simulated machine.
const SIMULATE: &str = "DEVCOMM_SIMULATE";
/// The environment variable with the kernel files to compile.
const KERNEL_FILES: &str = "DEVCOMM_KERNEL_FILES";
/// Default number of simulated GPUs.
const GPUS: &str = "4";

/// Runs `example` with `args` and returns its exit code. It runs on this system's GPUs, or is
/// simulated if there are none or `DEVCOMM_SIMULATE` is set. A simulated run needs no PTX, so it
/// does not run setup.
pub fn run(example: &str, args: &[String]) -> Result<u8> {
    let project = Project::open()?;
    let examples = project.examples();
    if !examples.iter().any(|name| name == example) {
        bail!("there is no example {example:?}; the examples are: {}", examples.join(", "));
    }
    let mut command = cargo();
    command.args(["run", "--package", EXAMPLES_PACKAGE, "--bin", example]);
    match simulation() {
        Some(simulation) => drop(command.env(SIMULATE, simulation)),
        None => {
            setup(true, Optional::Ptxas)?;
            command.arg("--release");
            match project.kernel_files(example) {
                // It launches no kernel of devcomm, and needs no PTX.
                Some(files) if files.is_empty() => {}
                Some(files) => {
                    command.args(["--features", "ptx"]).env(KERNEL_FILES, files.join(","));
                }
                None => drop(command.args(["--features", "ptx"])),
            }
        }
    }
    let status = command.arg("--").args(args).status().context("cargo does not start")?;
    if status.success() {
        eprintln!("next: a kernel of your own, as docs/guide/src/first_kernel.md shows");
    }
    Ok(exit_code(status))
}

/// Returns the machine to simulate, if any.
fn simulation() -> Option<OsString> {
    if let Some(requested) = std::env::var_os(SIMULATE).filter(|value| !value.is_empty()) {
        return Some(requested);
    }
    let reason = match cuda::driver_info() {
        Ok(machine) if machine.gpus.is_empty() => "the driver has none".to_owned(),
        Ok(_) => return None,
        Err(reason) => reason,
    };
    eprintln!("no GPU here ({reason}): simulating {GPUS}, as with {SIMULATE}={GPUS}");
    Some(GPUS.into())
}
