//! Peers: third-party packages and programs that measure the same operations. They run with a
//! process for each GPU, before this program uses the GPUs and again after it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use devcomm_locate::{NcclPart, find_nccl};
use serde::Serialize;

use crate::base::options::{RunOptions, without_flags};
use crate::contenders::contender::Variant;
use crate::contenders::contest::{Contest, VariantInfo};
use crate::contenders::foreign::{self, PeerResult};
use crate::contenders::selection::Selection;

/// A kind of peer.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    /// The program that is started unless the command line names another; of `nccl` the variable
    /// with which this program is started.
    program: &'static str,
    /// The Python script that runs the program, or that the program, a Python, runs.
    script: Option<&'static str>,
    variants: &'static [Variant],
}

/// All kinds. The first process of a peer prints a line of JSON for each result. All programs but
/// that of `nccl` get a job as JSON and the environment of torchrun.
const KINDS: [Kind; 5] = [
    Kind {
        name: "torch",
        program: "python3",
        script: Some(include_str!("../../peers/torch_symm_mem.py")),
        variants: &[Variant::TorchOneShot, Variant::TorchTwoShot, Variant::TorchFused],
    },
    Kind {
        name: "nccl-tests",
        program: "all_reduce_perf",
        script: Some(include_str!("../../peers/nccl_tests.py")),
        variants: &[Variant::NcclTestsLsa, Variant::NcclTestsLsaVector],
    },
    Kind {
        name: "flashinfer",
        program: "flashinfer",
        script: None,
        variants: &[Variant::FlashInfer, Variant::Vllm],
    },
    Kind {
        name: "nccl-ep",
        program: "python3",
        script: Some(include_str!("../../peers/nccl_ep.py")),
        variants: &[Variant::NcclEpLl, Variant::NcclEpHt],
    },
    // This program, with other variables of NCCL in the environment.
    Kind {
        name: "nccl",
        program: "NCCL_SYM_TMA_ENABLE=1",
        script: None,
        variants: &[Variant::NcclSym],
    },
];

/// The flag of benchmarks that peers run too.
#[derive(Args, Clone, Debug, Default)]
pub struct PeerOptions {
    /// Also run these, comma-separated, in processes of their own on the same number of GPUs,
    /// before the others and again after them: `torch[=PYTHON]`, PyTorch's symmetric memory;
    /// `nccl-tests[=PROGRAM]`, its program all_reduce_perf; `flashinfer[=PROGRAM]`, compiled by
    /// bench/peers/build.sh, with its copy of vLLM's all-reduce; `nccl-ep[=PYTHON]`, NCCL EP by a
    /// Python with torch and nccl-extensions, which needs nvcc and NCCL 2.30's headers;
    /// `nccl[=VARIABLE=VALUE]`, NCCL's symmetric kernels with this in the environment, such as
    /// NCCL_SYM_KERNEL
    #[arg(long, value_delimiter = ',', value_name = "NAME[=PROGRAM]")]
    peers: Vec<Peer>,
}

/// A peer that the flag names.
#[derive(Clone, Debug)]
struct Peer {
    kind: &'static Kind,
    program: PathBuf,
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, program) = text.split_once('=').unwrap_or((text, ""));
        let kind = KINDS.iter().find(|kind| kind.name == name);
        let all = || KINDS.map(|kind| kind.name).join(", ");
        let kind = kind.ok_or_else(|| format!("there is no peer `{name}`, but {}", all()))?;
        let program = if program.is_empty() { kind.program } else { program };
        Ok(Self { kind, program: program.into() })
    }
}

/// What to measure: a part of [`Job`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerWork {
    /// All-reduces of this number of elements, by type.
    Counts(BTreeMap<&'static str, Vec<usize>>),
    /// All-reduces with RMSNorm by type: numbers of tokens, and of elements of a token.
    RmsNorm(BTreeMap<&'static str, Vec<[usize; 2]>>),
    /// Matrix products with a collective.
    Product {
        collective: &'static str,
        shapes: Vec<[usize; 3]>,
        /// Whether calls alternate between copies of B that together exceed the L2 cache.
        cold: bool,
    },
    /// Operations of expert parallelism, with these numbers of tokens of a rank.
    Experts {
        tokens: Vec<usize>,
        hidden: usize,
        experts: usize,
        top_k: usize,
        routing: String,
        operations: Vec<&'static str>,
    },
}

/// The argument of a peer, as JSON.
#[derive(Serialize)]
struct Job<'a> {
    #[serde(flatten)]
    work: &'a PeerWork,
    variants: Vec<&'static str>,
    iters: usize,
    warmup: usize,
    check: u32,
    graph: usize,
    rounds: usize,
    seed: u64,
}

