//! Compiles packages to LLVM bitcode with cargo: the kernel package, and `core`.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use cargo_metadata::{Artifact, CrateType, Message};

use crate::arch::{NvvmArch, TARGET};
use crate::diagnostics::Diagnostics;
use crate::error::Error;
use crate::package::KernelPackage;
use crate::toolchain::Toolchain;

/// Features that every kernel crate needs and stable rustc rejects in source. Those that the crate
/// root already enables are not added.
const FEATURES: [&str; 2] = ["abi_ptx", "asm_experimental_arch"];

/// How a kernel's checks and panics are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Panics {
    /// A panic is a trap.
    Silent,
    /// A panic prints its message, and traps.
    Reported,
    /// A panic is [`Reported`](Self::Reported); debug assertions and overflow checks are on.
    Checked,
}

/// Parameters of a compilation.
#[derive(Debug)]
pub(crate) struct Compile<'a> {
    pub(crate) toolchain: &'a Toolchain,
    pub(crate) package: &'a KernelPackage,
    pub(crate) arch: NvvmArch,
    pub(crate) panics: Panics,
    pub(crate) target_dir: &'a Path,
    /// Whether to run cargo with `--quiet` and print its messages only at the end.
    pub(crate) quiet: bool,
}

/// A sysroot for the GPU.
#[derive(Debug)]
pub(crate) struct Sysroot {
    pub(crate) folder: PathBuf,
    /// The bitcode of its crates.
    pub(crate) bitcode: Vec<PathBuf>,
}

/// The bitcode of the kernel package and of its dependencies.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) kernels: PathBuf,
    pub(crate) libraries: Vec<PathBuf>,
    /// The source files outside of the package's [`sources`](KernelPackage::sources).
    pub(crate) sources: Vec<PathBuf>,
}

/// A library compiled for the GPU.
#[derive(Debug)]
pub(crate) struct Library {
    /// The root file of its source.
    pub(crate) source: PathBuf,
    /// The rlib, for dependent crates.
    pub(crate) library: PathBuf,
    pub(crate) bitcode: PathBuf,
}

