//! Schedules: the rules by which a machine chooses what runs next.

use std::fmt;

/// The order in which a simulated machine runs its threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// A fixed order or, with a seed, a random one.
    #[default]
    Fair,
    /// Random priorities of warps, of which `depth - 1` change among the first `steps` steps.
    Pct { depth: u32, steps: u64 },
    /// A random order, but some threads run only when nothing else can.
    Lag(Lag),
    /// A list of choices: an index among the threads that can run, for each choice. After the
    /// list's end, each choice is the first.
    Choices(Vec<u32>),
}

impl Schedule {
    /// Returns whether the schedule chooses each step of a thread, rather than turns of blocks.
    pub(crate) fn is_by_step(&self) -> bool {
        matches!(self, Self::Pct { .. } | Self::Choices(_))
    }
}

/// The part of the machine that lags far behind in an unfair schedule. See
/// [`Simulation::lag`](crate::Simulation::lag).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lag {
    /// One thread of each grid of one rank.
    Thread,
    /// One warp of each grid of one rank.
    Warp,
    /// One block of each grid of one rank.
    Block,
    /// One rank: its kernels, and its thread on the host.
    Rank,
}

impl Lag {
    /// All variants.
    pub const ALL: [Self; 4] = [Self::Thread, Self::Warp, Self::Block, Self::Rank];

    fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Warp => "warp",
            Self::Block => "block",
            Self::Rank => "rank",
        }
    }

    /// Returns the variant with this name.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|lag| lag.name() == name)
    }
}

impl fmt::Display for Lag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A choice of a run between two or more threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The index of the alternative that was taken.
    pub taken: u32,
    /// The number of alternatives.
    pub of: u32,
}
