//! `devcomm bench`: runs the installed `devcomm-bench`.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Result, bail};

/// The program. It is a package of its own: it embeds compiled kernels, and takes minutes to build.
const PROGRAM: &str = "devcomm-bench";

/// Run `devcomm-bench`, which measures kernels against NCCL's host calls
#[derive(Debug, clap::Args)]
pub struct Bench {
    /// Arguments for devcomm-bench
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

impl Bench {
    /// Replaces this process by the program; returns only with an error.
    ///
    /// # Errors
    ///
    /// If it is not installed, with the command that installs it, or does not start.
    pub fn run(&self) -> Result<u8> {
        let error = Command::new(PROGRAM).args(&self.args).exec();
        match error.kind() {
            ErrorKind::NotFound => bail!(
                "{PROGRAM} is not installed; on a machine where `devcomm setup` has run:\n  cargo \
                 install --git {} {PROGRAM} --features ptx",
                env!("CARGO_PKG_REPOSITORY")
            ),
            _ => bail!("{PROGRAM} does not start: {error}"),
        }
    }
}
