//! The choices of a run: all come from one [`Chooser`], so a run is a function of its settings.

use fastrand::Rng;

use crate::base::error::{Error, Result};
use crate::base::schedule::{Choice, Schedule};
use crate::base::simulation::Simulation;

/// Makes the choices of a run.
pub(crate) enum Chooser {
    /// Chooses the first alternative.
    First,
    /// Chooses at random.
    Random(Rng),
    /// Follows a list where threads are chosen, and takes the first alternative elsewhere.
    List(List),
}

/// The planned choices, and the choices made.
#[derive(Default)]
pub(crate) struct List {
    planned: Vec<u32>,
    made: Vec<Choice>,
    /// The number of the first planned choice that was not possible.
    impossible: Option<usize>,
}

impl Chooser {
    pub(super) fn new(settings: &Simulation) -> Self {
        match (&settings.schedule, settings.random_seed()) {
            (Schedule::Choices(planned), _) => {
                Self::List(List { planned: planned.clone(), ..List::default() })
            }
            (_, Some(seed)) => Self::Random(Rng::with_seed(seed)),
            (_, None) => Self::First,
        }
    }

    /// Chooses an index below `n`, without a list: 0, or at random.
    #[inline]
    pub(crate) fn choose(&mut self, n: usize) -> usize {
        match self {
            Self::Random(rng) => rng.usize(..n),
            Self::First | Self::List(_) => 0,
        }
    }

    /// Chooses an index below `n`: by the list if there is one, else as [`choose`](Self::choose).
    pub(crate) fn branch(&mut self, n: usize) -> usize {
        match self {
            Self::List(list) if n > 1 => list.next(n),
            _ => self.choose(n),
        }
    }

    /// Returns the length of a turn, if the order is random: 1 to 64, often short, so that short
    /// kernels overlap too.
    pub(super) fn length(&mut self) -> Option<usize> {
        self.random().map(|rng| 1 << rng.usize(..7))
    }

    /// Returns the random generator, if the order is random.
    pub(super) fn random(&mut self) -> Option<&mut Rng> {
        match self {
            Self::Random(rng) => Some(rng),
            Self::First | Self::List(_) => None,
        }
    }

    /// Returns the choices made by a list so far.
    pub(super) fn made(&self) -> &[Choice] {
        match self {
            Self::List(list) => &list.made,
            Self::First | Self::Random(_) => &[],
        }
    }

    /// Fails if a planned choice was not possible.
    pub(super) fn check(&self) -> Result<()> {
        let Self::List(list) = self else { return Ok(()) };
        let Some(at) = list.impossible else { return Ok(()) };
        let (planned, of) = (list.planned[at], list.made[at].of);
        Err(Error::Settings(format!(
            "choice {at} is {planned}, but there are only {of} alternatives: the choices are of \
             another program or of other settings, or the program does not depend on its choices \
             alone"
        )))
    }
}

impl List {
    fn next(&mut self, n: usize) -> usize {
        let planned = self.planned.get(self.made.len()).map_or(0, |choice| *choice as usize);
        if planned >= n {
            self.impossible.get_or_insert(self.made.len());
        }
        let taken = if planned < n { planned } else { 0 };
        self.made.push(Choice { taken: taken as u32, of: n as u32 });
        taken
    }
}
