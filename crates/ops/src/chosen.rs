//! The plans that a user of an operation chose.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use devcomm_host::Result;

/// The plan that was set for all shapes, and those that were measured.
pub(crate) struct Chosen<P> {
    set: Cell<Option<P>>,
    measured: RefCell<HashMap<[usize; 3], P>>,
}

impl<P> Default for Chosen<P> {
    fn default() -> Self {
        Self { set: Cell::new(None), measured: RefCell::default() }
    }
}

impl<P: Copy> Chosen<P> {
    /// Sets a plan for all shapes, or none.
    pub(crate) fn set(&self, plan: Option<P>) {
        self.set.set(plan);
    }

    /// The plans for a shape, the first choice first, and the reasons.
    pub(crate) fn of(&self, shape: [usize; 3]) -> impl Iterator<Item = (P, &'static str)> {
        let set = self.set.get().map(|plan| (plan, "as it was set"));
        let measured = self.measured.borrow().get(&shape).copied();
        set.into_iter().chain(measured.map(|plan| (plan, "as it was measured")))
    }

    /// Keeps what `measure` finds for a shape. It sets plans as it likes: none is set or measured
    /// when it begins, and the one that was set is so again when it has ended. An error leaves all
    /// as it was: other ranks may ask for another shape, and keep the plan of this one.
    pub(crate) fn find(&self, shape: [usize; 3], measure: impl FnOnce() -> Result<P>) -> Result<P> {
        let (set, before) = (self.set.take(), self.measured.borrow_mut().remove(&shape));
        let found = measure();
        self.set.set(set);
        let kept = found.as_ref().ok().copied().or(before);
        self.measured.borrow_mut().extend(kept.map(|plan| (shape, plan)));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::refuse;

    #[test]
    fn a_plan_that_was_set_comes_first_and_is_kept_by_a_measurement() {
        let (chosen, shape) = (Chosen::default(), [1, 2, 3]);
        let of = |shape| chosen.of(shape).map(|(plan, _)| plan).collect::<Vec<_>>();
        chosen.set(Some('a'));
        let measure = || {
            assert!(of(shape).is_empty());
            chosen.set(Some('x'));
            Ok('b')
        };
        assert_eq!(chosen.find(shape, measure).unwrap(), 'b');
        assert_eq!((of(shape), of([1, 2, 4])), (vec!['a', 'b'], vec!['a']));
        let failed = chosen.find(shape, || refuse("no GPU".to_owned()));
        assert!(failed.is_err());
        assert_eq!(of(shape), ['a', 'b']);
    }
}