/// The variants of a peer that failed, and the reason.
pub type FailedPeer = (Vec<Variant>, Error);

impl PeerOptions {
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Omits the variants of kinds that were not asked for. Each of those that were has one in the
    /// contest and in the selection.
    pub fn select(&self, contest: &Contest, selection: &mut Selection) -> Result<()> {
        for Peer { kind: Kind { name, variants, .. }, .. } in &self.peers {
            let is_of = |info: &VariantInfo| variants.contains(&info.variant);
            let benchmark = contest.benchmark;
            ensure!(contest.variants.iter().any(is_of), "{benchmark} has no variant of {name}");
            let has = variants.iter().any(|variant| selection.has(*variant));
            ensure!(has, "--peers {name}, but --variants names none of its");
        }
        let asked = |kind: &Kind| self.peers.iter().any(|peer| peer.kind.name == kind.name);
        // This program also runs the variant of `nccl` itself.
        for kind in KINDS.iter().filter(|kind| kind.name != "nccl" && !asked(kind)) {
            for variant in kind.variants {
                selection.omit(*variant, format!("--peers {} runs it", kind.name))?;
            }
        }
        Ok(())
    }

    /// Refuses peers that would do other work with this flag of the command line, of which they
    /// know nothing; this program, as the peer `nccl`, gets the whole command line.
    pub fn refuse_with(&self, flag: &str) -> Result<()> {
        let other = self.peers.iter().map(|peer| peer.kind.name).find(|name| *name != "nccl");
        ensure!(
            other.is_none(),
            "--peers {}: it cannot run with {flag}",
            other.unwrap_or_default()
        );
        Ok(())
    }

    /// Runs the peers that have selected variants on `ranks` GPUs, one after the other. Returns
    /// their results, and the variants of those that failed, or that printed nothing for as long as
    /// `patience`, with the reason.
    pub fn run(
        &self,
        work: &PeerWork,
        selection: &Selection,
        run: &RunOptions,
        (ranks, patience): (usize, Duration),
    ) -> Result<(Vec<PeerResult>, Vec<FailedPeer>)> {
        let (mut rows, mut failed) = (Vec::new(), Vec::new());
        for peer in &self.peers {
            let mut variants = peer.kind.variants.to_vec();
            variants.retain(|variant| selection.has(*variant));
            // An earlier run of a peer without any has failed.
            if variants.is_empty() {
                continue;
            }
            match peer.run(work, &variants, run, (ranks, patience)) {
                Ok(found) => rows.extend(found),
                Err(why) => failed.push((variants, why)),
            }
        }
        Ok((rows, failed))
    }
}

impl Peer {
    fn run(
        &self,
        work: &PeerWork,
        variants: &[Variant],
        run: &RunOptions,
        (ranks, patience): (usize, Duration),
    ) -> Result<Vec<PeerResult>> {
        let name = self.kind.name;
        let RunOptions { iters, warmup, check, graph, rounds, seed, .. } = *run;
        let names = variants.iter().map(|variant| variant.name()).collect();
        let job = Job { work, variants: names, iters, warmup, check, graph, rounds, seed };
        let job = serde_json::to_string(&job)?;
        // The port is free now, and seldom taken before rank 0 listens.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        // One process of this program starts all ranks, as threads, without torchrun's variables.
        let ranks = if name == "nccl" { 1 } else { ranks };
        let commands = (0..ranks).map(|rank| {
            let mut command = self.command(&job);
            for (variable, value) in [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_WORLD_SIZE", ranks),
                ("MASTER_PORT", port.into()),
            ] {
                if name != "nccl" {
                    command.env(variable, value.to_string());
                }
            }
            (format!("{name}'s rank {rank}"), command)
        });
        let mut rows = Vec::new();
        foreign::run(name, commands, patience, |line| {
            eprintln!("{name}: {line}");
            // A script prints rows and, after `#`, its progress; a program's libraries may print
            // anything, so that only JSON is a row there.
            let is_row = self.kind.script.is_some() && !line.starts_with('#');
            if is_row || line.starts_with('{') {
                rows.extend(self.parse(line, variants, rounds)?);
            }
            Ok(())
        })?;
        Ok(rows)
    }

