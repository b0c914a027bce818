//! Processes of third-party programs that measure the same operations. Their results join the rows
//! of this program's variants.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use serde::Deserialize;

use crate::contenders::contender::Variant;

/// How often the processes are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// One variant's result in one case.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct PeerResult {
    pub variant: Variant,
    pub algorithm: Option<String>,
    #[serde(rename = "type")]
    pub dtype: String,
    /// Bytes of a message.
    pub size: usize,
    /// `[m, n, k]` of a matrix product.
    pub shape: Option<[usize; 3]>,
    pub tokens: Option<usize>,
    pub hidden: Option<usize>,
    /// The operation, where it is in the column of reductions.
    pub operation: Option<String>,
    /// Microseconds per operation in every round, on the slowest rank.
    #[serde(default)]
    pub times_us: Vec<f64>,
    pub wrong: Option<usize>,
    /// Why there are no times.
    pub left_out: Option<String>,
}

impl PeerResult {
    /// Prints that there is no row of it, and why.
    pub fn leave_out(&self, why: &str) {
        println!("# left out: {} of {} B {:?}: {why}", self.variant, self.size, self.shape);
    }

    #[cfg(test)]
    pub fn new(variant: Variant, dtype: &str, size: usize) -> Self {
        let row = serde_json::json!({ "variant": variant, "type": dtype, "size": size });
        serde_json::from_value(row).unwrap()
    }
}

/// Runs the processes of `program`, of which there is at least one, each with its name. Passes the
/// lines that the first one prints to `read`, and kills all if it prints nothing for as long as
/// `patience`.
pub fn run(
    program: &str,
    commands: impl IntoIterator<Item = (String, Command)>,
    patience: Duration,
    mut read: impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut processes = Processes::start(commands)?;
    let (sender, lines) = channel();
    let output = processes.0[0].child.stdout.take().context("the first process has no output")?;
    thread::spawn(move || {
        // The reader ends with the process.
        BufReader::new(output).lines().map_while(Result::ok).try_for_each(|l| sender.send(l))
    });
    let (mut last_line, mut last) = (String::new(), Instant::now());
    loop {
        match lines.recv_timeout(POLL_INTERVAL) {
            Ok(line) => {
                read(&line)?;
                (last_line, last) = (line, Instant::now());
            }
            Err(RecvTimeoutError::Disconnected) => {
                let [first, others @ ..] = &mut processes.0[..] else { return Ok(()) };
                let first = first.has_ended(&last_line)?;
                if have_ended(others)? && first {
                    return Ok(());
                }
                // Its output has ended, and the process is about to end.
                thread::sleep(POLL_INTERVAL);
            }
            Err(RecvTimeoutError::Timeout) => {
                have_ended(&mut processes.0[1..])?;
            }
        }
        let silent = last.elapsed();
        ensure!(silent < patience, "{program} has printed nothing for {} s", silent.as_secs());
    }
}

/// A process, and the thread that collects what it prints to standard error.
struct Process {
    name: String,
    child: Child,
    errors: Option<JoinHandle<String>>,
}

impl Process {
    /// Returns whether it has ended; an error, with the last line of its output, if it has failed.
    fn has_ended(&mut self, last_line: &str) -> Result<bool> {
        let Some(status) = self.child.try_wait()? else { return Ok(false) };
        if !status.success() {
            let errors = self.errors.take().and_then(|errors| errors.join().ok());
            let errors = errors.unwrap_or_default();
            eprint!("{errors}");
            let why = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(last_line);
            let why = if why.is_empty() { "no message" } else { why };
            bail!("{} has failed ({status}): {why}", self.name);
        }
        Ok(true)
    }
}

/// Returns whether all have ended; an error if one has failed.
fn have_ended(processes: &mut [Process]) -> Result<bool> {
    processes.iter_mut().try_fold(true, |all, process| Ok(all & process.has_ended("")?))
}

/// Processes that are killed when this is dropped.
struct Processes(Vec<Process>);

impl Processes {
    fn start(commands: impl IntoIterator<Item = (String, Command)>) -> Result<Self> {
        let mut processes = Self(Vec::new());
        for (name, mut command) in commands {
            let is_first = processes.0.is_empty();
            command.stdin(Stdio::null()).stderr(Stdio::piped());
            command.stdout(if is_first { Stdio::piped() } else { Stdio::null() });
            let started = command.spawn();
            let program = || format!("cannot start {}", command.get_program().display());
            let mut child = started.with_context(program)?;
            let errors = child.stderr.take().map(|mut errors| {
                thread::spawn(move || {
                    let mut bytes = Vec::new();
                    // After an error the text ends early.
                    let _ = errors.read_to_end(&mut bytes);
                    String::from_utf8_lossy(&bytes).into_owned()
                })
            });
            processes.0.push(Process { name, child, errors });
        }
        Ok(processes)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for Process { child, .. } in &mut self.0 {
            // A process that has ended cannot be killed, and need not be.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Stand-ins for other programs, for tests.
#[cfg(test)]
pub mod fake {
    use std::path::PathBuf;
    use std::process::Command;

    /// Returns a shell script as the program `name`, in a folder that is removed when it is
    /// dropped.
    pub fn program(name: &str, script: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(name);
        // Another process writes it, as a file that this one has open cannot be run.
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod +x \"$0\"";
        let mut command = Command::new("sh");
        assert!(command.args(["-c", write]).arg(&program).arg(script).status().unwrap().success());
        (folder, program)
    }
}
