//! The waits that an abort has ended, and their summary in an error's text.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use devcomm_types::{StuckRecord, WaitFor, WaitKind};

/// The most lines of a summary.
const LINES: usize = 16;
/// The most number ranges in a line.
const RANGES: usize = 8;

/// A wait that an abort ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckWait {
    /// `blockIdx.x`.
    pub block: u32,
    /// `threadIdx.x`.
    pub thread: u32,
    /// The wait in which the thread was.
    pub wait: WaitFor,
}

impl fmt::Display for StuckWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}, thread {}: {}", self.block, self.thread, self.wait)
    }
}

/// Returns the waits that kernels have recorded, sorted. Records of an unknown kind are skipped.
pub(crate) fn waits(records: &[StuckRecord]) -> Vec<StuckWait> {
    let wait = |record: &StuckRecord| {
        let StuckRecord { kind, block, index, context, peer, thread, wanted, seen } = *record;
        let kind = WaitKind::from_raw(kind)?;
        Some(StuckWait {
            block,
            thread,
            wait: WaitFor { kind, index, context, peer, wanted, seen },
        })
    };
    let mut waits: Vec<StuckWait> = records.iter().filter_map(wait).collect();
    waits.sort_by_key(|wait| (wait.block, wait.thread));
    waits
}

/// Waits that are equal, or differ only in their index.
struct SameWait {
    /// The first of these waits.
    wait: WaitFor,
    blocks: BTreeSet<u32>,
    threads: BTreeSet<u32>,
    indices: BTreeSet<u32>,
}

/// Returns the end of an error's text, with one line per [`SameWait`].
pub(super) fn report(waits: &[StuckWait]) -> String {
    if waits.is_empty() {
        return "; no block recorded what it waited for".to_owned();
    }
    let mut groups: Vec<SameWait> = Vec::new();
    for &StuckWait { block, thread, wait } in waits {
        let same = |group: &SameWait| group.wait == WaitFor { index: group.wait.index, ..wait };
        let at = groups.iter().position(same).unwrap_or_else(|| {
            let (blocks, threads, indices) = Default::default();
            groups.push(SameWait { wait, blocks, threads, indices });
            groups.len() - 1
        });
        groups[at].blocks.insert(block);
        groups[at].threads.insert(thread);
        groups[at].indices.insert(wait.index);
    }
    let mut text = "; what they waited for:".to_owned();
    for group in groups.iter().take(LINES) {
        let _ = write!(text, "\n  {group}");
    }
    if let Some(left @ 1..) = groups.len().checked_sub(LINES) {
        let _ = write!(text, "\n  and {left} other waits");
    }
    text
}

impl fmt::Display for SameWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wait, blocks, threads, indices } = self;
        write!(f, "{}, {}: {wait}", numbers("block", blocks), numbers("thread", threads))?;
        let mut others = indices.clone();
        others.remove(&wait.index);
        if others.is_empty() { Ok(()) } else { write!(f, "; also at {}", ranges(&others)) }
    }
}

/// Returns `block 3`, or `blocks 0-7, 9`.
fn numbers(what: &str, set: &BTreeSet<u32>) -> String {
    let plural = if set.len() == 1 { "" } else { "s" };
    format!("{what}{plural} {}", ranges(set))
}

/// Returns `0-7, 9`: at most [`RANGES`] of them.
fn ranges(set: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &number in set {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let shown = ranges.iter().take(RANGES).map(|&(first, last)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if ranges.len() > RANGES {
        text.push_str(", ...");
    }
    text
}

#[cfg(test)]
#[path = "stuck_tests.rs"]
mod tests;
