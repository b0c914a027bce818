//! Copies that land late: with [`weak`](crate::Simulation::weak), what TMA, bulk copies, `cp.async`
//! and messages to other blocks of a cluster write may be in memory only once a thread has waited
//! for it.
//!
//! Such a copy writes to a place beside memory, from where the wait moves it. Its source is read at
//! once, and accesses are checked for races where the copy is started.

use std::cell::{Cell, RefCell};

use cuda_std::arch::{Access, Engine, Event};
use litemap::LiteMap;

use crate::memory::Memory;
use crate::thread::Thread;

/// What a write that is under way waits for: an `mbarrier` by its address, or the end of a thread's
/// groups of a kind.
type Awaited = (usize, Kind);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Barrier,
    Bulk,
    CpAsync,
}

/// A write of up to 16 bytes.
struct Late {
    address: usize,
    bytes: usize,
    value: Cell<u128>,
}

/// The writes that are under way.
#[expect(clippy::vec_box, reason = "threads write to their addresses")]
#[derive(Default)]
pub(crate) struct LateWrites(RefCell<LiteMap<Awaited, Vec<Box<Late>>>>);

impl LateWrites {
    /// The writes have landed. Memory that has been freed keeps its content.
    fn land(&self, memory: &Memory, gpu: u32, awaited: Awaited) {
        let Some(writes) = self.0.borrow_mut().remove(&awaited) else { return };
        for Late { address, bytes, value } in writes.into_iter().map(|write| *write) {
            let is_shared = awaited.1 != Kind::Bulk;
            if is_shared || memory.contains(gpu, address, bytes) {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(address);
                // SAFETY: the access was checked when the copy was started. Shared memory lives as
                // long as its block, in which the waiting thread runs, and global memory was
                // checked again.
                unsafe { to.copy_from_nonoverlapping(value.as_ptr().cast(), bytes) };
            }
        }
    }

    pub(crate) fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

impl Thread {
    /// Where the thread's asynchronous write goes if it lands late.
    pub(crate) fn late(&self, address: usize, bytes: usize, access: Access) -> Option<usize> {
        let gpus = self.gpus();
        let is_weak = gpus.settings.weak && gpus.random();
        if !is_weak || access != Access::Write {
            return None;
        }
        let awaited = match self.race.borrow().engine() {
            Engine::Thread | Engine::Wgmma => return None,
            Engine::Load(barrier) | Engine::Send(barrier) => (barrier, Kind::Barrier),
            Engine::Bulk => (self.number(), Kind::Bulk),
            Engine::CpAsync => (self.number(), Kind::CpAsync),
        };
        if gpus.chosen(2) == 0 {
            return None;
        }
        let late = Box::new(Late { address, bytes, value: Cell::new(0) });
        let place = late.value.as_ptr().expose_provenance();
        let mut writes = gpus.late.0.borrow_mut();
        writes.entry(awaited).or_default().push(late);
        Some(place)
    }

    /// What the event ends has landed.
    pub(crate) fn land_late(&self, event: &Event) {
        let awaited = match *event {
            Event::BarrierInit(barrier) => {
                // Of a block that had this memory before.
                self.gpus().late.0.borrow_mut().remove(&(barrier, Kind::Barrier));
                return;
            }
            Event::BarrierWaited(barrier) => (barrier, Kind::Barrier),
            Event::Wait { engine: Engine::Bulk, reads_only: false, .. } => {
                (self.number(), Kind::Bulk)
            }
            Event::Wait { engine: Engine::CpAsync, .. } => (self.number(), Kind::CpAsync),
            _ => return,
        };
        self.gpus().late.land(&self.gpus().memory, self.block().gpu as u32, awaited);
    }

    /// The thread has ended: its bulk copies land.
    pub(crate) fn land_all_late(&self) {
        let late = &self.gpus().late;
        late.land(&self.gpus().memory, self.block().gpu as u32, (self.number(), Kind::Bulk));
        late.0.borrow_mut().remove(&(self.number(), Kind::CpAsync));
    }

    /// A number that no other running thread has.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}
