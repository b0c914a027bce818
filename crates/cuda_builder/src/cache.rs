//! What was made before, kept by the hash of all that it was made of, for as long as builds use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// What an entry says of itself. An entry that has it is whole.
const SIDECAR: &str = "module.json";

/// An entry that no build has used for so long is removed.
const KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The folder with what earlier builds made.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) folder: PathBuf,
}

/// One module, or another thing, on disk.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) folder: PathBuf,
}

impl Entry {
    pub(crate) fn ptx(&self) -> PathBuf {
        self.folder.join("module.ptx")
    }

    pub(crate) fn sidecar(&self) -> PathBuf {
        self.folder.join(SIDECAR)
    }

    pub(crate) fn cubin(&self) -> PathBuf {
        self.folder.join("module.cubin")
    }

    fn info<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&fs::read(self.sidecar()).ok()?).ok()
    }
}

impl Cache {
    fn entry(&self, key: &str) -> Entry {
        Entry { folder: self.folder.join(key) }
    }

    /// The entry of this key, if it was made before. It counts as used now.
    pub(crate) fn find<T: DeserializeOwned>(&self, key: &str) -> Option<(Entry, T)> {
        let entry = self.entry(key);
        let info = entry.info()?;
        // The sidecar's time is that of the last use. On a disk that keeps no times it is that of
        // the making, and the entry will be made again.
        let sidecar = fs::File::options().append(true).open(entry.sidecar());
        let _ = sidecar.and_then(|file| file.set_modified(SystemTime::now()));
        Some((entry, info))
    }

    /// Removes what no build has used for [`KEPT_FOR`], and what builds that were killed have left.
    /// One that cannot be removed stays.
    pub(crate) fn remove_unused(&self) {
        let is_old = |path: &Path| {
            // An unfinished entry has no sidecar.
            let metadata = fs::metadata(path.join(SIDECAR)).or_else(|_| fs::metadata(path));
            let used = metadata.and_then(|metadata| metadata.modified());
            used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > KEPT_FOR))
        };
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if is_old(&entry.path()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The entry of this key; one build makes it, and others that want it wait for that one.
    pub(crate) fn find_or_make<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        make: impl FnOnce(&Entry) -> Result<T, Error>,
    ) -> Result<(Entry, T), Error> {
        if let Some(kept) = self.find(key) {
            return Ok(kept);
        }
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        // Beside the entries.
        let path = self.folder.with_extension(format!("{key}.lock"));
        let lock = fs::File::create(&path).map_err(Error::io("create", &path))?;
        // On a disk without locks each makes it, and all get the same.
        let _ = lock.lock();
        match self.find(key) {
            Some(made_meanwhile) => Ok(made_meanwhile),
            None => self.make(key, make),
        }
    }

    /// Has `make` fill a new entry, which then appears as a whole: another build may be looking.
    pub(crate) fn make<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        make: impl FnOnce(&Entry) -> Result<T, Error>,
    ) -> Result<(Entry, T), Error> {
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        let new = tempfile::Builder::new().prefix("new-").tempdir_in(&self.folder);
        let new = new.map_err(Error::io("create a folder in", &self.folder))?;
        let fresh = Entry { folder: new.path().to_owned() };
        let info = make(&fresh)?;
        let text = serde_json::to_string_pretty(&info).unwrap_or_default();
        let sidecar = fresh.sidecar();
        fs::write(&sidecar, text).map_err(Error::io("write", &sidecar))?;
        let entry = self.entry(key);
        // What another build has put there meanwhile was made of the same parts, and may be in use;
        // only an incomplete entry is replaced.
        if self.find::<T>(key).is_none() {
            let _ = fs::remove_dir_all(&entry.folder);
            let placed = fs::rename(new.path(), &entry.folder);
            if self.find::<T>(key).is_none() {
                placed.map_err(Error::io("create", &entry.folder))?;
            }
        }
        Ok((entry, info))
    }
}

/// Copies a file, unless the same contents are there: an unchanged time stamp saves a rebuild.
pub(crate) fn copy_if_changed(from: &Path, to: &Path) -> Result<(), Error> {
    write_if_changed(to, &fs::read(from).map_err(Error::io("read", from))?)
}

/// Writes a file, unless it has these contents.
pub(crate) fn write_if_changed(path: &Path, contents: &[u8]) -> Result<(), Error> {
    if fs::read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    fs::write(path, contents).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::artifact::Sidecar;

    fn sidecar() -> Sidecar {
        Sidecar {
            arch: "sm_90".to_owned(),
            ptx_isa: "8.6".to_owned(),
            rustc: String::new(),
            llvm: String::new(),
            nccl: None,
            kernels: Vec::new(),
        }
    }

    #[test]
    fn builds_that_want_the_same_at_once_make_it_once() {
        let folder = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = Cache { folder: folder.path().join("modules") };
                    let make = |_: &Entry| {
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok(sidecar())
                    };
                    cache.find_or_make("wanted", make).unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn a_module_goes_when_no_build_has_used_it_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: folder.path().to_owned() };
        let long_ago = SystemTime::now() - KEPT_FOR - Duration::from_secs(60);
        for key in ["used", "unused"] {
            let make = |entry: &Entry| {
                fs::write(entry.ptx(), "").unwrap();
                Ok(sidecar())
            };
            let (entry, _) = cache.make(key, make).unwrap();
            fs::File::options()
                .append(true)
                .open(entry.sidecar())
                .unwrap()
                .set_modified(long_ago)
                .unwrap();
        }
        // Another build that is at work.
        fs::create_dir(folder.path().join("new-1")).unwrap();

        cache.find::<Sidecar>("used").unwrap();
        cache.remove_unused();
        assert!(cache.find::<Sidecar>("used").is_some());
        assert!(!folder.path().join("unused").exists());
        assert!(folder.path().join("new-1").exists());
    }
}
