//! Files that a run writes.

use std::fs::{self, File};
use std::io::{
    self,
    ErrorKind::{PermissionDenied, ReadOnlyFilesystem},
};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

/// Flags for outputs in addition to the table.
#[derive(Args, Clone, Debug)]
pub struct OutputOptions {
    /// Also write the rows as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Also write header and rows as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl OutputOptions {
    /// Fails if the files cannot be written, before anything is measured. The flags of an earlier
    /// run are parsed too, whose files need not be here.
    pub fn validate(&self) -> Result<()> {
        for (flag, path) in [("--csv", &self.csv), ("--json", &self.json)] {
            validate_output(flag, path.as_deref())?;
        }
        Ok(())
    }
}

/// Fails if the file of a flag cannot be written. An existing file keeps its content, and a missing
/// one is not created.
pub fn validate_output(flag: &str, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let opened = match File::create_new(path) {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            File::options().append(true).open(path).map(drop)
        }
        Err(error) => Err(error),
    };
    opened.with_context(|| format!("{flag}: cannot write {}", path.display()))
}

/// Writes a file. A reader, also after this program was killed, sees the old text or the new one,
/// unless the folder takes no new file.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let at_once = || -> io::Result<()> {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if target.exists() && !target.is_file() {
            // This is a device, such as /dev/stdout.
            return fs::write(path, text);
        }
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let new = target.with_file_name(name);
        match fs::write(&new, text) {
            Ok(()) => fs::rename(&new, &target),
            // The folder takes no new file, but this one may be written.
            Err(error) => match error.kind() {
                PermissionDenied | ReadOnlyFilesystem => fs::write(path, text),
                _ => Err(error),
            },
        }
    };
    at_once().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_before_anything_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.csv");
        let validate = |path: &Path| {
            let output = OutputOptions { csv: Some(path.to_owned()), json: None };
            output.validate().map_err(|error| format!("{error:#}"))
        };
        assert_eq!(validate(&path), Ok(()));
        assert!(!path.exists());
        fs::write(&path, "rows").unwrap();
        assert_eq!(validate(&path), Ok(()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "rows");
        let error = validate(&path.join("y.csv")).unwrap_err();
        assert!(error.contains("--csv") && error.contains("Not a directory"), "{error}");
        assert!(validate(folder.path()).unwrap_err().contains("Is a directory"));
        assert!(validate(&folder.path().join("no/x.csv")).unwrap_err().contains("No such file"));
    }

    #[test]
    fn a_file_is_replaced_also_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("rows"), folder.path().join("link"));
        write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(link.is_symlink());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        write(Path::new("/dev/null"), "text").unwrap();
        assert!(write(folder.path(), "text").is_err());
    }
}
