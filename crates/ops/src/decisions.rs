//! The decision for a plan, for each shape of an operation.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;
use std::str::FromStr;

use devcomm_host::Result;

use crate::Explanation;
use crate::extents::Extents;
use crate::tuned::Tuned;

/// Values by their keys: permanent ones, and at most [`LIMIT`] others.
pub(crate) struct Cache<K, V> {
    /// The values, each with whether it is permanent.
    values: HashMap<K, (V, bool)>,
    /// How many others were inserted since they were last removed.
    others: usize,
}

/// The most values that are not permanent. It bounds the memory of a program whose shapes change
/// with every step, such as the rows of a batch.
const LIMIT: usize = 4096;

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self { values: HashMap::new(), others: 0 }
    }
}

impl<K: Eq + Hash, V: Copy> Cache<K, V> {
    pub(crate) fn get(&self, key: &K) -> Option<V> {
        self.values.get(key).map(|(value, _)| *value)
    }

    /// Adds a value that is not permanent. If there are too many of these, it removes the others.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.others >= LIMIT {
            self.values.retain(|_, (_, is_permanent)| *is_permanent);
            self.others = 0;
        }
        self.others += 1;
        self.values.insert(key, (value, false));
    }

    /// Adds a permanent value.
    pub(crate) fn insert_permanent(&mut self, key: K, value: V) {
        self.values.insert(key, (value, true));
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The plans that were chosen for an operation, and what was decided for each shape.
pub(crate) struct Decisions<P> {
    /// The plan that was set for all shapes.
    set: Cell<Option<P>>,
    /// The plans that this object has measured.
    measured: RefCell<HashMap<Extents, P>>,
    /// The plans that this machine measured before.
    tuned: Tuned<P>,
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
            let chosen = [
                (self.set.get(), "as it was set"),
                (self.measured.borrow().get(&extents).copied(), "as it was measured"),
                (self.tuned.plan(extents), "as this machine measured"),
            ];
            let mut chosen = chosen
                .into_iter()
                .filter_map(|(plan, reason)| Some(Explanation { plan: plan?, reason }));
            let decision = chosen.find(|chosen| can(chosen.plan)).unwrap_or_else(choose);
            self.decided.borrow_mut().insert(extents, decision);
            decision
        })
    }

    /// Returns whether a plan was set or measured for a shape.
    pub(crate) fn has_choice(&self, extents: Extents) -> bool {
        let is_measured = || self.measured.borrow().contains_key(&extents);
        self.set.get().is_some() || is_measured() || self.tuned.plan(extents).is_some()
    }

    /// Sets a plan for all shapes, or none, and forgets all decisions. These depend on which plans
    /// were prepared, and ranks ask for them at different times, so old decisions could differ.
    pub(crate) fn set(&self, plan: Option<P>) {
        self.set.set(plan);
        self.decided.borrow_mut().clear();
    }

    /// Makes the result of `find_fastest` the measured plan of a shape. `find_fastest` may set
    /// plans: when it begins, none is set, or measured for the shape; when it has ended, the plan
    /// that was set before is set again. An error, such as for ranks with different shapes, leaves
    /// the measured plan as it was. `extents` is `None` in a rank whose shape is not valid.
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
mod tests {
    use super::*;
    use crate::check::refuse;

    /// Returns the plans that are considered for a shape, in their order.
    fn plans(decisions: &Decisions<char>, extents: Extents) -> Vec<char> {
        let plans = RefCell::new(Vec::new());
        let can = |plan| {
            plans.borrow_mut().push(plan);
            false
        };
        decisions.decide(extents, can, || Explanation { plan: '?', reason: "" });
        decisions.decided.borrow_mut().clear();
        plans.into_inner()
    }

    #[test]
    fn a_plan_that_was_set_comes_first_and_is_kept_by_a_measurement() {
        let decisions = Decisions::new(Tuned::without_file());
        let [shape, other] = [[1, 2, 3], [1, 2, 4]].map(|shape| Extents::new(shape).unwrap());
        [shape, other].into_iter().for_each(|shape| decisions.tuned.insert(shape, 't'));
        decisions.set(Some('a'));
        let measure = || {
            assert_eq!(plans(&decisions, shape), ['t']);
            decisions.set(Some('x'));
            Ok('b')
        };
        assert_eq!(decisions.measure(Some(shape), measure).unwrap(), 'b');
        assert_eq!(plans(&decisions, shape), ['a', 'b', 't']);
        assert_eq!(plans(&decisions, other), ['a', 't']);
        let failed = decisions.measure(Some(shape), || refuse("no GPU"));
        assert!(failed.is_err());
        assert_eq!(plans(&decisions, shape), ['a', 'b', 't']);
    }

    #[test]
    fn a_decision_is_made_once_until_another_plan_is_set() {
        let (decisions, made) = (Decisions::new(Tuned::without_file()), Cell::new(0));
        let ask = |m| {
            let extents = Extents::new([m, 8, 8]).unwrap();
            let choose = || {
                made.set(made.get() + 1);
                Explanation { plan: m, reason: "" }
            };
            assert_eq!(decisions.decide(extents, |_| true, choose).plan, m);
        };
        [1, 2, 1, 2, 2].into_iter().for_each(ask);
        assert_eq!(made.get(), 2);
        decisions.set(None);
        ask(1);
        assert_eq!(made.get(), 3);
    }

    #[test]
    fn there_are_not_more_decisions_than_memory_for_them() {
        let mut cache = Cache::default();
        cache.insert_permanent(0, 'a');
        (1..=3 * LIMIT).for_each(|key| cache.insert(key, 'b'));
        assert!(cache.values.len() <= LIMIT + 1);
        assert_eq!((cache.get(&0), cache.get(&(3 * LIMIT))), (Some('a'), Some('b')));
    }
}
