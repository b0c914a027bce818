//! `devcomm setup`: fetches missing components of kernel builds. Idempotent.
//!
//! rustup installs `rust-src`, and on demand the toolchain that the shipped kernels were tuned
//! with.
//!
//! NCCL and ptxas are Python wheels, in a cache that all projects share
//! (`devcomm_locate::cache_dir`). A wheel is unpacked under a temporary name and renamed when
//! complete, under a lock, so that killed or concurrent setups leave no partial wheel.

use std::fs::{self, File, TryLockError};
use std::io::IsTerminal;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cuda_builder::{KernelCompiler, TUNED_TOOLCHAIN, kernel_compiler};
use devcomm_locate::{
    NcclPart, NcclTree, NcclVersion, NotFound, cache_dir, find_nccl, find_ptxas, wheel_dir,
};
use rustix::fs::OFlags;

/// The NCCL version that devcomm is built and tested with; defined only here.
pub const NCCL_VERSION: NcclVersion = NcclVersion { major: 2, minor: 32, patch: 3 };

/// NCCL's wheel.
const NCCL_PACKAGE: &str = "nvidia-nccl-cu13";

/// The wheel with ptxas, and its version; any ptxas that `find_ptxas` accepts is used instead.
const PTXAS_PACKAGE: (&str, &str) = ("nvidia-cuda-nvcc", "13.5.37");

/// The components that are optional for a task.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Optional {
    /// None: all components are required.
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
    /// Also install the Rust toolchain that the shipped kernels were tuned with; it then compiles
    /// kernels, and yours the host's code
    #[arg(long)]
    pub kernel_toolchain: bool,
}

