//! Shared helpers: packages, toolchains, and a stand-in for a build script.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use cuda_builder::{Artifacts, CudaBuilder};
use devcomm_locate::{NCCL_VERSION, NcclPart, find_nccl, find_ptxas};
use libtest_mimic::{Failed, Trial};

/// Result of a test.
pub type TestResult = Result<(), Failed>;

/// A requirement of a test.
#[derive(Clone, Copy)]
pub enum Needs {
    RustSource,
    Nccl,
    Ptxas,
    Nightly,
}

static RUST_SOURCE: LazyLock<Option<String>> = LazyLock::new(|| {
    let compiler = cuda_builder::kernel_compiler();
    compiler.err().map(|error| format!("{error}; run `cargo xtask setup`"))
});
static NCCL: LazyLock<Option<String>> = LazyLock::new(|| {
    let found = find_nccl(None, NcclPart::Bitcode, |tree| tree.has_version(NCCL_VERSION));
    found.err().map(|_| "no NCCL bitcode; run `cargo xtask setup`".to_owned())
});
static PTXAS: LazyLock<Option<String>> =
    LazyLock::new(|| find_ptxas().err().map(|_| "no ptxas; run `cargo xtask setup`".to_owned()));

/// The nightly compiler, if rustup has one with rust-src.
pub static NIGHTLY: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let output = Command::new("rustup").args(["which", "--toolchain", "nightly", "rustc"]).output();
    let output = output.ok().filter(|output| output.status.success())?;
    let rustc = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    let core = rustc.parent()?.parent()?.join("lib/rustlib/src/rust/library/core");
    core.is_dir().then_some(rustc)
});

impl Needs {
    /// Returns the reason, if it is missing.
    fn missing(self) -> Option<String> {
        match self {
            Self::RustSource => RUST_SOURCE.clone(),
            Self::Nccl => NCCL.clone(),
            Self::Ptxas => PTXAS.clone(),
            Self::Nightly => NIGHTLY.is_none().then(|| "no nightly with rust-src".to_owned()),
        }
    }
}

/// Returns a test that runs if its requirements are met, and otherwise is listed as ignored with
/// the reason. With `DEVCOMM_REQUIRE_KERNELS=1` it fails instead; a nightly is never required.
pub fn test(
    name: &str,
    needs: &[Needs],
    body: impl FnOnce() -> TestResult + Send + 'static,
) -> Trial {
    let missing = needs.iter().find_map(|need| Some((*need, need.missing()?)));
    let Some((need, reason)) = missing else {
        return Trial::test(name, body);
    };
    let required = env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1");
    if required && !matches!(need, Needs::Nightly) {
        return Trial::test(name, move || Err(reason.into()));
    }
    Trial::test(format!("{name} (skipped: {reason})"), body).with_ignored_flag(true)
}

/// Fails with a message unless `condition` holds.
pub fn ensure(condition: bool, message: impl AsRef<str>) -> TestResult {
    if condition { Ok(()) } else { Err(message.as_ref().into()) }
}

/// Returns a test's folder, the same in each run, so that builds are reused.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A kernel package in its own folder.
pub struct Package {
    pub name: String,
    pub folder: PathBuf,
}

impl Package {
    /// Returns a copy of the fixture package.
    pub fn fixture(test: &str) -> Self {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kernels");
        // Packages with the same name would share results in the target folder.
        let package = Self { name: format!("fixture-{test}"), folder: folder(test) };
        let manifest = fs::read_to_string(from.join("Cargo.toml")).unwrap();
        package.write("Cargo.toml", &manifest.replace("fixture-kernels", &package.name));
        for entry in fs::read_dir(from.join("src")).unwrap() {
            let path = entry.unwrap().path();
            let name = format!("src/{}", path.file_name().unwrap().to_str().unwrap());
            package.write(&name, &fs::read_to_string(path).unwrap());
        }
        package
    }

    /// Returns a package with this source after a common prelude.
    pub fn new(name: &str, source: &str) -> Self {
        let package = Self { name: name.replace('_', "-"), folder: folder(name) };
        let manifest = format!(
            "[package]\nname = \"{}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n",
            package.name
        );
        package.write("Cargo.toml", &manifest);
        let prelude = "#![no_std]\n#![feature(stdarch_nvptx)]\n#[panic_handler]\nfn panic(_: \
                       &core::panic::PanicInfo) -> ! { loop {} }\n";
        package.write("src/lib.rs", &format!("{prelude}{source}"));
        package
    }

