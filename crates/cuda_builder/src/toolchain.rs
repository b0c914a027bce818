//! Finds the Rust toolchain that compiles kernels: rustc, the sources of `core`, LLVM.
//!
//! It need not be the one that compiles the host's code: kernels and host code share no object
//! file.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::semver::Version;

use crate::error::Error;

/// The oldest LLVM that reads NCCL's bitcode, which is from clang 20.
const OLDEST_LLVM: u32 = 20;

/// The toolchain with which the shipped kernels were tuned. Where rustup has it, with `rust-src`,
/// it compiles the kernels, whatever compiles the host's code.
pub const TUNED_TOOLCHAIN: &str = "1.95.0";

/// The newest minor version of Rust (1.x) that the kernels are tested with.
const NEWEST_TESTED: u64 = 99;

/// The variable that names another toolchain for kernels: `user` for the one that cargo runs, a
/// name that rustup knows, or the folder of a toolchain.
pub(crate) const VARIABLE: &str = "DEVCOMM_KERNEL_TOOLCHAIN";

/// The compiler of kernels, as [`kernel_compiler`] finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCompiler {
    /// The path or name of its rustc.
    pub rustc: PathBuf,
    /// What `rustc --version` prints: `rustc 1.95.0 (59807616e 2026-04-14)`.
    pub version: String,
    /// The version of its LLVM, `22.1.2`.
    pub llvm_version: String,
    /// The libLLVM, which links and optimises kernels.
    pub libllvm: PathBuf,
}

