//! The compiled kernels of a program.

use super::embedded::Embedded;
use crate::error::{LaunchError, Result};

/// A set without kernels, for a program that compiles its kernels to PTX only with the feature
/// `ptx`, and was built without it. Simulated GPUs run kernels without PTX; loading this set on a
/// GPU is [`LaunchError::KernelsUnavailable`].
pub const WITHOUT_PTX: KernelSet = KernelSet {
    modules: &[],
    only: None,
    unavailable: Some(
        "the program was built without PTX: build it with `--features ptx` to run on GPUs",
    ),
};

/// One compiled module: its file's stem, its PTX (zlib), its description in JSON, and its cubin
/// (zlib), if the build found `ptxas`.
pub type ModuleSource = (&'static str, &'static [u8], &'static str, Option<&'static [u8]>);

/// The compiled kernels of a program, which the kernel build writes and the binary includes.
///
/// `devcomm::include_kernels!()` is the set of a program, and [`WITHOUT_PTX`] one for simulated
/// GPUs.
#[derive(Clone, Copy, Debug)]
pub struct KernelSet {
    /// The modules: machine code that launches of kernels trust.
    pub(super) modules: &'static [ModuleSource],
    /// The modules' files, if not all of them are loaded.
    pub(super) only: Option<&'static [&'static str]>,
    /// Why the kernels were not built, and what to do; `None` when they were.
    pub unavailable: Option<&'static str>,
}

impl KernelSet {
    /// Makes the set from the generated file of the kernel build: `devcomm::include_kernels!()`
    /// calls it.
    ///
    /// # Safety
    ///
    /// The modules were compiled from the kernels whose package, file and name they have.
    #[must_use]
    pub const unsafe fn new(index: (&'static [ModuleSource], Option<&'static str>)) -> Self {
        Self { modules: index.0, only: None, unavailable: index.1 }
    }

    /// Returns the kernels of these source files alone, which
    /// [`Kernel::FILE`](devcomm_types::Kernel::FILE) names: loading them takes less time and
    /// memory.
    #[must_use]
    pub const fn only(self, files: &'static [&'static str]) -> Self {
        Self { only: Some(files), ..self }
    }

    pub(super) fn is_without_ptx(&self) -> bool {
        self.unavailable == WITHOUT_PTX.unavailable
    }

    /// Reads every module's description.
    pub(super) fn describe(&self) -> Result<Vec<Embedded>> {
        if let Some(reason) = self.unavailable {
            return Err(LaunchError::KernelsUnavailable { reason: reason.to_owned() }.into());
        }
        let is_wanted =
            |module: &&ModuleSource| self.only.is_none_or(|files| files.contains(&module.0));
        self.modules.iter().filter(is_wanted).map(Embedded::parse).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_part_of_a_set_has_only_the_modules_of_its_files() {
        const JSON: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","kernels":[]}"#;
        const MODULES: &[ModuleSource] = &[("sum", &[], JSON, None), ("fill", &[], JSON, None)];
        let set = KernelSet { modules: MODULES, only: None, unavailable: None };
        let files = |set: KernelSet| -> Vec<_> {
            set.describe().unwrap().into_iter().map(|module| module.file).collect()
        };
        assert_eq!(files(set), ["sum", "fill"]);
        assert_eq!(files(set.only(&["fill", "gone"])), ["fill"]);
    }

    #[test]
    fn a_program_without_kernels_says_why() {
        let why = "no rust-src; run rustup component add rust-src";
        let set = KernelSet { unavailable: Some(why), ..WITHOUT_PTX };
        let error = set.describe().err().unwrap();
        assert!(matches!(error, Error::Launch(LaunchError::KernelsUnavailable { .. })));
        assert!(error.to_string().contains("rustup component add rust-src"), "{error}");
    }
}
