//! The advice in reports of races: synchronisation that would order the two accesses.

use cuda_std::arch::Space;

use super::Races;
use super::clock::THREADS;
use super::ops::Transfer;
use super::shadow::Stamp;

impl Races {
    /// Returns what would order two accesses.
    pub(super) fn remedy(
        &self,
        now: Stamp,
        before: Stamp,
        space: Space,
        of_window: bool,
    ) -> String {
        let (a, b) = (now.agent(), before.agent());
        let [at, from] = [a, b].map(|agent| self.position(agent));
        let scopes = (now.kind().scope, before.kind().scope);
        if let Some(text) = self.remedy_of_transfer(now, before) {
            return text;
        }
        let text = if let (Some(_), Some(_)) = scopes {
            match at.gpu == from.gpu {
                true => {
                    "a scope of the accesses that includes both threads is missing: `Scope::Gpu` \
                     for threads of two blocks"
                }
                false => {
                    "a scope of the accesses that includes both threads is missing: `Scope::Sys` \
                     for threads of two ranks"
                }
            }
        } else if now.kind().is_async && before.kind().writes && !before.kind().is_async {
            match space {
                Space::Shared => {
                    "a `fence_async_shared` (fence.proxy.async) between them and what orders the \
                     threads is missing"
                }
                Space::Global => {
                    "a `fence_async_global` (fence.proxy.async.global) between them and what \
                     orders the threads is missing"
                }
            }
        } else if b.number >= THREADS {
            "a wait for the end of the asynchronous operation, which orders its accesses before \
             this one, is missing"
        } else if (a.op, a.block) == (b.op, b.block) {
            remedy_in_block(a.number / 32 == b.number / 32, of_window)
        } else if at.gpu == from.gpu && a.op != b.op {
            "the two operations overlap: one stream or an event that orders them, or memory for \
             each of them, is missing"
        } else if at.gpu == from.gpu {
            "missing: a release at GPU scope after the access that must come first and an acquire \
             before the other one, or the end of the kernel between them"
        } else {
            "missing: a barrier of the ranks between them, or a release at system scope after the \
             access that must come first and an acquire before the other one"
        };
        text.to_owned()
    }
}

impl Races {
    /// Returns what would order two accesses, one of them a transfer's.
    fn remedy_of_transfer(&self, now: Stamp, before: Stamp) -> Option<String> {
        let transfer_of = |stamp: Stamp| self.ops.borrow()[stamp.agent().op.index()].transfer;
        let transfers = (transfer_of(before), transfer_of(now));
        let ((transfer, poster, releases), moves, other) = match transfers {
            (None, None) => return None,
            (Some((first, ..)), Some((second, ..))) => {
                let ends = [(first, before), (second, now)].map(|(t, stamp)| end_of(t, stamp));
                return Some(remedy_of_two(ends));
            }
            (Some(transfer), None) => (transfer, before, now),
            (None, Some(transfer)) => (transfer, now, before),
        };
        let by = self.describe(other);
        let text = match (transfer, moves.kind().writes) {
            (Transfer::Put, false) if moves == now && !releases => {
                "the put releases nothing (`released_to`); missing: a fence at system scope by the \
                 thread that posts the put, after the store and before the put"
            }
            (Transfer::Put, false) if by.thread == Some(poster) => {
                "the put may not have read its source yet: a flush (`gin.flush`) after the put, or \
                 a wait for its counter, is missing before the store"
            }
            (Transfer::Put, false) => {
                let (meet, after) = match by.thread {
                    _ if by.rank != poster.rank => ("a barrier of the ranks", "such a barrier"),
                    Some(_) => ("a barrier of both threads", "such a barrier"),
                    None => ("a stream, or an event, that orders both", "the same order"),
                };
                return Some(format!(
                    "{meet} is missing before the put, if it is to send what is stored; or, before \
                     the store, a flush (`gin.flush`) after the put, or a wait for its counter, \
                     and then {after}: the put may not have read its source yet"
                ));
            }
            (Transfer::Put, true) if moves == before => {
                "a wait for the put's signal (`gin.wait_signal`), with an acquire, before the \
                 access is missing; or, if the access is to what the put replaces, a barrier of \
                 the ranks or a signal between the access and the put"
            }
            (Transfer::Put, true) => {
                "a wait for the put's signal (`gin.wait_signal`) before the access is missing; or, \
                 if the access is to what the put replaces, a barrier of the ranks or a signal \
                 between the access and the put"
            }
            (Transfer::Get, true) => {
                "a flush (`gin.flush`) after the get, or a wait for its request, is missing before \
                 the access to the get's target"
            }
            (Transfer::Get, false) => {
                "a barrier of the ranks or a signal is missing: between the store and the get that \
                 is to read it, or between the get's flush and the store that replaces what it \
                 reads"
            }
        };
        Some(text.to_owned())
    }
}

/// Returns how a kernel waits for the end of a transfer's access.
fn end_of(transfer: Transfer, access: Stamp) -> &'static str {
    match (transfer, access.kind().writes) {
        (Transfer::Put, true) => "for a put's signal, with an acquire, in the rank that it reaches",
        (Transfer::Put, false) => "for a put's counter, or a flush, in the rank that posts it",
        (Transfer::Get, _) => "by a flush after a get, in the rank that posts it",
    }
}

/// Returns what would order two transfers; `a` and `b` name the waits for their ends.
fn remedy_of_two([a, b]: [&'static str; 2]) -> String {
    let wait = if a == b { a.to_owned() } else { format!("{a}; or {b}") };
    format!(
        "missing: a wait for the end of the transfer that must come first ({wait}), before the \
         other one is posted; if another rank posts the other one, also a barrier of the ranks, or \
         a signal, after the wait"
    )
}

/// Returns what would order two threads of a block, of one warp or of two.
fn remedy_in_block(of_warp: bool, of_window: bool) -> &'static str {
    match (of_warp, of_window) {
        (true, false) => "a `sync_warp` or `sync_threads` between them is missing",
        (true, true) => {
            "a `sync_warp` or `sync_threads` between them is missing; or, if threads of other \
             ranks access the window between them, a barrier of the ranks, which orders both \
             threads too"
        }
        (false, false) => {
            "a `sync_threads` or another barrier of both threads between them is missing"
        }
        (false, true) => {
            "a `sync_threads` or another barrier of both threads between them is missing; or, if \
             threads of other ranks access the window between them, a barrier of the ranks, which \
             orders both threads too"
        }
    }
}
