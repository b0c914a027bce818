//! Tests of old values.

use std::panic::Location;
use std::rc::Rc;

use cuda_std::arch::{Access, Order, Scope, Space};

use crate::base::owner::Owner;
use crate::memory::{Allocation, GpuSet, Memory};
use crate::race::{Races, ThreadClock};

#[test]
fn memory_that_is_freed_has_no_old_values() {
    let memory = Rc::new(Memory::new(Races::new(true, true, 0)));
    let words = Allocation::single(&memory, GpuSet::all(), 8, Owner::Buffer { id: 0, rank: 0 });
    let words = words.unwrap();
    let (place, at) = ((words.part(0).addr(), 8, Space::Global), Location::caller());
    let store = Access::AtomicWrite(Order::Relaxed, Scope::Sys);
    let mut thread = ThreadClock::default();
    let stored = memory.races.access(memory.as_ref(), &mut thread, place, store, at, &|_| 0);
    assert!(stored.is_ok() && memory.races.old.words.borrow().len() == 2);
    drop(words);
    assert!(memory.races.old.words.borrow().is_empty());
}
