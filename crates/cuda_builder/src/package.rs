//! Finds the kernel package and the sources that its kernels depend on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, TargetKind};

use crate::compile::TARGET;
use crate::error::Error;

/// The kernel package.
#[derive(Debug)]
pub(crate) struct KernelPackage {
    pub(crate) name: String,
    /// A manifest of the workspace that has it, as a member or as a dependency.
    pub(crate) manifest: PathBuf,
    /// Root source file of its library.
    pub(crate) root_file: PathBuf,
    /// Source folders and files of the kernels, with those of path dependencies.
    pub(crate) sources: Vec<PathBuf>,
    /// The minor version of Rust (1.x) that its manifest asks for, if any.
    pub(crate) needs: Option<u64>,
    /// The workspace that was searched.
    pub(crate) workspace: PathBuf,
    /// The target folder.
    pub(crate) target: PathBuf,
}

/// Looks for `name` in the workspace of `manifest_dir`, then among its path dependencies, then
/// among its other dependencies.
pub(crate) fn find(name: &str, manifest_dir: &Path) -> Result<KernelPackage, Error> {
    let manifest = manifest_dir.join("Cargo.toml");
    let mut graph = PackageGraph::default();
    let metadata = graph.read(&manifest)?;
    let target = metadata.target_directory.into_std_path_buf();
    let workspace = metadata.workspace_root.into_std_path_buf();
    let lock = workspace.join("Cargo.lock");
    if !graph.packages.contains_key(name) {
        let folders: Vec<PathBuf> = graph.packages.values().flat_map(path_dependencies).collect();
        graph.follow(folders)?;
    }
    let mut package = graph.packages.get(name).cloned();
    let built_by = match &package {
        Some(package) => package.manifest_path.clone().into_std_path_buf(),
        None => {
            package = graph.dependency(name, &manifest)?;
            manifest.clone()
        }
    };
    let Some(package) = package else {
        let known = graph.packages.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(Error::NoPackage { package: name.to_owned(), manifest, known });
    };
    let is_library = |kind: &TargetKind| {
        use TargetKind::{CDyLib, DyLib, Lib, RLib, StaticLib};
        matches!(kind, Lib | RLib | DyLib | CDyLib | StaticLib)
    };
    let library = package.targets.iter().find(|target| target.kind.iter().any(is_library));
    let library = library.ok_or_else(|| Error::NoLibrary(name.to_owned()))?;
    let mut sources = graph.sources(&package)?;
    sources.extend(Some(lock).filter(|lock| lock.is_file()));
    Ok(KernelPackage {
        name: name.to_owned(),
        manifest: built_by,
        root_file: library.src_path.clone().into_std_path_buf(),
        sources,
        needs: package.rust_version.map(|version| version.minor),
        workspace,
        target,
    })
}

/// Packages found so far, by name.
#[derive(Default)]
struct PackageGraph {
    packages: BTreeMap<String, Package>,
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
            self.packages.entry(package.name.to_string()).or_insert_with(|| package.clone());
        }
        Ok(metadata)
    }

    fn knows(&self, folder: &Path) -> bool {
        self.packages.values().any(|package| package_folder(package) == folder)
    }

    /// Reads the packages in these folders and their path dependencies.
    fn follow(&mut self, mut folders: Vec<PathBuf>) -> Result<(), Error> {
        while let Some(folder) = folders.pop() {
            if self.knows(&folder) {
                continue;
            }
            let metadata = self.read(&folder.join("Cargo.toml"))?;
            folders.extend(metadata.packages.iter().flat_map(path_dependencies));
        }
        Ok(())
    }

    /// Looks for `name` among the direct dependencies of the packages found so far, of any source.
    ///
    /// Such a package is built as a dependency of `manifest`, whose lock file has its version and
    /// those of its dependencies.
    fn dependency(&self, name: &str, manifest: &Path) -> Result<Option<Package>, Error> {
        let depends = |package: &Package| package.dependencies.iter().any(|one| one.name == name);
        if !self.packages.values().any(depends) {
            return Ok(None);
        }
        let metadata = MetadataCommand::new()
            .manifest_path(manifest)
            .other_options(["--filter-platform", TARGET].map(str::to_owned))
            .exec()
            .map_err(|source| Error::Workspace { manifest: manifest.to_owned(), source })?;
        Ok(metadata.packages.into_iter().find(|package| package.name == name))
    }

    /// Returns the sources of a package and of its path dependencies.
    fn sources(&mut self, package: &Package) -> Result<Vec<PathBuf>, Error> {
        let mut folders = vec![package_folder(package)];
        let mut index = 0;
        while let Some(folder) = folders.get(index).cloned() {
            index += 1;
            self.follow(vec![folder.clone()])?;
            let package = self.packages.values().find(|package| package_folder(package) == folder);
            for dependency in package.into_iter().flat_map(path_dependencies) {
                if !folders.contains(&dependency) {
                    folders.push(dependency);
                }
            }
        }
        let parts =
            |folder: PathBuf| ["Cargo.toml", "build.rs", "src"].map(|name| folder.join(name));
        Ok(folders.into_iter().flat_map(parts).filter(|path| path.exists()).collect())
    }
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
