//! Builds the [`Stall`] report of what every thread waits for, at a deadlock or a limit.

use std::rc::Rc;

use devcomm_types::{WaitFor, WaitKind};
use litemap::LiteMap;

use super::Scheduler;
use crate::base::error::{Returned, Site, Stall, Waiter, Waiting};
use crate::base::timeline::{Row, Span, Timeline};
use crate::gpu::registers;
use crate::gpu::thread::{Block, Thread, Wait};
use crate::gpu::waits::NamedWait;

impl Scheduler {
    /// Returns what every thread waits for now.
    pub(crate) fn stall(&self) -> Box<Stall> {
        let mut blocks: Vec<&Rc<Block>> = self.blocks.iter().flatten().collect();
        blocks.sort_by_key(|block| (block.gpu, block.grid.id, block.index));
        let mut kernels: Vec<_> = blocks.iter().map(|block| block.grid.launch.kernel).collect();
        let (mut ended, mut pending) = (vec![0; self.gpus.len()], vec![0; self.gpus.len()]);
        for grid in self.grids.values() {
            ended[grid.launch.gpu] += grid.ended.get();
            pending[grid.launch.gpu] += grid.blocks - grid.next.get();
        }
        kernels.sort_unstable();
        kernels.dedup();
        Box::new(Stall {
            host: Vec::new(),
            kernel: kernels.join(", "),
            waiters: blocks.iter().flat_map(|block| block.waiters()).collect(),
            returned: blocks.iter().filter_map(|block| block.returned()).collect(),
            ended,
            pending,
        })
    }
}

/// Adds numbers to others, in order and without duplicates.
fn merge<T: Ord>(all: &mut Vec<T>, more: Vec<T>) {
    all.extend(more);
    all.sort_unstable();
    all.dedup();
}

impl Block {
    /// Returns what the block's threads wait for.
    fn waiters(&self) -> impl Iterator<Item = Waiter> + use<> {
        // Threads are grouped by message and location. Those that wait for peers or in a named wait
        // come first, since the others wait for them.
        let mut groups: LiteMap<(bool, String, String), Waiter> = LiteMap::new();
        let waiting = |thread: &Thread| Some((thread.tid.get(), thread.waiting()?));
        for (tid, (what, at)) in self.threads().filter_map(waiting) {
            let location = at.map_or_else(String::new, |at| at.to_string());
            let last =
                !matches!(what, Waiting::Peers { .. } | Waiting::Messages { .. } | Waiting::For(_));
            // Threads at the same barrier may wait for different peers or messages.
            let text = match &what {
                Waiting::Peers { index, .. } => index.to_string(),
                Waiting::Messages { first, .. } => WaitFor { index: 0, ..*first }.to_string(),
                _ => what.to_string(),
            };
            let group = groups.entry((last, text, location));
            let waiter = group.or_insert_with(|| Waiter {
                kernel: self.grid.launch.kernel,
                rank: self.gpu,
                comm_rank: self.comm_rank().filter(|rank| *rank != self.gpu),
                block: self.index,
                threads: 0,
                ids: Vec::new(),
                what: what.clone(),
                polled: self.thread(tid).polled(&what),
                at,
            });
            waiter.threads += 1;
            waiter.ids.push(tid);
            match (&mut waiter.what, what) {
                (Waiting::Peers { missing, .. }, Waiting::Peers { missing: more, .. }) => {
                    merge(missing, more);
                }
                (Waiting::Messages { indices, .. }, Waiting::Messages { indices: more, .. }) => {
                    merge(indices, more);
                }
                _ => {}
            }
        }
        groups.into_iter().map(|(_, waiter)| waiter)
    }

    /// Returns the threads that have left the kernel, if any.
    fn returned(&self) -> Option<Returned> {
        let ended = |thread: &&Thread| matches!(thread.wait.get(), Wait::Exited | Wait::Done);
        let ids: Vec<u32> = self.threads().filter(ended).map(|thread| thread.tid.get()).collect();
        (!ids.is_empty()).then_some(Returned { rank: self.gpu, block: self.index, ids })
    }

    /// Returns the block's rank in its kernel's communicator.
    fn comm_rank(&self) -> Option<usize> {
        let communicator = self.grid.communicator.get()?;
        communicator.iter().position(|gpu| *gpu as usize == self.gpu)
    }
}

/// The state of a block in the timeline.
impl Block {
    /// Records a change of what the block waits for.
    pub(super) fn record_waits(&self, timeline: &Timeline) {
        if !timeline.is_on() {
            return;
        }
        let now = self.waits_for();
        let is_same = match (&*self.waits.borrow(), &now) {
            (Some((_, name, at)), Some((other, place))) => name == other && at == place,
            (before, now) => before.is_none() && now.is_none(),
        };
        if !is_same {
            timeline.extend(self.wait(timeline.now()));
            self.waits.replace(now.map(|(name, at)| (timeline.now(), name, at)));
        }
    }