/// Finds the compiler of kernels: what `DEVCOMM_KERNEL_TOOLCHAIN` names, else [`TUNED_TOOLCHAIN`]
/// if rustup has it with `rust-src`, else the toolchain that cargo runs.
///
/// # Errors
///
/// If there is none, or it lacks `rust-src` or a loadable LLVM.
pub fn kernel_compiler() -> Result<KernelCompiler, Error> {
    let Toolchain { rustc, version, llvm_version, libllvm, .. } = Toolchain::find(None, None)?;
    Ok(KernelCompiler { rustc: rustc.into(), version, llvm_version, libllvm })
}

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
    /// Examines the given rustc, else the [chosen one](kernel_compiler). `needs` is the
    /// version of Rust that the kernels ask for.
    pub(crate) fn find(rustc: Option<&Path>, needs: Option<&Version>) -> Result<Self, Error> {
        let chosen = match rustc {
            Some(rustc) => Some(rustc.to_owned()),
            None => chosen(&env::var(VARIABLE).unwrap_or_default(), rustup_home(), needs)?,
        };
        let from_env = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let running_cargo = from_env("CARGO").unwrap_or_else(|| "cargo".into());
        let (rustc, cargo) = match &chosen {
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

    /// Returns what to tell the user of a compiler that is newer than those tested.
    pub(crate) fn notice(&self) -> Option<String> {
        let number = self.version.split_whitespace().nth(1)?;
        (minor(number)? > NEWEST_TESTED).then(|| {
            format!(
                "kernels are compiled by rustc {number}, newer than 1.{NEWEST_TESTED}, the newest \
                 that devcomm is tested with; `devcomm setup --kernel-toolchain` installs \
                 {TUNED_TOOLCHAIN} for kernels alone"
            )
        })
    }
}

/// Returns the minor version of Rust in `1.95` or `1.95.0-nightly`.
fn minor(version: &str) -> Option<u64> {
    version.split('.').nth(1)?.parse().ok()
}

/// Returns the rustc of the toolchain that is `wanted`, or the default; `None` is the one that
/// cargo runs.
fn chosen(
    wanted: &str,
    rustup: Option<PathBuf>,
    needs: Option<&Version>,
) -> Result<Option<PathBuf>, Error> {
    let installed = |name: &str| {
        let ours = format!("{name}-{}-", env::consts::ARCH);
        let is_it = |path: &PathBuf| {
            let folder = path.file_name().unwrap_or_default().to_string_lossy();
            folder == name || folder.starts_with(&ours)
        };
        let all = rustup.as_ref()?.join("toolchains").read_dir().ok()?;
        all.filter_map(|entry| Some(entry.ok()?.path())).find(is_it)
    };
    let rustc = |folder: PathBuf| Some(folder.join("bin/rustc")).filter(|path| path.is_file());
    match wanted {
        "user" => Ok(None),
        "" => {
            // `None`, if the kernels ask for no version, is less than any.
            let too_old = needs > Version::parse(TUNED_TOOLCHAIN).ok().as_ref();
            let tuned = installed(TUNED_TOOLCHAIN).filter(|folder| !too_old && has_source(folder));
            Ok(tuned.and_then(rustc))
        }
        wanted => {
            let folder = match wanted.contains('/') {
                true => Some(PathBuf::from(wanted)),
                false => installed(wanted),
            };
            let missing = || Error::NoKernelToolchain(wanted.to_owned());
            folder.and_then(rustc).ok_or_else(missing).map(Some)
        }
    }
}

/// Returns where rustup keeps its toolchains.
fn rustup_home() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("RUSTUP_HOME").or_else(|| Some(set("HOME")?.join(".rustup")))
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

/// Returns the folder of `core`'s sources.
fn source_of(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib/src/rust/library/core")
}

fn has_source(sysroot: &Path) -> bool {
    source_of(sysroot).is_dir()
}

fn check_rust_source(sysroot: &Path) -> Result<(), Error> {
    match has_source(sysroot) {
        true => Ok(()),
        false => Err(Error::NoRustSource {
            folder: source_of(sysroot),
            fix: rust_source_command(sysroot),
        }),
    }
}

/// Returns the command that installs rust-src for the toolchain in `sysroot`.
fn rust_source_command(sysroot: &Path) -> String {
    let is_rustup = sysroot.parent().is_some_and(|parent| parent.ends_with("toolchains"));
    match sysroot.file_name() {
        Some(name) if is_rustup => {
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
    use std::fs;
    use std::path::{Path, PathBuf};

    use cargo_metadata::semver::Version;

    use super::{TUNED_TOOLCHAIN, Toolchain, chosen, rust_source_command};

    /// Returns a home of rustup with a complete toolchain of each name.
    fn rustup(names: &[&str]) -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        for name in names {
            let folder = folder(home.path(), name);
            fs::create_dir_all(folder.join("bin")).unwrap();
            fs::write(folder.join("bin/rustc"), "").unwrap();
            fs::create_dir_all(folder.join("lib/rustlib/src/rust/library/core")).unwrap();
        }
        home
    }

    fn folder(home: &Path, name: &str) -> PathBuf {
        let full = format!("{name}-{}-unknown-linux-gnu", std::env::consts::ARCH);
        home.join("toolchains").join(full)
    }

    #[test]
    fn the_tuned_toolchain_compiles_kernels_where_it_is_complete() {
        let home = rustup(&[TUNED_TOOLCHAIN, "1.99.1"]);
        let rustc = |wanted: &str, needs: Option<Version>| {
            chosen(wanted, Some(home.path().to_owned()), needs.as_ref()).unwrap()
        };
        let version = |minor, patch| Some(Version::new(1, minor, patch));
        let tuned = folder(home.path(), TUNED_TOOLCHAIN);
        assert_eq!(rustc("", None), Some(tuned.join("bin/rustc")));
        assert_eq!(rustc("", version(95, 0)), Some(tuned.join("bin/rustc")));
        for newer in [version(95, 1), version(96, 0)] {
            assert_eq!(rustc("", newer), None, "the kernels need a newer one");
        }
        assert_eq!(rustc("user", None), None);
        fs::remove_dir_all(tuned.join("lib")).unwrap();
        assert_eq!(rustc("", None), None, "without rust-src it cannot compile `core`");
        assert_eq!(chosen("", None, None).unwrap(), None);
    }

    #[test]
    fn a_toolchain_is_named_as_rustup_does_or_by_its_folder() {
        let home = rustup(&[TUNED_TOOLCHAIN, "1.99.1"]);
        let rustc = |wanted: &str| chosen(wanted, Some(home.path().to_owned()), None);
        let newer = folder(home.path(), "1.99.1");
        let full = newer.file_name().unwrap().to_str().unwrap();
        for wanted in ["1.99.1", full, newer.to_str().unwrap()] {
            assert_eq!(rustc(wanted).unwrap(), Some(newer.join("bin/rustc")), "{wanted}");
        }
        for wanted in ["1.99", "1.98.0", "/no/such/folder"] {
            let error = rustc(wanted).unwrap_err();
            assert!(error.is_missing_part(), "{error}");
            let text = error.to_string();
            assert!(text.contains(wanted) && text.contains("rustup toolchain install"), "{text}");
        }
    }

    #[test]
    fn only_a_compiler_newer_than_those_tested_is_noticed() {
        let toolchain = |version: &str| Toolchain {
            rustc: "rustc".into(),
            cargo: "cargo".into(),
            version: version.to_owned(),
            llvm_version: String::new(),
            libllvm: PathBuf::new(),
        };
        for version in
            ["rustc 1.95.0 (59807616e 2026-04-14)", "rustc 1.99.1", "rustc 1.97.0-nightly"]
        {
            assert_eq!(toolchain(version).notice(), None, "{version}");
        }
        let notice = toolchain("rustc 1.100.0-beta.1 (0 2026-11-01)").notice().unwrap();
        assert!(notice.contains("rustc 1.100.0-beta.1") && notice.lines().count() == 1, "{notice}");
    }

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