impl Compile<'_> {
    /// Compiles the kernel package. Messages of cargo and rustc go to standard error.
    pub(crate) fn run(&self, sysroot: Sysroot) -> Result<Compiled, Error> {
        let package = self.package;
        let mut flags = self.rustflags();
        flags.push(format!("--sysroot={}", sysroot.folder.display()));
        let mut command = self.command(&package.name, &package.manifest, self.target_dir, &flags);
        command.args(&package.features).arg("--");
        for feature in self.missing_features() {
            command.arg(format!("-Zcrate-attr=feature({feature})"));
        }
        // rustc 1.99 warns of features that a crate does not use, and earlier ones do not
        // know this lint.
        command.args(["-Aunknown_lints", "-Aunused_features"]);
        let mut libraries = self.compiled(command)?;
        let kernels = libraries.iter().position(|library| library.source == package.root_file);
        let kernels = kernels
            .ok_or_else(|| self.failed(format!("it did not report package `{}`", package.name)))?;
        let Library { library, bitcode: kernels, .. } = libraries.swap_remove(kernels);
        let sources = self.sources(&library)?;
        let libraries = libraries.into_iter().map(|library| library.bitcode);
        Ok(Compiled { kernels, libraries: libraries.chain(sysroot.bitcode).collect(), sources })
    }

    /// Returns the source files that cargo lists next to a library, those of path dependencies too,
    /// without the package's own and those that build scripts generate.
    fn sources(&self, library: &Path) -> Result<Vec<PathBuf>, Error> {
        let list = library.with_extension("d");
        let text = match fs::read_to_string(&list) {
            // Cargo has none for a library of which it does not know the files.
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.map_err(Error::io("read", &list))?,
        };
        // It lists no file of a package from a registry. A backslash precedes a space in a path.
        let files = text.trim_end().split_once(": ").map_or("", |(_, files)| files);
        let files = files.replace("\\ ", "\0");
        let files = files.split(' ').filter(|file| !file.is_empty()).map(|file| {
            let file = PathBuf::from(file.replace('\0', " "));
            // `src/../../shared.rs` is not in `src`.
            fs::canonicalize(&file).unwrap_or(file)
        });
        let known: Vec<PathBuf> = (self.package.sources.iter().map(PathBuf::as_path))
            .chain([self.target_dir])
            .filter_map(|at| fs::canonicalize(at).ok())
            .collect();
        Ok(files.filter(|file| !known.iter().any(|at| file.starts_with(at))).collect())
    }

    fn failed(&self, reason: String) -> Error {
        Error::Program { program: self.toolchain.cargo.to_string_lossy().into_owned(), reason }
    }

    /// Runs cargo and returns the GPU libraries that it reports.
    pub(crate) fn compiled(&self, mut command: Command) -> Result<Vec<Library>, Error> {
        let stderr = if self.quiet { Stdio::piped() } else { Stdio::inherit() };
        let output = command.stdin(Stdio::null()).stderr(stderr).output();
        let output = output.map_err(|e| self.failed(e.to_string()))?;
        let cargo_messages = String::from_utf8_lossy(&output.stderr);
        let (mut libraries, mut diagnostics) = (Vec::new(), Diagnostics::default());
        for message in Message::parse_stream(&output.stdout[..]) {
            match message.map_err(|e| self.failed(e.to_string()))? {
                Message::CompilerArtifact(artifact) => libraries.extend(self.library(&artifact)?),
                Message::CompilerMessage(message) => diagnostics.add(message),
                // Cargo reports the end of every build that it started.
                Message::BuildFinished(_) => diagnostics.begun = true,
                _ => {}
            }
        }
        if output.status.success() {
            eprint!("{}{cargo_messages}", diagnostics.text);
            return Ok(libraries);
        }
        if !diagnostics.begun {
            let (package, messages) = (self.package.name.clone(), cargo_messages.trim().to_owned());
            return Err(Error::NotBegun { package, messages });
        }
        let error = diagnostics.error(&self.package.name, &self.package.root_file);
        // A dependency has an error for each use of `std`, of which only the advice is printed.
        if !matches!(error, Error::NeedsStd { .. }) {
            eprint!("{}{cargo_messages}", diagnostics.text);
        }
        Err(error)
    }

    /// Returns the GPU library of a cargo artifact, if it is one.
    fn library(&self, artifact: &Artifact) -> Result<Option<Library>, Error> {
        let is_rlib = |kind: &CrateType| matches!(kind, CrateType::Lib | CrateType::RLib);
        let file = |extension: &str| {
            let is_it =
                |name: &&Utf8PathBuf| is_for_gpu(name) && name.extension() == Some(extension);
            artifact.filenames.iter().find(is_it).map(|name| name.as_std_path())
        };
        let Some(library) =
            file("rlib").filter(|_| artifact.target.crate_types.iter().any(is_rlib))
        else {
            return Ok(None);
        };
        let bitcode = file("rmeta").and_then(bitcode_of).or_else(|| bitcode_of(library));
        let bitcode = bitcode.ok_or_else(|| {
            self.failed(format!(
                "it wrote no bitcode of `{}` to {}; remove that folder and build again",
                artifact.target.name,
                self.target_dir.display()
            ))
        })?;
        let source = artifact.target.src_path.clone().into_std_path_buf();
        Ok(Some(Library { source, library: library.to_owned(), bitcode }))
    }

    /// Returns the cargo command that compiles a package's library for the GPU.
    pub(crate) fn command(
        &self,
        package: &str,
        manifest: &Path,
        target_dir: &Path,
        flags: &[String],
    ) -> Command {
        let mut command = Command::new(&self.toolchain.cargo);
        for (name, _) in env::vars_os() {
            if is_build_setting(&name) {
                command.env_remove(name);
            }
        }
        command
            .env("RUSTC", &self.toolchain.rustc)
            // This process may use unstable features, which kernels need and stable rustc has.
            .env("RUSTC_BOOTSTRAP", "1")
            // An empty wrapper also overrides one in a configuration file.
            .env("RUSTC_WRAPPER", "")
            .env("RUSTC_WORKSPACE_WRAPPER", "")
            // The encoded form overrides flags in configuration files, which are for the host.
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            // The profile belongs to the user's workspace; the environment and the flags override
            // it.
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_STRIP", "none")
            .env("CARGO_INCREMENTAL", "0")
            .args(["rustc", "--release", "--lib", "--crate-type", "rlib"])
            .args(["--target", TARGET, message_format()])
            .args(["--package", package, "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(target_dir);
        if self.quiet {
            command.arg("--quiet");
        }
        command
    }

    /// Returns the flags for rustc. For those that disable its optimisations, see "Barriers" in the
    /// crate's documentation.
    pub(crate) fn rustflags(&self) -> Vec<String> {
        let checks = if self.panics == Panics::Checked { "on" } else { "off" };
        let mut flags = vec![
            // These flags come after the profile's, which may be for one package.
            "-Copt-level=3".to_owned(),
            // Line tables for profilers. Full debug info marks the PTX `debug`: less optimisation.
            "-Cdebuginfo=line-directives-only".to_owned(),
            format!("-Cdebug-assertions={checks}"),
            format!("-Coverflow-checks={checks}"),
            format!("-Ctarget-cpu={}", self.arch),
            "--emit=llvm-bc".to_owned(),
            "-Ccodegen-units=1".to_owned(),
            "-Cno-prepopulate-passes".to_owned(),
            "-Zmir-enable-passes=-JumpThreading".to_owned(),
        ];
        match self.panics {
            // A failed check traps, without code for its message.
            Panics::Silent => flags
                .extend(["-Zunstable-options".to_owned(), "-Cpanic=immediate-abort".to_owned()]),
            // The panic handler in `cuda_std` tests this condition.
            Panics::Reported => flags.push("--cfg=devcomm_panic_messages".to_owned()),
            // It also tests for debug assertions.
            Panics::Checked => {}
        }
        flags
    }

    fn missing_features(&self) -> impl Iterator<Item = &'static str> {
        let root = fs::read_to_string(&self.package.root_file).unwrap_or_default();
        FEATURES.into_iter().filter(move |feature| !root.contains(feature))
    }
}

