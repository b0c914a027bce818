//! Selects the variants of a comparison.

use std::fmt;

use anyhow::{Result, ensure};

use crate::contenders::contender::Variant;
use crate::contenders::contest::VariantInfo;

/// The variants of a run, and the omitted ones.
#[derive(Clone, Debug)]
pub struct Selection {
    wanted: Vec<VariantInfo>,
    /// Whether the variants were named on the command line.
    named: bool,
    omitted: Vec<(Variant, String)>,
}

impl Selection {
    /// Returns the named variants, else all of the benchmark's.
    pub fn new(named: &[Variant], infos: &[VariantInfo], benchmark: &str) -> Result<Self> {
        for variant in named {
            let names: Vec<&str> = infos.iter().map(|info| info.variant.name()).collect();
            ensure!(
                names.contains(&variant.name()),
                "{benchmark} has no variant `{variant}`; it has: {}",
                names.join(", ")
            );
        }
        let wants = |info: &&VariantInfo| named.is_empty() || named.contains(&info.variant);
        let wanted = infos.iter().filter(wants).copied().collect();
        Ok(Self { wanted, named: !named.is_empty(), omitted: Vec::new() })
    }

    /// Returns whether a variant is selected.
    pub fn has(&self, variant: Variant) -> bool {
        self.wanted.iter().any(|wanted| wanted.variant == variant)
    }

    /// Returns the result of `make`, if the variant is selected.
    pub fn make<T>(&self, variant: Variant, make: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.has(variant).then(make).transpose()
    }

    /// Omits a variant that cannot run here; an error if it was named.
    pub fn omit(&mut self, variant: Variant, why: impl fmt::Display) -> Result<()> {
        if self.has(variant) {
            ensure!(!self.named, "{variant} cannot run: {why}");
            self.wanted.retain(|wanted| wanted.variant != variant);
            self.omitted.push((variant, why.to_string()));
            ensure!(!self.wanted.is_empty(), "no variant can run: {}", self.reasons());
        }
        Ok(())
    }

    fn reasons(&self) -> String {
        let reasons = self.omitted.iter().map(|(variant, why)| format!("{variant}: {why}"));
        reasons.collect::<Vec<_>>().join("; ")
    }
}

/// A comment line per variant: its description, or why it was omitted.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for VariantInfo { variant, what, .. } in &self.wanted {
            writeln!(f, "# {variant}: {what}")?;
        }
        self.omitted
            .iter()
            .try_for_each(|(variant, why)| writeln!(f, "# left out: {variant}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Variant::{Cpp, Nccl, NcclSym, Rust, RustLsa};

    fn all() -> [VariantInfo; 4] {
        [(Rust, "r"), (Cpp, "c"), (Nccl, "n"), (NcclSym, "s")]
            .map(|(variant, what)| VariantInfo::column(variant, what))
    }

    #[test]
    fn a_variant_that_cannot_run_is_left_out_with_its_reason() {
        let mut selection = Selection::new(&[], &all(), "all-reduce").unwrap();
        selection.omit(Cpp, "not compiled").unwrap();
        assert!(selection.has(Rust) && !selection.has(Cpp));
        let text = "# rust: r\n# nccl: n\n# nccl-sym: s\n# left out: cpp: not compiled\n";
        assert_eq!(selection.to_string(), text);
        for (variant, why) in [(Rust, "a"), (Nccl, "b")] {
            selection.omit(variant, why).unwrap();
        }
        let error = selection.omit(NcclSym, "c").unwrap_err().to_string();
        assert_eq!(error, "no variant can run: cpp: not compiled; rust: a; nccl: b; nccl-sym: c");
    }

    #[test]
    fn a_variant_that_was_asked_for_is_not_left_out() {
        let mut selection = Selection::new(&[Nccl, Rust], &all(), "all-reduce").unwrap();
        selection.omit(Cpp, "not compiled").unwrap();
        assert_eq!(selection.to_string(), "# rust: r\n# nccl: n\n");
        let error = selection.omit(Nccl, "no NCCL").unwrap_err().to_string();
        assert_eq!(error, "nccl cannot run: no NCCL");
    }

    #[test]
    fn a_benchmark_names_the_variants_that_it_has() {
        let error = Selection::new(&[RustLsa], &all(), "all-reduce").unwrap_err().to_string();
        assert!(
            error.contains("no variant `rust-lsa`; it has: rust, cpp, nccl, nccl-sym"),
            "{error}"
        );
    }
}
