//! `cargo xtask run`: one example, on the GPUs of this machine or simulated.

use std::ffi::OsString;

use anyhow::{Context, Result, bail};

use crate::cuda;
use crate::project::{EXAMPLES_PACKAGE, Project, cargo, exit_code};
use crate::setup::{Without, setup};

/// Names the machine to simulate, for any program.
const SIMULATE: &str = "DEVCOMM_SIMULATE";
/// Where there is no GPU, and nobody says what to simulate.
const GPUS: &str = "4";

/// Runs `example` with `args` and returns its exit code: on the GPUs of this machine, or on
/// simulated ones where there is none or `DEVCOMM_SIMULATE` asks for them. Those need no PTX, and
/// what makes PTX is not fetched.
pub fn run(example: &str, args: &[String]) -> Result<u8> {
    let examples = Project::open()?.examples();
    if !examples.iter().any(|name| name == example) {
        bail!("there is no example {example:?}; the examples are: {}", examples.join(", "));
    }
    let mut command = cargo();
    command.args(["run", "--package", EXAMPLES_PACKAGE, "--bin", example]);
    match simulation() {
        Some(simulation) => drop(command.env(SIMULATE, simulation)),
        None => {
            setup(true, Without::Ptxas)?;
            command.args(["--release", "--features", "ptx"]);
        }
    }
    let status = command.arg("--").args(args).status().context("cargo does not start")?;
    Ok(exit_code(status))
}

/// What is to be simulated, if anything is.
fn simulation() -> Option<OsString> {
    if let Some(asked) = std::env::var_os(SIMULATE).filter(|value| !value.is_empty()) {
        return Some(asked);
    }
    let reason = match cuda::machine() {
        Ok(machine) if machine.gpus.is_empty() => "the driver has none".to_owned(),
        Ok(_) => return None,
        Err(reason) => reason,
    };
    eprintln!("no GPU here ({reason}): simulating {GPUS}, as with {SIMULATE}={GPUS}");
    Some(GPUS.into())
}
