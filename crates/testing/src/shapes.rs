//! Random sizes, grids and blocks.

use std::ops::{Deref, DerefMut};

/// Random numbers, equal on every rank.
#[derive(Clone, Debug)]
pub struct Shapes(fastrand::Rng);

impl Shapes {
    /// Random numbers from a seed.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// One of `1..=most`, uniformly.
    pub fn up_to(&mut self, most: usize) -> usize {
        self.usize(1..=most)
    }

    /// One of `1..=most`, uniform in the order of magnitude: small and odd ones as well as large
    /// ones.
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
