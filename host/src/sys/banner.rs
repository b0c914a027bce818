//! Reads NCCL's version and its CUDA version from the library's file: no function returns both.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

const BANNER: &[u8] = b"NCCL version ";
/// The most bytes of a version, with its NUL.
const LONGEST: usize = 64;
/// The bytes that are searched, from the start: constants come before the code for GPUs.
const SEARCHED: u64 = 64 << 20;

/// Returns the version of a library's file, such as `2.32.3+cuda13.4`.
pub(crate) fn build_of(library: &Path) -> Option<String> {
    search(File::open(library).ok()?).ok().flatten()
}

/// Reads the file in chunks, since it may have hundreds of megabytes.
fn search(file: impl Read) -> io::Result<Option<String>> {
    const CHUNK: u64 = 1 << 20;
    let (mut file, mut bytes) = (file.take(SEARCHED), Vec::new());
    loop {
        // Keep the end of the previous chunk: a banner may span both.
        bytes.drain(..bytes.len().saturating_sub(BANNER.len() + LONGEST));
        let end = file.by_ref().take(CHUNK).read_to_end(&mut bytes)? == 0;
        if let Some(version) = find(&bytes) {
            return Ok(Some(version));
        }
        if end {
            return Ok(None);
        }
    }
}

/// Returns the version of a complete banner, with its final NUL. Format strings ("NCCL version %d")
/// do not count.
fn find(bytes: &[u8]) -> Option<String> {
    let mut rest = bytes;
    loop {
        let first = rest.iter().position(|byte| *byte == BANNER[0])?;
        rest = &rest[first..];
        if let Some(version) = rest.strip_prefix(BANNER) {
            let end = version.iter().take(LONGEST).position(|byte| *byte == 0);
            let version = end.map(|end| &version[..end]).filter(|text| is_version(text));
            if let Some(version) = version {
                return String::from_utf8(version.to_vec()).ok();
            }
        }
        rest = &rest[1..];
    }
}

fn is_version(text: &[u8]) -> bool {
    text.first().is_some_and(u8::is_ascii_digit) && text.iter().all(u8::is_ascii_graphic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banner_is_found_wherever_it_lies_and_a_format_is_not_taken_for_one() {
        for start in [0, 5, (1 << 20) - 90, (1 << 20) - 20, (1 << 20) - 1, 3 << 20] {
            let mut file = b"NCCL version %d.%d\0NNCCL version \0".to_vec();
            file.resize(file.len() + start, b'N');
            file.extend(b"NCCL version 2.32.3+cuda13.4\0more");
            assert_eq!(search(&file[..]).unwrap().as_deref(), Some("2.32.3+cuda13.4"), "{start}");
        }
        assert_eq!(search(&b"NCCL version 2.32.3 and no end"[..]).unwrap(), None);
        assert_eq!(search(&b""[..]).unwrap(), None);
    }
}
