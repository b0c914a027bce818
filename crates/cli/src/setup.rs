//! `devcomm setup`: fetches missing components of kernel builds. Idempotent.
//!
//! rustup installs `rust-src`, and on demand the toolchain that the shipped kernels were tuned
//! with.
//!
//! NCCL and ptxas are Python wheels, in a cache that all projects share
//! (`devcomm_locate::cache_dir`). A wheel is unpacked under a temporary name and renamed when
//! complete, under a lock, so that killed or concurrent setups leave no partial wheel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use cuda_builder::{KernelCompiler, TUNED_TOOLCHAIN, kernel_compiler};
use devcomm_locate::{NCCL_VERSION, NcclPart, NcclTree, NotFound, find_nccl, find_ptxas, wheel_of};

use crate::wheels::{Wheel, fetch, verify};

/// NCCL's wheel, of [`NCCL_VERSION`].
const NCCL: Wheel = Wheel {
    package: "nvidia-nccl-cu13",
    version: "2.32.3",
    sha256: [
        "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
        "a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c",
    ],
};

/// The wheel with ptxas; any ptxas that `find_ptxas` accepts is used instead.
pub const PTXAS: Wheel = Wheel {
    package: "nvidia-cuda-nvcc",
    version: "13.5.37",
    sha256: [
        "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
        "588eda18eb5076ae859fe272844b526459228af22df0b117f54eec3aa82bc9c8",
    ],
};

/// The components that are optional for a task.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Optional {
    /// No components: all of them are required.
    Nothing,
    /// ptxas, needed only for resource reports and cubins: the driver assembles PTX when kernels
    /// are loaded.
    Ptxas,
}

/// Fetch what kernel builds need: rust-src by rustup, NCCL and ptxas by pip into a cache that all
/// projects share
#[derive(Debug, clap::Args)]
// xtask adds an option to it.
#[group(skip)]
pub struct Setup {
    /// Print nothing if nothing is missing
    #[arg(long)]
    pub quiet: bool,
    /// Also install the Rust toolchain that the shipped kernels were tuned with; kernels are then
    /// compiled with it, and the host's code with yours
    #[arg(long)]
    pub kernel_toolchain: bool,
}

impl Setup {
    /// Fetches what is missing; all components are required.
    ///
    /// # Errors
    ///
    /// The errors are those of [`setup`], and one if rustup cannot install the toolchain.
    pub fn run(&self) -> Result<u8> {
        if self.kernel_toolchain {
            rustup(&[
                "toolchain",
                "install",
                TUNED_TOOLCHAIN,
                "--profile=minimal",
                "--component=rust-src",
                "--no-self-update",
            ])?;
        }
        setup(self.quiet, Optional::Nothing).map(|()| 0)
    }
}

/// Fetches missing components. With `quiet`, present ones are not reported.
///
/// # Errors
///
/// If a component cannot be fetched; the error says what that needs, the network or a program.
pub fn setup(quiet: bool, optional: Optional) -> Result<()> {
    let report = |name: &str, what: &str| {
        if !quiet {
            println!("{name:<9} {what}");
        }
    };
    let KernelCompiler { version, llvm_version, rustc, .. } = compiler_with_source()?;
    report("rustc", &format!("{version}, LLVM {llvm_version} ({})", rustc.display()));

    // With `quiet` builds call this again and again: hashes take a second.
    let tree = match find_pinned_nccl() {
        Ok(tree) if quiet || is_whole(&tree.root) => tree,
        _ => {
            fetch(NCCL.package, NCCL.version, &[NCCL], || {
                find_pinned_nccl().is_ok_and(|tree| is_whole(&tree.root))
            })?;
            find_pinned_nccl()?
        }
    };
    report("NCCL", &format!("{NCCL_VERSION} in {} ({})", tree.root.display(), tree.found_by));

    let ptxas = find_ptxas().ok().filter(|path| quiet || is_whole(path));
    match ptxas.map_or_else(fetch_ptxas, Ok) {
        Ok(path) => report("ptxas", &path.display().to_string()),
        Err(error) if optional == Optional::Ptxas => {
            eprintln!("warning: continuing without ptxas (no register counts, cubins): {error:#}");
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Finds a tree of [`NCCL_VERSION`] with library and bitcode.
///
/// # Errors
///
/// If there is none, with every place tried and its reason.
pub fn find_pinned_nccl() -> Result<NcclTree, NotFound> {
    find_nccl(None, NcclPart::Bitcode, |tree| match tree.library {
        Some(_) => tree.has_version(NCCL_VERSION),
        None => Err("it has no lib/libnccl.so.2".to_owned()),
    })
}

fn fetch_ptxas() -> Result<PathBuf> {
    fetch(PTXAS.package, PTXAS.version, &[PTXAS], || {
        find_ptxas().is_ok_and(|path| is_whole(&path))
    })?;
    Ok(find_ptxas()?)
}

/// Returns whether the cached wheel that has this file is undamaged; true for a file that is in
/// none.
pub(crate) fn is_whole(file: &Path) -> bool {
    let Some(Err(damage)) = wheel_of(file).map(|wheel| verify(&wheel)) else { return true };
    eprintln!("fetching again what was damaged: {damage:#}");
    false
}

/// Returns the compiler of kernels; adds `rust-src` to its toolchain if that has none.
fn compiler_with_source() -> Result<KernelCompiler> {
    match kernel_compiler() {
        Err(cuda_builder::Error::NoRustSource { fix, .. }) => {
            eprintln!("adding rust-src to the toolchain ...");
            // `fix` is a command of rustup's, or advice for a compiler that is not rustup's.
            let arguments = fix.strip_prefix("rustup ").unwrap_or("component add rust-src");
            rustup(&arguments.split(' ').collect::<Vec<_>>())?;
            Ok(kernel_compiler()?)
        }
        found => Ok(found?),
    }
}

/// Runs rustup.
fn rustup(arguments: &[&str]) -> Result<()> {
    let done = format!("`rustup {}`", arguments.join(" "));
    let status = Command::new("rustup").args(arguments).stdout(std::io::stderr()).status();
    let status = status.with_context(|| {
        format!(
            "there is no rustup to run {done}: install Rust through https://rustup.rs, or your \
             distribution's rust-src package"
        )
    })?;
    ensure!(status.success(), "{done} failed: see its message above; it needs the network");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wheel_of_nccl_is_of_the_version_that_is_required() {
        assert_eq!(NCCL.version, NCCL_VERSION.to_string());
    }
}
