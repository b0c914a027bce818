//! Asynchronous copies of kernels that are under way, with [`weak`](crate::Simulation::weak): TMA,
//! bulk copies, `cp.async` and messages to other blocks of a cluster.
//!
//! Each piece of such a copy reads its source at one time and lands (writes its target) later. The
//! seed determines both times: at the copy's start, or between turns of threads, at the latest in
//! the wait for the copy. So a source that is overwritten too early, or a target that is read too
//! early, has wrong data, in whole or in part. The start of a copy checks for races.

use std::cell::RefCell;
use std::collections::BTreeMap;

use cuda_std::arch::{Engine, Event, Piece, Source};

use crate::base::error::Site;
use crate::gpu::gpus::Gpus;
use crate::gpu::thread::Thread;
use crate::memory::Memory;

/// What a copy waits for: a phase of the `mbarrier` at an address, or a thread's groups.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Awaited {
    Barrier(usize),
    Bulk { thread: usize },
    CpAsync { thread: usize },
}

impl Awaited {
    fn of(engine: Engine, thread: usize) -> Option<Self> {
        match engine {
            Engine::Thread | Engine::Wgmma => None,
            Engine::Load(barrier) | Engine::Send(barrier) => Some(Self::Barrier(barrier)),
            Engine::Bulk => Some(Self::Bulk { thread }),
            Engine::CpAsync => Some(Self::CpAsync { thread }),
        }
    }

    /// Returns whether the copy is from shared to global memory; other copies are to shared memory.
    fn is_bulk(self) -> bool {
        matches!(self, Self::Bulk { .. })
    }
}

/// A piece that has not landed.
struct Pending {
    piece: Piece,
    gpu: u32,
    /// The value that lands, if the source has been read; else the source's value at the start.
    value: u128,
    is_read: bool,
    /// The number of the thread's commits since the start.
    commits: u32,
}

impl Pending {
    /// Reads the source, unless it has been freed.
    fn read(&mut self, memory: &Memory, awaited: Awaited) {
        let Source::Memory(from) = self.piece.from else { return };
        let from_global = !awaited.is_bulk();
        let reads = !std::mem::replace(&mut self.is_read, true);
        if reads && (!from_global || memory.contains(self.gpu, from, self.piece.bytes)) {
            // SAFETY: the access was checked when the copy was started. Global memory was checked
            // again, and shared memory is that of the block of a thread that has not ended.
            self.value = unsafe { self.piece.read() };
        }
    }

    /// Writes the bytes that were read to the target, unless it has been freed.
    fn land(&self, memory: &Memory, awaited: Awaited) {
        if !awaited.is_bulk() || memory.contains(self.gpu, self.piece.to, self.piece.bytes) {
            // SAFETY: as for the source. Shared memory is that of a block that has not ended:
            // `forget` removes the pieces for other blocks.
            unsafe { self.piece.land(self.value) };
        }
    }
}

/// The pieces that are under way.
#[derive(Default)]
pub(crate) struct Copies(RefCell<State>);

#[derive(Default)]
struct State {
    /// Pieces by what they wait for, in the order in which the first one of each was started: so a
    /// choice among them does not depend on addresses, which differ between runs.
    waiting: BTreeMap<u64, (Awaited, Vec<Pending>)>,
    /// The keys in `waiting`.
    numbers: BTreeMap<Awaited, u64>,
    last_number: u64,
}

impl State {
    fn add(&mut self, awaited: Awaited, kept: Pending) {
        let number = *self.numbers.entry(awaited).or_insert_with(|| {
            self.last_number += 1;
            self.last_number
        });
        self.waiting.entry(number).or_insert((awaited, Vec::new())).1.push(kept);
    }

    fn get(&mut self, awaited: Awaited) -> Option<&mut Vec<Pending>> {
        let number = self.numbers.get(&awaited)?;
        self.waiting.get_mut(number).map(|(_, kept)| kept)
    }

    /// Replaces each piece that waits for `awaited` by the result of `step`: `None` if it landed.
    fn advance(&mut self, awaited: Awaited, step: impl FnMut(Pending) -> Option<Pending>) {
        let Some(kept) = self.get(awaited) else { return };
        *kept = std::mem::take(kept).into_iter().filter_map(step).collect();
        if kept.is_empty() {
            let number = self.numbers.remove(&awaited);
            number.map(|number| self.waiting.remove(&number));
        }
    }
}

impl Copies {
    pub(crate) fn is_idle(&self) -> bool {
        self.0.borrow().waiting.is_empty()
    }

