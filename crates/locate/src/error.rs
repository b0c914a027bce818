//! The crate's error.

use std::fmt;

/// A place that the search tried, and why it was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The place: a path, or the variable or program that would have named one.
    pub place: String,
    /// Why it was rejected.
    pub reason: String,
}

/// The error if nothing suitable was found. The message says what was searched for, lists every
/// place tried with the reason for its rejection, and advises what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} was not found; places tried, in order:{}\nwhat to do: {advice}",
    AttemptList(tried)
)]
pub struct NotFound {
    what: String,
    tried: Vec<Attempt>,
    advice: String,
}

impl NotFound {
    pub(crate) fn new(what: &str, tried: Vec<Attempt>, advice: &str) -> Self {
        Self { what: what.to_owned(), tried, advice: advice.to_owned() }
    }

    /// Returns what was searched for.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Returns every place tried, in the order of the search.
    #[must_use]
    pub fn tried(&self) -> &[Attempt] {
        &self.tried
    }

    /// Returns what the user can do.
    #[must_use]
    pub fn advice(&self) -> &str {
        &self.advice
    }
}

struct AttemptList<'a>(&'a [Attempt]);

impl fmt::Display for AttemptList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|tried| write!(f, "\n  - {}: {}", tried.place, tried.reason))
    }
}
