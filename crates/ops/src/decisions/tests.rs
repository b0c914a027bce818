//! Tests of decisions.

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
    decisions.decided.take();
    plans.into_inner()
}

#[test]
fn a_plan_that_was_set_comes_first_and_is_kept_by_a_measurement() {
    let decisions = Decisions::new(Tuned::in_folder(None, "gpu", "product", 1));
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
    let (decisions, made) =
        (Decisions::new(Tuned::in_folder(None, "gpu", "product", 1)), Cell::new(0));
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
    cache.permanent.insert(0, 'a');
    (1..=3 * LIMIT).for_each(|key| cache.insert(key, 'b'));
    assert!(cache.others.len() <= LIMIT);
    assert_eq!((cache.get(&0), cache.get(&(3 * LIMIT))), (Some('a'), Some('b')));
}
