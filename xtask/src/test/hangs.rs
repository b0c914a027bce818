//! Detects hanging tests: each test has a time limit, which excludes compilation.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Follows the output of a test harness.
pub struct HangDetector {
    limit: Duration,
    /// Deadline of the running test; `None` while none runs, or for a limit beyond the clock's end.
    deadline: Option<Instant>,
    /// The tests that the harness has named at the start of a line.
    named: Vec<String>,
    /// The tests that it has reported as slow.
    long: BTreeSet<String>,
}

impl HangDetector {
    /// Returns a detector with a limit per test; `running` tells whether tests run from the start.
    pub fn new(limit: Duration, running: bool) -> Self {
        let deadline = running.then(|| Instant::now().checked_add(limit)).flatten();
        Self { limit, deadline, named: Vec::new(), long: BTreeSet::new() }
    }

    /// Returns the deadline of the running test.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Processes a line, complete or not. The harness prints a test's name at the start of a line:
    /// before the test if one runs at a time, else after it.
    pub fn read(&mut self, line: &str) {
        if line.starts_with("test result: ") {
            // No test runs now: rustdoc compiles the next crate's examples.
            self.deadline = None;
        } else if line.starts_with("running ") {
            self.restart();
        } else if let Some(rest) = line.strip_prefix("test ") {
            if let Some((name, _)) = rest.split_once(" has been running for over ") {
                self.long.insert(name.to_owned());
            } else if let Some((name, _)) = rest.split_once(" ... ")
                && self.named.last().is_none_or(|last| last != name)
            {
                self.named.push(name.to_owned());
                self.restart();
            }
        }
    }

    fn restart(&mut self) {
        self.deadline = Instant::now().checked_add(self.limit);
    }

    /// Returns the tests that may hang. `tests` are the program's in start order, `at_once` of
    /// which run concurrently.
    pub fn unfinished(&self, tests: &[String], at_once: usize) -> Vec<String> {
        if at_once == 1 {
            return self.named.last().cloned().into_iter().collect();
        }
        let open = |test: &&String| !self.named.contains(test);
        let long: Vec<String> = self.long.iter().filter(open).cloned().collect();
        if !long.is_empty() {
            return long;
        }
        tests.iter().filter(open).take(at_once).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(1000);

    fn watch(text: &str) -> HangDetector {
        let mut watch = HangDetector::new(LIMIT, true);
        text.lines().for_each(|line| watch.read(line));
        watch
    }

    fn names(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_time_starts_again_when_a_test_ends() {
        let mut watch = watch("running 2 tests");
        let before = watch.deadline().unwrap();
        watch.read("some test's output");
        assert_eq!(watch.deadline(), Some(before));
        watch.read("test a ... ok");
        assert!(watch.deadline().unwrap() > before);
    }

    #[test]
    fn a_time_longer_than_any_clock_is_no_limit() {
        let mut watch = HangDetector::new(Duration::MAX, true);
        watch.read("running 1 test");
        assert_eq!(watch.deadline(), None);
    }

    #[test]
    fn compiling_between_programs_has_no_limit() {
        let mut watch = HangDetector::new(LIMIT, false);
        assert_eq!(watch.deadline(), None);
        watch.read("running 1 test");
        assert!(watch.deadline().is_some());
        watch.read("test result: ok. 1 passed; 0 failed; 0 ignored");
        assert_eq!(watch.deadline(), None);
    }

    #[test]
    fn of_tests_one_at_a_time_the_last_that_was_named_hangs() {
        let watch = watch("running 3 tests\ntest a ... GPU-TEST a: ran\nok\ntest b ... ");
        assert_eq!(watch.unfinished(&names("a b c"), 1), ["b"]);
    }

    #[test]
    fn of_concurrent_tests_those_hang_that_the_harness_reports_as_slow() {
        let text = "test a ... ok\ntest c has been running for over 60 seconds\n\
                    test b has been running for over 60 seconds\ntest b ... ok";
        assert_eq!(watch(text).unfinished(&names("a b c d e"), 2), ["c"]);
    }

    #[test]
    fn without_such_a_line_the_first_that_have_not_ended_hang() {
        assert_eq!(watch("test b ... ok").unfinished(&names("a b c d e"), 2), ["a", "c"]);
    }
}
