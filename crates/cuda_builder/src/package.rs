//! Finds the kernel package and the sources that its kernels depend on.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::semver::Version;
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, TargetKind};

use crate::arch::TARGET;
use crate::error::Error;

const MANIFEST: &str = "Cargo.toml";

/// The kernel package.
#[derive(Debug)]
pub(crate) struct KernelPackage {
    pub(crate) name: String,
    /// A manifest of the workspace that has it, as a member or as a dependency.
    pub(crate) manifest: PathBuf,
    /// Root source file of its library.
    pub(crate) root_file: PathBuf,
    /// Cargo's arguments for the features that the calling package enables.
    pub(crate) features: Vec<String>,
    /// Source folders and manifests of the kernels, with those of path dependencies.
    pub(crate) sources: Vec<PathBuf>,
    /// The newest Rust that its manifest or that of a path dependency asks for, if any.
    pub(crate) needs: Option<Version>,
    /// The workspace that was searched.
    pub(crate) workspace: PathBuf,
    /// The target folder.
    pub(crate) target: PathBuf,
}

/// Looks for `name` in the workspace of `manifest_dir`, then among its path dependencies, then
/// among its other dependencies.
pub(crate) fn find(name: &str, manifest_dir: &Path) -> Result<KernelPackage, Error> {
    let manifest = manifest_dir.join(MANIFEST);
    let mut graph = PackageGraph::default();
    let metadata = graph.read(&manifest)?;
    let target = metadata.target_directory.into_std_path_buf();
    let workspace = metadata.workspace_root.into_std_path_buf();
    if graph.named(name).is_none() {
        let folders: Vec<PathBuf> = graph.all().flat_map(path_dependencies).collect();
        graph.follow(folders)?;
    }
    let mut package = graph.named(name).cloned();
    let (built_by, features) = match &package {
        Some(package) => {
            (package.manifest_path.clone().into_std_path_buf(), graph.features(name, &manifest))
        }
        None => {
            // Cargo takes the features from the manifests of the workspace that it builds.
            package = graph.dependency(name, &manifest)?;
            (manifest.clone(), Vec::new())
        }
    };
    let Some(package) = package else {
        let mut known: Vec<&str> = graph.all().map(|package| package.name.as_str()).collect();
        known.sort_unstable();
        let known = known.join(", ");
        return Err(Error::NoPackage { package: name.to_owned(), manifest, known });
    };
    let root_file = root_file(&package).ok_or_else(|| Error::NoLibrary(name.to_owned()))?;
    let folders = graph.with_path_dependencies(&package)?;
    let needs = folders.iter().filter_map(|folder| graph.at(folder)?.rust_version.clone()).max();
    Ok(KernelPackage {
        name: name.to_owned(),
        manifest: built_by,
        root_file,
        features,
        sources: graph.sources(folders),
        needs,
        workspace,
        target,
    })
}

/// Packages found so far, by folder: those of several workspaces may have one name. The workspace
/// that was read first comes first.
#[derive(Default)]
struct PackageGraph {
    packages: Vec<(PathBuf, Package)>,
    /// The folders of the workspaces that were read.
    workspaces: Vec<PathBuf>,
}

impl PackageGraph {
    /// Reads the workspace of a manifest, without resolving dependencies, so without network
    /// access.
    fn read(&mut self, manifest: &Path) -> Result<Metadata, Error> {
        let metadata = MetadataCommand::new()
            .manifest_path(manifest)
            .no_deps()
            .exec()
            .map_err(|source| Error::Workspace { manifest: manifest.to_owned(), source })?;
        for package in &metadata.packages {
            let folder = package_folder(package);
            if self.at(&folder).is_none() {
                self.packages.push((folder, package.clone()));
            }
        }
        self.workspaces.push(metadata.workspace_root.clone().into_std_path_buf());
        Ok(metadata)
    }

    fn all(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().map(|(_, package)| package)
    }

    fn at(&self, folder: &Path) -> Option<&Package> {
        self.packages.iter().find(|(at, _)| at == folder).map(|(_, package)| package)
    }

    fn named(&self, name: &str) -> Option<&Package> {
        self.all().find(|package| package.name == name)
    }

    /// Reads the packages in these folders and their path dependencies.
    fn follow(&mut self, mut folders: Vec<PathBuf>) -> Result<(), Error> {
        while let Some(folder) = folders.pop() {
            if self.at(&folder).is_some() {
                continue;
            }
            let metadata = self.read(&folder.join(MANIFEST))?;
            folders.extend(metadata.packages.iter().flat_map(path_dependencies));
            // A folder may have a second name, by a symbolic link, under which it is not found.
            folders.retain(|other| *other != folder);
        }
        Ok(())
    }

    /// Looks for `name` among the direct dependencies of the packages found so far, of any source.
    ///
    /// Such a package is built as a dependency of `manifest`, whose lock file has its version and
    /// those of its dependencies.
    fn dependency(&self, name: &str, manifest: &Path) -> Result<Option<Package>, Error> {
        let depends = |package: &Package| package.dependencies.iter().any(|one| one.name == name);
        if !self.all().any(depends) {
            return Ok(None);
        }
        let metadata = MetadataCommand::new()
            .manifest_path(manifest)
            .other_options(["--filter-platform", TARGET].map(str::to_owned))
            .exec()
            .map_err(|source| Error::Workspace { manifest: manifest.to_owned(), source })?;
        Ok(metadata.packages.into_iter().find(|package| package.name == name))
    }

