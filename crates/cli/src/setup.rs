//! `devcomm setup`: fetches missing components of kernel builds, and changes nothing if none is
//! missing.
//!
//! rustup installs `rust-src`, and on demand the toolchain with which the shipped kernels were
//! tuned.
//!
//! NCCL and ptxas are Python wheels, in a cache that all projects share
//! (`devcomm_locate::cache_dir`). A wheel is unpacked under a temporary name and renamed when
//! complete, under a lock, so that killed or concurrent setups leave no partial wheel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use cuda_builder::{KernelCompiler, TUNED_TOOLCHAIN, kernel_compiler};
use devcomm_locate::{
    NCCL_VERSION, NcclPart, NcclTree, NotFound, cache_dir_if_safe, find_nccl, find_ptxas,
};

use crate::wheels::{Wheel, damage, fetch};

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
// It has no group, as xtask flattens it into a command with one more option.
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
    /// Fetches what is missing; all components are required. Says what to do next.
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
        setup(self.quiet, Optional::Nothing)?;
        if !self.quiet {
            println!("next: {}", next_step());
        }
        Ok(0)
    }
}

/// Returns what to do after setup: run an example, or, by the installed command, which has none,
/// start or inspect a project.
fn next_step() -> &'static str {
    let program = std::env::current_exe().unwrap_or_default();
    match program.file_stem().is_some_and(|name| name == "xtask") {
        true => "cargo xtask run lsa_allreduce",
        false => "devcomm new my-kernels, or in a project: devcomm ptx --all",
    }
}

/// Fetches missing components. With `quiet`, present ones are not reported.
///
/// # Errors
///
/// If a component cannot be fetched; the error says what that needs, the network or a program. If
/// `DEVCOMM_CACHE` is a relative path.
pub fn setup(quiet: bool, optional: Optional) -> Result<()> {
    let report = |name: &str, what: &str| {
        if !quiet {
            println!("{name:<9} {what}");
        }
    };
    cache_dir_if_safe()?;
    let KernelCompiler { version, llvm_version, rustc, .. } = compiler_with_source()?;
    report("rustc", &format!("{version}, LLVM {llvm_version} ({})", rustc.display()));

    let tree = find_or_fetch(NCCL, quiet, find_pinned_nccl, |tree| &tree.root)?;
    report("NCCL", &format!("{NCCL_VERSION} in {} ({})", tree.root.display(), tree.found_by));

    match find_or_fetch(PTXAS, quiet, find_ptxas, PathBuf::as_path) {
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

/// Returns what `find` finds, of which `path` is in the wheel. Fetches the wheel first if `find`
/// finds nothing, or if what it finds is damaged in the cache.
pub(crate) fn find_or_fetch<T, E: Into<anyhow::Error>>(
    wheel: Wheel,
    quiet: bool,
    find: impl Fn() -> Result<T, E>,
    path: impl Fn(&T) -> &Path,
) -> Result<T> {
    if let Ok(found) = find() {
        // Builds call this again and again, with `quiet`. So it checks no hashes then: that takes a
        // second.
        match if quiet { None } else { damage(path(&found)) } {
            Some(damage) => eprintln!("fetching again what was damaged: {damage}"),
            None => return Ok(found),
        }
    }
    fetch(wheel.package, wheel.version, &[wheel], || {
        find().is_ok_and(|found| damage(path(&found)).is_none())
    })?;
    find().map_err(Into::into)
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
