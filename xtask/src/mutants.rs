//! `cargo xtask mutants`: plants bugs in the kernels, each of which the simulator must find.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::project::{cargo, exit_code};

/// Runs the originals and then the mutants, in up to `schedules` schedules each, and returns the
/// exit code. Originals that take long run in fewer schedules, unless `all`. The last line is how
/// many mutants are caught.
pub fn mutants(schedules: u64, all: bool) -> Result<u8> {
    let mut result = 0;
    let mut caught = String::new();
    for part in ["originals", "every_mutant_is_caught"] {
        let mut command = cargo();
        command.args(["test", "--package", "devcomm", "--test", "mutants", "--", "--nocapture"]);
        command.arg(part).env("DEVCOMM_SCHEDULES", schedules.to_string());
        command.env("DEVCOMM_ORIGINALS", if all { "all" } else { "" });
        let mut child = command.stdout(Stdio::piped()).spawn().context("cargo does not start")?;
        for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let line = line.context("the output of cargo")?;
            println!("{line}");
            if line.ends_with(" caught") {
                caught = line;
            }
        }
        result = exit_code(child.wait().context("cargo")?).max(result);
    }
    println!("{caught}");
    Ok(result)
}
