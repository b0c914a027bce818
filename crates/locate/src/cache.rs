//! Finds devcomm's cache, one folder per user, and the wheels in it.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::env::Env;

/// The folder that `devcomm setup` fills and all projects share: `$DEVCOMM_CACHE`, else
/// `$XDG_CACHE_HOME/devcomm`, else `$HOME/.cache/devcomm`. It need not exist.
#[must_use]
pub fn cache_dir() -> PathBuf {
    cache_dir_from(|name| std::env::var_os(name))
}

/// The folder in [`cache_dir`] of an unpacked Python wheel, e.g. `nvidia-nccl-cu13` and `2.32.3`.
/// If it exists, it is complete: a wheel is unpacked under another name and then renamed.
#[must_use]
pub fn wheel_dir(package: &str, version: &str) -> PathBuf {
    wheels(&cache_dir()).join(format!("{package}-{version}"))
}

pub(crate) fn cache_dir_from(var: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("DEVCOMM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("devcomm")))
        .or_else(|| Some(set("HOME")?.join(".cache/devcomm")))
        // No home directory, as in a service account: a folder that outlives this process.
        .unwrap_or_else(|| std::env::temp_dir().join("devcomm-cache"))
}

fn wheels(cache: &Path) -> PathBuf {
    cache.join("wheels")
}

/// The cached wheels whose folder name starts with `prefix`, newest version first, and the searched
/// folder.
pub(crate) fn cached_wheels(env: &Env, prefix: &str) -> (PathBuf, Vec<PathBuf>) {
    let folder = wheels(&cache_dir_from(&env.var));
    let mut found: Vec<PathBuf> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| name_of(path).starts_with(prefix) && path.is_dir())
        .collect();
    found.sort_by_key(|path| Reverse(version_key(&name_of(path))));
    (folder, found)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The numbers of the last dash-separated segment of `name`, so that 2.9.1 sorts below 2.32.3.
fn version_key(name: &str) -> Vec<u32> {
    let version = name.rsplit('-').next().unwrap_or_default();
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> PathBuf {
        cache_dir_from(|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_cache_is_named_by_the_nearest_variable() {
        let all = [("DEVCOMM_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(with(&all), Path::new("/a"));
        assert_eq!(with(&all[1..]), Path::new("/b/devcomm"));
        assert_eq!(with(&all[2..]), Path::new("/c/.cache/devcomm"));
        assert_eq!(with(&[("DEVCOMM_CACHE", ""), ("HOME", "/c")]), Path::new("/c/.cache/devcomm"));
    }

    #[test]
    fn wheel_versions_compare_as_numbers() {
        assert!(version_key("nvidia-nccl-cu13-2.32.3") > version_key("nvidia-nccl-cu13-2.9.1"));
    }
}
