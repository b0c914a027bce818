//! The wheel for Python: its check before a release, and its place in a pack.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::project::{Project, root};

/// The wheel is for Linux with this glibc or a newer one. Zig's linker has the older library's
/// symbols, and maturin refuses a wheel that needs others.
const PLATFORM: &str = "manylinux_2_28";

/// The most bytes of the wheel.
const LIMIT: u64 = 40 << 20;

/// Builds the wheel for a release with maturin and the compiled kernels, in the folder `wheels` of
/// the target folder, and runs its tests on simulated GPUs. Returns what `python3` lacks, if it
/// lacks something.
pub fn check() -> Result<Option<String>> {
    for module in ["maturin", "ziglang", "pytest", "numpy"] {
        if !has(module) {
            return Ok(Some(format!("not installed: python3 -m pip install {module}")));
        }
    }
    if !has("torch") {
        println!("python3 has no torch: the tests with its tensors are skipped");
    }
    if Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("valgrind is not installed: the tests of accesses to memory are skipped");
    }
    let target = Project::open()?.target_folder();
    let wheels = target.join("wheels");
    // What an earlier check has left.
    let _ = fs::remove_dir_all(&wheels);
    let mut build = Command::new("python3");
    build.args(["-m", "maturin", "build", "--release", "--locked", "--features", "kernels-bin"]);
    build.args(["--zig", "--compatibility", PLATFORM, "--out"]).arg(&wheels);
    build.current_dir(root().join("python")).env("CARGO_TARGET_DIR", target);
    run(&mut build, "maturin")?;
    let wheel = wheel_in(&wheels)?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{}: {bytes} bytes", wheel.display());
    ensure!(bytes <= LIMIT, "the wheel has {bytes} bytes, more than {LIMIT}");
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let site = folder.path().join("site");
    unpack(&wheel, &site)?;
    let mut tests = Command::new("python3");
    tests.args(["-m", "pytest", "-p", "no:cacheprovider"]).arg(root().join("python/tests"));
    tests.env("PYTHONPATH", site).env("PYTHONDONTWRITEBYTECODE", "1");
    run(&mut tests, "pytest")?;
    Ok(None)
}

/// Unpacks a wheel, a zip file, to a folder for `PYTHONPATH`.
pub fn unpack(wheel: &Path, to: &Path) -> Result<()> {
    ensure!(wheel.is_file(), "there is no wheel {}; `maturin build` makes it", wheel.display());
    let mut unzip = Command::new("python3");
    unzip.args(["-I", "-m", "zipfile", "-e"]).arg(wheel).arg(to);
    run(&mut unzip, "python3 -m zipfile")
}

/// Returns whether `python3` has a module.
fn has(module: &str) -> bool {
    let script =
        format!("import importlib.util, sys; sys.exit(not importlib.util.find_spec({module:?}))");
    let mut command = Command::new("python3");
    command.args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn wheel_in(folder: &Path) -> Result<PathBuf> {
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "whl") {
            return Ok(path);
        }
    }
    bail!("maturin made no wheel")
}

fn run(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{what} does not start"))?;
    ensure!(status.success(), "{what} failed, see above");
    Ok(())
}
