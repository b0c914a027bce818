//! Fetches Python wheels into the cache, and checks what is in it.

use std::fs::{self, File, TryLockError};
use std::io::{self, IsTerminal};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use devcomm_locate::{WheelFile, cache_dir, wheel_dir, wheel_files, wheel_of};
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

/// A wheel to fetch.
#[derive(Clone, Copy, Debug)]
pub struct Wheel {
    /// The package, as `nvidia-nccl-cu13`.
    pub package: &'static str,
    /// The version.
    pub version: &'static str,
    /// The SHA-256 of its files for Linux on x86_64 and on aarch64, in hexadecimal. Other files are
    /// refused, whatever the index offers.
    pub sha256: [&'static str; 2],
}

impl Wheel {
    /// Returns a line of pip's requirements.
    fn requirement(&self) -> String {
        let Self { package, version, sha256: [x86_64, aarch64] } = self;
        format!("{package}=={version} --hash=sha256:{x86_64} --hash=sha256:{aarch64}\n")
    }
}

/// Downloads wheels with pip and unpacks them into the folder `name`-`version` of the cache. Does
/// nothing if another process has done so before this one gets the cache's lock: `is_there` is then
/// true.
///
/// # Errors
///
/// If there is no pip, or it cannot download, or what it downloads has another SHA-256, or the
/// cache cannot be written.
pub fn fetch(
    name: &str,
    version: &str,
    packages: &[Wheel],
    is_there: impl Fn() -> bool,
) -> Result<()> {
    let target = wheel_dir(name, version)?;
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

    let names =
        packages.iter().map(|Wheel { package, version, .. }| format!("{package}=={version}"));
    let all = names.collect::<Vec<_>>().join(" ");
    let requirements = partial.join("requirements.txt");
    fs::write(&requirements, packages.iter().map(Wheel::requirement).collect::<String>())?;
    eprintln!("downloading {all} into {} ...", wheels.display());
    let progress = if std::io::stderr().is_terminal() { "on" } else { "off" };
    let mut pip = module(python, "pip");
    pip.args(["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"])
        .args(["--disable-pip-version-check", "--quiet", "--progress-bar", progress, "--dest"])
        .arg(&download)
        .args(["--require-hashes", "--requirement"])
        .arg(&requirements);
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
    // Written to disk before the rename: otherwise a file might be empty after a crash of the
    // system.
    rustix::fs::syncfs(File::open(&tree)?)?;
    if target.exists() {
        // Only complete folders get this name, but `is_there` rejects this one: it was damaged
        // later.
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
    // A symbolic link is not followed.
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

/// Returns a Python with pip; that of a virtual environment often has none.
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

/// Returns a command that runs a module of Python. Python looks for modules first in its working
/// directory, so that is not the caller's, which may have any.
fn module(python: &str, name: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", name]).current_dir("/");
    command
}

/// Runs a command; `otherwise` is the error if it fails.
fn run(command: &mut Command, otherwise: &str) -> Result<()> {
    // pip's messages go to standard error, not into this command's output.
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

/// Checks all files of an unpacked wheel by their hashes, which takes a second for NCCL's.
///
/// # Errors
///
/// If a file is missing, cut or changed; the error names it.
pub fn verify(wheel: &Path) -> Result<()> {
    for WheelFile { path, sha256, .. } in wheel_files(wheel).map_err(anyhow::Error::msg)? {
        let mut hash = Sha256::new();
        let read = File::open(&path).and_then(|mut file| io::copy(&mut file, &mut hash));
        read.with_context(|| path.display().to_string())?;
        ensure!(base64(&hash.finalize()) == sha256, "{} was cut or changed", path.display());
    }
    Ok(())
}

/// Returns what is wrong with the cached wheel that has this file, by the hashes of all its files.
pub(crate) fn damage(file: &Path) -> Option<String> {
    verify(&wheel_of(file)?).err().map(|error| format!("{error:#}"))
}

/// Encodes bytes in the base64 of URLs, without padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = three.iter().fold(0_usize, |number, byte| number << 8 | usize::from(*byte));
        let number = number << (8 * (3 - three.len()));
        let digit = |index: usize| char::from(DIGITS[number >> (18 - 6 * index) & 63]);
        text.extend((0..=three.len()).map(digit));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;
    use crate::setup::find_or_fetch;

    /// Prints that a test was left out.
    fn skip(test: &str, reason: &str) {
        // Past the harness's capture: `cargo xtask test` counts such lines.
        let _ = writeln!(io::stdout(), "SKIPPED {test}: {reason}");
    }

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

    /// Writes a wheel of one file, and returns its SHA-256.
    fn write_wheel(folder: &Path, contents: &str) -> String {
        let path = folder.join("devcomm_test-1.0-py3-none-any.whl");
        let code = "import base64, hashlib, sys, zipfile\n\
            path, contents = sys.argv[1:]\n\
            info = 'devcomm_test-1.0.dist-info/'\n\
            lines = lambda *lines: ''.join(line + '\\n' for line in lines)\n\
            named = lines('Metadata-Version: 2.1', 'Name: devcomm-test', 'Version: 1.0')\n\
            kind = lines('Wheel-Version: 1.0', 'Root-Is-Purelib: true', 'Tag: py3-none-any')\n\
            files = {'file': contents, info + 'METADATA': named, info + 'WHEEL': kind}\n\
            digest = lambda data: hashlib.sha256(data.encode()).digest()\n\
            text = lambda data: base64.urlsafe_b64encode(digest(data)).decode().rstrip('=')\n\
            record = [f'{n},sha256={text(d)},{len(d)}' for n, d in files.items()]\n\
            files[info + 'RECORD'] = lines(*record, info + 'RECORD,,')\n\
            with zipfile.ZipFile(path, 'w') as wheel:\n    \
                [wheel.writestr(name, data) for name, data in files.items()]\n";
        let mut python = Command::new("python3");
        python.args(["-c", code]).arg(&path).arg(contents);
        assert!(python.status().unwrap().success());
        format!("{:x}", Sha256::digest(fs::read(path).unwrap()))
    }

    #[test]
    fn only_a_wheel_with_a_known_hash_is_unpacked_and_a_damaged_one_is_fetched_again() {
        // This runs in a process of its own, whose variables name the cache and pip's source.
        const CHILD: &str = "DEVCOMM_TEST_FETCH";
        if let Ok(hash) = std::env::var(CHILD) {
            let wheel = Wheel {
                package: "devcomm-test",
                version: "1.0",
                sha256: ["00".repeat(32), hash].map(|hash| &*hash.leak()),
            };
            let folder = wheel_dir(wheel.package, wheel.version).unwrap();
            let file = folder.join("file");
            let find = || fs::metadata(&file).map(|_| file.clone());
            return drop(find_or_fetch(wheel, false, find, PathBuf::as_path).unwrap());
        }
        if python_with_pip().is_err() {
            return skip(
                "only_a_wheel_with_a_known_hash_is_unpacked_and_a_damaged_one_is_fetched_again",
                "there is no python3 with pip",
            );
        }
        let folder = tempfile::tempdir().unwrap();
        let hash = write_wheel(folder.path(), "contents");
        let fetched = |hash: &str| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args([
                "--nocapture",
                "--exact",
                "wheels::tests::only_a_wheel_with_a_known_hash_is_unpacked_and_a_damaged_one_is_\
                 fetched_again",
            ]);
            child.env(CHILD, hash).env("DEVCOMM_CACHE", folder.path().join("cache"));
            child.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", folder.path());
            let output = child.output().unwrap();
            output.status.success().then(|| String::from_utf8(output.stderr).unwrap())
        };
        assert_eq!(fetched(&"11".repeat(32)), None);
        let wheel = folder.path().join("cache/wheels/devcomm-test-1.0");
        assert!(!wheel.exists());
        assert!(!fetched(&hash).unwrap().contains("damaged"));
        verify(&wheel).unwrap();
        fs::write(wheel.join("file"), "CONTENTS").unwrap();
        devcomm_locate::check_wheel(&wheel).unwrap();
        let error = verify(&wheel).unwrap_err().to_string();
        assert!(error.ends_with("file was cut or changed"), "{error}");
        for damaged in ["CONTENTS", "cut"] {
            fs::write(wheel.join("file"), damaged).unwrap();
            let said = fetched(&hash).unwrap();
            let count = said.matches("fetching again what was damaged").count();
            assert_eq!(count, 1, "the damage is said once: {said}");
            assert_eq!(fs::read_to_string(wheel.join("file")).unwrap(), "contents");
        }
    }

    #[test]
    fn hashes_are_compared_as_wheels_write_them() {
        let texts = ["", "Zg", "Zm8", "Zm9v", "Zm9vYg", "_-8"];
        let bytes: [&[u8]; 6] = [b"", b"f", b"fo", b"foo", b"foob", &[0xff, 0xef]];
        assert_eq!(bytes.map(base64), texts);
    }

    #[test]
    fn python_takes_no_module_from_the_callers_folder() {
        // This runs in a process of its own, since a process has one working directory.
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
            return skip(
                "python_takes_no_module_from_the_callers_folder",
                "there is no python3 that runs modules of its folder",
            );
        }
        fs::remove_file(&mark).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "wheels::tests::python_takes_no_module_from_the_callers_folder"]);
        assert!(child.env(CHILD, "1").current_dir(&folder).output().unwrap().status.success());
        assert!(!mark.exists());
    }

    #[test]
    fn a_killed_setup_leaves_no_files_for_the_next_one() {
        let wheels = tempfile::tempdir().unwrap();
        fs::create_dir_all(wheels.path().join(".partial-nvidia-nccl-cu13-2.32.3/tree")).unwrap();
        fs::create_dir_all(wheels.path().join("nvidia-cuda-nvcc-13.5.37")).unwrap();
        remove_leftovers(wheels.path()).unwrap();
        let left: Vec<_> =
            fs::read_dir(wheels.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["nvidia-cuda-nvcc-13.5.37"]);
    }
}