    /// Writes a file of the package; an unchanged file keeps its modification time.
    pub fn write(&self, name: &str, contents: &str) {
        let path = self.folder.join(name);
        if fs::read_to_string(&path).is_ok_and(|old| old == contents) {
            return;
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    /// Returns the source of its library.
    pub fn source(&self) -> String {
        fs::read_to_string(self.folder.join("src/lib.rs")).unwrap()
    }

    /// Writes these lines before the manifest's last section.
    pub fn add_to_manifest(&self, lines: &str) {
        let manifest = fs::read_to_string(self.folder.join("Cargo.toml")).unwrap();
        let manifest = manifest.replacen("[workspace]\n", &format!("{lines}\n[workspace]\n"), 1);
        self.write("Cargo.toml", &manifest);
    }

    pub fn builder(&self) -> CudaBuilder {
        CudaBuilder::new(&self.name)
            .manifest_dir(&self.folder)
            .target_dir(target())
            .out_dir(self.folder.join("out"))
    }

    /// Runs this program as the package's build script, with a changed environment.
    pub fn as_build_script(&self, change: impl FnOnce(&mut Command)) -> Output {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .env(SCRIPT, &self.name)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("OUT_DIR", self.folder.join("out-dir"))
            .env_remove("DEVCOMM_REQUIRE_KERNELS");
        fs::create_dir_all(self.folder.join("out-dir")).unwrap();
        change(&mut command);
        command.output().unwrap()
    }

    /// Returns the index that the build script wrote.
    pub fn index(&self) -> String {
        fs::read_to_string(self.folder.join("out-dir/kernels/kernels.rs")).unwrap_or_default()
    }
}

/// Returns one target folder for all tests, so that `core` is compiled once.
pub fn target() -> PathBuf {
    folder("target")
}

const SCRIPT: &str = "DEVCOMM_TEST_BUILD_SCRIPT";

/// The build script checks the costs of all kernels if this variable is set.
pub const CHECK_ALL: &str = "DEVCOMM_TEST_CHECK_ALL";

/// Returns whether this process acts as a build script.
pub fn is_build_script() -> bool {
    env::var_os(SCRIPT).is_some()
}

/// Acts as a build script.
pub fn build_script() {
    let package = env::var(SCRIPT).unwrap_or_default();
    let all = env::var_os(CHECK_ALL).is_some();
    let result = CudaBuilder::new(package).target_dir(target()).check_all(all).build();
    if let Err(error) = result {
        eprintln!("Error: {error:?}");
        std::process::exit(1);
    }
}

/// Hides NCCL from `devcomm-locate`: no Python, no `ldconfig`, and paths that do not exist.
pub fn hide_nccl(command: &mut Command) {
    let failing = "#!/bin/sh\nexit 1\n";
    let bin = folder("no-python");
    fs::create_dir_all(&bin).unwrap();
    for name in ["python3", "python", "ldconfig"] {
        script(&bin.join(name), failing);
    }
    let path = env::var("PATH").unwrap_or_default();
    command
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("DEVCOMM_NCCL_HOME", "/nonexistent/nccl")
        .env("DEVCOMM_CACHE", "/nonexistent/cache");
    for name in ["NCCL_HOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
}

/// Writes an executable shell script.
pub fn script(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Returns the PTX of one kernel: from its entry to the end of its body.
pub fn body(artifacts: &Artifacts, kernel: &str) -> String {
    let holds = |kernels: &[cuda_builder::Kernel]| kernels.iter().any(|k| k.name == kernel);
    let module = artifacts.modules.iter().find(|module| holds(&module.info.kernels)).unwrap();
    let text = fs::read_to_string(&module.ptx).unwrap();
    let (_, rest) = text.split_once(&format!(".entry {kernel}(")).unwrap();
    rest.split_once("\n}").unwrap().0.to_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the output of a command.
pub fn run(command: &mut Command) -> String {
    String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
}