impl Setup {
    /// Fetches what is missing; all components are required.
    ///
    /// # Errors
    ///
    /// As [`setup`], or if rustup cannot install the toolchain.
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
/// If a component cannot be fetched: it is said what that needs, the network or a program.
pub fn setup(quiet: bool, without: Optional) -> Result<()> {
    let report = |name: &str, what: &str| {
        if !quiet {
            println!("{name:<9} {what}");
        }
    };
    let KernelCompiler { version, llvm_version, rustc, .. } = compiler_with_source()?;
    report("rustc", &format!("{version}, LLVM {llvm_version} ({})", rustc.display()));

    let tree = match find_pinned_nccl() {
        Ok(tree) => tree,
        Err(_) => {
            let version = NCCL_VERSION.to_string();
            fetch(NCCL_PACKAGE, &version, &[(NCCL_PACKAGE, &version)], || {
                find_pinned_nccl().is_ok()
            })?;
            find_pinned_nccl()?
        }
    };
    report("NCCL", &format!("{NCCL_VERSION} in {} ({})", tree.root.display(), tree.found_by));

    match find_ptxas().or_else(|_| fetch_ptxas()) {
        Ok(path) => report("ptxas", &path.display().to_string()),
        Err(error) if without == Optional::Ptxas => {
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
    find_nccl(None, NcclPart::Bitcode, |tree| match (tree.version, &tree.library) {
        (Some(NCCL_VERSION), Some(_)) => Ok(()),
        (Some(NCCL_VERSION), None) => Err("it has no lib/libnccl.so.2".to_owned()),
        (Some(other), _) => Err(format!("it is NCCL {other}, required is {NCCL_VERSION}")),
        (None, _) => Err("it has no include/nccl.h with a version".to_owned()),
    })
}

fn fetch_ptxas() -> Result<PathBuf> {
    let (package, version) = PTXAS_PACKAGE;
    fetch(package, version, &[PTXAS_PACKAGE], || find_ptxas().is_ok())?;
    Ok(find_ptxas()?)
}

/// The compiler of kernels; adds `rust-src` to its toolchain if that has none.
fn compiler_with_source() -> Result<KernelCompiler> {
    match kernel_compiler() {
        Err(cuda_builder::Error::NoRustSource { fix, .. }) => {
            eprintln!("adding rust-src to the toolchain ...");
            // Without a toolchain of rustup it names a distribution's package too.
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

/// Downloads wheels, given by package and version, with pip and unpacks them into the folder
/// `name`-`version` of the cache. Does nothing if another process has done so before this one
/// gets the cache's lock: `is_there` is then true.
///
/// # Errors
///
/// If there is no pip, or it cannot download, or the cache cannot be written.
pub fn fetch(
    name: &str,
    version: &str,
    packages: &[(&str, &str)],
    is_there: impl Fn() -> bool,
) -> Result<()> {
    // Absolute, as programs that are run below do not run in this folder.
    let target = std::path::absolute(wheel_dir(name, version)?)?;
    let wheels = target.parent().context("the cache has no folder")?.to_owned();
    fs::create_dir_all(&wheels).with_context(|| {
        format!("cannot create {}; set DEVCOMM_CACHE to a writable folder", wheels.display())
    })?;
    let _lock = lock(&cache_dir()?.join("setup.lock"))?;
    if is_there() {
        return Ok(());
    }
    remove_leftovers(&wheels)?;
    let python = python_with_pip()?;
    let partial = wheels.join(format!("{PARTIAL}{name}-{version}"));
    let (download, tree) = (partial.join("download"), partial.join("tree"));
    fs::create_dir_all(&tree)?;

    let wanted: Vec<String> =
        packages.iter().map(|(package, version)| format!("{package}=={version}")).collect();
    let all = wanted.join(" ");
    eprintln!("downloading {all} into {} ...", wheels.display());
    let progress = if std::io::stderr().is_terminal() { "on" } else { "off" };
    let mut pip = module(python, "pip");
    pip.args(["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"])
        .args(["--disable-pip-version-check", "--quiet", "--progress-bar", progress, "--dest"])
        .arg(&download)
        .args(&wanted);
    run(
        &mut pip,
        &format!(
            "pip could not download {all} (its message is above): it needs the \
             network and a package index; where there is none, copy {} from a machine that has it",
            target.display()
        ),
    )?;
    for entry in fs::read_dir(&download)? {
        let wheel = entry?.path();
        let mut unzip = module(python, "zipfile");
        unzip.arg("-e").arg(&wheel).arg(&tree);
        run(&mut unzip, &format!("{} does not unpack; is the disk full?", wheel.display()))?;
    }
    make_programs_executable(&tree)?;
    if target.exists() {
        // Only complete folders get this name, but `is_there` rejects it: it is damaged.
        fs::remove_dir_all(&target)?;
    }
    fs::rename(&tree, &target)?;
    fs::remove_dir_all(&partial)?;
    ensure!(is_there(), "{all} is now in {}, but is not found there", target.display());
    Ok(())
}

/// Prefix of the folders of unfinished downloads.
const PARTIAL: &str = ".partial-";

/// Acquires the cache's lock, held until the returned file is dropped.
fn lock(path: &Path) -> Result<File> {
    // Not what a link names.
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let file =
        File::options().write(true).create(true).truncate(false).custom_flags(flags).open(path);
    let file = file.with_context(|| format!("cannot write {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {
            eprintln!("waiting for another setup to finish ({} is locked) ...", path.display());
        }
        Err(TryLockError::Error(error)) => return Err(error).context("cannot lock the cache"),
    }
    file.lock().context("cannot lock the cache")?;
    Ok(file)
}

/// Removes partial downloads of killed setups. The caller holds the lock, so no other setup runs.
fn remove_leftovers(wheels: &Path) -> Result<()> {
    for entry in fs::read_dir(wheels)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// A Python with pip; that of a virtual environment often has none.
pub(crate) fn python_with_pip() -> Result<&'static str> {
    let has_pip = |python: &&str| {
        let mut pip = module(python, "pip");
        pip.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        pip.status().is_ok_and(|status| status.success())
    };
    ["python3", "python", "/usr/bin/python3"].into_iter().find(has_pip).context(
        "NCCL and ptxas are fetched by pip, and no python3 with pip was found: install Python 3 \
         and pip (`python3 -m ensurepip --user`, or your system's python3-pip), or set \
         DEVCOMM_NCCL_HOME to an unpacked NCCL",
    )
}

/// A program that runs a module of Python. Python looks for modules in the folder in which it runs
/// first: the caller's may have any.
fn module(python: &str, name: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", name]).current_dir("/");
    command
}

/// Runs a command; `otherwise` is the error if it fails.
fn run(command: &mut Command, otherwise: &str) -> Result<()> {
    // pip's messages go to standard error, not into the task's output.
    let status = command.stdin(Stdio::null()).stdout(std::io::stderr()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => bail!("{otherwise}"),
        Err(error) => Err(error)
            .with_context(|| format!("{} does not start", command.get_program().display())),
    }
}

/// Restores the executable bits in `bin` folders, which Python's zipfile drops.
fn make_programs_executable(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            make_programs_executable(&path)?;
        } else if folder.ends_with("bin") {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_a_wheel_become_executable_and_nothing_else_does() {
        let tree = tempfile::tempdir().unwrap();
        let (bin, lib) = (tree.path().join("nvidia/cu13/bin"), tree.path().join("nvidia/cu13/lib"));
        for folder in [&bin, &lib] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join("file"), "").unwrap();
            fs::set_permissions(folder.join("file"), fs::Permissions::from_mode(0o644)).unwrap();
        }
        make_programs_executable(tree.path()).unwrap();
        let mode =
            |folder: &Path| fs::metadata(folder.join("file")).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&bin), mode(&lib)), (0o755, 0o644));
    }

    #[test]
    fn the_cache_has_one_lock_holder_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("setup.lock");
        let held = lock(&path).unwrap();
        assert!(matches!(File::create(&path).unwrap().try_lock(), Err(TryLockError::WouldBlock)));
        drop(held);
        lock(&path).unwrap();
    }

