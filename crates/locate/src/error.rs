//! The one error of this crate.

use std::fmt;

/// A place that was searched, and why what is there will not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The place: a path, or the variable or program that would have named one.
    pub place: String,
    /// Why it was skipped.
    pub reason: String,
}

/// Nothing fitting was found. Its text names what was looked for, every place with its reason, and
/// what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} was not found; places tried, in order:{}\nwhat to do: {advice}", Listing(tried))]
pub struct NotFound {
    what: String,
    tried: Vec<Tried>,
    advice: String,
}

impl NotFound {
    pub(crate) fn new(what: &str, tried: Vec<Tried>, advice: &str) -> Self {
        Self { what: what.to_owned(), tried, advice: advice.to_owned() }
    }

    /// What was looked for.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Every place tried, in the order of the search.
    #[must_use]
    pub fn tried(&self) -> &[Tried] {
        &self.tried
    }

    /// What to do about it.
    #[must_use]
    pub fn advice(&self) -> &str {
        &self.advice
    }
}

struct Listing<'a>(&'a [Tried]);

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|tried| write!(f, "\n  - {}: {}", tried.place, tried.reason))
    }
}
