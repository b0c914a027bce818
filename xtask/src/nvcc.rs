//! Finds or fetches nvcc, used only for C++ sources, and checks for its host compiler.
//!
//! nvcc consists of several wheels, which are unpacked into one folder of the cache.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use devcomm_cli::setup::fetch;
use devcomm_locate::wheel_dir;

use crate::project::root;

/// The wheels of nvcc: compiler driver, front end, back end and headers. Those with [`VERSION`]
/// must match: the headers refuse another compiler.
const PACKAGES: [(&str, &str); 5] = [
    ("nvidia-cuda-nvcc", VERSION),
    ("nvidia-nvvm", VERSION),
    ("nvidia-cuda-crt", VERSION),
    ("nvidia-cuda-runtime", VERSION),
    ("nvidia-cuda-cccl", "13.3.5.0.6"),
];
const VERSION: &str = "13.5.37";

/// The folder of the wheels in the cache. Its name must not begin with `nvidia-cuda-nvcc`: by that
/// prefix `find_ptxas` finds the wheel with ptxas.
const FOLDER: &str = "cuda-compiler";

/// The environment variable with the path of another nvcc.
const VARIABLE: &str = "DEVCOMM_NVCC";

/// A working nvcc.
pub struct Nvcc {
    /// The program.
    pub path: PathBuf,
    /// `nvcc 13.5.37`.
    pub version: String,
}

/// The CUDA files of a folder of the checkout, sorted by name.
pub fn sources(folder: &str) -> Result<Vec<PathBuf>> {
    let folder = root().join(folder);
    let entries =
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut sources: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    Ok(sources)
}

/// The nvcc of [`VARIABLE`], else the cache's.
///
/// # Errors
///
/// If the download or a host compiler is missing.
pub fn find() -> Result<Nvcc> {
    let path = match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(named) => PathBuf::from(named),
        None => cached()?,
    };
    ensure!(
        path.is_file(),
        "there is no nvcc at {}: `cargo xtask setup --twins` downloads it, or set {VARIABLE} to \
        the nvcc of CUDA 13",
        path.display()
    );
    let version = version_of(&path)?;
    ensure_host_compiler()?;
    Ok(Nvcc { path, version })
}

/// As [`find`], but downloads missing wheels.
pub fn find_or_fetch() -> Result<Nvcc> {
    if std::env::var_os(VARIABLE).is_none_or(|value| value.is_empty()) && !cached()?.is_file() {
        // Checked before the download, which is useless without a host compiler.
        ensure_host_compiler()?;
        fetch(FOLDER, VERSION, &PACKAGES, || cached().is_ok_and(|path| path.is_file()))?;
    }
    find()
}

fn cached() -> Result<PathBuf> {
    Ok(wheel_dir(FOLDER, VERSION)?.join("nvidia/cu13/bin/nvcc"))
}

fn version_of(path: &PathBuf) -> Result<String> {
    let output = Command::new(path).arg("--version").output();
    let output = output.with_context(|| format!("{} does not start", path.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_once(", V").and_then(|(_, rest)| rest.split_whitespace().next());
    match version {
        Some(version) if output.status.success() => Ok(format!("nvcc {version}")),
        _ => bail!("{} --version prints no version", path.display()),
    }
}

/// nvcc uses a host compiler's preprocessor.
fn ensure_host_compiler() -> Result<()> {
    if std::env::var_os("NVCC_CCBIN").is_some_and(|value| !value.is_empty()) {
        return Ok(());
    }
    let mut gcc = Command::new("g++");
    let status = gcc.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ensure!(
        status.is_ok_and(|status| status.success()),
        "nvcc needs a host compiler, and there is no g++: install one (your system's g++ or \
         build-essential), or set NVCC_CCBIN to one"
    );
    Ok(())
}