/// Returns the flag for messages as JSON, with colours for a terminal.
fn message_format() -> &'static str {
    match std::io::stderr().is_terminal() {
        true => "--message-format=json,json-diagnostic-rendered-ansi",
        false => "--message-format=json",
    }
}

/// Returns whether cargo has compiled a file for the GPU, and not for a macro or a build script: by
/// its folder.
fn is_for_gpu(file: &Utf8Path) -> bool {
    file.ancestors().any(|folder| folder.ends_with(format!("{TARGET}/release")))
}

/// Returns the bitcode, which rustc writes next to the metadata as the crate's name without `lib`.
fn bitcode_of(artifact: &Path) -> Option<PathBuf> {
    let stem = artifact.file_stem()?.to_str()?.strip_prefix("lib")?;
    Some(artifact.with_file_name(format!("{stem}.bc"))).filter(|path| path.is_file())
}

/// Returns whether a variable configures the build of the crate whose build script this is. Cargo's
/// home, network, registry, terminal and job-server settings are kept.
fn is_build_setting(name: &OsStr) -> bool {
    const KEPT: [&str; 6] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_TERM_",
        "CARGO_MAKEFLAGS",
    ];
    const OTHERS: [&str; 6] = ["OUT_DIR", "TARGET", "HOST", "PROFILE", "DEBUG", "OPT_LEVEL"];
    let name = name.to_string_lossy();
    let is_cargo = name.starts_with("CARGO_") && !KEPT.iter().any(|kept| name.starts_with(kept));
    is_cargo
        || name.starts_with("RUSTC")
        || name.starts_with("RUSTDOC")
        || name == "RUSTFLAGS"
        || OTHERS.contains(&&*name)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{is_build_setting, is_for_gpu};
    use crate::toolchain::Toolchain;

    /// Returns the output of a program of this toolchain; it must succeed.
    fn output(program: &std::ffi::OsStr, arguments: &[&str]) -> String {
        let mut command = Command::new(program);
        let output = command.env("RUSTC_BOOTSTRAP", "1").args(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap() + &stderr
    }

    #[test]
    fn the_toolchain_has_every_unstable_flag() {
        let toolchain = Toolchain::find(None, None).unwrap();
        let flags = output(&toolchain.rustc, &["-Zhelp"]);
        for flag in ["crate-attr", "mir-enable-passes", "unstable-options"] {
            assert!(flags.contains(flag), "{} has no -Z{flag}", toolchain.version);
        }
        let flags = output(&toolchain.cargo, &["-Zhelp"]);
        assert!(flags.contains("build-std"), "its cargo has no -Zbuild-std");
        output(&toolchain.rustc, &["--print=cfg", "-Zunstable-options", "-Cpanic=immediate-abort"]);
        output(&toolchain.rustc, &["--print=cfg", "-Cno-prepopulate-passes"]);

        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("empty.rs");
        std::fs::write(&source, "").unwrap();
        let metadata = format!("--emit=metadata={}", folder.path().join("empty.rmeta").display());
        let flag = "-Zmir-enable-passes=-JumpThreading";
        let arguments = ["--crate-type=lib", &metadata, flag, source.to_str().unwrap()];
        let messages = output(&toolchain.rustc, &arguments);
        assert_eq!(messages, "", "{} warns of {flag}", toolchain.version);
    }

    #[test]
    fn the_folder_of_a_workspace_may_have_the_gpus_name() {
        let file = |path: &str| is_for_gpu(format!("/{path}/deps/libsyn-1.rlib").as_str().into());
        for target in ["me/target", "nvptx64-nvidia-cuda-demo/target", "nvptx64-nvidia-cuda/t"] {
            assert!(file(&format!("{target}/nvptx64-nvidia-cuda/release")), "{target}");
            assert!(!file(&format!("{target}/release")), "{target}");
        }
    }

    #[test]
    fn the_outer_builds_settings_do_not_reach_the_kernels() {
        for name in [
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "CARGO_PROFILE_RELEASE_LTO",
            "RUSTFLAGS",
            "RUSTC_WORKSPACE_WRAPPER",
            "OUT_DIR",
        ] {
            assert!(is_build_setting(name.as_ref()), "{name}");
        }
        for name in ["PATH", "CARGO_HOME", "CARGO_NET_OFFLINE", "RUSTUP_TOOLCHAIN", "HOME"] {
            assert!(!is_build_setting(name.as_ref()), "{name}");
        }
    }
}
