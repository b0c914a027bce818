//! Finds devcomm's cache, one folder per user, and the wheels in it.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::env::Env;

/// Returns the folder that `devcomm setup` fills and all projects share: `$DEVCOMM_CACHE`, else
/// `$XDG_CACHE_HOME/devcomm`, else `$HOME/.cache/devcomm`. It is absolute, and need not exist. For
/// a user without any of these, such as a service account, it is `devcomm-UID` in the system's
/// temporary folder, which this function creates with access for this user only.
///
/// # Errors
///
/// [`NoCache`] if `DEVCOMM_CACHE` is a relative path, or another user owns the folder in the
/// temporary one, or has access to it.
pub fn cache_dir() -> Result<PathBuf, NoCache> {
    let folder = Folder::of(|name| std::env::var_os(name))?;
    folder.make().and_then(|()| folder.check())?;
    Ok(folder.path)
}

/// Does the same as [`cache_dir`], for callers that can do without a cache: `None` if others could
/// write to it.
///
/// # Errors
///
/// [`NoCache::Relative`].
pub fn cache_dir_if_safe() -> Result<Option<PathBuf>, NoCache> {
    match cache_dir() {
        Err(error @ NoCache::Relative { .. }) => Err(error),
        found => Ok(found.ok()),
    }
}

/// Returns the folder in [`cache_dir`] of an unpacked Python wheel, e.g. `nvidia-nccl-cu13` and
/// `2.32.3`. If it exists, it was complete: a wheel is unpacked under another name and then
/// renamed.
///
/// # Errors
///
/// The errors are those of [`cache_dir`].
pub fn wheel_dir(package: &str, version: &str) -> Result<PathBuf, NoCache> {
    Ok(wheels(&cache_dir()?).join(format!("{package}-{version}")))
}