    pub(crate) fn clear(&self) {
        self.0.take();
    }

    /// Forgets the pieces that use shared memory which no longer exists.
    pub(crate) fn forget(&self, start: usize, bytes: usize) {
        let (gone, state) = (start..start + bytes, &mut *self.0.borrow_mut());
        state.waiting.retain(|_, (awaited, kept)| {
            kept.retain(|kept| !gone.contains(&kept.piece.to));
            !kept.is_empty() && !matches!(awaited, Awaited::Barrier(at) if gone.contains(at))
        });
        state.numbers.retain(|_, number| state.waiting.contains_key(number));
    }

    /// Lets each of some pieces that wait for the same thing read, land or neither, by `choose`.
    pub(crate) fn step(&self, memory: &Memory, mut choose: impl FnMut(usize) -> usize) {
        let mut state = self.0.borrow_mut();
        let Some((&first, _)) = state.waiting.first_key_value() else { return };
        let from = first + choose((state.last_number - first + 1) as usize) as u64;
        let chosen = state.waiting.range(from..).chain(&state.waiting).next();
        let Some((_, &(awaited, _))) = chosen else { return };
        state.advance(awaited, |mut kept| {
            match choose(3) {
                0 if kept.is_read => {
                    kept.land(memory, awaited);
                    return None;
                }
                1 => kept.read(memory, awaited),
                _ => {}
            }
            Some(kept)
        });
    }

    /// Ends a wait for `awaited`: all pieces are read, and land.
    fn end_all(&self, memory: &Memory, awaited: Awaited) {
        self.end(memory, awaited, 0, false);
    }

    /// Ends a wait for `awaited`: the pieces that at least `commits` commits follow are read, and
    /// land unless the wait is `reads_only`.
    fn end(&self, memory: &Memory, awaited: Awaited, commits: u32, reads_only: bool) {
        self.0.borrow_mut().advance(awaited, |mut kept| {
            if kept.commits >= commits {
                kept.read(memory, awaited);
                if !reads_only {
                    kept.land(memory, awaited);
                    return None;
                }
            }
            Some(kept)
        });
    }
}

impl Thread {
    /// Returns whether a piece of a copy is kept as pending; if not, the caller moves it at once.
    pub(crate) fn keeps_piece(&self, engine: Engine, piece: Piece, at: Site) -> bool {
        let gpus = self.gpus();
        // A removed copy moves scratch memory, which is valid only now.
        let is_weak = gpus.settings.weak && gpus.random() && !gpus.removes(self.state.line_of(at));
        let Some(awaited) = Awaited::of(engine, self.number()).filter(|_| is_weak) else {
            return false;
        };
        // Half of the pieces move at once, a quarter is read at once and lands later, and the rest
        // is read later too.
        let is_read = match gpus.chosen(4) {
            0 | 1 => return false,
            read => read == 2 || matches!(piece.from, Source::Value(_)),
        };
        // SAFETY: the simulator has checked the access to the source.
        let value = unsafe { piece.read() };
        let gpu = self.block().gpu as u32;
        let kept = Pending { piece, gpu, value, is_read, commits: 0 };
        gpus.copies.0.borrow_mut().add(awaited, kept);
        true
    }

    /// Ends the copies that the event waits for.
    pub(crate) fn end_copies(&self, event: &Event) {
        let Gpus { copies, memory, .. } = self.gpus();
        if copies.is_idle() {
            return;
        }
        match *event {
            Event::Commit(engine) => {
                let mut state = copies.0.borrow_mut();
                let awaited = Awaited::of(engine, self.number());
                let kept = awaited.and_then(|awaited| state.get(awaited));
                kept.into_iter().flatten().for_each(|kept| kept.commits += 1);
            }
            Event::BarrierWaited(barrier) => {
                copies.end_all(memory, Awaited::Barrier(barrier));
            }
            Event::Wait { engine, pending, reads_only } => {
                if let Some(awaited) = Awaited::of(engine, self.number()) {
                    copies.end(memory, awaited, pending.saturating_add(1), reads_only);
                }
            }
            _ => {}
        }
    }

    /// Ends all copies of a thread that has ended.
    pub(crate) fn end_all_copies(&self) {
        let Gpus { copies, memory, .. } = self.gpus();
        let thread = self.number();
        for awaited in [Awaited::Bulk { thread }, Awaited::CpAsync { thread }] {
            copies.end_all(memory, awaited);
        }
    }

    /// Returns a number that no other running thread has.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}
