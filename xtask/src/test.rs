//! `cargo xtask test`: every test of the workspace in a sensible order, and one verdict at the end.
//!
//! A test that cannot run here, for want of GPUs or a C++ compiler, passes for cargo, which knows no
//! third outcome. It prints a line, past the harness, and is counted as what it was:
//!
//! ```text
//! SKIPPED name: reason
//! GPU-TEST name: skipped (reason)
//! GPU-TEST name: ran
//! GPU-TEST name part: ran
//! ```

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use devcomm_locate::{find_gin_loopback, gin_machine};

use crate::group::{End, Group};
use crate::project::{Project, cargo, is_for_gpus};
use crate::setup::{Without, setup};

/// The time of one phase, compilation included, unless [`TIMEOUT_VARIABLE`] names another.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);
const TIMEOUT_VARIABLE: &str = "DEVCOMM_TEST_TIMEOUT";

/// Runs every test and returns the exit code: 0 when nothing failed.
pub fn test() -> Result<u8> {
    let limit = time_limit(std::env::var(TIMEOUT_VARIABLE).ok().as_deref())?;
    setup(true, Without::Ptxas)?;
    let mut tally = Tally::default();
    for phase in phases(&Project::open()?) {
        println!("\n== {} ==", phase.title);
        phase.run(limit, &mut tally)?;
    }
    print!("{}", tally.verdict());
    Ok(u8::from(!tally.failed.is_empty()))
}

fn time_limit(seconds: Option<&str>) -> Result<Duration> {
    let Some(text) = seconds else { return Ok(TIMEOUT) };
    let seconds = text.parse::<u64>().ok().filter(|seconds| *seconds > 0);
    let limit = seconds.map(Duration::from_secs);
    limit.with_context(|| format!("{TIMEOUT_VARIABLE}={text:?} is not a number of seconds"))
}

/// One invocation of `cargo test`.
struct Phase {
    title: &'static str,
    /// What to build and run.
    select: Vec<String>,
    /// Arguments of the test programs.
    args: &'static [&'static str],
    /// Variables for them.
    environment: Vec<(&'static str, String)>,
}

impl Phase {
    fn run(&self, limit: Duration, tally: &mut Tally) -> Result<()> {
        let mut command = cargo();
        command
            // The whole workspace each time, so that every phase builds its crates with the same
            // features.
            .args(["test", "--workspace", "--no-fail-fast"])
            .args(&self.select)
            .arg("--")
            .args(self.args)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        let failed_before = tally.failed.len();
        let mut unfinished = Vec::new();
        let end = Group::spawn(command)?.run(limit, |output| {
            // At once, also an unfinished line: it names a test that hangs.
            let mut stdout = std::io::stdout();
            stdout.write_all(output)?;
            stdout.flush()?;
            unfinished.extend_from_slice(output);
            while let Some(end) = unfinished.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = unfinished.drain(..=end).collect();
                tally.read(String::from_utf8_lossy(&line).trim_end());
            }
            Ok(())
        })?;
        let rest = String::from_utf8_lossy(&unfinished);
        let title = self.title;
        match end {
            End::Exit(status) => {
                tally.read(rest.trim_end());
                // A program that does not compile, or dies, reports no failing test.
                if !status.success() && tally.failed.len() == failed_before {
                    tally
                        .failed
                        .push(format!("{title}: cargo test ended with {status}, see above"));
                }
            }
            End::Killed => {
                let at = rest.trim();
                let at = if at.is_empty() { String::new() } else { format!(", at `{at}`") };
                tally.failed.push(format!(
                    "{title}: killed after {} s{at} ({TIMEOUT_VARIABLE} sets the time)",
                    limit.as_secs()
                ));
                println!();
            }
        }
        Ok(())
    }
}

/// What gives the tests on GPUs a network for their kernels where there is no RDMA card: devcomm's plugin, unless another is named.
fn network() -> Vec<(&'static str, String)> {
    if gin_machine(None).has_rdma() || std::env::var_os("NCCL_RMA_PLUGIN").is_some() {
        return Vec::new();
    }
    // Without it those tests say that there is no network.
    let plugin = find_gin_loopback(None).ok();
    plugin.map(|path| devcomm_locate::gin_loopback_environment(&path).to_vec()).unwrap_or_default()
}

