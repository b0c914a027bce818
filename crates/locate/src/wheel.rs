//! Checks that a wheel in the cache has all the files that its RECORD lists.

use std::path::{Path, PathBuf};

use crate::cache::cache_dir;

/// A file of an unpacked wheel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WheelFile {
    /// The path.
    pub path: PathBuf,
    /// The length in bytes.
    pub size: u64,
    /// The SHA-256, in the base64 of URLs, without padding.
    pub sha256: String,
}

/// Returns the files of the wheels that were unpacked into the folder `wheel`, by their `RECORD`s.
/// A `RECORD` lists all files of its wheel except itself.
///
/// # Errors
///
/// If there is no `RECORD`, or it cannot be read.
pub fn wheel_files(wheel: &Path) -> Result<Vec<WheelFile>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", wheel.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(wheel).map_err(failed)? {
        let folder = entry.map_err(failed)?.path();
        if folder.extension().is_none_or(|extension| extension != "dist-info") {
            continue;
        }
        let record = folder.join("RECORD");
        let text = std::fs::read_to_string(&record);
        let text = text.map_err(|error| format!("{}: {error}", record.display()))?;
        // A line has a path, in which commas may be, a hash and a size.
        files.extend(text.lines().filter_map(|line| {
            let mut fields = line.rsplitn(3, ',');
            let size = fields.next()?.trim().parse().ok()?;
            let sha256 = fields.next()?.strip_prefix("sha256=")?.to_owned();
            let path = wheel.join(fields.next()?.trim_matches('"'));
            Some(WheelFile { path, size, sha256 })
        }));
    }
    if files.is_empty() {
        return Err(format!("{} is not complete: it has no RECORD of its files", wheel.display()));
    }
    Ok(files)
}

/// Checks that all files of an unpacked wheel are there, by their sizes.
///
/// # Errors
///
/// The error names a file that is missing or cut. The errors of [`wheel_files`] are returned too.
pub fn check_wheel(wheel: &Path) -> Result<(), String> {
    for WheelFile { path, size, .. } in wheel_files(wheel)? {
        match std::fs::metadata(&path) {
            Ok(found) if found.len() == size => {}
            Ok(found) => {
                let (found, path) = (found.len(), path.display());
                return Err(format!("{path} has {found} of {size} bytes: it was cut or changed"));
            }
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    Ok(())
}

/// Returns the cache's folder of the wheel that has this file; `None` for a file elsewhere.
#[must_use]
pub fn wheel_of(file: &Path) -> Option<PathBuf> {
    let wheels = cache_dir().ok()?.join("wheels");
    file.ancestors().find(|folder| folder.parent() == Some(&wheels)).map(Path::to_owned)
}

/// Writes the RECORD of what is in the folder.
#[cfg(test)]
pub(crate) fn record(wheel: &Path) {
    fn list(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { list(&path, files) } else { files.push(path) }
        }
    }
    let info = wheel.join("nvidia-1.dist-info");
    std::fs::create_dir_all(&info).unwrap();
    let mut files = Vec::new();
    list(wheel, &mut files);
    let line = |file: &PathBuf| {
        let size = std::fs::metadata(file).unwrap().len();
        format!("{},sha256=hash,{size}\n", file.strip_prefix(wheel).unwrap().display())
    };
    let lines: String = files.iter().filter(|file| !file.ends_with("RECORD")).map(line).collect();
    std::fs::write(info.join("RECORD"), lines + "nvidia-1.dist-info/RECORD,,\n").unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_whose_file_is_cut_or_missing_is_not_complete() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path();
        let none = check_wheel(wheel).unwrap_err();
        assert!(none.ends_with("it has no RECORD of its files"), "{none}");
        let file = wheel.join("a,b");
        std::fs::write(&file, "contents").unwrap();
        record(wheel);
        check_wheel(wheel).unwrap();
        let expected = WheelFile { path: file.clone(), size: 8, sha256: "hash".into() };
        assert_eq!(wheel_files(wheel).unwrap(), [expected]);
        std::fs::write(&file, "cont").unwrap();
        let cut = check_wheel(wheel).unwrap_err();
        assert!(cut.ends_with("a,b has 4 of 8 bytes: it was cut or changed"), "{cut}");
        std::fs::remove_file(&file).unwrap();
        assert!(check_wheel(wheel).unwrap_err().contains("No such file"));
    }
}
