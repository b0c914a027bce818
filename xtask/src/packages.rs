//! A test of the crates as crates.io would have them: it packages and unpacks them, and builds a
//! new project that uses nothing else of devcomm, in a folder outside of this checkout.
//!
//! ```text
//! cargo package --> X-0.1.0.crate --tar--> crates/X-0.1.0
//! devcomm new   --> a project, to which [patch.crates-io] gives these folders
//!     in it: cargo test, cargo run on simulated GPUs, and a build with kernels for GPUs
//! ```

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use cargo_metadata::MetadataCommand;
use devcomm_cli::new;
use tempfile::TempDir;

use crate::project::{Project, cargo, root};

/// The unpacked crates, and a new project that uses them, in a temporary folder that is removed on
/// drop.
pub struct PackagedProject {
    folder: TempDir,
    /// Whether the project has the versions of other crates in the checkout's `Cargo.lock`, which
    /// cargo has already downloaded. Otherwise it has the newest compatible ones of the registry.
    locked: bool,
}

/// The command that checks the format; it has no option `--offline`.
const FMT: [&str; 3] = ["fmt", "--all", "--check"];

impl PackagedProject {
    /// Packages the crates and creates the project. With `locked`, it takes the versions of
    /// `Cargo.lock` and needs no network.
    ///
    /// # Errors
    ///
    /// If a crate cannot be packaged, a package has no licence or no README, or the temporary
    /// folder cannot be written.
    pub fn new(locked: bool) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
        let outside = fs::canonicalize(folder.path())?;
        ensure!(
            !outside.starts_with(fs::canonicalize(root())?),
            "{} is in the checkout: set TMPDIR to a folder outside of it",
            outside.display()
        );
        let this = Self { folder, locked };
        this.unpack(&package()?)?;
        new::create(&this.project(), None, true)?;
        if locked {
            fs::copy(root().join("Cargo.lock"), this.project().join("Cargo.lock"))?;
        }
        Ok(this)
    }

    fn project(&self) -> PathBuf {
        self.folder.path().join("packaged-sums")
    }

    fn crates(&self) -> PathBuf {
        self.folder.path().join("crates")
    }

    /// Unpacks the packages, and writes a setting by which cargo uses them instead of the
    /// registry's crates of these names.
    fn unpack(&self, packages: &[PathBuf]) -> Result<()> {
        let mut patch = "[patch.crates-io]\n".to_owned();
        fs::create_dir_all(self.crates())?;
        for package in packages {
            let mut tar = Command::new("tar");
            tar.arg("-xzf").arg(package).arg("-C").arg(self.crates());
            let status = tar.status().context("tar does not start")?;
            ensure!(status.success(), "{} does not unpack", package.display());
            let folder = self.crates().join(package.file_stem().unwrap_or_default());
            for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
                ensure!(folder.join(file).is_file(), "{} has no {file}", package.display());
            }
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let name = name.rsplit_once('-').map_or("", |(name, _)| name);
            // No project depends on this program, and cargo warns of an unused patch.
            if name != "devcomm-cli" {
                patch += &format!("{name} = {{ path = {folder:?} }}\n");
            }
        }
        let settings = self.folder.path().join(".cargo");
        fs::create_dir_all(&settings)?;
        Ok(fs::write(settings.join("config.toml"), patch)?)
    }

    /// Checks the project's format, and runs its tests and its program on simulated GPUs.
    ///
    /// # Errors
    ///
    /// If they do not build, fail, or compute a wrong sum, or a crate is not a packaged one.
    pub fn runs_simulated(&self) -> Result<()> {
        // A minimal toolchain has no rustfmt.
        match cargo().args(["fmt", "--version"]).output() {
            Ok(found) if found.status.success() => drop(self.output(&FMT)?),
            _ => println!("its format is not checked: there is no rustfmt"),
        }
        self.output(&["test", "--workspace"])?;
        self.prints_the_sum(&["run"])?;
        self.check_uses_packages_only()
    }

    /// Runs the program with its kernels compiled for GPUs, and in addition with devcomm's own
    /// (`operations`), on simulated GPUs.
    ///
    /// # Errors
    ///
    /// If they do not compile, or the program fails.
    pub fn builds_for_gpus(&self, operations: bool) -> Result<()> {
        let features = if operations { "ptx,devcomm/ptx" } else { "ptx" };
        self.prints_the_sum(&["run", "--features", features])
    }

    /// Runs the program with devcomm's own kernels as their package has them, on simulated GPUs.
    ///
    /// # Errors
    ///
    /// If the package has no kernels of these sources, or the program fails.
    pub fn runs_with_compiled_kernels(&self) -> Result<()> {
        self.prints_the_sum(&["run", "--features", "devcomm/kernels-bin"])
    }

    fn prints_the_sum(&self, arguments: &[&str]) -> Result<()> {
        let output = self.output(arguments)?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let expected = "2 ranks, and the sum of their numbers is 1\n";
        ensure!(printed == expected, "the program printed {printed:?}, not {expected:?}");
        Ok(())
    }

    /// Runs cargo in the project.
    fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = cargo();
        command.current_dir(self.project()).args(arguments);
        if arguments != FMT {
            command.args(self.offline());
        }
        command.env_remove("CARGO_TARGET_DIR").env_remove("DEVCOMM_BUILD_SKIP");
        command.env("DEVCOMM_TEST_GPUS", "0");
        // Tests set their number of GPUs themselves.
        match arguments.first() {
            Some(&"run") => command.env("DEVCOMM_SIMULATE", "2"),
            _ => command.env_remove("DEVCOMM_SIMULATE"),
        };
        println!("cargo {} ...", arguments.join(" "));
        let output = command.output().context("cargo does not start")?;
        ensure!(
            output.status.success(),
            "`cargo {}` in a new project on the packaged crates failed:\n{}{}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
        Ok(output)
    }

    fn offline(&self) -> &[&str] {
        if self.locked { &["--offline"] } else { &[] }
    }

    /// Checks that the project uses the unpacked crates and no file of the checkout.
    fn check_uses_packages_only(&self) -> Result<()> {
        // Offline, cargo lists only what it has downloaded: the packages for this platform.
        let mut rustc = Command::new("rustc");
        let output = rustc.arg("-vV").output().context("rustc does not start")?;
        let text = String::from_utf8(output.stdout)?;
        let host = text.lines().find_map(|line| line.strip_prefix("host: "));
        let options = ["--filter-platform", host.context("rustc -vV prints no host")?];
        let options = options.iter().chain(self.offline()).map(|&option| option.to_owned());
        let mut command = MetadataCommand::new();
        command.current_dir(self.project()).other_options(options.collect::<Vec<_>>());
        let packages = command.exec()?.packages;
        let here = fs::canonicalize(root())?;
        for package in &packages {
            let manifest = package.manifest_path.as_std_path();
            ensure!(!manifest.starts_with(&here), "{} is used", manifest.display());
            let is_packaged = manifest.starts_with(self.crates());
            let is_ours = package.name.starts_with("devcomm");
            ensure!(is_packaged == is_ours, "{} is not the packaged one", manifest.display());
        }
        ensure!(packages.iter().any(|one| one.name == "devcomm"), "devcomm is not used");
        Ok(())
    }
}

/// Packages the crates that are published, and returns the files.
fn package() -> Result<Vec<PathBuf>> {
    let project = Project::open()?;
    let names = project.published();
    let mut command = cargo();
    // The project builds all of them, so cargo need not verify each by itself.
    command.args(["package", "--offline", "--allow-dirty", "--no-verify", "--quiet"]);
    for name in &names {
        command.args(["--package", name]);
    }
    let status = command.status().context("cargo does not start")?;
    ensure!(status.success(), "cargo package failed, see above");
    let version = env!("CARGO_PKG_VERSION");
    let folder = project.target_folder().join("package");
    Ok(names.iter().map(|name| folder.join(format!("{name}-{version}.crate"))).collect())
}
