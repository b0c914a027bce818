//! Sums up the results of test programs from their output.

use std::collections::BTreeMap;

/// The test programs' results.
#[derive(Debug, Default)]
pub struct Tally {
    passed: usize,
    /// Tests that the programs left out: names, with their reasons.
    ignored: Vec<String>,
    failed: Vec<String>,
    /// The GPU tests, and whether any of their parts ran.
    gpu: BTreeMap<String, bool>,
    gpu_reasons: Vec<String>,
    /// Skipped tests that need no GPU: name and reason.
    skipped: Vec<String>,
    /// The names in the list of failures being read.
    listed: Vec<String>,
}

impl Tally {
    /// Records a failure that no test program reported.
    pub fn fail(&mut self, what: String) {
        self.failed.push(what);
    }

    /// Returns the number of failures.
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Processes one line of a test program's output.
    pub fn read(&mut self, line: &str) {
        if let Some(outcome) = line.strip_prefix("test result: ") {
            self.passed += count(outcome, "passed");
            let failed = count(outcome, "failed");
            // Without failures, indented lines are a test's output.
            self.listed.truncate(failed);
            self.listed
                .resize(failed, "a failed test whose name was not printed, see above".to_owned());
            self.failed.append(&mut self.listed);
        } else if let Some(name) = ignored(line) {
            self.ignored.push(name);
        } else if line == "failures:" {
            // It is printed twice: before the failures' output, then before the list of names.
            self.listed.clear();
        } else if let Some(name) = line.strip_prefix("    ") {
            self.listed.push(name.to_owned());
        } else if let Some((_, report)) = line.split_once("GPU-TEST ") {
            self.read_gpu(report);
        } else if let Some((_, report)) = line.split_once("SKIPPED ") {
            self.skipped.push(report.to_owned());
        }
    }

    /// Processes `name: ran` or `name: skipped (reason)`. A test of several parts reports each, as
    /// `name part`.
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

    /// Returns the summary: failures, skipped tests, and totals.
    pub fn verdict(&self) -> String {
        let mut text = "\n".to_owned();
        let lists =
            [("failed", &self.failed), ("ignored", &self.ignored), ("skipped", &self.skipped)];
        for (title, tests) in lists {
            if !tests.is_empty() {
                text += &format!("{title}:\n");
                tests.iter().for_each(|test| text += &format!("  {test}\n"));
            }
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
            // The harness counts a skipped test as passed.
            self.passed.saturating_sub(skipped),
            self.failed.len(),
        );
        text
    }
}

/// Returns the test of a line such as `test name ... ignored, reason`.
fn ignored(line: &str) -> Option<String> {
    let (name, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ignored")?;
    let reason = outcome.strip_prefix(", ").map(|reason| format!(": {reason}"));
    Some(name.to_owned() + &reason.unwrap_or_default())
}

/// Returns the number before `word` in `ok. 15 passed; 0 failed; ...`.
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
    fn passed_tests_add_up_over_programs_and_ignored_ones_are_named() {
        let tally = tally(
            "running 4 tests\ntest a ... ok\ntest b ... ok\n\
             test src/lib.rs - c (line 3) ... ignored\ntest d ... ignored, too slow\n\
             test result: ok. 2 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out\n\
             test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(
            tally.verdict(),
            "\nignored:\n  src/lib.rs - c (line 3)\n  d: too slow\nGPU: 0 run, 0 skipped\n\
             42 passed, 0 failed, 0 skipped\n"
        );
    }

    #[test]
    fn a_skipped_gpu_test_is_not_a_passed_one() {
        // With one thread and no capture, the line starts with the test's name.
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
             test waits ... GPU-TEST waits 0: skipped (no GPU)\n\
             GPU-TEST waits 1: skipped (no GPU)\nok\n\
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
