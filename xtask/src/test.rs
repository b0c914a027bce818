//! `cargo xtask test`: runs every test of the workspace, fast ones first, and prints one summary at
//! the end.
//!
//! First everything is built, without a time limit. Then the programs run, one after the other: a
//! line for each, with its time, and all its output if a test fails. A test that hangs is killed
//! with its program, and named. Tests in `gpu_*` run on simulated GPUs and then, if present, on
//! this system's.
//!
//! A test that cannot run here, without GPUs or a C++ compiler, reports success to its harness.
//! These lines, which tests print past the harness's capture, tell which tests to count as skipped:
//!
//! ```text
//! SKIPPED name: reason
//! GPU-TEST name: skipped (reason)
//! GPU-TEST name: ran
//! GPU-TEST name part: ran
//! ```

mod hangs;
mod programs;
mod tally;

use std::io::Write;
use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use devcomm_cli::cuda;
use devcomm_cli::setup::{Optional, setup};
use devcomm_locate::{find_gin_loopback, gin_support};

use crate::mpich;
use crate::process_group::{End, ProcessGroup};
use crate::project::{Project, cargo};
use hangs::HangDetector;
use programs::{Phase, Program};
use tally::Tally;

/// Time limit of a test, unless [`TIMEOUT_VARIABLE`] is set. Some tests compile kernels, or
/// programs that must not compile, and the system may be slow.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);
const TIMEOUT_VARIABLE: &str = "DEVCOMM_TEST_TIMEOUT";
/// Makes tests in `gpu_*` run on this system's GPUs (`devcomm_testing::machines::TEST_GPUS`).
const TEST_GPUS: &str = "DEVCOMM_TEST_GPUS";

/// Runs every test; returns exit code 0 if none failed.
pub fn test() -> Result<u8> {
    let limit = time_limit(std::env::var(TIMEOUT_VARIABLE).ok().as_deref())?;
    setup(true, Optional::Ptxas)?;
    // PTX is embedded only if there are GPUs; tests of PTX compile their own kernels.
    let features: &[&str] = if cuda::has_gpus() { &["--features", "ptx"] } else { &[] };
    let mut tally = Tally::default();
    println!("\n== build ==");
    match programs::build(&Project::open()?, features, &launcher())? {
        Some(programs) => run_all(&programs, features, limit, &mut tally)?,
        None => tally.fail("the tests do not compile, see above".to_owned()),
    }
    print!("{}", tally.verdict());
    Ok(u8::from(tally.failures() > 0))
}

/// Returns the environment variable with MPICH's launcher; none if it cannot be fetched, and then
/// the test that needs it is skipped.
fn launcher() -> Vec<(&'static str, String)> {
    match mpich::mpiexec() {
        Ok(path) => vec![(mpich::VARIABLE, path.display().to_string())],
        Err(error) => {
            eprintln!("warning: continuing without the launcher of MPICH: {error:#}");
            Vec::new()
        }
    }
}

fn time_limit(seconds: Option<&str>) -> Result<Duration> {
    let Some(text) = seconds else { return Ok(TIMEOUT) };
    let seconds = text.parse::<u64>().ok().filter(|seconds| *seconds > 0);
    let limit = seconds.map(Duration::from_secs);
    limit.with_context(|| format!("{TIMEOUT_VARIABLE}={text:?} is not a number of seconds"))
}

fn run_all(
    programs: &[Program],
    features: &[&str],
    limit: Duration,
    tally: &mut Tally,
) -> Result<()> {
    let mut phase = None;
    for program in programs {
        if phase == Some(Phase::Units) && program.phase != Phase::Units {
            run_documentation(features, limit, tally)?;
        }
        if phase != Some(program.phase) {
            println!("\n== {} ==", program.phase.title());
            phase = Some(program.phase);
        }
        let at_once = available_parallelism().map_or(1, |count| count.get());
        run_program(program, program.command(), at_once, limit, tally)?;
    }
    if cuda::has_gpus() {
        println!("\n== GPUs ==");
        for program in programs.iter().filter(|program| program.phase == Phase::Gpu) {
            // Each test uses all GPUs, so they run one at a time.
            let mut command = program.command();
            command.args(["--nocapture", "--test-threads=1"]).env(TEST_GPUS, "1").envs(network());
            run_program(program, command, 1, limit, tally)?;
        }
    }
    Ok(())
}

/// Runs a test program, with `at_once` concurrent tests.
fn run_program(
    program: &Program,
    command: Command,
    at_once: usize,
    limit: Duration,
    tally: &mut Tally,
) -> Result<()> {
    let watch = HangDetector::new(limit, true);
    run(&program.name, command, watch, tally, |watch| watch.unfinished(&program.tests(), at_once))
}

