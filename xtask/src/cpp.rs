//! `cargo xtask cpp`: compiles and runs CUDA C++ programs against NCCL's headers and library,
//! without this project's code, to show what any program that uses NCCL can do on this machine.
//!
//! ```text
//! tests/cpp/X.cu  --nvcc, NCCL's headers and library-->  target/cpp/X
//! ```

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cuda_builder::NvvmArch;
use devcomm_cli::setup::{Optional, find_pinned_nccl, setup};
use devcomm_locate::NcclTree;

use crate::nvcc::{self, Nvcc};
use crate::project::Project;

/// Compiles and runs the programs.
pub fn cpp() -> Result<()> {
    let programs = build()?;
    let tree = find_pinned_nccl()?;
    let library = tree.library.as_deref().context("the NCCL installation has no library")?;
    for program in programs {
        println!("== {}", program.display());
        let mut path = OsString::from(library.parent().unwrap_or(Path::new(".")));
        if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        let mut command = Command::new(&program);
        let status = command.env("LD_LIBRARY_PATH", path).status();
        let status = status.with_context(|| format!("{} does not start", program.display()))?;
        ensure!(status.success(), "{} failed: {status}", program.display());
    }
    Ok(())
}

/// The folder of the programs' sources.
const SOURCES: &str = "tests/cpp";

/// Compiles the programs and returns their paths. Fetches NCCL and nvcc if they are missing.
pub fn build() -> Result<Vec<PathBuf>> {
    // `setup` prints nothing about components that exist. These programs do not need ptxas.
    setup(true, Optional::Ptxas)?;
    let (nvcc, tree) = (nvcc::find_or_fetch()?, find_pinned_nccl()?);
    let folder = Project::open()?.target_folder().join("cpp");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    nvcc::sources(SOURCES)?.iter().map(|source| compile(&nvcc, &tree, source, &folder)).collect()
}

/// Compiles a program, with the CUDA runtime linked statically and NCCL dynamically.
fn compile(nvcc: &Nvcc, tree: &NcclTree, source: &Path, folder: &Path) -> Result<PathBuf> {
    let include = tree.include.as_deref().context("the NCCL installation has no headers")?;
    let library = tree.library.as_deref().context("the NCCL installation has no library")?;
    let program = folder.join(source.file_stem().unwrap_or_default());
    let mut command = Command::new(&nvcc.path);
    command.args(["-O3", "-std=c++17", "-arch", NvvmArch::Compute90.name(), "-I"]);
    command.args([include, source]);
    // nvcc refuses the file name `libnccl.so.2`, which does not end in `.so`; the linker takes it.
    command.arg("-Xlinker").arg(library);
    // An nvcc of Python's wheels does not look for the CUDA runtime in its own folder `lib`.
    if let Some(lib) = nvcc.path.parent().and_then(Path::parent).map(|home| home.join("lib")) {
        command.arg("-L").arg(lib);
    }
    command.arg("-o").arg(&program);
    let output =
        command.output().with_context(|| format!("{} does not start", nvcc.path.display()))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        bail!("nvcc does not compile {}:\n{}", source.display(), messages.trim());
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn every_program_compiles() {
        let name = "every_program_compiles";
        let (nvcc, tree) = match (nvcc::find(), find_pinned_nccl()) {
            (Ok(nvcc), Ok(tree)) => (nvcc, tree),
            (nvcc, _) => {
                let nvcc = nvcc.err().map(|error| error.to_string());
                let reason = nvcc.unwrap_or_else(|| "NCCL is not set up".to_owned());
                // This is written to stdout, as the test harness would capture `println!`.
                let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {reason}");
                return;
            }
        };
        let (folder, sources) = (tempfile::tempdir().unwrap(), nvcc::sources(SOURCES).unwrap());
        assert!(!sources.is_empty());
        for source in sources {
            let program = compile(&nvcc, &tree, &source, folder.path()).unwrap();
            assert!(program.is_file());
        }
    }
}
