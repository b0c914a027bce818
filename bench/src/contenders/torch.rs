//! Operations of PyTorch's symmetric memory: `bench/torch_symm_mem.py`, run by a Python with torch
//! as one process for each GPU, before this program uses the GPUs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::base::options::RunOptions;
use crate::contenders::contender::Variant;
use crate::contenders::foreign::{self, Foreign};
use crate::contenders::selection::Selection;

const SCRIPT: &str = include_str!("../../torch_symm_mem.py");

/// Torch's all-reduces.
pub const ALL_REDUCES: [Variant; 2] = [Variant::TorchOneShot, Variant::TorchTwoShot];

/// The flag of benchmarks that torch runs too.
#[derive(Args, Clone, Debug)]
pub struct TorchOptions {
    /// Also run the operations of PyTorch's symmetric memory, by this Python with torch, in
    /// processes of its own on the same number of GPUs, before the others
    #[arg(long = "torch", value_name = "PYTHON", num_args = 0..=1)]
    #[arg(default_missing_value = "python3")]
    python: Option<PathBuf>,
}

impl TorchOptions {
    /// The Python, if it is asked for.
    pub fn python(&self) -> Option<&Path> {
        self.python.as_deref()
    }

    /// Omits torch's variants if it is not.
    pub fn select(&self, selection: &mut Selection, variants: &[Variant]) -> Result<()> {
        if self.python.is_none() {
            for variant in variants {
                selection.omit(*variant, "--torch [PYTHON] runs it")?;
            }
        }
        Ok(())
    }
}

/// What to measure: the script's argument.
#[derive(Debug, Serialize)]
pub struct Measurement {
    #[serde(flatten)]
    work: Work,
    variants: Vec<&'static str>,
    iters: usize,
    warmup: usize,
    check: u32,
    graph: usize,
    rounds: usize,
    seed: u64,
}

/// The operations.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// All-reduces of so many elements, by type.
    Counts(BTreeMap<&'static str, Vec<usize>>),
    /// Matrix products with a collective.
    Product {
        collective: &'static str,
        shapes: Vec<[usize; 3]>,
        /// Whether calls take turns with copies of B that exceed the L2 cache.
        cold: bool,
    },
}

/// What the script prints of one variant in one case.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    variant: String,
    #[serde(rename = "type")]
    dtype: String,
    size: usize,
    shape: Option<[usize; 3]>,
    #[serde(default)]
    times_us: Vec<f64>,
    wrong: Option<usize>,
    /// Why there are no times.
    left_out: Option<String>,
}

impl Measurement {
    /// Of those of torch's variants that are selected.
    pub fn new(
        work: Work,
        variants: &[Variant],
        selection: &Selection,
        run: &RunOptions,
    ) -> Result<Self> {
        let variants = variants.iter().filter(|variant| selection.has(**variant));
        let variants: Vec<_> = variants.map(|variant| variant.name()).collect();
        ensure!(!variants.is_empty(), "--torch, but --variants names none of torch's");
        let RunOptions { iters, warmup, check, graph, rounds, seed, .. } = *run;
        Ok(Self { work, variants, iters, warmup, check, graph, rounds, seed })
    }

    /// Runs the script on `ranks` GPUs. It is ended if it prints nothing for as long as `patience`.
    pub fn run(&self, python: &Path, ranks: usize, patience: Duration) -> Result<Vec<Foreign>> {
        // Free now, and seldom taken until rank 0 listens.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let measurement = serde_json::to_string(self)?;
        let commands = (0..ranks).map(|rank| {
            let command = command(python, &measurement, rank, ranks, port);
            (format!("torch's rank {rank}"), command)
        });
        let mut rows = Vec::new();
        foreign::run("torch", commands, patience, |line| {
            eprintln!("torch: {line}");
            rows.extend(self.parse(line)?);
            Ok(false)
        })?;
        Ok(rows)
    }

    /// A row, or none for a variant that was left out.
    fn parse(&self, line: &str) -> Result<Option<Foreign>> {
        let parsed = serde_json::from_str(line);
        let Line { variant, dtype, size, shape, times_us, wrong, left_out } =
            parsed.with_context(|| format!("torch printed no row: {line}"))?;
        let known = Variant::from_str(&variant, false).ok();
        let known = known.filter(|variant| self.variants.contains(&variant.name()));
        let variant = known.with_context(|| format!("torch printed no row: {line}"))?;
        if let Some(why) = left_out {
            println!("# left out: {variant} of {size} B {shape:?}: {why}");
            return Ok(None);
        }
        let (has, rounds) = (times_us.len(), self.rounds);
        ensure!(has == rounds, "torch printed {has} times for {rounds} rounds: {line}");
        let times = times_us.into_iter().map(|us| us / 1e6).collect();
        Ok(Some(Foreign { variant, dtype, size, shape, times, wrong }))
    }
}

/// The process of a rank.
fn command(python: &Path, measurement: &str, rank: usize, ranks: usize, port: u16) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, measurement]);
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
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::foreign::fake;

    /// Runs a shell script in Python's place, on three ranks, for two rounds.
    fn run(script: &str, patience: Duration) -> Result<Vec<Foreign>> {
        let (_folder, python) = fake::program("python", script);
        let measurement = Measurement {
            work: Work::Counts([("bf16", vec![4])].into()),
            variants: vec!["torch-one-shot", "torch-two-shot", "torch-fused"],
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
            echo "$one \"left_out\": \"no such operation\"}"
            fused="$(row torch-fused bf16 16)"
            echo "$fused \"shape\": [2, 4, 8], \"times_us\": [1, 1], \"wrong\": 0}"
        "#;
        let row = |variant, dtype: &str, (size, shape), times, wrong| {
            let times = Vec::from(times).into_iter().map(|us: f64| us / 1e6).collect();
            Foreign { variant, dtype: dtype.to_owned(), size, shape, times, wrong }
        };
        let expected = [
            row(Variant::TorchOneShot, "bf16", (8, None), [2.0, 3.5], Some(0)),
            row(Variant::TorchTwoShot, "f32", (4, None), [1.0, 1.0], None),
            row(Variant::TorchFused, "bf16", (16, Some([2, 4, 8])), [1.0, 1.0], Some(0)),
        ];
        assert_eq!(run(script, PATIENCE).unwrap(), expected);
    }

    #[test]
    fn products_are_passed_on_with_their_shapes() {
        let (shapes, cold) = (vec![[8, 16, 24]], true);
        let work = Work::Product { collective: "reduce-scatter", shapes, cold };
        let json = serde_json::to_value(work).unwrap();
        let product = serde_json::json!({
            "collective": "reduce-scatter", "shapes": [[8, 16, 24]], "cold": true
        });
        assert_eq!(json, serde_json::json!({ "product": product }));
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
