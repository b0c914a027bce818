//! Tests the exchange of PyTorch's tensors by DLPack, and the use of PyTorch's NCCL: a process of
//! Python imports torch, and then loads this package's library. It needs GPUs, and `python3` with
//! torch.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = include_str!("../tensors.py");

/// Returns the path of this package's library: where cargo leaves it, or in a pack's `lib`.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap();
    let places = ["../lib", ".", ".."].map(|place| folder.join(place));
    let files = places.map(|place| place.join("libdevcomm_torch_tests.so"));
    let found = files.iter().find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("none of {files:?} is there")).clone()
}

/// Returns why the test cannot run.
fn missing() -> Option<String> {
    if std::env::var_os("DEVCOMM_TEST_GPUS").is_none_or(|on| on.is_empty() || on == "0") {
        return Some("simulated GPUs have no PyTorch".to_owned());
    }
    let script = "import torch; assert torch.cuda.is_available()";
    match Command::new("python3").args(["-c", script]).output() {
        Ok(output) if output.status.success() => None,
        Ok(_) => Some("python3 has no torch that finds a GPU".to_owned()),
        Err(error) => Some(format!("python3 does not start: {error}")),
    }
}

#[test]
fn torchs_tensors_come_and_go_and_its_nccl_is_used() {
    let outcome = match missing() {
        Some(reason) => format!("skipped ({reason})"),
        None => {
            run(&library());
            "ran".to_owned()
        }
    };
    let name = "torchs_tensors_come_and_go_and_its_nccl_is_used";
    let _ = writeln!(std::io::stdout(), "GPU-TEST {name}: {outcome}");
}

fn run(library: &Path) {
    let mut python = Command::new("python3");
    // The library must find torch's NCCL because it is loaded, not by its path.
    python.env_remove("DEVCOMM_NCCL_HOME").args(["-c", SCRIPT]).arg(library);
    let output = python.output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b));
    assert!(output.status.success() && stdout.ends_with("PASS\n"), "{stdout}{stderr}");
}
