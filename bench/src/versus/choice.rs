//! Who takes part in a comparison.

use std::fmt;

use anyhow::{Result, ensure};

use crate::contender::Variant;

/// A variant, and what it does in a benchmark.
pub type Described = (Variant, &'static str);

/// The variants of a run, and those that had to be left out.
#[derive(Clone, Debug)]
pub struct Choice {
    wanted: Vec<Described>,
    /// Whether they were asked for by name.
    named: bool,
    left_out: Vec<(Variant, String)>,
}

impl Choice {
    /// What was asked for, or else all that the benchmark has.
    pub fn new(named: &[Variant], of_benchmark: &[Described], benchmark: &str) -> Result<Self> {
        for variant in named {
            let names: Vec<&str> = of_benchmark.iter().map(|(variant, _)| variant.name()).collect();
            ensure!(
                names.contains(&variant.name()),
                "{benchmark} has no variant `{variant}`; it has: {}",
                names.join(", ")
            );
        }
        let wants = |(variant, _): &&Described| named.is_empty() || named.contains(variant);
        let wanted = of_benchmark.iter().filter(wants).copied().collect();
        Ok(Self { wanted, named: !named.is_empty(), left_out: Vec::new() })
    }

    /// Whether a variant takes part.
    pub fn has(&self, variant: Variant) -> bool {
        self.wanted.iter().any(|(wanted, _)| *wanted == variant)
    }

    /// Goes on without a variant that cannot run here. One that was asked for by name is an error.
    pub fn leave_out(&mut self, variant: Variant, why: impl fmt::Display) -> Result<()> {
        if self.has(variant) {
            ensure!(!self.named, "{variant} cannot run: {why}");
            self.wanted.retain(|(wanted, _)| *wanted != variant);
            self.left_out.push((variant, why.to_string()));
            ensure!(!self.wanted.is_empty(), "no variant can run: {}", self.reasons());
        }
        Ok(())
    }

    fn reasons(&self) -> String {
        let reasons = self.left_out.iter().map(|(variant, why)| format!("{variant}: {why}"));
        reasons.collect::<Vec<_>>().join("; ")
    }
}

/// A line of comment for each variant: what it does, or why it was left out.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wanted.iter().try_for_each(|(variant, what)| writeln!(f, "# {variant}: {what}"))?;
        self.left_out
            .iter()
            .try_for_each(|(variant, why)| writeln!(f, "# left out: {variant}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Variant::{Cpp, Nccl, NcclSym, Rust, RustLsa};

    const ALL: [Described; 4] = [(Rust, "r"), (Cpp, "c"), (Nccl, "n"), (NcclSym, "s")];

    #[test]
    fn a_variant_that_cannot_run_is_left_out_with_its_reason() {
        let mut choice = Choice::new(&[], &ALL, "all-reduce").unwrap();
        choice.leave_out(Cpp, "not compiled").unwrap();
        assert!(choice.has(Rust) && !choice.has(Cpp));
        let text = "# rust: r\n# nccl: n\n# nccl-sym: s\n# left out: cpp: not compiled\n";
        assert_eq!(choice.to_string(), text);
        for (variant, why) in [(Rust, "a"), (Nccl, "b")] {
            choice.leave_out(variant, why).unwrap();
        }
        let error = choice.leave_out(NcclSym, "c").unwrap_err().to_string();
        assert_eq!(error, "no variant can run: cpp: not compiled; rust: a; nccl: b; nccl-sym: c");
    }

    #[test]
    fn a_variant_that_was_asked_for_is_not_left_out() {
        let mut choice = Choice::new(&[Nccl, Rust], &ALL, "all-reduce").unwrap();
        choice.leave_out(Cpp, "nobody wants it").unwrap();
        assert_eq!(choice.to_string(), "# rust: r\n# nccl: n\n");
        let error = choice.leave_out(Nccl, "no NCCL").unwrap_err().to_string();
        assert_eq!(error, "nccl cannot run: no NCCL");
    }

    #[test]
    fn a_benchmark_names_the_variants_that_it_has() {
        let error = Choice::new(&[RustLsa], &ALL, "all-reduce").unwrap_err().to_string();
        assert!(
            error.contains("no variant `rust-lsa`; it has: rust, cpp, nccl, nccl-sym"),
            "{error}"
        );
    }
}
