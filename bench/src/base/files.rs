//! Locates the compiled twins: kernels that exist in Rust and in CUDA C++.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The environment variable that names the folder of the compiled twins.
const VARIABLE: &str = "DEVCOMM_TWINS";

/// The output folder of `cargo xtask twins`: `rust/X.cubin` and `cpp/X.cubin`, each with `X.json`.
#[derive(Clone, Debug)]
pub struct TwinFiles(PathBuf);

impl TwinFiles {
    /// Returns the named folder, else the variable's, else `twins` next to this program's folder:
    /// `target/twins` for `target/release/devcomm-bench`, and likewise in a pack
    /// (`cargo xtask pack`).
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let variable = || std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let folder = match named.map(Path::to_owned).or_else(|| variable().map(PathBuf::from)) {
            Some(folder) => folder,
            None => {
                let program = std::env::current_exe().context("this program has no path")?;
                let above = program.parent().and_then(Path::parent);
                above.context("this program is in no folder")?.join("twins")
            }
        };
        for language in ["rust", "cpp"] {
            if !folder.join(language).is_dir() {
                bail!(
                    "{} has no compiled twins: run `cargo xtask twins`, or name their folder \
                     with --twins or {VARIABLE}",
                    folder.display()
                );
            }
        }
        Ok(Self(folder))
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Returns whether both modules of a pair exist.
    pub fn has(&self, name: &str) -> bool {
        [self.rust(&[name]), self.cpp(&[name])].iter().flatten().all(|path| path.is_file())
    }

    /// Returns the Rust modules of these names.
    pub fn rust(&self, names: &[&str]) -> Vec<PathBuf> {
        self.modules("rust", names)
    }

    /// Returns the C++ modules of these names.
    pub fn cpp(&self, names: &[&str]) -> Vec<PathBuf> {
        self.modules("cpp", names)
    }

    fn modules(&self, language: &str, names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(|name| self.0.join(language).join(format!("{name}.cubin"))).collect()
    }
}
