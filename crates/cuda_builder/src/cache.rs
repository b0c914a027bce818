//! Linked modules, kept by the hash of all that they were made of.

use std::fs;
use std::path::{Path, PathBuf};

use crate::artifact::Sidecar;
use crate::error::Error;

/// The folder with the modules of earlier builds.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) folder: PathBuf,
}

/// One module on disk.
#[derive(Debug)]
pub(crate) struct Entry {
    folder: PathBuf,
}

impl Entry {
    pub(crate) fn ptx(&self) -> PathBuf {
        self.folder.join("module.ptx")
    }

    pub(crate) fn sidecar(&self) -> PathBuf {
        self.folder.join("module.json")
    }

    pub(crate) fn cubin(&self) -> PathBuf {
        self.folder.join("module.cubin")
    }

    pub(crate) fn info(&self) -> Option<Sidecar> {
        serde_json::from_slice(&fs::read(self.sidecar()).ok()?).ok()
    }
}

impl Cache {
    fn entry(&self, key: &str) -> Entry {
        Entry { folder: self.folder.join(key) }
    }

    /// The module of this key, if it was made before.
    pub(crate) fn find(&self, key: &str) -> Option<(Entry, Sidecar)> {
        let entry = self.entry(key);
        let info = entry.info()?;
        entry.ptx().is_file().then_some((entry, info))
    }

    /// Has `make` fill a new entry, which then appears as a whole: another build may be looking.
    pub(crate) fn make(
        &self,
        key: &str,
        make: impl FnOnce(&Entry) -> Result<Sidecar, Error>,
    ) -> Result<(Entry, Sidecar), Error> {
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
        if self.find(key).is_none() {
            let _ = fs::remove_dir_all(&entry.folder);
            let placed = fs::rename(new.path(), &entry.folder);
            if self.find(key).is_none() {
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