    /// Returns the spans of the block and of its present wait, up to now.
    pub(super) fn spans(&self, now: u64) -> impl Iterator<Item = Span> {
        let name = self.grid.launch.kernel.to_owned();
        let whole = self.span(self.began, now, name, None, false);
        std::iter::once(whole).chain(self.wait(now))
    }

    fn wait(&self, now: u64) -> Option<Span> {
        let (begin, name, at) = self.waits.borrow().clone().filter(|(begin, ..)| *begin < now)?;
        Some(self.span(begin, now, name, at, true))
    }

    fn span(&self, begin: u64, end: u64, name: String, at: Option<Site>, waits: bool) -> Span {
        let row = Row::Block(self.grid.launch.kernel, self.index);
        Span { rank: self.gpu, row, begin, end, name, waits, at }
    }

    /// Returns what the block waits for; `None` if one of its threads runs. It is the wait of the
    /// first thread that waits for something outside the block, if there is such a thread.
    fn waits_for(&self) -> Option<(String, Option<Site>)> {
        let mut found: Option<(bool, String, Option<Site>)> = None;
        for thread in self.threads() {
            let Some((what, at)) = thread.waiting() else { continue };
            let is_inner = match what {
                Waiting::Nothing | Waiting::Computing => return None,
                Waiting::Block { .. } | Waiting::Warp { .. } | Waiting::Coop { .. } => true,
                _ => false,
            };
            if found.as_ref().is_none_or(|(inner, ..)| *inner && !is_inner) {
                found = Some((is_inner, what.to_string(), at));
            }
        }
        found.map(|(_, what, at)| (what, at))
    }
}

impl Thread {
    /// Returns what the thread waits for and where, unless it has ended.
    fn waiting(&self) -> Option<(Waiting, Option<Site>)> {
        let named = self.state.named.get().filter(|_| self.in_named_wait.get());
        Some(match self.wait.get() {
            Wait::Exited | Wait::Done => return None,
            Wait::Ready | Wait::Spin { .. } | Wait::Network if named.is_some() => {
                let named = named?;
                (self.describe_wait(named), Some(named.at))
            }
            Wait::Network | Wait::Ready | Wait::Failed => (Waiting::Nothing, None),
            Wait::Barrier { id, at, coop_call: None } => (Waiting::Block { barrier: id }, Some(at)),
            Wait::Barrier { coop_call: Some(call), at, .. } => {
                (Waiting::Coop { call: call.to_string() }, Some(at))
            }
            Wait::Previous { at } => (Waiting::Previous, Some(at)),
            Wait::Phase { barrier, parity, at } => {
                (self.waits_for_phase(barrier, parity), Some(at))
            }
            Wait::Registers { count, at } => (registers::waiting(self, count), Some(at)),
            Wait::Cluster { at, .. } => (Waiting::Cluster, Some(at)),
            Wait::Warp { coop_call: Some(call), at, .. } => {
                (Waiting::Coop { call: call.to_string() }, Some(at))
            }
            Wait::Warp { mask, at, .. } => (Waiting::Warp { mask }, Some(at)),
            Wait::Inbox(wait) => (wait.waiting(), Some(wait.at)),
            Wait::Spin { at, plain: false } => (Waiting::Spin, Some(at)),
            Wait::Spin { at, plain: true } => (Waiting::PlainSpin, Some(at)),
            Wait::Running => (Waiting::Computing, None),
        })
    }

    /// Returns the memory that the thread polls in a wait, with its value, or the epoch of a line
    /// of an LL all-to-all.
    fn polled(&self, what: &Waiting) -> Option<String> {
        let polled = if what.is_poll() { self.polled_memory()? } else { return None };
        let Waiting::Messages { first, .. } = what else { return Some(polled) };
        let WaitFor { kind, seen, wanted, .. } = *first;
        Some(match polled.split_once(" is 0x") {
            Some((line, _)) if kind == WaitKind::LlA2a => {
                format!("{line} has epoch {seen}, not {wanted}")
            }
            _ => polled,
        })
    }

    /// Returns what a named wait is for, with the current value.
    fn describe_wait(&self, NamedWait { mut what, .. }: NamedWait) -> Waiting {
        if let Some(until) = self.state.until.get() {
            what.seen = until.seen();
        }
        match what {
            WaitFor { kind: WaitKind::LsaBarrier, index, peer: 0.., .. } => {
                Waiting::Peers { index, missing: vec![what.peer as usize] }
            }
            WaitFor { kind: WaitKind::Lamport | WaitKind::LlA2a, index, .. } => {
                Waiting::Messages { first: what, indices: vec![index] }
            }
            _ => Waiting::For(what),
        }
    }
}
