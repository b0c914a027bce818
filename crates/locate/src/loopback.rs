//! Finds devcomm's RMA plugin, which provides GIN on a system without an RDMA card.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::env::Env;
use crate::error::{Attempt, NotFound};

const VARIABLE: &str = "DEVCOMM_GIN_LOOPBACK";

const ADVICE: &str = "build it by `cargo build -p devcomm-rma-loopback`, put \
                      libdevcomm_rma_loopback.so beside the program, or name it in \
                      DEVCOMM_GIN_LOOPBACK";

/// Folders to search, relative to the program's folder: that folder and cargo's `deps` in it; the
/// same two for a test or an example, which cargo puts one folder deeper; `lib` next to `bin`.
const SEARCHED: [&str; 5] = ["", "deps", "..", "../deps", "../lib"];

/// Finds `libdevcomm_rma_loopback.so`: the explicit path, else that of `DEVCOMM_GIN_LOOPBACK`, else
/// next to the running program, where cargo puts it for a program that depends on devcomm. If there
/// are several files, the newest is found.
///
/// # Errors
///
/// [`NotFound`], with every place tried and its reason. A path given by argument or variable is the
/// only place tried.
pub fn find_gin_loopback(explicit: Option<&Path>) -> Result<PathBuf, NotFound> {
    find_gin_loopback_in(&Env::real(), explicit)
}

pub(crate) fn find_gin_loopback_in(
    env: &Env,
    explicit: Option<&Path>,
) -> Result<PathBuf, NotFound> {
    let not_found = |tried| NotFound::new("devcomm's RMA plugin", tried, ADVICE);
    let named = explicit
        .map(|path| (path.to_owned(), "the given path"))
        .or_else(|| Some((env.path_var(VARIABLE)?, VARIABLE)));
    if let Some((path, by)) = named {
        return match fs::canonicalize(&path) {
            Ok(path) if path.is_file() => Ok(path),
            _ => {
                let place = format!("{} ({by})", path.display());
                Err(not_found(vec![Attempt { place, reason: "there is no such file".to_owned() }]))
            }
        };
    }
    let unset = Attempt { place: VARIABLE.to_owned(), reason: "not set".to_owned() };
    let mut tried = vec![unset];
    let mut found = Vec::new();
    for folder in env.program.as_deref().and_then(Path::parent).into_iter().flat_map(searched) {
        found.extend(plugins_in(&folder));
        let reason = "it holds no libdevcomm_rma_loopback.so".to_owned();
        tried.push(Attempt { place: folder.display().to_string(), reason });
    }
    // Cargo leaves older builds in its folders.
    let age = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    found.into_iter().max_by_key(age).ok_or_else(|| not_found(tried))
}

/// Returns the environment variables that a program must set before it loads NCCL or uses a GPU,
/// for GIN PROXY through devcomm's plugin at `plugin` (an absolute path).
///
/// - `NCCL_RMA_PLUGIN` names the plugin; `NCCL_GIN_TYPE=2` selects GIN PROXY, the only type that
///   uses a plugin.
/// - `NCCL_RMA_PLUGIN_REF_COUNT=1` keeps the library loaded after the last communicator.
/// - `CUDA_MODULE_LOADING=EAGER`: lazy loading of a module would block while a kernel waits for a
///   signal.
/// - `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the default of 8 hardware queues a copy may be queued
///   after a waiting kernel.
#[must_use]
pub fn gin_loopback_environment(plugin: &Path) -> [(&'static str, String); 5] {
    [
        ("NCCL_RMA_PLUGIN", plugin.display().to_string()),
        ("NCCL_RMA_PLUGIN_REF_COUNT", "1".to_owned()),
        ("NCCL_GIN_TYPE", "2".to_owned()),
        ("CUDA_MODULE_LOADING", "EAGER".to_owned()),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32".to_owned()),
    ]
}

/// Returns the existing folders of [`SEARCHED`].
fn searched(program_folder: &Path) -> impl Iterator<Item = PathBuf> {
    let folders = SEARCHED.iter().map(|relative| program_folder.join(relative));
    folders.filter_map(|folder| fs::canonicalize(folder).ok())
}

/// Returns the files with the plugin's name, with or without cargo's hash.
fn plugins_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| is_plugin(&entry.file_name())).map(|entry| entry.path())
}

fn is_plugin(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.strip_prefix("libdevcomm_rma_loopback")
        .and_then(|rest| rest.strip_suffix(".so"))
        .is_some_and(|hash| hash.is_empty() || hash.starts_with('-'))
}

#[cfg(test)]
#[path = "loopback_tests.rs"]
mod tests;
