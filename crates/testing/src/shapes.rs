//! Random sizes, grids and blocks for tests.

use std::ops::{Deref, DerefMut};

/// A random number generator that gives every rank the same numbers.
#[derive(Clone, Debug)]
pub struct Shapes(fastrand::Rng);

impl Shapes {
    /// Returns a generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Returns a uniformly distributed number in `1..=most`.
    pub fn up_to(&mut self, most: usize) -> usize {
        self.usize(1..=most)
    }

    /// Returns a number in `1..=most`, about uniform in its logarithm: small and large sizes are
    /// equally likely.
    pub fn size(&mut self, most: usize) -> usize {
        let bits = self.up_to(most.ilog2() as usize + 1);
        self.up_to(most.min(1 << bits))
    }
}

impl Deref for Shapes {
    type Target = fastrand::Rng;

    fn deref(&self) -> &fastrand::Rng {
        &self.0
    }
}

impl DerefMut for Shapes {
    fn deref_mut(&mut self) -> &mut fastrand::Rng {
        &mut self.0
    }
}
