//! The stamp of the compiled kernels: what they were compiled from. `cargo xtask kernels-bin`
//! writes it, and the build script of this package checks it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The version of this package, and of the crates that use it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The folders with the sources of the kernels and of their compiler, in a checkout.
const SOURCES: [&str; 6] = [
    "../../kernels/src",
    "../cuda_builder/src",
    "../cuda_std/src",
    "../cuda_std_macros/src",
    "../nccl_device/src",
    "../types/src",
];

/// Returns the folders with the kernels' sources; none if the package is not in a checkout, which
/// has all of them: a vendored package may lie beside a user's own folder `kernels/src`.
pub fn sources(package: &Path) -> Vec<PathBuf> {
    let folders = SOURCES.map(|folder| package.join(folder));
    if folders.iter().all(|folder| folder.is_dir()) { folders.into() } else { Vec::new() }
}

/// Writes the stamp of the kernels in the folder `data` of a package.
pub fn write(package: &Path) -> io::Result<()> {
    let (sources, files) = (hash(sources(package))?, hash(files(package)?)?);
    fs::write(package.join("data/stamp"), format!("{VERSION} {sources} {files}\n"))
}

/// Checks that the folder `data` of a package has the kernels of its stamp, and that they are of
/// this version and, in a checkout, of its sources.
pub fn check(package: &Path) -> Result<(), String> {
    let stamp = fs::read_to_string(package.join("data/stamp")).unwrap_or_default();
    let stamped = |index| stamp.split(' ').nth(index).unwrap_or_default().trim();
    let (sources, version) = (sources(package), stamped(0));
    let hash_is = |paths: io::Result<Vec<PathBuf>>, index| {
        paths.and_then(hash).is_ok_and(|hash| hash == stamped(index))
    };
    let problem = if stamp.is_empty() {
        "are missing".to_owned()
    } else if version != VERSION {
        format!("are of devcomm {version}, and this is devcomm {VERSION}")
    } else if !hash_is(files(package), 2) {
        "are damaged".to_owned()
    } else if !sources.is_empty() && !hash_is(Ok(sources), 1) {
        "are older than the sources in this checkout".to_owned()
    } else {
        return Ok(());
    };
    let package = fs::canonicalize(package).unwrap_or_default();
    Err(format!(
        "the compiled kernels in {}/data {problem}: `cargo xtask kernels-bin` compiles them, and \
         so does the feature `ptx` instead of `kernels-bin`",
        package.display()
    ))
}

/// Returns the files in the folder `data` of a package that its library includes.
pub fn files(package: &Path) -> io::Result<Vec<PathBuf>> {
    let is_included = |path: &PathBuf| {
        let extension = path.extension().unwrap_or_default();
        ["json", "rs", "z"].iter().any(|included| extension == *included)
    };
    let mut paths = entries(&package.join("data"))?;
    paths.retain(is_included);
    Ok(paths)
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Returns a hash (FNV-1a of 64 bits, in hexadecimal) of the names and contents of files, and of
/// all files in folders.
fn hash(mut left: Vec<PathBuf>) -> io::Result<String> {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    while let Some(path) = left.pop() {
        let name = path.file_name().unwrap_or_default().to_owned();
        let contents = if path.is_dir() {
            left.extend(entries(&path)?);
            Vec::new()
        } else {
            fs::read(&path)?
        };
        let length = (contents.len() as u64).to_le_bytes();
        for part in [name.as_encoded_bytes(), &length, &contents] {
            for byte in part {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
    }
    Ok(format!("{hash:016x}"))
}
