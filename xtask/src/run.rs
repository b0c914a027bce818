//! `cargo xtask run`: one example, on the GPUs of this machine or simulated.

use anyhow::{Context, Result, bail};

use crate::cuda;
use crate::project::{EXAMPLES_PACKAGE, Project, cargo, exit_code};
use crate::setup::{Without, setup};

/// Runs `example` with `args` and returns its exit code. An example finds out itself whether there
/// are GPUs, and simulates them if not; then it needs no PTX, and what makes PTX is not fetched.
pub fn run(example: &str, args: &[String]) -> Result<u8> {
    let examples = Project::open()?.examples();
    if !examples.iter().any(|name| name == example) {
        bail!("there is no example {example:?}; the examples are: {}", examples.join(", "));
    }
    let mut command = cargo();
    command.args(["run", "--package", EXAMPLES_PACKAGE, "--bin", example]);
    if !is_simulated(args) {
        setup(true, Without::Ptxas)?;
        command.args(["--release", "--features", "ptx"]);
    }
    let status = command.arg("--").args(args).status().context("cargo does not start")?;
    Ok(exit_code(status))
}

/// Whether no kernel will run on a GPU: the simulator is asked for, or there is no GPU.
fn is_simulated(args: &[String]) -> bool {
    asks_for_simulator(args)
        || std::env::var_os("DEVCOMM_SIMULATE").is_some_and(|value| !value.is_empty())
        || !cuda::has_gpus()
}

fn asks_for_simulator(args: &[String]) -> bool {
    args.iter().any(|arg| arg == "--sim" || arg.starts_with("--sim="))
}

#[cfg(test)]
mod tests {
    use super::asks_for_simulator;

    #[test]
    fn an_option_that_asks_for_the_simulator_has_two_spellings() {
        let asks = |text: &str| {
            asks_for_simulator(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
        };
        assert!(asks("--dtype f32 --sim 3") && asks("--sim=3"));
        assert!(!asks("--gpus 2") && !asks("--simple"));
    }
}
