//! The decision for a plan, for each shape of an operation.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;
use std::str::FromStr;

use crate::prelude::*;
use crate::tuned::Tuned;

/// Values by their keys: permanent ones, and at most [`LIMIT`] others.
pub(crate) struct Cache<K, V> {
    pub(crate) permanent: HashMap<K, V>,
    others: HashMap<K, V>,
}

/// The most values that are not permanent, for programs whose shapes change with every step.
const LIMIT: usize = 4096;

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self { permanent: HashMap::new(), others: HashMap::new() }
    }
}

impl<K: Eq + Hash, V: Copy> Cache<K, V> {
    pub(crate) fn get(&self, key: &K) -> Option<V> {
        self.permanent.get(key).or_else(|| self.others.get(key)).copied()
    }

    /// Adds a value that is not permanent, and removes the others if there are too many.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.others.len() >= LIMIT {
            self.others.clear();
        }
        self.others.insert(key, value);
    }
}

/// The plans that were chosen for an operation, and what was decided for each shape.
pub(crate) struct Decisions<P> {
    /// The plan that was set for all shapes.
    set: Cell<Option<P>>,
    /// The plans that this object has measured.
    measured: RefCell<HashMap<Extents, P>>,
    /// The plans that this machine measured before.
    pub(crate) tuned: Tuned<P>,
    decided: RefCell<Cache<Extents, Explanation<P>>>,
}

impl<P: Copy + FromStr + Display> Decisions<P> {
    pub(crate) fn new(tuned: Tuned<P>) -> Self {
        let (measured, decided) = (RefCell::default(), RefCell::default());
        Self { set: Cell::new(None), measured, tuned, decided }
    }

    /// Returns the decision for a shape: the first of the plans that were chosen for which `can`
    /// is true, or the result of `choose`.
    pub(crate) fn decide(
        &self,
        extents: Extents,
        can: impl Fn(P) -> bool,
        choose: impl FnOnce() -> Explanation<P>,
    ) -> Explanation<P> {
        let known = self.decided.borrow().get(&extents);
        known.unwrap_or_else(|| {
            let decision = self.chosen(extents).find(|how| can(how.plan)).unwrap_or_else(choose);
            self.decided.borrow_mut().insert(extents, decision);
            decision
        })
    }

    /// Returns the plans that were chosen for a shape, and why, in their order.
    pub(crate) fn chosen(&self, extents: Extents) -> impl Iterator<Item = Explanation<P>> {
        let chosen = [
            (self.set.get(), "as it was set"),
            (self.measured.borrow().get(&extents).copied(), "as it was measured"),
            (self.tuned.plan(extents), "as this machine measured"),
        ];
        chosen.into_iter().filter_map(|(plan, reason)| Some(Explanation { plan: plan?, reason }))
    }

    /// Sets a plan for all shapes, or none, and forgets all decisions, which depend on the plans
    /// that were prepared when each rank asked for them.
    pub(crate) fn set(&self, plan: Option<P>) {
        self.set.set(plan);
        self.decided.take();
    }

    /// Makes the result of `find_fastest` the measured plan of a shape, which is `None` if it is
    /// not valid. `find_fastest` may set plans: when it begins, none is set, or measured for the
    /// shape; then the plan that was set before is set again. An error leaves the measured plan as
    /// it was.
    pub(crate) fn measure(
        &self,
        extents: Option<Extents>,
        find_fastest: impl FnOnce() -> Result<P>,
    ) -> Result<P> {
        let set = self.set.get();
        let before = extents.and_then(|extents| self.measured.borrow_mut().remove(&extents));
        self.set(None);
        let fastest = find_fastest();
        self.set(set);
        let entry = extents.zip(fastest.as_ref().ok().copied().or(before));
        self.measured.borrow_mut().extend(entry);
        if let (Ok(plan), Some(extents)) = (&fastest, extents) {
            self.tuned.save(extents, *plan);
        }
        fastest
    }
}

#[cfg(test)]
mod tests;