/// The phases, fast ones first.
fn phases(project: &Project) -> Vec<Phase> {
    let root_tests = project.tests();
    let with = |prefix: &str| -> Vec<String> {
        root_tests.iter().filter(|name| name.starts_with(prefix)).cloned().collect()
    };
    let mut of_members = project.tests_of_members();
    of_members.retain(|name| !is_for_gpus(name));
    let for_gpus = project.gpu_tests().into_iter().flat_map(|(_, names)| names);
    let prefixes = ["sim", "ptx", "abi", "ui", "gpu"];
    let other =
        root_tests.iter().filter(|name| !prefixes.iter().any(|prefix| name.starts_with(prefix)));
    let tests = |names: Vec<String>| {
        names.into_iter().flat_map(|name| ["--test".to_owned(), name]).collect()
    };
    let phase = |title, select| Phase { title, select, args: &[], environment: Vec::new() };
    let mut phases = vec![
        phase("unit tests", vec!["--lib".to_owned(), "--bins".to_owned()]),
        phase("examples in the documentation", vec!["--doc".to_owned()]),
        phase("tests of the crates", tests(of_members)),
        phase("tests of the whole", tests(other.cloned().collect())),
        phase("simulator", tests(with("sim"))),
        phase("PTX", tests(with("ptx"))),
        phase("ABI", tests(with("abi"))),
        phase("what must not compile", tests(with("ui"))),
    ];
    phases.push(Phase {
        title: "GPU",
        select: tests(for_gpus.collect()),
        // Each test takes all GPUs, so one at a time; and the harness would swallow the lines that
        // say what ran.
        args: &["--nocapture", "--test-threads=1"],
        environment: network(),
    });
    phases.retain(|phase| !phase.select.is_empty());
    phases
}

/// What the test programs reported.
#[derive(Debug, Default)]
struct Tally {
    passed: usize,
    ignored: usize,
    failed: Vec<String>,
    /// The GPU tests, and whether one of their parts ran.
    gpu: BTreeMap<String, bool>,
    gpu_reasons: Vec<String>,
    /// Tests without GPUs that were skipped: name and reason.
    skipped: Vec<String>,
    /// The names in the list of failures that is being read.
    failures: Vec<String>,
}

impl Tally {
    /// Takes in one line of a test program.
    fn read(&mut self, line: &str) {
        if let Some(outcome) = line.strip_prefix("test result: ") {
            self.passed += count(outcome, "passed");
            self.ignored += count(outcome, "ignored");
            let failed = count(outcome, "failed");
            // Without failures, indented lines were some test's output.
            self.failures.truncate(failed);
            self.failures.resize(failed, "a test without a name, see above".to_owned());
            self.failed.append(&mut self.failures);
        } else if line == "failures:" {
            // Printed twice: over the failures' own output, then over the list of names.
            self.failures.clear();
        } else if let Some(name) = line.strip_prefix("    ") {
            self.failures.push(name.to_owned());
        } else if let Some((_, report)) = line.split_once("GPU-TEST ") {
            self.read_gpu(report);
        } else if let Some((_, report)) = line.split_once("SKIPPED ") {
            self.skipped.push(report.to_owned());
        }
    }

    /// Takes in `name: ran` or `name: skipped (reason)`. A test of several parts reports each, as `name part`.
    fn read_gpu(&mut self, report: &str) {
        let Some((name, outcome)) = report.split_once(": ") else { return };
        let name = name.split(' ').next().unwrap_or(name);
        let ran = self.gpu.entry(name.to_owned()).or_default();
        *ran |= outcome.starts_with("ran");
        if let Some(reason) = outcome.strip_prefix("skipped") {
            let reason = reason.trim();
            let reason = reason.strip_prefix('(').unwrap_or(reason);
            let reason = reason.strip_suffix(')').unwrap_or(reason);
            if !reason.is_empty() && !self.gpu_reasons.iter().any(|known| known == reason) {
                self.gpu_reasons.push(reason.to_owned());
            }
        }
    }

