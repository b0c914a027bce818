//! `cargo xtask test`: every test of the workspace in a sensible order, and one verdict at the end.
//!
//! A test that needs GPUs and finds none passes for cargo, which knows no third outcome. Such a
//! test prints `GPU-TEST name: skipped (reason)`, or `GPU-TEST name: ran`, and is counted here as
//! what it was.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::project::{Project, cargo};
use crate::setup::{Without, setup};

/// Runs every test and returns the exit code: 0 when nothing failed.
pub fn test() -> Result<u8> {
    setup(true, Without::Ptxas)?;
    let mut tally = Tally::default();
    for phase in phases(&Project::open()?) {
        println!("\n== {} ==", phase.title);
        phase.run(&mut tally)?;
    }
    print!("{}", tally.verdict());
    Ok(u8::from(!tally.failed.is_empty()))
}

/// One invocation of `cargo test`.
struct Phase {
    title: &'static str,
    /// What to build and run.
    select: Vec<String>,
    /// Arguments of the test programs.
    args: &'static [&'static str],
}

impl Phase {
    fn run(&self, tally: &mut Tally) -> Result<()> {
        let mut child = cargo()
            // The whole workspace each time, so that every phase builds its crates with the same
            // features.
            .args(["test", "--workspace", "--no-fail-fast"])
            .args(&self.select)
            .arg("--")
            .args(self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cargo does not start")?;
        let failed_before = tally.failed.len();
        let mut lines =
            BufReader::new(child.stdout.take().context("cargo's output was not piped")?);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            std::io::stdout().write_all(&line)?;
            tally.read(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
        let status = child.wait()?;
        // A program that does not compile, or dies, reports no failing test.
        if !status.success() && tally.failed.len() == failed_before {
            tally.failed.push(format!("{}: cargo test ended with {status}, see above", self.title));
        }
        Ok(())
    }
}

/// The phases, fast ones first.
fn phases(project: &Project) -> Vec<Phase> {
    let root_tests = project.tests();
    let with = |prefix: &str| -> Vec<String> {
        root_tests.iter().filter(|name| name.starts_with(prefix)).cloned().collect()
    };
    let prefixes = ["sim", "ptx", "abi", "ui", "gpu"];
    let other =
        root_tests.iter().filter(|name| !prefixes.iter().any(|prefix| name.starts_with(prefix)));
    let tests = |names: Vec<String>| {
        names.into_iter().flat_map(|name| ["--test".to_owned(), name]).collect()
    };
    let phase = |title, select| Phase { title, select, args: &[] };
    let mut phases = vec![
        phase("unit tests", vec!["--lib".to_owned(), "--bins".to_owned()]),
        phase("examples in the documentation", vec!["--doc".to_owned()]),
        phase("tests of the crates", tests(project.tests_of_members())),
        phase("tests of the whole", tests(other.cloned().collect())),
        phase("simulator", tests(with("sim"))),
        phase("PTX", tests(with("ptx"))),
        phase("ABI", tests(with("abi"))),
        phase("what must not compile", tests(with("ui"))),
    ];
    phases.push(Phase {
        title: "GPU",
        select: tests(with("gpu")),
        // Each test takes all GPUs, so one at a time; and the harness would swallow the lines that
        // say what ran.
        args: &["--nocapture", "--test-threads=1"],
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
    gpu_ran: usize,
    gpu_skipped: usize,
    gpu_reasons: Vec<String>,
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
        }
    }

    /// Takes in `name: ran` or `name: skipped (reason)`.
    fn read_gpu(&mut self, report: &str) {
        let Some((_, outcome)) = report.split_once(": ") else { return };
        if let Some(reason) = outcome.strip_prefix("skipped") {
            self.gpu_skipped += 1;
            let reason = reason.trim();
            let reason = reason.strip_prefix('(').unwrap_or(reason);
            let reason = reason.strip_suffix(')').unwrap_or(reason);
            if !reason.is_empty() && !self.gpu_reasons.iter().any(|known| known == reason) {
                self.gpu_reasons.push(reason.to_owned());
            }
        } else if outcome.starts_with("ran") {
            self.gpu_ran += 1;
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
        text += &format!("GPU: {} run, {} skipped", self.gpu_ran, self.gpu_skipped);
        if !self.gpu_reasons.is_empty() {
            text += &format!(" ({})", self.gpu_reasons.join("; "));
        }
        text += &format!(
            "\n{} passed, {} failed, {} skipped\n",
            // For cargo a skipped test has passed.
            self.passed.saturating_sub(self.gpu_skipped),
            self.failed.len(),
            self.gpu_skipped
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
    use super::Tally;

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
