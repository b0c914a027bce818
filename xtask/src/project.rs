//! The checkout: its root, its packages, and cargo commands in it.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package, PackageId, TargetKind};

/// The package of the examples.
pub const EXAMPLES_PACKAGE: &str = "devcomm-examples";

/// Returns the root folder of the checkout.
pub fn root() -> PathBuf {
    // cargo reports the manifest's current location; the checkout may have moved since this program
    // was built.
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest_dir.parent().map_or_else(|| manifest_dir.clone(), Path::to_path_buf)
}

/// Returns a command for the cargo that runs this program, in the root folder. Build scripts that
/// it runs fail if kernels cannot be built, instead of leaving them out.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).env("DEVCOMM_REQUIRE_KERNELS", "1");
    command
}

/// Returns the exit code as a shell reports it.
pub fn exit_code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The workspace, from `cargo metadata`.
pub struct Project(Metadata);

impl Project {
    /// Runs `cargo metadata`.
    pub fn open() -> Result<Self> {
        let mut command = MetadataCommand::new();
        command.current_dir(root()).no_deps();
        command.exec().map(Self).context("cargo metadata does not read the workspace")
    }

    /// Returns the examples.
    pub fn examples(&self) -> Vec<String> {
        let package = self.0.packages.iter().find(|package| package.name == EXAMPLES_PACKAGE);
        package.map_or_else(Vec::new, |package| targets(package, &TargetKind::Bin))
    }

    /// Returns the kernel files that an example uses, if `examples/Cargo.toml` lists them.
    pub fn kernel_files(&self, example: &str) -> Option<Vec<String>> {
        let package = self.0.packages.iter().find(|package| package.name == EXAMPLES_PACKAGE)?;
        let files = package.metadata["kernel-files"][example].as_array()?;
        Some(files.iter().filter_map(|file| file.as_str().map(str::to_owned)).collect())
    }

    /// Returns the packages with GPU integration tests, and those tests.
    pub fn gpu_tests(&self) -> Vec<(String, Vec<String>)> {
        let with_tests = |package: &Package| {
            let mut tests = targets(package, &TargetKind::Test);
            tests.retain(|name| is_for_gpus(name));
            (package.name.to_string(), tests)
        };
        self.0.packages.iter().map(with_tests).filter(|(_, tests)| !tests.is_empty()).collect()
    }

    /// Returns the packages that are published.
    pub fn published(&self) -> Vec<String> {
        // The others have an empty list of registries.
        let published = self.0.packages.iter().filter(|package| package.publish.is_none());
        published.map(|package| package.name.to_string()).collect()
    }

    /// Returns cargo's target folder.
    pub fn target_folder(&self) -> PathBuf {
        self.0.target_directory.clone().into()
    }

    /// Returns the package with this id.
    pub fn package(&self, id: &PackageId) -> Option<&Package> {
        self.0.packages.iter().find(|package| package.id == *id)
    }
}

/// Returns whether a test program of this name needs GPUs.
fn is_for_gpus(test: &str) -> bool {
    test.starts_with("gpu")
}

fn targets(package: &Package, kind: &TargetKind) -> Vec<String> {
    let all = package.targets.iter().filter(|target| target.kind.contains(kind));
    let mut names: Vec<String> = all.map(|target| target.name.clone()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_files_are_listed_for_examples_that_exist_and_exist_themselves() {
        let project = Project::open().unwrap();
        let is_package = |package: &&Package| package.name == EXAMPLES_PACKAGE;
        let package = project.0.packages.iter().find(is_package).unwrap();
        let listed = package.metadata["kernel-files"].as_object().unwrap();
        let examples = project.examples();
        let folders = ["kernels/src", "examples/kernels/src"];
        for example in listed.keys() {
            assert!(examples.contains(example), "{example} is no example");
            for file in project.kernel_files(example).unwrap() {
                let is_in =
                    |folder: &&str| root().join(folder).join(format!("{file}.rs")).is_file();
                assert!(folders.iter().any(is_in), "{example}: {file}");
            }
        }
    }
}
