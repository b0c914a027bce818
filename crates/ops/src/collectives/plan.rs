//! Plans of collectives, and their choice by a table of measurements or by a model.

use std::collections::HashSet;

use crate::plan::{Field, H100, H200, PlanText, names, plan_text};
use crate::prelude::*;

/// How a collective is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// One step, by [`Lamport`](nccl_device::Lamport) messages, which need no separate flags.
    Lamport,
    /// Stores to the peers; an all-reduce in two steps, to the ranks that reduce and from them.
    Push,
    /// Loads from the peers; an all-reduce stores the sums to them.
    Pull,
    /// NCCL's call.
    Nccl,
}

names! {
    Algorithm "algorithm" "lamport, push, pull or nccl":
    Lamport "lamport" Push "push" Pull "pull" Nccl "nccl"
}

/// A collective that tables of measurements may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// Every rank gets the sum of all.
    AllReduce,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// Every rank gets the parts of all.
    AllGather,
    /// Every rank gets its part of each rank's.
    AllToAll,
    /// Every rank gets what one has.
    Broadcast,
}

names! {
    CollectiveKind "collective" "all-reduce, reduce-scatter, all-gather, all-to-all or broadcast":
    AllReduce "all-reduce" ReduceScatter "reduce-scatter" AllGather "all-gather"
    AllToAll "all-to-all" Broadcast "broadcast"
}

/// An algorithm with its grid. As text: `lamport:16x128` has 16 blocks of 128 threads; `nccl` has
/// no grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CollectivePlan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Blocks; 0 for NCCL, which chooses them.
    pub blocks: u32,
    /// Threads of a block; 0 for NCCL.
    pub threads: u32,
}

impl CollectivePlan {
    /// The plan that calls NCCL.
    pub const NCCL: Self = Self { algorithm: Algorithm::Nccl, blocks: 0, threads: 0 };
}

plan_text!(CollectivePlan);

impl PlanText for CollectivePlan {
    const FORMS: &'static str =
        "nccl, or lamport, push or pull with a grid, such as lamport:16x128";

    const NAMES: &'static [(&'static str, Self)] = &[("nccl", Self::NCCL)];

    fn from_fields(name: &str, fields: &[Field]) -> Option<Self> {
        let algorithm = name.parse().ok().filter(|algorithm| *algorithm != Algorithm::Nccl)?;
        let &[(blocks, Some(threads))] = fields else { return None };
        Some(Self { algorithm, blocks, threads })
    }

    fn fields(self) -> (&'static str, Vec<Field>) {
        let Self { algorithm, blocks, threads } = self;
        let name = Algorithm::NAMES.iter().find(|(_, named)| *named == algorithm);
        let grid = (blocks > 0).then_some((blocks, Some(threads)));
        (name.map_or("", |(name, _)| name), grid.into_iter().collect())
    }
}

/// What is asked for, and the kernels that can do it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) kind: CollectiveKind,
    pub(super) data_type: DataType,
    pub(super) bytes: usize,
    /// The slots that a message uses, if it can be sent in one step.
    pub(super) slots: Option<u32>,
    /// The most vectors of a thread; `None` for any number.
    pub(super) rows: Option<u32>,
    /// The most blocks in one step, and threads of a block.
    pub(super) most_blocks: u32,
    pub(super) most_threads: u32,
    /// The plan with the most blocks that stores to the peers, if a kernel can do the operation so.
    pub(super) push: Option<CollectivePlan>,
    /// The plan with the most blocks that loads from the peers, if a kernel can do so.
    pub(super) pull: Option<CollectivePlan>,
    /// Why NCCL does what no kernel can.
    pub(super) nccl: &'static str,
}

pub(super) const SHORT: &str = "as the message is short";

impl Request {
    /// Returns the request of an operation that only NCCL can do.
    pub(super) fn by_nccl(kind: CollectiveKind, reason: &'static str) -> Self {
        Self {
            kind,
            data_type: DataType::Uint8,
            bytes: 0,
            slots: None,
            rows: None,
            most_blocks: 0,
            most_threads: 0,
            push: None,
            pull: None,
            nccl: reason,
        }
    }

    /// Returns the plan that is taken without measurements.
    pub(super) fn model(&self) -> Explanation {
        let how = |plan, reason| Explanation { plan, reason };
        if let Some(slots) = self.slots {
            let plan = self.in_one_step(slots, threads(slots));
            // If a thread has at most `rows` vectors, the usual threads may be too few for all.
            let is_enough = self.can(plan);
            let plan = if is_enough { plan } else { self.in_one_step(slots, self.most_threads) };
            return how(plan, SHORT);
        }
        let push = self.push.map(|plan| how(plan, "as the message is long, and goes to a window"));
        let pull = self.pull.map(|plan| how(plan, "as the message is long and in a window"));
        push.or(pull).unwrap_or(how(CollectivePlan::NCCL, self.nccl))
    }

