//! Checks that the driver is new enough for the CUDA version that an NCCL library was built for.
//!
//! NCCL contains a CUDA runtime. It runs on drivers of the same major CUDA version, whatever the
//! minor version, and on later drivers; on a driver of an earlier major version, NCCL does not
//! work. No function returns the runtime's version: it is read from the banner in the library's
//! file, `NCCL version 2.32.3+cuda13.4`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::banner::build_of;
use super::cuda;
use crate::error::{NcclError, Result};
use crate::machine::Machine;

/// A CUDA version: major, minor.
type Version = (u32, u32);

/// Fails if the NCCL library at that path needs a newer driver than the machine's. A library whose
/// CUDA version is unknown is accepted; so is a simulated machine's.
pub(crate) fn check_driver(machine: &Machine, library: &Path) -> Result<()> {
    static KNOWN: Mutex<Option<HashMap<PathBuf, Option<Version>>>> = Mutex::new(None);
    if machine.is_simulated() {
        return Ok(());
    }
    let driver = cuda::driver_version(machine)?;
    let built = *KNOWN
        .lock()
        .get_or_insert_default()
        .entry(library.to_owned())
        .or_insert_with(|| build_of(library).as_deref().and_then(built_for));
    match (built, version(driver.as_bytes())) {
        (Some(built), Some(driver)) => check_major(library, built, driver),
        _ => Ok(()),
    }
}

fn check_major(library: &Path, built: Version, driver: Version) -> Result<()> {
    if built.0 <= driver.0 {
        return Ok(());
    }
    let reason = format!(
        "it was built for CUDA {}.{}, and the driver supports CUDA {}.{}; update NVIDIA's driver \
         to one for CUDA {}.0 or newer, or name an NCCL built for CUDA {} in DEVCOMM_NCCL_HOME",
        built.0, built.1, driver.0, driver.1, built.0, driver.0
    );
    Err(NcclError::Unusable { path: library.to_owned(), reason }.into())
}

/// Returns the CUDA version of a build such as `2.32.3+cuda13.4`.
fn built_for(build: &str) -> Option<Version> {
    version(build.split_once("+cuda")?.1.as_bytes())
}

/// Parses `13.4` at the start of a text.
fn version(text: &[u8]) -> Option<Version> {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse().ok();
    let (major, rest) = text.split_at(digits(text));
    let minor = rest.strip_prefix(b".")?;
    Some((number(major)?, number(&minor[..digits(minor)])?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cuda_of_a_build_is_read_whatever_the_suffix_of_its_version() {
        assert_eq!(built_for("2.32.3+cuda13.4"), Some((13, 4)));
        assert_eq!(built_for("2.33.0rc1+cuda12.9"), Some((12, 9)));
        // The last one is a format string of the library.
        for none in ["2.32.3", "+cuda", "2.32.3+cuda%d.%d"] {
            assert_eq!(built_for(none), None);
        }
    }

    #[test]
    fn a_driver_of_an_earlier_major_version_is_refused_with_both_versions() {
        let check = |built, driver| check_major(Path::new("/lib/libnccl.so.2"), built, driver);
        check((13, 4), (13, 0)).unwrap();
        check((12, 9), (13, 0)).unwrap();
        let refusal = check((13, 4), (12, 8)).unwrap_err().to_string();
        for part in ["/lib/libnccl.so.2", "CUDA 13.4", "CUDA 12.8", "CUDA 13.0 or newer"] {
            assert!(refusal.contains(part), "{refusal}");
        }
    }
}