    /// The failures, the GPU line, and the closing line.
    fn verdict(&self) -> String {
        let mut text = "\n".to_owned();
        if !self.failed.is_empty() {
            text += "failed:\n";
            self.failed.iter().for_each(|name| text += &format!("  {name}\n"));
        }
        if self.ignored > 0 {
            text += &format!("ignored by the test programs: {}\n", self.ignored);
        }
        if !self.skipped.is_empty() {
            text += "skipped:\n";
            self.skipped.iter().for_each(|report| text += &format!("  {report}\n"));
        }
        let gpu_ran = self.gpu.values().filter(|ran| **ran).count();
        let gpu_skipped = self.gpu.len() - gpu_ran;
        text += &format!("GPU: {gpu_ran} run, {gpu_skipped} skipped");
        if !self.gpu_reasons.is_empty() {
            text += &format!(" ({})", self.gpu_reasons.join("; "));
        }
        let skipped = gpu_skipped + self.skipped.len();
        text += &format!(
            "\n{} passed, {} failed, {skipped} skipped\n",
            // For cargo a skipped test has passed.
            self.passed.saturating_sub(skipped),
            self.failed.len(),
        );
        text
    }
}

/// The number before `word` in `ok. 15 passed; 0 failed; ...`.
fn count(outcome: &str, word: &str) -> usize {
    let mut words = outcome.split([' ', ';']).filter(|part| !part.is_empty());
    let mut last = None;
    words
        .find_map(|part| {
            let found = (part == word).then_some(last);
            last = part.parse().ok();
            found
        })
        .flatten()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Tally {
        let mut tally = Tally::default();
        text.lines().for_each(|line| tally.read(line));
        tally
    }

    #[test]
    fn passed_tests_add_up_over_programs() {
        let tally = tally(
            "running 2 tests\ntest a ... ok\ntest b ... ok\n\n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n\
             test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(
            tally.verdict(),
            "\nignored by the test programs: 1\nGPU: 0 run, 0 skipped\n\
             42 passed, 0 failed, 0 skipped\n"
        );
    }

    #[test]
    fn a_skipped_gpu_test_is_not_a_passed_one() {
        // With one thread and no capture, the harness leaves the test's name in front.
        let tally = tally(
            "test sums ... GPU-TEST sums: skipped (no GPU)\nok\n\
             test waits ... GPU-TEST waits: skipped (too few GPUs (1))\nok\n\
             test loads ... GPU-TEST loads: ran\nok\n\
             test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(
            tally.verdict(),
            "\nGPU: 1 run, 2 skipped (no GPU; too few GPUs (1))\n1 passed, 0 failed, 2 skipped\n"
        );
    }

    #[test]
    fn a_gpu_test_of_several_parts_is_one_test() {
        let tally = tally(
            "test sums ... GPU-TEST sums on 2: ran\nGPU-TEST sums on 4: skipped (too few)\nok\n\
             test waits ... GPU-TEST waits 0: skipped (no GPU)\nGPU-TEST waits 1: skipped (no GPU)\nok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(
            tally.verdict(),
            "\nGPU: 1 run, 1 skipped (too few; no GPU)\n1 passed, 0 failed, 1 skipped\n"
        );
    }

    #[test]
    fn a_test_that_needs_no_gpu_and_cannot_run_is_named_with_its_reason() {
        let tally = tally(
            "test a ... ok\nSKIPPED layout: no C++ compiler: try g++\ntest layout ... ok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(
            tally.verdict(),
            "\nskipped:\n  layout: no C++ compiler: try g++\nGPU: 0 run, 0 skipped\n\
             1 passed, 0 failed, 1 skipped\n"
        );
    }

    #[test]
    fn the_time_of_a_phase_is_a_number_of_seconds() {
        assert_eq!(time_limit(None).unwrap(), TIMEOUT);
        assert_eq!(time_limit(Some("90")).unwrap(), Duration::from_secs(90));
        for bad in ["", "0", "-1", "1h"] {
            assert!(time_limit(Some(bad)).unwrap_err().to_string().contains(TIMEOUT_VARIABLE));
        }
    }

    #[test]
    fn every_failing_test_is_named_once() {
        let tally = tally(
            "failures:\n\n---- one stdout ----\n\n\
             thread 'one' panicked at src/lib.rs:1:1:\n    left: 1\n\n\
             failures:\n    one\n    group::two\n\n\
             test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(tally.failed, ["one", "group::two"]);
        assert!(tally.verdict().ends_with("4 passed, 2 failed, 0 skipped\n"));
    }

    #[test]
    fn indented_output_of_passing_tests_is_no_failure() {
        let tally = tally(
            "test a ...     indented\n    more of it\nok\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert!(tally.failed.is_empty());
    }
}
