//! Finds or fetches nvcc, used only for C++ sources, and checks for its host compiler.
//!
//! nvcc consists of several wheels, which are unpacked into one folder of the cache.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use devcomm_cli::setup::PTXAS;
use devcomm_cli::wheels::{Wheel, fetch};
use devcomm_locate::{check_wheel, wheel_dir};

use crate::project::root;

/// The wheels of nvcc: compiler driver, front end, back end and headers. Those with [`VERSION`]
/// must match: the headers refuse another compiler.
const PACKAGES: [Wheel; 5] = [
    PTXAS,
    Wheel {
        package: "nvidia-nvvm",
        version: VERSION,
        sha256: [
            "c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070",
            "b659bd3115b7ac7ec8931e67d0e2c0dd09cd35b08a6a7372df6f8f22c67da80a",
        ],
    },
    Wheel {
        package: "nvidia-cuda-crt",
        version: VERSION,
        sha256: [
            "e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29",
            "9ed2c565fdf3244fa6719769a80a466b85bfd4b1467ea339353bc91c971d09e0",
        ],
    },
    Wheel {
        package: "nvidia-cuda-runtime",
        version: VERSION,
        sha256: [
            "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
            "de2dc5a7367974228b0a69588a9acc9340d3768bef1bf38bf0801eb08497cd2d",
        ],
    },
    Wheel {
        package: "nvidia-cuda-cccl",
        version: "13.3.5.0.6",
        sha256: [
            "d5230098fa2df5021e1a00c0c4eee41797671a91119d31e892463e5ccf3ee326",
            "6f30b8076b3e69951c459c94ae190bde51924b320076ebaec376d36848b4c76e",
        ],
    },
];
const VERSION: &str = PTXAS.version;

/// The folder of the wheels in the cache. Its name must not begin with `nvidia-cuda-nvcc`: by that
/// prefix `find_ptxas` finds the wheel with ptxas.
const FOLDER: &str = "cuda-compiler";

/// The path of nvcc in this folder.
const IN_WHEEL: &str = "nvidia/cu13/bin/nvcc";

/// The environment variable with the path of another nvcc.
const VARIABLE: &str = "DEVCOMM_NVCC";

/// A working nvcc.
pub struct Nvcc {
    /// The program.
    pub path: PathBuf,
    /// `nvcc 13.5.37`.
    pub version: String,
}

/// Returns the CUDA files of a folder of the checkout, sorted by name.
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

/// Returns the nvcc of [`VARIABLE`], else the cache's.
///
/// # Errors
///
/// If the download or a host compiler is missing.
pub fn find() -> Result<Nvcc> {
    let path = match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(named) => PathBuf::from(named),
        None => wheel()?.join(IN_WHEEL),
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

/// Does the same as [`find`], but downloads missing wheels.
pub fn find_or_fetch() -> Result<Nvcc> {
    let is_cached = || wheel().is_ok_and(|wheel| check_wheel(&wheel).is_ok());
    if std::env::var_os(VARIABLE).is_none_or(|value| value.is_empty()) && !is_cached() {
        // This comes before the download, which is useless without a host compiler.
        ensure_host_compiler()?;
        fetch(FOLDER, VERSION, &PACKAGES, is_cached)?;
    }
    find()
}

/// Returns the folder of the wheels in the cache.
fn wheel() -> Result<PathBuf> {
    Ok(wheel_dir(FOLDER, VERSION)?)
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

/// Checks that there is a host compiler, whose preprocessor nvcc uses.
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
