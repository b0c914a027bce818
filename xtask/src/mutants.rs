//! `cargo xtask mutants`: plants bugs in the kernels, each of which the simulator must find.

use anyhow::{Context, Result};

use crate::project::{cargo, exit_code};

/// Runs the mutants, in up to `schedules` schedules each, and returns the exit code.
pub fn mutants(schedules: u64) -> Result<u8> {
    let mut command = cargo();
    command.args(["test", "--package", "devcomm", "--test", "mutants", "--", "--nocapture"]);
    command.env("DEVCOMM_SCHEDULES", schedules.to_string());
    Ok(exit_code(command.status().context("cargo does not start")?))
}
