//! Who waits for what, when a run is stuck or meets a limit.

use std::collections::BTreeMap;

use devcomm_types::{WaitFor, WaitKind};

use super::Scheduler;
use crate::error::{Stall, Waiter, Waiting};
use crate::thread::{Wait, Within};
use crate::waits::{Named, WaitState};

impl Scheduler<'_> {
    /// Who waits for what now.
    pub(super) fn stall(&self) -> Box<Stall> {
        let run = self.run;
        let mut waiters = Vec::new();
        for block in run.blocks.iter().filter(|block| block.live.get() > 0) {
            // By text and place; those that wait for peers first, since others wait for them.
            let mut groups: BTreeMap<(bool, String, String), Waiter> = BTreeMap::new();
            for thread in block.threads(run) {
                let state = &run.waits[thread.id as usize];
                let named = state.named.get().filter(|_| thread.waits.get());
                let (what, at) = match thread.wait.get() {
                    Wait::Exited | Wait::Done => continue,
                    Wait::Ready | Wait::Spin { .. } | Wait::Network if named.is_some() => named
                        .map_or((Waiting::Nothing, None), |named| {
                            (state.wants(named), Some(named.at))
                        }),
                    Wait::Network | Wait::Ready | Wait::Failed => (Waiting::Nothing, None),
                    Wait::Barrier { id, at, within: None } => {
                        (Waiting::Block { barrier: id }, Some(at))
                    }
                    Wait::Barrier { within: Some(Within::LsaBarrier(index)), at, .. } => {
                        (Waiting::Coop { index }, Some(at))
                    }
                    Wait::Barrier { within: Some(Within::Call(call)), at, .. } => {
                        (Waiting::CoopIn { call }, Some(at))
                    }
                    Wait::Warp { mask, at } => (Waiting::Warp { mask }, Some(at)),
                    Wait::Inbox(wait) => (wait.waiting(), Some(wait.at)),
                    Wait::Spin { at } => (Waiting::Spin, Some(at)),
                    Wait::Running => (Waiting::Computing, None),
                };
                let place = at.map_or_else(String::new, |at| at.to_string());
                let (rank, index) = (block.rank, block.index.get());
                let behind = !matches!(what, Waiting::Peers { .. } | Waiting::For(_));
                // Each thread may wait for a peer of its own at one barrier.
                let text = match &what {
                    Waiting::Peers { index, .. } => index.to_string(),
                    _ => what.to_string(),
                };
                let group = groups.entry((behind, text, place));
                let waiter = group.or_insert_with(|| Waiter {
                    rank,
                    block: index,
                    threads: 0,
                    what: what.clone(),
                    at,
                });
                waiter.threads += 1;
                if let (Waiting::Peers { missing, .. }, Waiting::Peers { missing: more, .. }) =
                    (&mut waiter.what, what)
                {
                    missing.extend(more);
                    missing.sort_unstable();
                    missing.dedup();
                }
            }
            waiters.extend(groups.into_values());
        }
        Box::new(Stall {
            kernel: run.mode.kernel,
            waiters,
            ended: self.ended.clone(),
            pending: self.next_block.iter().map(|next| run.mode.grid - next).collect(),
        })
    }
}

impl WaitState {
    /// What it waits for, as things are now.
    fn wants(&self, named: Named) -> Waiting {
        let Named { mut what, .. } = named;
        if let Some(until) = self.until.get() {
            what.seen = until.seen();
        }
        match what {
            WaitFor { kind: WaitKind::LsaBarrier, index, peer: 0.., .. } => {
                Waiting::Peers { index, missing: vec![what.peer as usize] }
            }
            _ => Waiting::For(what),
        }
    }
}
