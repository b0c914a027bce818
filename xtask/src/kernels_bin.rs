//! `cargo xtask kernels-bin`: compiles the kernels into the package `devcomm-kernels-bin`, which
//! programs and the wheel for Python contain with the feature `kernels-bin`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cuda_builder::CudaBuilder;
use devcomm_cli::setup::{Optional, setup};
use xtask::licences::notices;

use crate::KERNELS;
use crate::project::root;

#[path = "../../crates/kernels_bin/stamp.rs"]
#[allow(dead_code, reason = "the package's build script checks the stamp")]
mod stamp;

/// The most that a registry takes for a package.
const LIMIT: usize = 10 << 20;

/// Compiles the kernels into the package. With `check`, compiles them in an empty folder, and
/// compares.
pub fn kernels_bin(check: bool) -> Result<()> {
    setup(true, Optional::Ptxas)?;
    let package = root().join("crates/kernels_bin");
    let data = package.join("data");
    if check {
        let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
        builder(&folder.path().join("data")).target_dir(folder.path()).build()?;
        let (again, packaged) = (contents(folder.path())?, contents(&package)?);
        let mut names: Vec<_> = again.keys().chain(packaged.keys()).collect();
        names.retain(|name| again.get(*name) != packaged.get(*name));
        ensure!(names.is_empty(), "these files in {} differ: {names:?}", data.display());
        println!("{} files have the same bytes", again.len());
        return Ok(());
    }
    let artifacts = builder(&data).build()?;
    let size: usize = contents(&package)?.values().map(Vec::len).sum();
    println!("{}: {} modules in {size} bytes", data.display(), artifacts.modules.len());
    ensure!(size <= LIMIT, "a package has at most {LIMIT} bytes");
    let licences = notices(&root().join("Cargo.toml"), &[KERNELS], &[])?;
    fs::write(data.join("THIRD_PARTY_CRATES"), licences)?;
    stamp::write(&package).with_context(|| format!("cannot stamp {}", data.display()))
}

/// Returns the builder of the kernels, for the architecture in `DEVCOMM_CUDA_ARCH` or sm_90.
fn builder(folder: &Path) -> CudaBuilder {
    CudaBuilder::new(KERNELS).manifest_dir(root()).out_dir(folder).line_tables(false)
}

/// Returns the compiled kernels in the folder `data` of a package.
fn contents(package: &Path) -> Result<BTreeMap<OsString, Vec<u8>>> {
    let read = |path: PathBuf| Ok((path.file_name().unwrap_or_default().into(), fs::read(&path)?));
    stamp::files(package)?.into_iter().map(read).collect()
}
