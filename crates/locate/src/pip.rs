//! The Python environment that a loaded NCCL belongs to, and the command that renews it there.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::version::NcclVersion;

/// The wheel for a Python environment that lacks the metadata of its own.
const DEFAULT_PACKAGE: &str = "nvidia-nccl-cu13";

/// The wheel's folder of the library, below the folder of packages.
const IN_WHEEL: &str = "nvidia/nccl/lib";

/// An NCCL in the packages of a Python environment, where PyTorch finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipNccl {
    /// The wheel's name: `nvidia-nccl-cu13`, or `nvidia-nccl-cu12`.
    pub package: String,
    /// The folder of packages, `.../lib/python3.12/site-packages`.
    pub site_packages: PathBuf,
    /// The environment's interpreter, `.../bin/python`; `None` if it is not there, as for packages
    /// of a user.
    pub python: Option<PathBuf>,
    /// Whether uv made the environment, which then has no pip.
    pub by_uv: bool,
}

impl PipNccl {
    /// Returns the environment that has this library,
    /// `.../site-packages/nvidia/nccl/lib/libnccl.so.2`. `None` for a library elsewhere.
    #[must_use]
    pub fn of_library(library: &Path) -> Option<Self> {
        let folder = library.parent().filter(|folder| folder.ends_with(IN_WHEEL))?;
        let site_packages = folder.ancestors().nth(Path::new(IN_WHEEL).components().count())?;
        let name = site_packages.file_name()?;
        if name != "site-packages" && name != "dist-packages" {
            return None;
        }
        // <prefix>/lib/python3.12/site-packages
        let prefix = site_packages.ancestors().nth(3);
        let python = prefix.map(|prefix| prefix.join("bin/python")).filter(|path| path.is_file());
        let is_uvs = |settings: &str| settings.lines().any(|line| line.starts_with("uv ="));
        let settings = prefix.map(|prefix| std::fs::read_to_string(prefix.join("pyvenv.cfg")));
        let by_uv = settings.is_some_and(|text| text.is_ok_and(|text| is_uvs(&text)))
            && !site_packages.join("pip").is_dir();
        Some(Self {
            by_uv,
            package: package_in(site_packages).unwrap_or_else(|| DEFAULT_PACKAGE.to_owned()),
            site_packages: site_packages.to_owned(),
            python,
        })
    }

    /// Returns the command that installs a version there.
    #[must_use]
    pub fn install(&self, version: NcclVersion) -> PipInstall<'_> {
        PipInstall { nccl: self, version }
    }
}

/// A command for the shell, from [`PipNccl::install`].
#[derive(Clone, Copy, Debug)]
pub struct PipInstall<'a> {
    nccl: &'a PipNccl,
    version: NcclVersion,
}

impl fmt::Display for PipInstall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PipNccl { package, site_packages, python, by_uv } = self.nccl;
        let version = self.version;
        match python.as_ref().map(|python| quoted(&python.display().to_string())) {
            Some(python) if *by_uv => {
                write!(f, "`uv pip install --python {python} {package}=={version}`")
            }
            Some(python) => write!(f, "`{python} -m pip install {package}=={version}`"),
            None => {
                let site = site_packages.display();
                write!(f, "`pip install {package}=={version}` with the pip of {site}")
            }
        }
    }
}

/// Returns the wheel's name, from the folder `nvidia_nccl_cu13-2.28.9.dist-info` next to the
/// packages.
fn package_in(site_packages: &Path) -> Option<String> {
    let entries = std::fs::read_dir(site_packages).ok()?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let packages = names.filter_map(|name| {
        let (package, _) = name.strip_suffix(".dist-info")?.split_once('-')?;
        package.starts_with("nvidia_nccl_cu").then(|| package.replace('_', "-"))
    });
    packages.max()
}

/// Returns a word for a shell, quoted if necessary.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+".contains(c);
    if word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEWER: NcclVersion = NcclVersion { major: 2, minor: 32, patch: 3 };

    /// Returns an environment below `root`, with these files and folders; returns the path of its
    /// library.
    fn environment(root: &Path, site: &str, folders: &[&str], python: bool) -> PathBuf {
        let site = root.join(site);
        let lib = site.join(IN_WHEEL);
        std::fs::create_dir_all(&lib).unwrap();
        for folder in folders {
            std::fs::create_dir_all(site.join(folder)).unwrap();
        }
        if python {
            std::fs::create_dir_all(root.join("bin")).unwrap();
            std::fs::write(root.join("bin/python"), "").unwrap();
        }
        lib.join("libnccl.so.2")
    }

    fn command(library: &Path) -> String {
        PipNccl::of_library(library).unwrap().install(NEWER).to_string()
    }

    #[test]
    fn the_command_is_for_the_environments_own_python_and_wheel() {
        let root = tempfile::tempdir().unwrap();
        for (name, wheel, package) in [
            ("a", "nvidia_nccl_cu13-2.28.9.dist-info", "nvidia-nccl-cu13"),
            ("b", "nvidia_nccl_cu12-2.27.5.dist-info", "nvidia-nccl-cu12"),
            ("c", "torch-2.11.0.dist-info", "nvidia-nccl-cu13"),
        ] {
            let root = root.path().join(name);
            let library = environment(&root, "lib/python3.12/site-packages", &[wheel], true);
            let python = root.join("bin/python");
            let expected = format!("`{} -m pip install {package}==2.32.3`", python.display());
            assert_eq!(command(&library), expected);
        }
    }

    #[test]
    fn an_environment_of_uv_without_pip_is_renewed_by_uv() {
        let root = tempfile::tempdir().unwrap();
        let site = "lib/python3.12/site-packages";
        let library = environment(root.path(), site, &[], true);
        let python = root.path().join("bin/python");
        let by_pip = format!("`{} -m pip install nvidia-nccl-cu13==2.32.3`", python.display());
        let settings = root.path().join("pyvenv.cfg");
        std::fs::write(&settings, "home = /usr/bin\nversion = 3.12.3\n").unwrap();
        assert_eq!(command(&library), by_pip);
        std::fs::write(&settings, "home = /usr/bin\nuv = 0.13.9\n").unwrap();
        let by_uv =
            format!("`uv pip install --python {} nvidia-nccl-cu13==2.32.3`", python.display());
        assert_eq!(command(&library), by_uv);
        std::fs::create_dir(root.path().join(site).join("pip")).unwrap();
        assert_eq!(command(&library), by_pip);
    }

    #[test]
    fn a_path_with_a_space_is_quoted() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("Ann's own env");
        let library = environment(&root, "lib/python3.12/site-packages", &[], true);
        let command = command(&library);
        assert!(command.contains(r"Ann'\''s own env/bin/python' -m pip install"), "{command}");
    }

    #[test]
    fn without_an_interpreter_the_folder_of_packages_is_named() {
        let root = tempfile::tempdir().unwrap();
        let site = "local/lib/python3.12/dist-packages";
        let library = environment(root.path(), site, &[], false);
        let expected = format!(
            "`pip install nvidia-nccl-cu13==2.32.3` with the pip of {}",
            root.path().join(site).display()
        );
        assert_eq!(command(&library), expected);
    }

    #[test]
    fn a_library_elsewhere_is_of_no_environment() {
        for library in [
            "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
            "/home/ann/.cache/devcomm/wheels/nvidia-nccl-cu13-2.32.3/nvidia/nccl/lib/libnccl.so.2",
            "/env/lib/python3.12/site-packages/other/lib/libnccl.so.2",
            "libnccl.so.2",
        ] {
            assert_eq!(PipNccl::of_library(Path::new(library)), None, "{library}");
        }
    }
}