    /// Returns cargo's arguments for the features of package `name` that the package of `manifest`
    /// enables, if it depends on it: those in its manifest, and in a build script those that its
    /// own features enable.
    fn features(&self, name: &str, manifest: &Path) -> Vec<String> {
        let path = |path: &Path| fs::canonicalize(path).ok();
        let caller = self.all().find(|one| path(one.manifest_path.as_std_path()) == path(manifest));
        let Some(caller) = caller else { return Vec::new() };
        let declared = || caller.dependencies.iter().filter(|one| one.name == name);
        let mut features: Vec<&str> =
            declared().flat_map(|one| &one.features).map(String::as_str).collect();
        // Cargo sets a variable for each feature of the package whose build script this is.
        let own =
            env::var_os("CARGO_MANIFEST_DIR").map(|folder| PathBuf::from(folder).join(MANIFEST));
        let is_script = own.is_some_and(|own| path(&own) == path(manifest));
        let is_on = |feature: &str| {
            let name = feature.to_uppercase().replace('-', "_");
            is_script && env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
        };
        let on = caller.features.iter().filter(|(feature, _)| is_on(feature));
        for (dependency, feature) in
            on.flat_map(|(_, all)| all).filter_map(|one| one.split_once('/'))
        {
            let dependency = dependency.trim_end_matches('?');
            if declared().any(|one| one.rename.as_ref().unwrap_or(&one.name) == dependency) {
                features.push(feature);
            }
        }
        let mut arguments = vec![format!("--features={}", features.join(","))];
        if declared().count() > 0 && !declared().any(|one| one.uses_default_features) {
            arguments.push("--no-default-features".to_owned());
        }
        arguments
    }

    /// Returns the folders of a package and of its path dependencies.
    fn with_path_dependencies(&mut self, package: &Package) -> Result<Vec<PathBuf>, Error> {
        let mut folders = vec![package_folder(package)];
        let mut index = 0;
        while let Some(folder) = folders.get(index).cloned() {
            index += 1;
            self.follow(vec![folder.clone()])?;
            for dependency in self.at(&folder).map(path_dependencies).unwrap_or_default() {
                if !folders.contains(&dependency) {
                    folders.push(dependency);
                }
            }
        }
        Ok(folders)
    }

    /// Returns the sources in these folders, with the manifests and lock files of their workspaces,
    /// which have versions and features of dependencies.
    fn sources(&self, folders: Vec<PathBuf>) -> Vec<PathBuf> {
        let in_each = |folders: Vec<PathBuf>, names: &'static [&str]| {
            let all = folders.into_iter();
            all.flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        };
        in_each(folders, &[MANIFEST, "build.rs", "src"])
            .chain(in_each(self.workspaces.clone(), &[MANIFEST, "Cargo.lock"]))
            .filter(|path| path.exists())
            .collect()
    }
}

/// Returns the root file of a package's library, if it has one.
fn root_file(package: &Package) -> Option<PathBuf> {
    let is_library = |kind: &TargetKind| {
        use TargetKind::{CDyLib, DyLib, Lib, RLib, StaticLib};
        matches!(kind, Lib | RLib | DyLib | CDyLib | StaticLib)
    };
    let library = package.targets.iter().find(|target| target.kind.iter().any(is_library));
    library.map(|library| library.src_path.clone().into_std_path_buf())
}

fn package_folder(package: &Package) -> PathBuf {
    let manifest = package.manifest_path.as_std_path();
    manifest.parent().unwrap_or(manifest).to_owned()
}

fn path_dependencies(package: &Package) -> Vec<PathBuf> {
    let dependencies =
        package.dependencies.iter().filter(|one| one.kind != DependencyKind::Development);
    dependencies.filter_map(|one| Some(one.path.clone()?.into_std_path_buf())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_one_name_in_two_workspaces_are_both_sources() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for (package, dependencies) in [
            ("a/kernels", "geometry = { path = \"../../b/geometry\" }"),
            ("a/common", ""),
            ("b/geometry", "common = { path = \"../common\" }"),
            ("b/common", ""),
        ] {
            let (package, name) = (root.join(package), package.split('/').nth(1).unwrap());
            fs::create_dir_all(package.join("src")).unwrap();
            fs::write(package.join("src/lib.rs"), "").unwrap();
            let rust = if name == "geometry" { "1.97.2" } else { "1.95" };
            let manifest = format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\
                 rust-version = \"{rust}\"\n\n[dependencies]\n{dependencies}\n"
            );
            fs::write(package.join("Cargo.toml"), manifest).unwrap();
        }
        for workspace in ["a", "b"] {
            let manifest = "[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n";
            fs::write(root.join(workspace).join("Cargo.toml"), manifest).unwrap();
        }
        let kernels = find("kernels", &root.join("a/kernels")).unwrap();
        assert_eq!(kernels.needs, Some(Version::new(1, 97, 2)));
        for source in
            ["a/kernels/src", "b/geometry/src", "b/common/src", "a/Cargo.toml", "b/Cargo.toml"]
        {
            assert!(kernels.sources.contains(&root.join(source)), "{:?}", kernels.sources);
        }
        assert!(!kernels.sources.contains(&root.join("a/common/src")), "{:?}", kernels.sources);
    }
}
