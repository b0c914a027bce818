//! A build cache on disk. The key of an entry is the hash of all its inputs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::artifact;
use crate::error::Error;

/// The JSON file of an entry, written last, which lists the other files. An entry is complete if it
/// has this file, and the files are as listed.
const LIST: &str = "entry.json";

/// An entry unused for this long is removed.
const KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A cache folder.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) folder: PathBuf,
    /// Whether the files of an entry are compared by hash, not only by size, each time that it is
    /// found.
    pub(crate) hashes: bool,
}

/// The folder of one entry: a module, NCCL's bitcode or a sysroot.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) folder: PathBuf,
}

/// The contents of [`LIST`].
#[derive(Serialize, Deserialize)]
struct List<T> {
    info: T,
    /// The files by their paths in the entry.
    files: BTreeMap<String, Contents>,
}

/// The size and the hash of a file.
#[derive(PartialEq, Serialize, Deserialize)]
struct Contents {
    size: u64,
    sha256: Option<String>,
}

impl Entry {
    pub(crate) fn ptx(&self) -> PathBuf {
        self.folder.join("module.ptx")
    }

    pub(crate) fn cubin(&self) -> PathBuf {
        self.folder.join("module.cubin")
    }

    fn list(&self) -> PathBuf {
        self.folder.join(LIST)
    }

    /// Returns the information that the entry was made with, if its files are unchanged.
    fn info<T: DeserializeOwned>(&self) -> Option<T> {
        let list: List<T> = serde_json::from_slice(&fs::read(self.list()).ok()?).ok()?;
        let is_whole = |(path, made): (&String, &Contents)| {
            let found = Contents::of(&self.folder.join(path), made.sha256.is_some());
            found.is_ok_and(|found| found == *made)
        };
        list.files.iter().all(is_whole).then_some(list.info)
    }
}

impl Contents {
    fn of(path: &Path, hashed: bool) -> Result<Self, Error> {
        let size = fs::metadata(path).map_err(Error::io("read", path))?.len();
        let sha256 = hashed.then(|| artifact::sha256_of(path)).transpose()?;
        Ok(Self { size, sha256 })
    }
}

/// Visits the files below a folder, and each folder after its content.
fn walk(folder: &Path, visit: &mut impl FnMut(&Path) -> Result<(), Error>) -> Result<(), Error> {
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        if path.is_dir() { walk(&path, visit)? } else { visit(&path)? }
    }
    visit(folder)
}

impl Cache {
    fn entry(&self, key: &str) -> Entry {
        Entry { folder: self.folder.join(key) }
    }

    /// Returns the entry with this key, if it exists and is whole; updates its time of use.
    pub(crate) fn find<T: DeserializeOwned>(&self, key: &str) -> Option<(Entry, T)> {
        let entry = self.entry(key);
        let info = entry.info()?;
        // The list's modification time is the time of last use. If it cannot be set, it stays the
        // time of creation, and the entry expires although it is used.
        let list = fs::File::options().append(true).open(entry.list());
        let _ = list.and_then(|file| file.set_modified(SystemTime::now()));
        Some((entry, info))
    }

    /// Removes entries unused for [`KEPT_FOR`], and leftovers of killed builds. Failures are
    /// ignored.
    pub(crate) fn remove_unused(&self) {
        let is_old = |path: &Path| {
            // An unfinished entry has no list.
            let metadata = fs::metadata(path.join(LIST)).or_else(|_| fs::metadata(path));
            let used = metadata.and_then(|metadata| metadata.modified());
            used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > KEPT_FOR))
        };
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if is_old(&entry.path()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Returns the entry with this key; one build creates it, and concurrent ones wait for it.
    pub(crate) fn find_or_make<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        make: impl FnOnce(&Entry) -> Result<T, Error>,
    ) -> Result<(Entry, T), Error> {
        if let Some(found) = self.find(key) {
            return Ok(found);
        }
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        // The lock file is next to the cache folder.
        let path = self.folder.with_extension(format!("{key}.lock"));
        let lock = fs::File::create(&path).map_err(Error::io("create", &path))?;
        // On a file system without locks each build creates the same entry.
        let _ = lock.lock();
        match self.find(key) {
            Some(found) => Ok(found),
            None => self.make(key, make),
        }
    }

    /// Returns whether an entry, and the lock file of its key, can be created.
    pub(crate) fn is_writable(&self) -> bool {
        let has_folder = fs::create_dir_all(&self.folder).is_ok();
        let mut folders = self.folder.ancestors().take(2);
        has_folder && folders.all(|folder| tempfile::tempfile_in(folder).is_ok())
    }

    /// Creates an entry with `make` in a temporary folder, and publishes it with an atomic rename.
    pub(crate) fn make<T: Serialize + DeserializeOwned>(
        &self,
        key: &str,
        make: impl FnOnce(&Entry) -> Result<T, Error>,
    ) -> Result<(Entry, T), Error> {
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        let new = tempfile::Builder::new().prefix("new-").tempdir_in(&self.folder);
        let new = new.map_err(Error::io("create a folder in", &self.folder))?;
        let unpublished = Entry { folder: new.path().to_owned() };
        let info = make(&unpublished)?;
        let mut list = List { info, files: BTreeMap::new() };
        walk(&unpublished.folder, &mut |path| {
            if let (true, Ok(name)) = (path.is_file(), path.strip_prefix(&unpublished.folder)) {
                let name = name.to_string_lossy().into_owned();
                list.files.insert(name, Contents::of(path, self.hashes)?);
            }
            Ok(())
        })?;
        let text = serde_json::to_string_pretty(&list).unwrap_or_default();
        fs::write(unpublished.list(), text).map_err(Error::io("write", &unpublished.list()))?;
        // All of it is synchronised before the rename: a crash of the system might truncate a file.
        walk(&unpublished.folder, &mut |path| {
            let file = fs::File::open(path).and_then(|file| file.sync_all());
            file.map_err(Error::io("write", path))
        })?;
        let entry = self.entry(key);
        // A concurrent build's entry is made of the same inputs and may be in use; only an
        // incomplete entry is replaced.
        if self.find::<T>(key).is_none() {
            let _ = fs::remove_dir_all(&entry.folder);
            let renamed = fs::rename(new.path(), &entry.folder);
            if self.find::<T>(key).is_none() {
                renamed.map_err(Error::io("create", &entry.folder))?;
            }
        }
        Ok((entry, list.info))
    }
}

