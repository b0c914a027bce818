//! The plans of an operation's shapes.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;

use devcomm_host::Result;

use crate::Explanation;
use crate::extents::Extents;

/// Values by their keys: those that are kept, and at most [`LIMIT`] others.
pub(crate) struct Cache<K, V> {
    /// Each with whether it is kept.
    values: HashMap<K, (V, bool)>,
    others: usize,
}

/// A program whose shapes change with every step, such as the rows of a batch, has no more.
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

    /// Adds a value, which is forgotten if there are too many.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.others >= LIMIT {
            self.values.retain(|_, (_, is_kept)| *is_kept);
            self.others = 0;
        }
        self.others += 1;
        self.values.insert(key, (value, false));
    }

    /// Adds a value that is kept.
    pub(crate) fn keep(&mut self, key: K, value: V) {
        self.values.insert(key, (value, true));
    }

    fn clear(&mut self) {
        self.values.clear();
        self.others = 0;
    }
}

/// The plan that was set for all shapes, those that were measured, and what follows for each shape.
pub(crate) struct Decisions<P> {
    set: Cell<Option<P>>,
    measured: RefCell<HashMap<Extents, P>>,
    decided: RefCell<Cache<Extents, Explanation<P>>>,
    /// Some of the last decisions, each at the place of its shape: most launches are of a few
    /// shapes, in turn, and find theirs without a hash.
    recent: [Recent<P>; RECENT],
}

const RECENT: usize = 16;

/// A shape and its decision.
type Recent<P> = Cell<Option<(Extents, Explanation<P>)>>;

/// The place of a shape.
fn place(extents: Extents) -> usize {
    let [m, n, k] = extents.array();
    (m ^ n.rotate_right(5) ^ k.rotate_right(3)) as usize % RECENT
}

impl<P> Default for Decisions<P> {
    fn default() -> Self {
        Self {
            set: Cell::new(None),
            measured: RefCell::default(),
            decided: RefCell::default(),
            recent: [const { Cell::new(None) }; RECENT],
        }
    }
}

impl<P: Copy> Decisions<P> {
    /// The decision for a shape. `decide` makes it from the plans that a user chose, the first
    /// choice first, with the reasons, and from that which this machine has measured before.
    pub(crate) fn of(
        &self,
        extents: Extents,
        tuned: impl FnOnce() -> Option<P>,
        decide: impl FnOnce(&[Option<Explanation<P>>]) -> Explanation<P>,
    ) -> Explanation<P> {
        let recent = &self.recent[place(extents)];
        if let Some((_, decision)) = recent.get().filter(|(known, _)| *known == extents) {
            return decision;
        }
        let known = self.decided.borrow().get(&extents);
        let decision = known.unwrap_or_else(|| {
            let measured = self.measured.borrow().get(&extents).copied();
            let set = self.set.get().map(|plan| Explanation { plan, reason: "as it was set" });
            let measured = measured.map(|plan| Explanation { plan, reason: "as it was measured" });
            let tuned =
                tuned().map(|plan| Explanation { plan, reason: "as this machine measured" });
            let decision = decide(&[set, measured, tuned]);
            self.decided.borrow_mut().insert(extents, decision);
            decision
        });
        recent.set(Some((extents, decision)));
        decision
    }

    /// Whether a plan was set or measured for a shape.
    pub(crate) fn has_choice(&self, extents: Extents) -> bool {
        self.set.get().is_some() || self.measured.borrow().contains_key(&extents)
    }

    /// Sets a plan for all shapes, or none.
    pub(crate) fn set(&self, plan: Option<P>) {
        self.set.set(plan);
        self.forget();
    }

    /// Forgets what was decided. What was prepared decides too, and ranks ask when they like: one
    /// may have a decision that the others make only now.
    fn forget(&self) {
        self.decided.borrow_mut().clear();
        self.recent.iter().for_each(|recent| recent.set(None));
    }

    /// Keeps what `measure` finds for a shape. It sets plans as it likes: none is set or measured
    /// when it begins, and the one that was set is so again when it has ended. An error leaves all
    /// as it was: other ranks may ask for another shape, and keep the plan of this one.
    pub(crate) fn find(
        &self,
        extents: Option<Extents>,
        measure: impl FnOnce() -> Result<P>,
    ) -> Result<P> {
        let set = self.set.take();
        let before = extents.and_then(|extents| self.measured.borrow_mut().remove(&extents));
        self.forget();
        let found = measure();
        self.set(set);
        let kept = extents.zip(found.as_ref().ok().copied().or(before));
        self.measured.borrow_mut().extend(kept);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::refuse;

    fn plans(decisions: &Decisions<char>, extents: Extents) -> Vec<char> {
        let mut plans = Vec::new();
        decisions.of(
            extents,
            || Some('t'),
            |chosen| {
                plans = chosen.iter().flatten().map(|chosen| chosen.plan).collect();
                Explanation { plan: '?', reason: "" }
            },
        );
        decisions.forget();
        plans
    }

    #[test]
    fn a_plan_that_was_set_comes_first_and_is_kept_by_a_measurement() {
        let decisions = Decisions::default();
        let [shape, other] = [[1, 2, 3], [1, 2, 4]].map(|shape| Extents::new(shape).unwrap());
        decisions.set(Some('a'));
        let measure = || {
            assert_eq!(plans(&decisions, shape), ['t']);
            decisions.set(Some('x'));
            Ok('b')
        };
        assert_eq!(decisions.find(Some(shape), measure).unwrap(), 'b');
        assert_eq!(plans(&decisions, shape), ['a', 'b', 't']);
        assert_eq!(plans(&decisions, other), ['a', 't']);
        let failed = decisions.find(Some(shape), || refuse("no GPU".to_owned()));
        assert!(failed.is_err());
        assert_eq!(plans(&decisions, shape), ['a', 'b', 't']);
    }

    #[test]
    fn a_decision_is_made_once_until_another_plan_is_set() {
        let (decisions, made) = (Decisions::default(), Cell::new(0));
        let ask = |m| {
            let extents = Extents::new([m, 8, 8]).unwrap();
            let decide = |_: &[_]| {
                made.set(made.get() + 1);
                Explanation { plan: m, reason: "" }
            };
            assert_eq!(decisions.of(extents, || None, decide).plan, m);
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
        cache.keep(0, 'a');
        (1..=3 * LIMIT).for_each(|key| cache.insert(key, 'b'));
        assert!(cache.values.len() <= LIMIT + 1);
        assert_eq!((cache.get(&0), cache.get(&(3 * LIMIT))), (Some('a'), Some('b')));
    }
}
