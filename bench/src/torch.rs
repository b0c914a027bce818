//! All-reduces of PyTorch's symmetric memory: `bench/torch_all_reduce.py`, run by a Python with
//! torch as one process for each GPU, before this program uses the GPUs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::contender::Variant;

const SCRIPT: &str = include_str!("../torch_all_reduce.py");

/// Torch's variants.
pub const VARIANTS: [Variant; 2] = [Variant::TorchOneShot, Variant::TorchTwoShot];

/// How often the processes are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What to measure: the script's argument.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// Elements of the messages, by type.
    pub counts: BTreeMap<&'static str, Vec<usize>>,
    pub variants: Vec<&'static str>,
    pub iters: usize,
    pub warmup: usize,
    pub check: u32,
    pub graph: usize,
    pub rounds: usize,
    pub seed: u64,
}

/// What the script prints of one variant in one case.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    variant: String,
    #[serde(rename = "type")]
    dtype: String,
    size: usize,
    times_us: Vec<f64>,
    wrong: Option<usize>,
}

/// One variant's result in one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreign {
    pub variant: Variant,
    pub dtype: String,
    /// Bytes of a message.
    pub size: usize,
    /// Seconds per operation in every round, on the slowest rank.
    pub times: Vec<f64>,
    pub wrong: Option<usize>,
}

impl Measurement {
    /// Runs the script on `ranks` GPUs. It is ended if it prints nothing for as long as `patience`.
    pub fn run(&self, python: &Path, ranks: usize, patience: Duration) -> Result<Vec<Foreign>> {
        let mut processes = Processes::start(python, &serde_json::to_string(self)?, ranks)?;
        let (sender, lines) = channel();
        let output = processes.0[0].child.stdout.take().context("rank 0 has no output")?;
        thread::spawn(move || {
            // The reader ends with the process.
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|l| sender.send(l))
        });
        let (mut rows, mut last) = (Vec::new(), Instant::now());
        loop {
            match lines.recv_timeout(POLL_INTERVAL) {
                Ok(line) => {
                    eprintln!("torch: {line}");
                    rows.push(self.parse(&line)?);
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Disconnected) if processes.have_ended()? => return Ok(rows),
                // Its output has ended, and the process is about to.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL_INTERVAL),
                Err(RecvTimeoutError::Timeout) => {
                    processes.have_ended()?;
                }
            }
            let silent = last.elapsed();
            ensure!(silent < patience, "torch has printed nothing for {} s", silent.as_secs());
        }
    }

    fn parse(&self, line: &str) -> Result<Foreign> {
        let parsed = serde_json::from_str(line);
        let Line { variant, dtype, size, times_us, wrong } =
            parsed.with_context(|| format!("torch printed no row: {line}"))?;
        let known = Variant::from_str(&variant, false).ok().filter(|v| VARIANTS.contains(v));
        let variant = known.with_context(|| format!("torch printed no row: {line}"))?;
        let (has, rounds) = (times_us.len(), self.rounds);
        ensure!(has == rounds, "torch printed {has} times for {rounds} rounds: {line}");
        let times = times_us.into_iter().map(|us| us / 1e6).collect();
        Ok(Foreign { variant, dtype, size, times, wrong })
    }
}

/// A rank's process, and the thread that collects what it prints to standard error.
struct Process {
    child: Child,
    errors: Option<JoinHandle<String>>,
}

/// The ranks, which are killed when this is dropped.
struct Processes(Vec<Process>);

impl Processes {
    fn start(python: &Path, measurement: &str, ranks: usize) -> Result<Self> {
        // Free now, and seldom taken until rank 0 listens.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let mut processes = Self(Vec::new());
        for rank in 0..ranks {
            let mut command = Command::new(python);
            command.args(["-c", SCRIPT, measurement]).stdin(Stdio::null()).stderr(Stdio::piped());
            command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
            for (name, value) in [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_WORLD_SIZE", ranks),
                ("MASTER_PORT", port.into()),
            ] {
                command.env(name, value.to_string());
            }
            command.env("MASTER_ADDR", "127.0.0.1");
            // Torch sets up multicast where NCCL must not, unless it is told.
            let is_set = |name| std::env::var_os(name).is_some();
            if std::env::var("NCCL_NVLS_ENABLE").is_ok_and(|value| value.trim() == "0")
                && !is_set("TORCH_SYMM_MEM_DISABLE_MULTICAST")
            {
                command.env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1");
            }
            let started = command.spawn();
            let mut child =
                started.with_context(|| format!("cannot start {}", python.display()))?;
            let errors = child.stderr.take().map(|mut errors| {
                thread::spawn(move || {
                    let mut bytes = Vec::new();
                    // Whatever it printed before an error is all that there is.
                    let _ = errors.read_to_end(&mut bytes);
                    String::from_utf8_lossy(&bytes).into_owned()
                })
            });
            processes.0.push(Process { child, errors });
        }
        Ok(processes)
    }

