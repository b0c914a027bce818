//! `cargo xtask mutants`: plants bugs in the kernels, each of which the simulator must find.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::project::{cargo, exit_code};

/// Runs the originals and then the mutants, in up to `schedules` schedules each or in a range of
/// them, and returns the exit code. Originals that take long run in fewer schedules, unless `all`.
/// The last line is how many mutants are caught. With `programs`, only these originals run.
pub fn mutants(schedules: &str, all: bool, programs: &[String]) -> Result<u8> {
    let run = |filter: &[&str]| run(filter, schedules, all);
    if !programs.is_empty() {
        let mut result = 0;
        for name in programs {
            let name = format!("programs::originals::{name}");
            result = run(&["--exact", &name])?.0.max(result);
        }
        return Ok(result);
    }
    let (originals, _) = run(&["originals"])?;
    let (mutants, caught) = run(&["every_mutant_is_caught"])?;
    println!("{caught}");
    Ok(originals.max(mutants))
}

/// Runs tests of the package; returns the exit code, and how many mutants are caught.
fn run(filter: &[&str], schedules: &str, all: bool) -> Result<(u8, String)> {
    let mut command = cargo();
    command.args(["test", "--package", "devcomm", "--test", "mutants", "--", "--nocapture"]);
    command.args(filter).env("DEVCOMM_SCHEDULES", schedules);
    command.env("DEVCOMM_ORIGINALS", if all { "all" } else { "" });
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo does not start")?;
    let (mut ran, mut caught) = (true, String::new());
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let line = line.context("the output of cargo")?;
        println!("{line}");
        ran &= line != "running 0 tests";
        if line.ends_with(" caught") {
            caught = line;
        }
    }
    ensure!(ran, "tests/mutants/programs.rs has nothing of this name: {}", filter.join(" "));
    Ok((exit_code(child.wait().context("cargo")?), caught))
}
