//! Compressed copies of PTX and cubins (zlib), which a program includes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// zlib's level: the best one makes files a few percent smaller, and takes several times longer.
const LEVEL: u8 = 6;

/// Returns the compressed copy of a file, next to it: `sum.ptx.z`.
pub(crate) fn path(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(".z");
    path.into()
}

/// Writes the compressed copy of a file.
pub(crate) fn write(file: &Path) -> Result<(), Error> {
    let bytes = fs::read(file).map_err(Error::io("read", file))?;
    let to = path(file);
    let packed = miniz_oxide::deflate::compress_to_vec_zlib(&bytes, LEVEL);
    fs::write(&to, packed).map_err(Error::io("write", &to))
}
