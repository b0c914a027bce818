//! `cargo xtask release-check`: what must hold before the crates are published, and takes too long
//! for every change. A check whose tool is not installed is skipped, and says so; without `cargo
//! deny` it fails, since nothing else looks for advisories and licences.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use devcomm_cli::setup::{Optional, setup};
use xtask::packages::PackagedProject;

use crate::project::{Project, cargo};
use crate::{kernels_bin, wheel};

/// How a check ended that did not fail.
enum Outcome {
    Passed,
    /// Why it did not run, and what it needs.
    Skipped(String),
}

type Check = fn() -> Result<Outcome>;

/// The checks, quick ones first.
const CHECKS: [(&str, Check); 8] = [
    ("dependencies (cargo deny)", deny),
    ("compatibility (cargo semver-checks)", semver),
    ("minimum supported Rust version", msrv),
    ("documentation as on docs.rs, without NCCL", docs),
    ("the compiled kernels, and the same bytes again", compiled_kernels),
    ("cargo publish --dry-run", publish),
    ("the wheel for Python", wheel),
    ("a new project on the packages and today's registry", packaged_project),
];

/// Runs all checks, and prints a summary; the exit code is 1 if one fails.
pub fn release_check() -> Result<u8> {
    let (mut summary, mut failed) = (String::new(), 0);
    for (name, check) in CHECKS {
        println!("\n== {name} ==");
        let outcome = match check() {
            Ok(Outcome::Passed) => "passed".to_owned(),
            Ok(Outcome::Skipped(reason)) => format!("skipped: {reason}"),
            Err(error) => {
                failed = 1;
                format!("FAILED: {error:#}")
            }
        };
        println!("{outcome}");
        summary += &format!("{name}: {outcome}\n");
    }
    print!("\n{summary}");
    Ok(failed)
}

/// The minimum Rust version, from the workspace's manifest.
const MSRV: &str = env!("CARGO_PKG_RUST_VERSION");

/// Runs a command; `what` is its name in the error.
fn run(mut command: Command, what: &str) -> Result<Outcome> {
    let status = command.status().with_context(|| format!("{what} does not start"))?;
    ensure!(status.success(), "{what} failed, see above");
    Ok(Outcome::Passed)
}

/// Returns whether cargo has this subcommand.
fn has(subcommand: &str) -> bool {
    let mut command = cargo();
    command.args([subcommand, "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns a cargo command for all published packages.
fn of_published(arguments: &[&str]) -> Result<Command> {
    let mut command = cargo();
    command.args(arguments);
    for name in Project::open()?.published() {
        command.args(["--package", &name]);
    }
    Ok(command)
}

fn deny() -> Result<Outcome> {
    ensure!(has("deny"), "not installed: cargo install --locked cargo-deny");
    let mut command = cargo();
    command.args(["deny", "--workspace", "--all-features", "check", "--hide-inclusion-graph"]);
    run(command, "cargo deny")
}

fn semver() -> Result<Outcome> {
    if !has("semver-checks") {
        return Ok(Outcome::Skipped("not installed: cargo install cargo-semver-checks".to_owned()));
    }
    let mut info = cargo();
    info.args(["info", "--registry", "crates-io", "devcomm"]).stdout(Stdio::null());
    if !info.status().context("cargo does not start")?.success() {
        let reason = "no version is on the registry to compare with (see above)";
        return Ok(Outcome::Skipped(reason.to_owned()));
    }
    run(of_published(&["semver-checks"])?, "cargo semver-checks")
}

fn msrv() -> Result<Outcome> {
    let mut command = Command::new("rustup");
    command
        .args(["run", MSRV, "cargo", "check", "--workspace"])
        .current_dir(crate::project::root());
    // These name the toolchain that runs this program.
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(variable);
    }
    let mut rustc = Command::new("rustup");
    rustc.args(["run", MSRV, "rustc", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    if rustc.status().is_ok_and(|status| status.success()) {
        return run(command, "cargo check");
    }
    let mut rustc = Command::new("rustc");
    let output = rustc.arg("--version").output().context("rustc does not start")?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    if version.starts_with(&format!("rustc {MSRV}.")) {
        println!("all other checks and tests run with {}", version.trim());
        return Ok(Outcome::Passed);
    }
    Ok(Outcome::Skipped(format!("not installed: rustup toolchain install {MSRV}")))
}

fn docs() -> Result<Outcome> {
    let empty = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut command = of_published(&["doc", "--no-deps", "--all-features"])?;
    command.env("DOCS_RS", "1").env("RUSTDOCFLAGS", "-D warnings");
    command.env("DEVCOMM_NCCL_HOME", empty.path()).env("DEVCOMM_CACHE", empty.path());
    command.env_remove("DEVCOMM_REQUIRE_KERNELS").env_remove("NCCL_HOME").env_remove("VIRTUAL_ENV");
    run(command, "cargo doc")
}

fn compiled_kernels() -> Result<Outcome> {
    kernels_bin::kernels_bin(false)?;
    kernels_bin::kernels_bin(true)?;
    Ok(Outcome::Passed)
}

fn publish() -> Result<Outcome> {
    let arguments = ["publish", "--dry-run", "--allow-dirty", "--registry", "crates-io"];
    run(of_published(&arguments)?, "cargo publish")
}

fn wheel() -> Result<Outcome> {
    Ok(wheel::check()?.map_or(Outcome::Passed, Outcome::Skipped))
}

fn packaged_project() -> Result<Outcome> {
    setup(true, Optional::Ptxas)?;
    let project = PackagedProject::new(false)?;
    project.runs_simulated()?;
    project.builds_for_gpus(true)?;
    project.runs_with_compiled_kernels()?;
    Ok(Outcome::Passed)
}
