//! Finds the Rust toolchain that compiles kernels: rustc, the sources of `core`, LLVM.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;

/// The oldest LLVM that reads NCCL's bitcode, which is from clang 20.
const OLDEST_LLVM: u32 = 20;

/// A Rust toolchain that can compile for the GPU.
#[derive(Debug)]
pub(crate) struct Toolchain {
    pub(crate) rustc: OsString,
    pub(crate) cargo: OsString,
    /// `rustc 1.95.0 (59807616e 2026-04-14)`.
    pub(crate) version: String,
    /// `22.1.2`.
    pub(crate) llvm_version: String,
    pub(crate) libllvm: PathBuf,
}

impl Toolchain {
    /// Examines the given rustc, else the one that cargo runs.
    pub(crate) fn find(rustc: Option<&Path>) -> Result<Self, Error> {
        let from_env = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let running_cargo = from_env("CARGO").unwrap_or_else(|| "cargo".into());
        let (rustc, cargo) = match rustc {
            // Another toolchain's cargo may not be able to build this one's `core`.
            Some(path) => {
                let sibling = path.with_file_name("cargo");
                let cargo = if sibling.is_file() { sibling.into() } else { running_cargo };
                (path.as_os_str().to_owned(), cargo)
            }
            None => (from_env("RUSTC").unwrap_or_else(|| "rustc".into()), running_cargo),
        };
        let verbose = output(&rustc, &["-vV"])?;
        let version = verbose.lines().next().unwrap_or_default().to_owned();
        let llvm = verbose.lines().find_map(|line| line.strip_prefix("LLVM version: "));
        let llvm_version = llvm.map(str::to_owned).ok_or_else(|| Error::Program {
            program: rustc.to_string_lossy().into_owned(),
            reason: "it reports no LLVM version; device code needs rustc's LLVM back end".into(),
        })?;
        let sysroot = PathBuf::from(output(&rustc, &["--print", "sysroot"])?.trim());
        check_rust_source(&sysroot)?;
        let major = llvm_version.split('.').next().and_then(|text| text.parse::<u32>().ok());
        if major.is_none_or(|major| major < OLDEST_LLVM) {
            return Err(Error::LlvmTooOld { has: llvm_version, needs: OLDEST_LLVM });
        }
        let libllvm = find_libllvm(&sysroot, &llvm_version)?;
        Ok(Self { rustc, cargo, version, llvm_version, libllvm })
    }
}

fn output(program: &OsString, arguments: &[&str]) -> Result<String, Error> {
    let failed = |reason: String| Error::Program {
        program: format!("{} {}", program.to_string_lossy(), arguments.join(" ")),
        reason,
    };
    let output =
        Command::new(program).args(arguments).output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    String::from_utf8(output.stdout).map_err(|e| failed(e.to_string()))
}

fn check_rust_source(sysroot: &Path) -> Result<(), Error> {
    let folder = sysroot.join("lib/rustlib/src/rust/library/core");
    if folder.is_dir() {
        return Ok(());
    }
    Err(Error::NoRustSource { folder, fix: rust_source_command(sysroot) })
}

/// The command that installs rust-src for the toolchain in `sysroot`.
fn rust_source_command(sysroot: &Path) -> String {
    let of_rustup = sysroot.parent().is_some_and(|parent| parent.ends_with("toolchains"));
    match sysroot.file_name() {
        Some(name) if of_rustup => {
            format!("rustup component add rust-src --toolchain {}", name.to_string_lossy())
        }
        // A distribution's Rust, unknown to rustup.
        _ => "apt install rust-src` (Debian, Ubuntu) or `rustup component add rust-src".to_owned(),
    }
}

/// Finds libLLVM: rustup's toolchains include it; a distribution's rustc uses the system's.
fn find_libllvm(sysroot: &Path, version: &str) -> Result<PathBuf, Error> {
    let major = version.split('.').next().unwrap_or_default();
    let minor = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let mut tried = Vec::new();
    let folder = sysroot.join("lib");
    let mut own: Vec<PathBuf> = std::fs::read_dir(&folder)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    own.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libLLVM") && name.contains(".so") && name.contains(major)
    });
    own.sort();
    tried.push(format!("{}/libLLVM*", folder.display()));
    // A match may be a linker script, which cannot be loaded.
    if let Some(path) = own.into_iter().find(|path| is_elf(path)) {
        return Ok(path);
    }
    let names = [format!("libLLVM.so.{minor}"), format!("libLLVM-{major}.so")];
    let folders = [
        "/usr/lib/x86_64-linux-gnu".to_owned(),
        "/usr/lib/aarch64-linux-gnu".to_owned(),
        "/usr/lib64".to_owned(),
        "/usr/lib".to_owned(),
        format!("/usr/lib/llvm-{major}/lib"),
    ];
    for folder in folders {
        for name in &names {
            let path = Path::new(&folder).join(name);
            if is_elf(&path) {
                return Ok(path);
            }
            tried.push(path.display().to_string());
        }
    }
    Err(Error::NoLlvm { tried: tried.join(", ") })
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *b"\x7fELF"
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::rust_source_command;

    #[test]
    fn the_command_names_rustups_toolchain() {
        let sysroot = Path::new("/home/u/.rustup/toolchains/1.95.0-x86_64-unknown-linux-gnu");
        assert_eq!(
            rust_source_command(sysroot),
            "rustup component add rust-src --toolchain 1.95.0-x86_64-unknown-linux-gnu"
        );
    }

    #[test]
    fn a_distributions_toolchain_is_not_sent_to_rustup_alone() {
        assert!(rust_source_command(Path::new("/usr")).contains("apt install rust-src"));
    }
}
