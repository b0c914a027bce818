//! The compiled kernels of a program.

use super::sidecar::Sidecar;
use crate::error::{LaunchError, Result};

/// One compiled module: its file's stem, its PTX, its description in JSON.
pub type ModuleSource = (&'static str, &'static str, &'static str);

/// The compiled kernels of a program, which the kernel build writes and the binary includes.
///
/// ```
/// use devcomm_host::KernelSet;
/// // A program has `KernelSet::new(include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs")))`.
/// const KERNELS: KernelSet = KernelSet::new((&[], Some("built with DEVCOMM_BUILD_SKIP=1")));
/// assert!(KERNELS.unavailable.is_some());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct KernelSet {
    /// The modules.
    pub modules: &'static [ModuleSource],
    /// Why the kernels were not built, and what to do; `None` when they were.
    pub unavailable: Option<&'static str>,
}

impl KernelSet {
    /// From the generated file of the kernel build, as in the example.
    #[must_use]
    pub const fn new(index: (&'static [ModuleSource], Option<&'static str>)) -> Self {
        Self { modules: index.0, unavailable: index.1 }
    }

    /// Reads every module's description.
    pub(super) fn describe(&self) -> Result<Vec<(&'static str, &'static str, Sidecar)>> {
        if let Some(reason) = self.unavailable {
            return Err(LaunchError::KernelsUnavailable { reason: reason.to_owned() }.into());
        }
        let sidecar = |&(file, ptx, json)| Ok((file, ptx, Sidecar::parse(file, json)?));
        self.modules.iter().map(sidecar).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_program_without_kernels_says_why() {
        let set = KernelSet::new((&[], Some("no rust-src; run rustup component add rust-src")));
        let error = set.describe().unwrap_err();
        assert!(matches!(error, Error::Launch(LaunchError::KernelsUnavailable { .. })));
        assert!(error.to_string().contains("rustup component add rust-src"), "{error}");
    }
}
