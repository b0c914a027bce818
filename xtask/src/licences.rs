//! The licences of the crates of other projects that programs contain, with their texts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId, TargetKind};

/// The platform of the programs.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Returns the notices of the crates from registries that these packages of a workspace are linked
/// with, directly or not, and those of the tests of `tested` packages: each text once, after the
/// crates that have it. Macros and build scripts are left out.
///
/// # Errors
///
/// If cargo does not resolve the workspace, there is no such package, a file cannot be read, or a
/// crate has no licence.
pub fn notices(manifest: &Path, packages: &[&str], tested: &[&str]) -> Result<String> {
    let mut command = MetadataCommand::new();
    command.manifest_path(manifest);
    command.other_options(["--locked", "--filter-platform", PLATFORM].map(str::to_owned));
    let metadata = command.exec().context("cargo metadata does not resolve the workspace")?;
    let mut crates: Vec<&Package> = linked(&metadata, packages, tested)?;
    crates.retain(|package| package.source.is_some());
    crates.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));

    let mut texts: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
    let mut notices = format!(
        "Crates of other projects\n========================\n\nThe programs ({}) contain these \
         crates, under the licences that each one names. Their texts follow.\n\n",
        [packages, tested].concat().join(", ")
    );
    for package in crates {
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref();
        let files = files(package)?;
        ensure!(licence.is_some() || !files.is_empty(), "{name} has no licence");
        writeln!(notices, "* {name}: {}", licence.unwrap_or("see its text"))?;
        for file in files {
            let text = fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            texts.entry(words).or_insert_with(|| (text, Vec::new())).1.push(name.clone());
        }
    }
    let mut texts: Vec<(String, Vec<String>)> = texts.into_values().collect();
    texts.sort_by(|a, b| a.1.cmp(&b.1));
    for (text, names) in texts {
        write!(notices, "\n{}\n{}\n\n{}\n", "-".repeat(80), names.join(", "), text.trim())?;
    }
    Ok(notices)
}

/// Returns these packages and the ones that they, or the tests of `tested`, are linked with.
fn linked<'a>(
    metadata: &'a Metadata,
    packages: &[&str],
    tested: &[&str],
) -> Result<Vec<&'a Package>> {
    let resolve = metadata.resolve.as_ref().context("cargo metadata has no dependencies")?;
    let by_id: BTreeMap<&PackageId, &Package> =
        metadata.packages.iter().map(|package| (&package.id, package)).collect();
    let mut open: Vec<&PackageId> = Vec::new();
    for name in packages.iter().chain(tested) {
        let package = metadata.packages.iter().find(|package| package.name.as_str() == *name);
        open.push(&package.with_context(|| format!("there is no package {name}"))?.id);
    }
    let mut all: BTreeSet<&PackageId> = open.iter().copied().collect();
    while let Some(id) = open.pop() {
        let node = resolve.nodes.iter().find(|node| node.id == *id);
        for dependency in &node.context("a package is not resolved")?.deps {
            let is_linked = dependency.dep_kinds.iter().any(|kind| match kind.kind {
                DependencyKind::Normal => true,
                DependencyKind::Development => tested.contains(&by_id[id].name.as_str()),
                _ => false,
            });
            let is_macro = by_id[&dependency.pkg]
                .targets
                .iter()
                .any(|target| target.kind.contains(&TargetKind::ProcMacro));
            if is_linked && !is_macro && all.insert(&dependency.pkg) {
                open.push(&dependency.pkg);
            }
        }
    }
    Ok(all.into_iter().map(|id| by_id[id]).collect())
}

/// Returns a crate's files of licences and notices.
fn files(package: &Package) -> Result<Vec<PathBuf>> {
    const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
    let folder = package.manifest_path.parent().context("a manifest has a folder")?;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {folder}"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