/// Runs the examples in the documentation (doctests), which cargo also compiles.
fn run_documentation(features: &[&str], limit: Duration, tally: &mut Tally) -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--doc", "--no-fail-fast"]).args(features);
    let watch = HangDetector::new(limit, false);
    run("examples in the documentation", command, watch, tally, |watch| {
        watch.unfinished(&[], usize::MAX)
    })
}

/// Runs a test command, and kills it when a test hangs.
fn run(
    name: &str,
    command: Command,
    mut watch: HangDetector,
    tally: &mut Tally,
    unfinished: impl FnOnce(&HangDetector) -> Vec<String>,
) -> Result<()> {
    print!("{name} ... ");
    std::io::stdout().flush()?;
    let (began, failed_before) = (Instant::now(), tally.failures());
    let (mut output, mut line) = (Vec::new(), Vec::new());
    let end = ProcessGroup::spawn(command)?.run(watch.deadline(), |chunk| {
        output.extend_from_slice(&chunk.bytes);
        if chunk.is_error {
            return Ok(watch.deadline());
        }
        line.extend_from_slice(&chunk.bytes);
        while let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            let rest = line.split_off(end + 1);
            let whole = String::from_utf8_lossy(&line).trim_end().to_owned();
            tally.read(&whole);
            watch.read(&whole);
            line = rest;
        }
        watch.read(&String::from_utf8_lossy(&line));
        Ok(watch.deadline())
    });
    match end {
        Ok(End::Exit(status)) => {
            tally.read(String::from_utf8_lossy(&line).trim_end());
            // A program that crashes reports no failing test.
            if !status.success() && tally.failures() == failed_before {
                tally.fail(format!("{name}: ended with {status}, see above"));
            }
        }
        Ok(End::Killed) => {
            let tests = unfinished(&watch);
            tally.fail(format!(
                "{name}: {} hangs ({TIMEOUT_VARIABLE} sets the time limit of a test)",
                if tests.is_empty() { "a test".to_owned() } else { tests.join(" or ") },
            ));
        }
        // The output tells what ran when a signal came.
        Err(_) => {}
    }
    let passed = end.is_ok() && tally.failures() == failed_before;
    println!("{}", ending(passed, began.elapsed(), &output));
    end.map(|_| ())
}

/// Returns the end of a program's line. The output of passing tests, such as the histories of ranks
/// that are lost on purpose, is left out.
fn ending(passed: bool, took: Duration, output: &[u8]) -> String {
    let seconds = took.as_secs_f64();
    match passed {
        true => format!("ok, {seconds:.1} s"),
        false => format!("FAILED after {seconds:.1} s\n{}", String::from_utf8_lossy(output)),
    }
}

/// Returns the environment variables that enable GIN for GPU tests without an RDMA card, by
/// devcomm's plugin, unless `NCCL_RMA_PLUGIN` is set.
fn network() -> Vec<(&'static str, String)> {
    if gin_support(None).has_rdma() || std::env::var_os("NCCL_RMA_PLUGIN").is_some() {
        return Vec::new();
    }
    // Without the plugin the tests of GIN are skipped.
    let plugin = find_gin_loopback(None).ok();
    plugin.map(|path| devcomm_locate::gin_loopback_environment(&path).to_vec()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_test_is_a_number_of_seconds() {
        assert_eq!(time_limit(None).unwrap(), TIMEOUT);
        assert_eq!(time_limit(Some("90")).unwrap(), Duration::from_secs(90));
        for bad in ["", "0", "-1", "1h"] {
            assert!(time_limit(Some(bad)).unwrap_err().to_string().contains(TIMEOUT_VARIABLE));
        }
    }

    #[test]
    fn only_a_program_whose_tests_fail_has_its_output_printed() {
        let ending = |passed| ending(passed, Duration::from_millis(1230), b"rank 0: lost\n");
        assert_eq!(ending(true), "ok, 1.2 s");
        assert_eq!(ending(false), "FAILED after 1.2 s\nrank 0: lost\n");
    }

    #[test]
    fn a_test_that_hangs_ends_its_program_and_is_named() {
        let mut tally = Tally::default();
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'running 2 tests'; echo 'test a ... ok'; sleep 600"]);
        let watch = HangDetector::new(Duration::from_millis(500), true);
        let tests = ["a", "b"].map(str::to_owned);
        run("prog", command, watch, &mut tally, |watch| watch.unfinished(&tests, 2)).unwrap();
        assert!(tally.verdict().contains("  prog: b hangs ("), "{}", tally.verdict());
    }
}