/// The error that a folder cannot be the cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCache {
    /// A relative path in `DEVCOMM_CACHE`.
    #[error(
        "DEVCOMM_CACHE={} is a relative path, so it names another folder in each working \
         directory; set it to an absolute path",
        path.display()
    )]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// A folder to which others may write, for a user without a home.
    #[error(
        "{} cannot be the cache of this user, who has no HOME: {why}; set DEVCOMM_CACHE to another \
         folder",
        path.display()
    )]
    Unsafe {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// The cache's folder.
struct Folder {
    path: PathBuf,
    /// Whether it is in a folder in which others can write.
    is_shared: bool,
}

impl Folder {
    fn of(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, NoCache> {
        let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let own = set("DEVCOMM_CACHE");
        if let Some(path) = own.as_ref().filter(|path| path.is_relative()) {
            return Err(NoCache::Relative { path: path.clone() });
        }
        // XDG's specification says that relative paths are to be ignored.
        let absolute = |name| set(name).filter(|path| path.is_absolute());
        let own = own
            .or_else(|| Some(absolute("XDG_CACHE_HOME")?.join("devcomm")))
            .or_else(|| Some(absolute("HOME")?.join(".cache/devcomm")));
        Ok(match own {
            Some(path) => Self { path, is_shared: false },
            None => {
                let temporary = absolute("TMPDIR").unwrap_or_else(|| "/tmp".into());
                let user = rustix::process::geteuid().as_raw();
                Self { path: temporary.join(format!("devcomm-{user}")), is_shared: true }
            }
        })
    }

    /// Creates a folder that is in a shared one, for this user only, unless it exists.
    fn make(&self) -> Result<(), NoCache> {
        if !self.is_shared {
            return Ok(());
        }
        match std::fs::DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(self.refused(error)),
            _ => Ok(()),
        }
    }

    /// Checks that no other user can have written to the folder.
    fn check(&self) -> Result<(), NoCache> {
        if !self.is_shared {
            return Ok(());
        }
        let why = self.why_unusable().map_err(|error| self.refused(error))?;
        why.map_or(Ok(()), |why| Err(self.refused(why)))
    }

    fn why_unusable(&self) -> io::Result<Option<String>> {
        let found = std::fs::symlink_metadata(&self.path)?;
        let (user, mode) = (rustix::process::geteuid().as_raw(), found.mode() & 0o777);
        Ok(if !found.is_dir() {
            Some("it is not a folder".to_owned())
        } else if found.uid() != user {
            Some(format!("it is of user {}, this process of user {user}", found.uid()))
        } else if mode & 0o077 != 0 {
            Some(format!("others may use it (mode {mode:o})"))
        } else {
            None
        })
    }

    fn refused(&self, why: impl ToString) -> NoCache {
        NoCache::Unsafe { path: self.path.clone(), why: why.to_string() }
    }
}

fn wheels(cache: &Path) -> PathBuf {
    cache.join("wheels")
}

/// Returns the cached wheels whose folder name starts with `prefix`, newest version first, and the
/// searched folder.
///
/// # Errors
///
/// The errors are those of [`cache_dir`].
pub(crate) fn cached_wheels(env: &Env, prefix: &str) -> Result<(PathBuf, Vec<PathBuf>), NoCache> {
    let cache = Folder::of(&env.var)?;
    let folder = wheels(&cache.path);
    if !cache.path.exists() {
        return Ok((folder, Vec::new()));
    }
    cache.check()?;
    let mut found: Vec<PathBuf> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| name_of(path).starts_with(prefix) && path.is_dir())
        .collect();
    found.sort_by_key(|path| Reverse(version_key(&name_of(path))));
    Ok((folder, found))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the numbers of the last dash-separated segment of `name`, so that 2.9.1 sorts below
/// 2.32.3. A part that is no number, such as that of a pre-release, counts as 0.
fn version_key(name: &str) -> Vec<u32> {
    let version = name.rsplit('-').next().unwrap_or_default();
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(vars: &[(&str, &str)]) -> Result<Folder, NoCache> {
        Folder::of(|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    fn path(vars: &[(&str, &str)]) -> PathBuf {
        folder(vars).unwrap().path
    }

    #[test]
    fn the_cache_is_named_by_the_nearest_variable() {
        let all = [("DEVCOMM_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(path(&all), Path::new("/a"));
        assert_eq!(path(&all[1..]), Path::new("/b/devcomm"));
        assert_eq!(path(&all[2..]), Path::new("/c/.cache/devcomm"));
        assert_eq!(path(&[("DEVCOMM_CACHE", ""), ("HOME", "/c")]), Path::new("/c/.cache/devcomm"));
    }

    #[test]
    fn a_relative_path_is_an_error_in_devcomms_variable_and_ignored_in_others() {
        let relative = [("DEVCOMM_CACHE", ".cache"), ("HOME", "/c")];
        let error = folder(&relative).err().unwrap().to_string();
        assert!(error.starts_with("DEVCOMM_CACHE=.cache is a relative path"), "{error}");
        let var = |name: &str| (name == "DEVCOMM_CACHE").then(|| ".cache".into());
        let env = Env { var: Box::new(var), ..Env::empty() };
        assert_eq!(cached_wheels(&env, "nvidia").unwrap_err().to_string(), error);
        assert_eq!(
            path(&[("XDG_CACHE_HOME", "b"), ("HOME", "/c")]),
            Path::new("/c/.cache/devcomm")
        );
        assert!(path(&[("HOME", "c"), ("TMPDIR", "d")]).starts_with("/tmp"));
    }

    #[test]
    fn without_a_home_the_cache_is_a_folder_for_this_user_only() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let temporary = tempfile::tempdir().unwrap();
        let cache = folder(&[("TMPDIR", temporary.path().to_str().unwrap())]).unwrap();
        let refused = |cache: &Folder, why: &str| {
            let error = cache.make().and_then(|()| cache.check()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        cache.make().and_then(|()| cache.check()).unwrap();
        cache.make().and_then(|()| cache.check()).unwrap();
        let mode = |mode| std::fs::Permissions::from_mode(mode);
        assert_eq!(std::fs::metadata(&cache.path).unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&cache.path, mode(0o770)).unwrap();
        refused(&cache, "others may use it (mode 770)");
        std::fs::remove_dir(&cache.path).unwrap();
        // Another user may create the path first.
        let other = tempfile::tempdir().unwrap();
        symlink(other.path(), &cache.path).unwrap();
        refused(&cache, "it is not a folder");
        let foreign = Folder { path: "/proc/1".into(), is_shared: true };
        if std::fs::metadata("/proc/1").unwrap().uid() != rustix::process::geteuid().as_raw() {
            refused(&foreign, "this process of user");
        }
    }

    #[test]
    fn wheels_in_a_cache_that_others_can_use_are_not_found() {
        use std::os::unix::fs::PermissionsExt;
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().to_owned();
        let var = move |name: &str| (name == "TMPDIR").then(|| path.clone().into());
        let env = Env { var: Box::new(var), ..Env::empty() };
        let cache = Folder::of(&env.var).unwrap();
        assert_eq!(cached_wheels(&env, "nvidia").unwrap().1, [] as [PathBuf; 0]);
        assert!(!cache.path.exists());
        cache.make().unwrap();
        let wheel = cache.path.join("wheels/nvidia-1.2.3");
        std::fs::create_dir_all(&wheel).unwrap();
        assert_eq!(cached_wheels(&env, "nvidia").unwrap().1, [wheel]);
        let others = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(&cache.path, others).unwrap();
        let error = cached_wheels(&env, "nvidia").unwrap_err().to_string();
        assert!(error.contains("others may use it") && error.contains("DEVCOMM_CACHE"), "{error}");
    }

    #[test]
    fn wheel_versions_compare_as_numbers() {
        assert!(version_key("nvidia-nccl-cu13-2.32.3") > version_key("nvidia-nccl-cu13-2.9.1"));
    }
}
