//! The compiled kernels of a program.

use super::embedded::Embedded;
use crate::error::{LaunchError, Result};

/// A set without kernels, for a program that compiles its kernels to PTX only with the feature
/// `ptx`, and was built without it. Simulated GPUs run kernels without PTX; loading this set on a
/// GPU is [`LaunchError::KernelsUnavailable`].
pub const WITHOUT_PTX: KernelSet = KernelSet::new((
    &[],
    Some("the program was built without PTX: build it with `--features ptx` to run on GPUs"),
));

/// One compiled module: its file's stem, its PTX (zlib), its description in JSON, and its cubin
/// (zlib), if the build found `ptxas`.
pub type ModuleSource = (&'static str, &'static [u8], &'static str, Option<&'static [u8]>);

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

    pub(super) fn is_without_ptx(&self) -> bool {
        self.unavailable == WITHOUT_PTX.unavailable
    }

    /// Reads every module's description.
    pub(super) fn describe(&self) -> Result<Vec<Embedded>> {
        if let Some(reason) = self.unavailable {
            return Err(LaunchError::KernelsUnavailable { reason: reason.to_owned() }.into());
        }
        self.modules.iter().map(Embedded::parse).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_program_without_kernels_says_why() {
        let set = KernelSet::new((&[], Some("no rust-src; run rustup component add rust-src")));
        let error = set.describe().err().unwrap();
        assert!(matches!(error, Error::Launch(LaunchError::KernelsUnavailable { .. })));
        assert!(error.to_string().contains("rustup component add rust-src"), "{error}");
    }
}
