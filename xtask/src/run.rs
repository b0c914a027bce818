//! `cargo xtask run`: one example, with everything it needs set up first.

use anyhow::{Context, Result, bail};

use crate::project::{Project, cargo, exit_code};
use crate::setup::{Without, setup};

/// Runs `example` with `args` and returns its exit code. An example finds out itself whether there
/// are GPUs, and simulates them if not.
pub fn run(example: &str, args: &[String]) -> Result<u8> {
    let examples = Project::open()?.examples();
    if !examples.iter().any(|name| name == example) {
        bail!("there is no example {example:?}; the examples are: {}", examples.join(", "));
    }
    setup(true, Without::Ptxas)?;
    let status = cargo()
        .args(["run", "--release", "--example", example, "--"])
        .args(args)
        .status()
        .context("cargo does not start")?;
    Ok(exit_code(status))
}