    #[test]
    fn the_lock_does_not_write_to_what_a_link_names() {
        let folder = tempfile::tempdir().unwrap();
        let (file, path) = (folder.path().join("file"), folder.path().join("setup.lock"));
        fs::write(&file, "contents").unwrap();
        std::os::unix::fs::symlink(&file, &path).unwrap();
        let error = lock(&path).unwrap_err().to_string();
        assert!(error.contains("cannot write") && error.contains("setup.lock"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "contents");
    }

    #[test]
    fn python_takes_no_module_from_the_callers_folder() {
        // In a process of its own, since the folder is that of a process.
        const CHILD: &str = "DEVCOMM_TEST_CHILD";
        if std::env::var_os(CHILD).is_some() {
            return drop(module("python3", "pip").arg("--help").output());
        }
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let code = format!("open({:?}, 'w')", mark.to_str().unwrap());
        fs::write(folder.path().join("pip.py"), code).unwrap();
        let mut direct = Command::new("python3");
        let direct = direct.args(["-m", "pip"]).current_dir(&folder).env_remove("PYTHONSAFEPATH");
        if !direct.output().is_ok_and(|_| mark.exists()) {
            return println!("left out: there is no python3 that runs modules of its folder");
        }
        fs::remove_file(&mark).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "setup::tests::python_takes_no_module_from_the_callers_folder"]);
        assert!(child.env(CHILD, "1").current_dir(&folder).output().unwrap().status.success());
        assert!(!mark.exists());
    }

    #[test]
    fn a_killed_setup_leaves_nothing_behind_for_the_next() {
        let wheels = tempfile::tempdir().unwrap();
        fs::create_dir_all(wheels.path().join(".partial-nvidia-nccl-cu13-2.32.3/tree")).unwrap();
        fs::create_dir_all(wheels.path().join("nvidia-cuda-nvcc-13.5.37")).unwrap();
        remove_leftovers(wheels.path()).unwrap();
        let left: Vec<_> =
            fs::read_dir(wheels.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["nvidia-cuda-nvcc-13.5.37"]);
    }
}
