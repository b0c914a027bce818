//! The workspace's test programs: built in one cargo call, and started as cargo starts them.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use cargo_metadata::{Artifact, Message, TargetKind};

use crate::project::{Project, cargo};

/// The kind of a test program. Programs run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Units,
    Integration,
    Simulator,
    Ptx,
    Ui,
    /// A test on simulated GPUs, and on real ones.
    Gpu,
}

impl Phase {
    pub fn title(self) -> &'static str {
        match self {
            Self::Units => "unit tests",
            Self::Integration => "integration tests",
            Self::Simulator => "simulator",
            Self::Ptx => "PTX",
            Self::Ui => "code that must not compile",
            Self::Gpu => "simulated GPUs",
        }
    }

    /// Returns the phase of an integration test, by its name.
    fn of(test: &str) -> Self {
        let prefixes =
            [("sim", Self::Simulator), ("ptx", Self::Ptx), ("ui", Self::Ui), ("gpu", Self::Gpu)];
        let known = prefixes.into_iter().find(|(prefix, _)| test.starts_with(prefix));
        known.map_or(Self::Integration, |(_, phase)| phase)
    }
}

/// One test program.
#[derive(Debug)]
pub struct Program {
    pub phase: Phase,
    /// Package and target, `devcomm-host machine`.
    pub name: String,
    path: PathBuf,
    /// Environment variables: those that cargo sets for the package, and those of all programs.
    environment: Vec<(&'static str, String)>,
    folder: PathBuf,
}

impl Program {
    /// Returns the command that runs it, as from cargo.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).envs(self.environment.iter().cloned());
        command
    }

    /// Returns the names of its tests, in start order.
    pub fn tests(&self) -> Vec<String> {
        let output = self.command().args(["--list", "--format", "terse"]).output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    }
}

/// Builds every test program of the workspace in one call, with one set of features; cargo shows
/// its progress. Returns them in order of their phases, or `None` if something does not compile.
/// They run with `variables` in their environment.
pub fn build(
    project: &Project,
    features: &[&str],
    variables: &[(&'static str, String)],
) -> Result<Option<Vec<Program>>> {
    let mut child = cargo()
        .args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"])
        .args(features)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo does not start")?;
    let stdout = child.stdout.take().context("cargo's output was not piped")?;
    let mut programs = Vec::new();
    for message in Message::parse_stream(BufReader::new(stdout)) {
        if let Message::CompilerArtifact(artifact) = message? {
            programs.extend(program(project, &artifact, variables));
        }
    }
    programs.sort_by(|a, b| (a.phase, &a.name).cmp(&(b.phase, &b.name)));
    Ok(child.wait()?.success().then_some(programs))
}

/// Returns the test program of an artifact, if it is one.
fn program(
    project: &Project,
    artifact: &Artifact,
    variables: &[(&'static str, String)],
) -> Option<Program> {
    let path = artifact.executable.as_ref().filter(|_| artifact.profile.test)?;
    let package = project.package(&artifact.package_id)?;
    let target = &artifact.target;
    let phase = match target.kind.contains(&TargetKind::Test) {
        true => Phase::of(&target.name),
        false => Phase::Units,
    };
    let folder = package.manifest_path.parent()?;
    let of_cargo = [
        ("CARGO_MANIFEST_DIR", folder.to_string()),
        ("CARGO_MANIFEST_PATH", package.manifest_path.to_string()),
        ("CARGO_PKG_NAME", package.name.to_string()),
        ("CARGO_PKG_VERSION", package.version.to_string()),
    ];
    let kind = if phase == Phase::Units { format!(" ({})", target.kind[0]) } else { String::new() };
    Some(Program {
        phase,
        name: format!("{} {}{kind}", package.name, target.name),
        path: path.clone().into(),
        environment: [&of_cargo, variables].concat(),
        folder: folder.into(),
    })
}
