//! Weak memory: atomic loads that see old values, where PTX's memory model allows it.
//!
//! Memory has the newest values. For the words that atomic stores have changed, the old values are
//! kept for a while. A load may see one of them unless a later value was stored before the load
//! by the order that [`Races`] knows, or an access before the load has seen a later value. So a
//! store is late for some threads and not for others. A load sees eight bytes of one age; the parts
//! of a longer one may have different ages.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::shadow::{NumberMap, Stamp, remove_range};
use super::sync::Release;
use super::{Accessor, Races};
use crate::base::owner::Registry;

/// The number of old values that are kept per word.
const KEPT: usize = 4;
/// The number of loads that may see an old value; later loads see a later value, since stores
/// arrive. Each line of a thread sees it once: a poll that saw it twice would only take longer.
const LOADS: usize = 64;
/// The number of accesses that have seen a later value, which an old value remembers. No load sees
/// an old value that could remember no more of them.
const SEEN: usize = 8;

/// A value that an atomic store has replaced.
struct OldValue {
    /// The number of the store; larger for later ones.
    store: u64,
    value: u32,
    /// The access that stored the value, and the releases that the value carries.
    writer: Stamp,
    releases: Rc<[Release]>,
    /// The store, and accesses that have seen its value or a later one.
    seen: Vec<Stamp>,
    /// Loads that have seen the old value.
    loads: Vec<Stamp>,
}

/// An old value that a load sees, the access that stored it, and the releases that it carries.
#[derive(Clone)]
pub(super) struct Seen {
    pub(super) value: u32,
    pub(super) writer: Stamp,
    pub(super) releases: Rc<[Release]>,
}

/// The old values of words, by canonical address.
#[derive(Default)]
pub(super) struct OldValues {
    words: RefCell<NumberMap<VecDeque<OldValue>>>,
    stores: RefCell<u64>,
}

impl OldValues {
    /// Forgets the old values of memory that is used anew.
    pub(super) fn forget(&self, range: Range<usize>) {
        remove_range(&mut self.words.borrow_mut(), range, 4);
    }
}

impl Races {
    /// Records that an atomic access replaces the words at `address`, which `writer` wrote; their
    /// values are kept.
    pub(super) fn keep_old(
        &self,
        memory: &dyn Registry,
        (address, bytes): (usize, usize),
        stamp: Stamp,
        writer: Stamp,
    ) {
        let mut stores = self.old.stores.borrow_mut();
        *stores += 1;
        let mut words = self.old.words.borrow_mut();
        for at in (address & !3..address + bytes).step_by(4) {
            let key = self.shadow.canonical(at, memory);
            let releases = self.words.borrow().get(&key).map(|word| word.releases.clone().into());
            let olds = words.entry(key).or_default();
            if olds.len() == KEPT {
                olds.pop_front();
            }
            // SAFETY: the access was checked: the aligned word around it is live memory.
            let value = unsafe { std::ptr::with_exposed_provenance::<u32>(at).read_volatile() };
            olds.push_back(OldValue {
                store: *stores,
                value,
                writer,
                releases: releases.unwrap_or_default(),
                seen: vec![stamp],
                loads: Vec::new(),
            });
        }
    }

    /// Removes the old values of words that a plain access writes.
    pub(super) fn forget_old(&self, memory: &dyn Registry, address: usize, bytes: usize) {
        let mut words = self.old.words.borrow_mut();
        if words.is_empty() {
            return;
        }
        for at in (address & !3..address + bytes).step_by(4) {
            words.remove(&self.shadow.canonical(at, memory));
        }
    }

    /// Returns the old values that an atomic load of the words at `address` sees, by the choices of
    /// `choose`: for each word `None` if it sees the newest.
    pub(super) fn see_old(
        &self,
        memory: &dyn Registry,
        (address, bytes): (usize, usize),
        stamp: Stamp,
        who: &Accessor<'_>,
        choose: &dyn Fn(usize) -> usize,
    ) -> [Option<Seen>; 4] {
        let mut seen = [const { None }; 4];
        let mut words = self.old.words.borrow_mut();
        let first = address & !3;
        let mut at = first;
        while at < address + bytes {
            let unit_end = ((at | 7) + 1).min(address + bytes);
            let keys: Vec<usize> =
                (at..unit_end).step_by(4).map(|at| self.shadow.canonical(at, memory)).collect();
            let is_late = |old: &OldValue| {
                let saw = |load: &Stamp| load.is_same_agent(stamp) && load.site() == stamp.site();
                old.seen.len() < SEEN
                    && old.loads.len() < LOADS
                    && !old.loads.iter().any(saw)
                    && old.seen.iter().all(|seen| !self.is_ordered(*seen, stamp, who))
            };
            // The stores that may be late: after the last one that is not.
            let mut stores = Vec::new();
            let mut arrived = 0;
            for old in keys.iter().filter_map(|key| words.get(key)).flatten() {
                if is_late(old) {
                    stores.push(old.store);
                } else {
                    arrived = arrived.max(old.store);
                }
            }
            stores.retain(|store| *store > arrived);
            stores.sort_unstable();
            stores.dedup();
            // All stores from this one on are late.
            let chosen = choose(stores.len() + 1);
            let late = chosen.checked_sub(1).map_or(u64::MAX, |index| stores[index]);
            for (i, key) in keys.iter().enumerate() {
                let Some(olds) = words.get_mut(key) else { continue };
                let value = olds.iter_mut().find(|old| old.store >= late).map(|old| {
                    old.loads.push(stamp);
                    let (writer, releases) = (old.writer, Rc::clone(&old.releases));
                    Seen { value: old.value, writer, releases }
                });
                seen[(at - first) / 4 + i] = value;
                // The load has seen the value of each store before.
                let before = |old: &&mut OldValue| old.store < late && old.seen.len() < SEEN;
                olds.iter_mut().filter(before).for_each(|old| old.seen.push(stamp));
            }
            at = unit_end;
        }
        seen
    }
}

#[cfg(test)]
mod tests;