    /// Returns a row, or none for a variant that was left out.
    fn parse(&self, line: &str, variants: &[Variant], rounds: usize) -> Result<Option<PeerResult>> {
        let none = || format!("{} printed no row: {line}", self.kind.name);
        let row: PeerResult = serde_json::from_str(line).with_context(none)?;
        ensure!(variants.contains(&row.variant), none());
        if let Some(why) = &row.left_out {
            row.leave_out(why);
            return Ok(None);
        }
        let (has, name) = (row.times_us.len(), self.kind.name);
        ensure!(has == rounds, "{name} printed {has} times for {rounds} rounds: {line}");
        Ok(Some(row))
    }

    /// Returns the process of a rank.
    fn command(&self, job: &str) -> Command {
        let mut command = match (self.kind.name, self.kind.script) {
            ("nccl", _) => return self.own_command(),
            ("torch" | "nccl-ep", script) => {
                let mut command = Command::new(&self.program);
                command.args(["-c", script.unwrap_or_default(), job]);
                if self.kind.name == "nccl-ep" {
                    command.envs(library_path().map(|path| ("LD_LIBRARY_PATH", path)));
                }
                command
            }
            (_, Some(script)) => {
                let mut command = Command::new("python3");
                command.args(["-c", script, job]).arg(&self.program);
                command.envs(library_path().map(|path| ("LD_LIBRARY_PATH", path)));
                command
            }
            (_, None) => {
                let mut command = Command::new(&self.program);
                command.arg(job);
                command
            }
        };
        command.env("MASTER_ADDR", "127.0.0.1");
        // Where NCCL must not use multicast, torch would, without this variable.
        let is_set = |name| std::env::var_os(name).is_some();
        if std::env::var("NCCL_NVLS_ENABLE").is_ok_and(|value| value.trim() == "0")
            && !is_set("TORCH_SYMM_MEM_DISABLE_MULTICAST")
        {
            command.env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1");
        }
        command
    }

    /// Returns the command of this program that measures only NCCL on windows.
    fn own_command(&self) -> Command {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let mut command = Command::new(std::env::current_exe().unwrap_or_default());
        command.args(own_arguments(words.iter().map(String::as_str)));
        let setting = self.program.to_string_lossy().into_owned();
        let (variable, value) = setting.split_once('=').unwrap_or((&setting, "1"));
        command.env(variable, value).env(AS_PEER, &setting);
        command
    }
}

/// Returns the arguments of this program as its own peer, from those that it was started with: for
/// one row per case, out of place, as a peer's rows are.
fn own_arguments<'a>(words: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    const REPLACED: &str =
        "--peers --json --csv --plot --compare --variants --nccl --between --in-place";
    let mut arguments = without_flags(words, REPLACED);
    arguments.extend(["--variants", "nccl-sym", "--nccl", "unmixed"]);
    arguments
}

/// The variable that makes this program print its results as a peer; its value is their algorithm.
pub const AS_PEER: &str = "DEVCOMM_BENCH_PEER";

