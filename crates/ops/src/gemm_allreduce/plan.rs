//! How a product and its all-reduce are done.

use std::fmt;
use std::str::FromStr;

/// How [`GemmAllReduce`](super::GemmAllReduce) does a product. As text: `strips`, `wide`,
/// `unfused`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmAllReducePlan {
    /// In one kernel, any number of ranks: strips of partial sums in f32 go to the rank that owns
    /// them, and the sums to all ranks. Each is rounded once.
    Strips,
    /// In one kernel, two Hopper GPUs, large matrices: every rank's product is rounded to bf16 and
    /// sent to the peer while the next tiles are multiplied. A sum is rounded again.
    Wide,
    /// By [`Gemm`](crate::Gemm), and then [`Collectives::all_reduce`](crate::Collectives).
    Unfused,
}

impl GemmAllReducePlan {
    const ALL: [(Self, &str); 3] =
        [(Self::Strips, "strips"), (Self::Wide, "wide"), (Self::Unfused, "unfused")];
}

impl fmt::Display for GemmAllReducePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(plan, _)| plan == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

/// The text is not a plan's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no plan: strips, wide or unfused")]
pub struct ParseGemmAllReducePlanError(String);

impl FromStr for GemmAllReducePlan {
    type Err = ParseGemmAllReducePlanError;

    fn from_str(text: &str) -> Result<Self, ParseGemmAllReducePlanError> {
        let plan = Self::ALL.iter().find(|(_, name)| *name == text);
        plan.map(|(plan, _)| *plan).ok_or_else(|| ParseGemmAllReducePlanError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read_as_they_are_written() {
        for (plan, name) in GemmAllReducePlan::ALL {
            assert_eq!((plan.to_string().as_str(), name.parse()), (name, Ok(plan)));
        }
        let error = "ring".parse::<GemmAllReducePlan>().unwrap_err().to_string();
        assert!(error.starts_with("`ring` is no plan"), "{error}");
    }
}