/// Copies a file unless the contents are equal: an unchanged time stamp avoids a rebuild.
pub(crate) fn copy_if_changed(from: &Path, to: &Path) -> Result<(), Error> {
    write_if_changed(to, &fs::read(from).map_err(Error::io("read", from))?)
}

/// Writes a file unless it has these contents.
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
            package: None,
            arch: "sm_90".to_owned(),
            ptx_isa: "8.6".to_owned(),
            rustc: String::new(),
            llvm: String::new(),
            nccl: None,
            cubin_sha256: None,
            kernels: Vec::new(),
        }
    }

    #[test]
    fn concurrent_builds_make_an_entry_once() {
        let folder = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = Cache { folder: folder.path().join("modules"), hashes: true };
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
    fn an_entry_whose_file_is_truncated_changed_or_missing_is_made_again() {
        for hashes in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let cache = Cache { folder: folder.path().join("core"), hashes };
            let made = AtomicUsize::new(0);
            let make = |entry: &Entry| {
                made.fetch_add(1, Ordering::Relaxed);
                fs::create_dir(entry.folder.join("lib")).unwrap();
                fs::write(entry.folder.join("lib/core.rlib"), "contents").unwrap();
                Ok(sidecar())
            };
            let mut times = 0;
            let mut is_made = |damage: &dyn Fn(&Path)| {
                let (entry, _) = cache.find_or_make("key", make).unwrap();
                let file = entry.folder.join("lib/core.rlib");
                assert_eq!(fs::read_to_string(&file).unwrap(), "contents");
                let new = made.load(Ordering::Relaxed) > times;
                times = made.load(Ordering::Relaxed);
                damage(&file);
                new
            };
            assert!(is_made(&|_| ()));
            assert!(!is_made(&|file| fs::write(file, "cont").unwrap()));
            assert!(is_made(&|file| fs::write(file, "").unwrap()));
            assert!(is_made(&|file| fs::remove_file(file).unwrap()));
            let cut_list = |file: &Path| {
                let list = file.parent().unwrap().with_file_name(LIST);
                let text = fs::read_to_string(&list).unwrap();
                fs::write(list, &text[..text.len() / 2]).unwrap();
            };
            assert!(is_made(&cut_list));
            assert!(is_made(&|_| ()));
            if hashes {
                assert!(!is_made(&|file| fs::write(file, "CONTENTS").unwrap()));
                assert!(is_made(&|_| ()));
            }
        }
    }

    #[test]
    fn an_entry_that_no_build_has_used_for_long_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: folder.path().to_owned(), hashes: true };
        let long_ago = SystemTime::now() - KEPT_FOR - Duration::from_secs(60);
        for key in ["used", "unused"] {
            let make = |entry: &Entry| {
                fs::write(entry.ptx(), "").unwrap();
                Ok(sidecar())
            };
            let (entry, _) = cache.make(key, make).unwrap();
            fs::File::options()
                .append(true)
                .open(entry.list())
                .unwrap()
                .set_modified(long_ago)
                .unwrap();
        }
        // The temporary folder of another build in progress.
        fs::create_dir(folder.path().join("new-1")).unwrap();

        cache.find::<Sidecar>("used").unwrap();
        cache.remove_unused();
        assert!(cache.find::<Sidecar>("used").is_some());
        assert!(!folder.path().join("unused").exists());
        assert!(folder.path().join("new-1").exists());
    }
}