/// Returns the folders of libraries, with that of devcomm's NCCL first.
fn library_path() -> Option<OsString> {
    let nccl = find_nccl(None, NcclPart::Library, |_| Ok(())).ok()?;
    let folder = nccl.library?.parent()?.to_owned();
    let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&others))).ok()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::contenders::foreign::fake;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        run: RunOptions,
        #[command(flatten)]
        peers: PeerOptions,
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Runs a shell script in a peer's place, on three ranks, for two rounds; an error if it fails.
    fn run(peer: &str, script: &str, patience: Duration) -> Result<Vec<PeerResult>> {
        let kind = KINDS.iter().find(|kind| kind.name == peer).unwrap();
        run_for(kind.variants, peer, script, patience)
    }

    /// Does the same for selected variants.
    fn run_for(
        selected: &[Variant],
        peer: &str,
        script: &str,
        patience: Duration,
    ) -> Result<Vec<PeerResult>> {
        let (_folder, program) = fake::program("program", script);
        let peers = format!("{peer}={}", program.display());
        let args = ["bench", "--rounds", "2", "-G", "1", "--peers", &peers];
        let Cli { run, peers } = Cli::parse_from(args);
        let work = PeerWork::Counts([("bf16", vec![4])].into());
        let infos = selected.iter().map(|variant| VariantInfo::column(*variant, ""));
        let selection = Selection::new(&[], &infos.collect::<Vec<_>>(), "")?;
        let (rows, mut failed) = peers.run(&work, &selection, &run, (3, patience))?;
        failed.pop().map_or(Ok(rows), |(variants, why)| {
            assert_eq!(variants, selected);
            Err(why)
        })
    }

    #[test]
    fn a_peer_that_was_left_out_is_not_started_again() {
        let rows = run_for(&[Variant::Rust], "torch", "exit 1", PATIENCE).unwrap();
        assert_eq!(rows, []);
    }

    #[test]
    fn the_rows_of_rank_0_are_read() {
        let script = r#"
            [ "$1" = -c ] && shift 2
            [ $WORLD_SIZE$LOCAL_WORLD_SIZE = 33 ] || exit 1
            [ $LOCAL_RANK = $RANK ] && [ $MASTER_ADDR:$MASTER_PORT != 127.0.0.1:0 ] || exit 1
            case "$1" in *'"counts":{"bf16":[4]}'*'"rounds":2'*) ;; *) exit 1 ;; esac
            row() { echo "{\"variant\": \"$1\", \"type\": \"$2\", \"size\": $3,"; }
            case "$1" in *flashinfer*)
                row="$(row flashinfer bf16 8) \"tokens\": 1, \"hidden\": 4,"
                echo "$row \"algorithm\": \"one-shot\", \"times_us\": [2, 2], \"wrong\": 0}"
                exit ;;
            esac
            one="$(row torch-one-shot bf16 8)" two="$(row torch-two-shot f32 4)"
            echo "$one \"times_us\": [2, 3.5], \"wrong\": 0}"
            echo "$two \"times_us\": [1, 1], \"wrong\": null}"
            echo "$one \"left_out\": \"no such operation\"}"
            fused="$(row torch-fused bf16 16)"
            echo "$fused \"shape\": [2, 4, 8], \"times_us\": [1, 1], \"wrong\": 0}"
        "#;
        let row = |variant, dtype: &str, (size, shape), times: [f64; 2], wrong| {
            let times_us = times.to_vec();
            PeerResult { shape, times_us, wrong, ..PeerResult::new(variant, dtype, size) }
        };
        let expected = [
            row(Variant::TorchOneShot, "bf16", (8, None), [2.0, 3.5], Some(0)),
            row(Variant::TorchTwoShot, "f32", (4, None), [1.0, 1.0], None),
            row(Variant::TorchFused, "bf16", (16, Some([2, 4, 8])), [1.0, 1.0], Some(0)),
        ];
        assert_eq!(run("torch", script, PATIENCE).unwrap(), expected);
        let rows = run("flashinfer", script, PATIENCE).unwrap();
        let columns = (rows[0].algorithm.as_deref(), rows[0].tokens, rows[0].hidden);
        assert_eq!(columns, (Some("one-shot"), Some(1), Some(4)));
    }

    #[test]
    fn this_program_as_a_peer_has_one_row_per_case() {
        let words = "all-reduce -b 8 --in-place --peers nccl --variants nccl,rust -n 3 --between";
        let expected = "all-reduce -b 8 -n 3 --variants nccl-sym --nccl unmixed";
        assert_eq!(own_arguments(words.split(' ')).join(" "), expected);
    }

    #[test]
    fn work_is_passed_on_as_json() {
        let (shapes, cold) = (vec![[8, 16, 24]], true);
        let work = PeerWork::Product { collective: "reduce-scatter", shapes, cold };
        let product = serde_json::json!({
            "collective": "reduce-scatter", "shapes": [[8, 16, 24]], "cold": true
        });
        assert_eq!(serde_json::to_value(work).unwrap(), serde_json::json!({ "product": product }));
        let work =
            serde_json::to_value(PeerWork::RmsNorm([("bf16", vec![[1, 64]])].into())).unwrap();
        assert_eq!(work, serde_json::json!({"rmsnorm": {"bf16": [[1, 64]]}}));
    }

    #[test]
    fn a_peer_without_its_package_or_with_other_output_is_told() {
        let fails = |script: &str, patience, words: &str| {
            let error = format!("{:#}", run("torch", script, patience).unwrap_err());
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