    /// Whether all have ended. An error if one has failed.
    fn have_ended(&mut self) -> Result<bool> {
        let mut all = true;
        for (rank, Process { child, errors }) in self.0.iter_mut().enumerate() {
            let Some(status) = child.try_wait()? else {
                all = false;
                continue;
            };
            if !status.success() {
                let errors = errors.take().and_then(|errors| errors.join().ok());
                let errors = errors.unwrap_or_default();
                eprint!("{errors}");
                let why = errors.lines().rfind(|line| !line.trim().is_empty());
                bail!("torch's rank {rank} has failed ({status}): {}", why.unwrap_or("no message"));
            }
        }
        Ok(all)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for Process { child, .. } in &mut self.0 {
            // One that has ended cannot be killed, and needs not.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a shell script in Python's place, on three ranks, for two rounds.
    fn run(script: &str, patience: Duration) -> Result<Vec<Foreign>> {
        let folder = tempfile::tempdir()?;
        let python = folder.path().join("python");
        // Written by another process: a file that this one has open cannot be run.
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod +x \"$0\"";
        let mut command = Command::new("sh");
        ensure!(command.args(["-c", write]).arg(&python).arg(script).status()?.success());
        let measurement = Measurement {
            counts: [("bf16", vec![4])].into(),
            variants: VARIANTS.map(Variant::name).to_vec(),
            iters: 20,
            warmup: 5,
            check: 1,
            graph: 1,
            rounds: 2,
            seed: 1,
        };
        measurement.run(&python, 3, patience)
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn the_rows_of_rank_0_are_read() {
        let script = r#"
            [ "$1" = -c ] && [ $WORLD_SIZE$LOCAL_WORLD_SIZE = 33 ] || exit 1
            [ $LOCAL_RANK = $RANK ] && [ $MASTER_ADDR:$MASTER_PORT != 127.0.0.1:0 ] || exit 1
            case "$3" in *'"counts":{"bf16":[4]}'*'"rounds":2'*) ;; *) exit 1 ;; esac
            row() { echo "{\"variant\": \"$1\", \"type\": \"$2\", \"size\": $3,"; }
            one="$(row torch-one-shot bf16 8)" two="$(row torch-two-shot f32 4)"
            echo "$one \"times_us\": [2, 3.5], \"wrong\": 0}"
            echo "$two \"times_us\": [1, 1], \"wrong\": null}"
        "#;
        let row = |variant, dtype: &str, size, times, wrong| {
            let times = Vec::from(times).into_iter().map(|us: f64| us / 1e6).collect();
            Foreign { variant, dtype: dtype.to_owned(), size, times, wrong }
        };
        let expected = [
            row(Variant::TorchOneShot, "bf16", 8, [2.0, 3.5], Some(0)),
            row(Variant::TorchTwoShot, "f32", 4, [1.0, 1.0], None),
        ];
        assert_eq!(run(script, PATIENCE).unwrap(), expected);
    }

    #[test]
    fn a_python_without_torch_or_with_other_output_is_told() {
        let fails = |script: &str, patience, words: &str| {
            let error = format!("{:#}", run(script, patience).unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        let why = "ModuleNotFoundError: No module named 'torch'";
        // The other ranks would wait for the one that fails.
        let script = format!("[ $RANK = 1 ] || exec sleep 60; echo \"{why}\" >&2; exit 1");
        fails(&script, PATIENCE, &format!("torch's rank 1 has failed (exit status: 1): {why}"));
        fails("exec sleep 60", Duration::ZERO, "torch has printed nothing for 0 s");
        fails("echo hello", PATIENCE, "torch printed no row: hello");
        let row = r#"{"variant": "torch-one-shot", "type": "f32", "size": 4, "times_us": [1]}"#;
        fails(&format!("echo '{row}'"), PATIENCE, "1 times for 2 rounds");
        let row = row.replace("torch-one-shot", "nccl");
        fails(&format!("echo '{row}'"), PATIENCE, "torch printed no row");
    }
}
