//! NCCL's version number: as text, as the integer of `ncclGetVersion`, and as `nccl.h` states it.

use std::fmt;
use std::path::Path;

/// The NCCL version that devcomm is built and tested with, and the only one whose device bitcode it
/// links; defined only here.
pub const NCCL_VERSION: NcclVersion = NcclVersion { major: 2, minor: 32, patch: 3 };

/// A version of NCCL, ordered by its numbers and displayed as `2.32.3`.
///
/// NCCL: `NCCL_MAJOR`, `NCCL_MINOR`, `NCCL_PATCH` and `NCCL_VERSION_CODE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion {
    /// The 2 of 2.32.3.
    pub major: u32,
    /// The 32 of 2.32.3.
    pub minor: u32,
    /// The 3 of 2.32.3.
    pub patch: u32,
}

impl NcclVersion {
    /// Reads the integer that `ncclGetVersion` returns: 23203 is 2.32.3, 2804 is 2.8.4.
    ///
    /// NCCL: `NCCL_VERSION_CODE`; releases up to 2.8 gave the major version a factor of 1,000,
    /// later ones of 10,000.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        let major_factor = if code < 10_000 { 1_000 } else { 10_000 };
        Self { major: code / major_factor, minor: code % major_factor / 100, patch: code % 100 }
    }

    /// Returns the integer that NCCL uses for this version: 2.32.3 is 23203.
    ///
    /// NCCL: `NCCL_VERSION`
    #[must_use]
    pub const fn code(self) -> u32 {
        let old = self.major < 2 || self.major == 2 && self.minor <= 8;
        let major_factor = if old { 1_000 } else { 10_000 };
        self.major * major_factor + self.minor * 100 + self.patch
    }

    /// Reads the version from the text of `nccl.h`.
    pub(crate) fn from_header(text: &str) -> Option<Self> {
        let number = |name: &str| {
            text.lines().find_map(|line| {
                let mut words = line.split_whitespace();
                (words.next() == Some("#define") && words.next() == Some(name))
                    .then(|| words.next()?.parse().ok())?
            })
        };
        Some(Self {
            major: number("NCCL_MAJOR")?,
            minor: number("NCCL_MINOR")?,
            patch: number("NCCL_PATCH")?,
        })
    }

    /// Reads the version from `nccl.h` in the folder `include`.
    pub(crate) fn of_headers(include: &Path) -> Option<Self> {
        // The header's encoding is unknown; the version lines are ASCII.
        let bytes = std::fs::read(include.join("nccl.h")).ok()?;
        Self::from_header(&String::from_utf8_lossy(&bytes))
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::NcclVersion;

    #[test]
    fn a_version_and_its_code_are_the_same_thing() {
        for (code, text) in
            [(23203, "2.32.3"), (22902, "2.29.2"), (20906, "2.9.6"), (2804, "2.8.4")]
        {
            let version = NcclVersion::from_code(code);
            assert_eq!(version.to_string(), text);
            assert_eq!(version.code(), code);
        }
    }

    #[test]
    fn versions_order_by_number_not_by_text() {
        assert!(NcclVersion::from_code(20906) < NcclVersion::from_code(23203));
        assert!(NcclVersion::from_code(2804) < NcclVersion::from_code(20906));
    }

    #[test]
    fn the_header_tells_the_version_whatever_its_spacing() {
        let header = "#ifndef NCCL_H_\n#define NCCL_MAJOR 2\n#define  NCCL_MINOR\t32\n\
                      #define NCCL_PATCH 3\n#define NCCL_SUFFIX \"\"\n";
        assert_eq!(NcclVersion::from_header(header), Some(NcclVersion::from_code(23203)));
        assert_eq!(NcclVersion::from_header("#define NCCL_MAJOR 2\n"), None);
    }
}
