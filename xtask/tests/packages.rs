//! Tests of a project that uses only the packaged crates.

use std::io::Write;

use anyhow::Result;
use devcomm_cli::setup::find_pinned_nccl;
use xtask::packages::PackagedProject;

#[test]
fn a_project_outside_of_the_checkout_builds_on_the_packages_alone_and_runs_without_gpus() {
    let check = || -> Result<()> {
        let project = PackagedProject::new(true)?;
        project.runs_simulated()?;
        match find_pinned_nccl() {
            Ok(_) => project.builds_for_gpus(false)?,
            // This is written to stdout, as the test harness would capture `println!`.
            Err(_) => writeln!(std::io::stdout(), "not built for GPUs: NCCL is not set up")?,
        }
        Ok(())
    };
    if let Err(error) = check() {
        panic!("{error:#}");
    }
}