    /// Returns the plan in one step with a thread for each slot, up to the most blocks.
    fn in_one_step(&self, slots: u32, threads: u32) -> CollectivePlan {
        let threads = threads.min(self.most_threads);
        let blocks = slots.div_ceil(threads).min(self.most_blocks);
        CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads }
    }

    /// Returns whether the plan does what is asked for.
    fn can(&self, plan: CollectivePlan) -> bool {
        let CollectivePlan { algorithm, blocks, threads } = plan;
        let is_within = |most: Option<CollectivePlan>| {
            most.is_some_and(|most| threads == most.threads && (1..=most.blocks).contains(&blocks))
        };
        match algorithm {
            Algorithm::Lamport => self.slots.is_some_and(|slots| {
                let all_threads = blocks.saturating_mul(threads);
                threads <= self.most_threads
                    && threads.is_multiple_of(32)
                    && blocks <= self.most_blocks
                    && slots <= self.rows.unwrap_or(u32::MAX).saturating_mul(all_threads)
            }),
            Algorithm::Push => is_within(self.push),
            Algorithm::Pull => is_within(self.pull),
            Algorithm::Nccl => true,
        }
    }

    /// Returns this plan with a grid for the request, if it does what is asked for: the same number
    /// of threads, in blocks of another size if need be, up to the most that the request allows.
    pub(super) fn adapt(&self, plan: CollectivePlan) -> Option<CollectivePlan> {
        let mut adapted = plan;
        match plan.algorithm {
            // A plan that a caller of `set_plan` made may have any numbers.
            Algorithm::Lamport if plan.threads == 0 => return None,
            Algorithm::Lamport => {
                let slots = self.slots?;
                if plan.blocks > self.most_blocks || plan.threads > self.most_threads {
                    let all = plan.blocks.saturating_mul(plan.threads);
                    let each = all.div_ceil(self.most_blocks).min(self.most_threads);
                    let each = each.next_multiple_of(32);
                    adapted.threads = each.max(plan.threads).min(self.most_threads);
                    adapted.blocks = all.div_ceil(adapted.threads).min(self.most_blocks);
                }
                adapted.blocks = adapted.blocks.min(slots.div_ceil(adapted.threads));
            }
            Algorithm::Push => adapted.threads = self.push?.threads,
            Algorithm::Pull => adapted.threads = self.pull?.threads,
            Algorithm::Nccl => {}
        }
        self.can(adapted).then_some(adapted)
    }

    /// Returns the plans that do what is asked for: first the measured one, if there is one, and
    /// then that of the model.
    pub(super) fn candidates(&self, measured: Option<CollectivePlan>) -> Vec<CollectivePlan> {
        let mut plans: Vec<_> = measured.into_iter().chain([self.model().plan]).collect();
        if let Some(slots) = self.slots {
            // 448 is the best for all-reduces of 8 to 64 MiB on two H200.
            let sizes = [64, 128, 256, 448, 512].into_iter();
            let useful = sizes.filter(|threads| *threads <= self.most_threads);
            let useful = useful.filter(|threads| *threads == 64 || threads / 2 < slots);
            plans.extend(useful.map(|threads| self.in_one_step(slots, threads)));
        }
        for most in self.push.into_iter().chain(self.pull) {
            let sizes = [most.blocks, 32, 64, 128];
            plans.extend(sizes.map(|blocks| CollectivePlan { blocks, ..most }));
        }
        plans.push(CollectivePlan::NCCL);
        let mut known = HashSet::new();
        plans.retain(|plan| self.can(*plan) && known.insert(*plan));
        plans
    }
}

/// Returns the threads of a block for this number of slots.
fn threads(slots: u32) -> u32 {
    match slots {
        0..=64 => 64,
        65..=4096 => 128,
        4097..=16384 => 256,
        _ => 512,
    }
}

/// Tables that `devcomm-bench tune` wrote, by the name of the GPU on which it ran.
const TABLES: [(&str, &str); 2] =
    [(H200, include_str!("plans/h200.txt")), (H100, include_str!("plans/h100.txt"))];

/// The plans of a table for one number of ranks.
#[derive(Debug, Default)]
pub(super) struct Table(Vec<Entry>);

/// A line of a table: `operation ranks type bytes plan`, and a comment after `#`. The plan is for
/// messages of at most `bytes` bytes. `bench/src/cases/tune_collectives.rs` writes it.
type Entry = (CollectiveKind, usize, DataType, usize, CollectivePlan);

fn parse_entry(line: &str) -> Option<Entry> {
    let mut words = line.split('#').next()?.split_whitespace();
    Some((
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
        DataType::from_name(words.next()?)?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
    ))
}

impl Table {
    /// Returns the table of GPUs of this name, which is empty if none were measured.
    pub(super) fn of(gpu: &str, ranks: usize) -> Self {
        let table = TABLES.iter().find(|(name, _)| gpu == *name);
        Self::parse(table.map_or("", |(_, text)| text), ranks)
    }

    fn parse(text: &str, ranks: usize) -> Self {
        let mut entries: Vec<_> = text.lines().filter_map(parse_entry).collect();
        entries.retain(|(_, entry_ranks, ..)| *entry_ranks == ranks);
        entries.sort_by_key(|(.., bytes, _)| *bytes);
        Self(entries)
    }

    /// Returns the plan of the next larger message that was measured.
    pub(super) fn find(&self, request: &Request) -> Option<CollectivePlan> {
        let is_for = |(kind, _, data_type, bytes, _): &&Entry| {
            (*kind, *data_type) == (request.kind, request.data_type) && *bytes >= request.bytes
        };
        self.0.iter().find(is_for).and_then(|(.., plan)| request.adapt(*plan))
    }
}

#[cfg(test)]
mod tests;
