//! Plans of collectives, and their choice by a table of measurements or by a model.

use std::collections::HashSet;

use devcomm_host::DataType;

use crate::Explanation;
use crate::plan::{Field, H100, H200, PlanText, names, plan_text};

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

names!(Algorithm: Lamport "lamport" Push "push" Pull "pull" Nccl "nccl");

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

names!(CollectiveKind: AllReduce "all-reduce" ReduceScatter "reduce-scatter" AllGather "all-gather"
    AllToAll "all-to-all" Broadcast "broadcast");

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

    fn from_fields(name: &str, fields: &[Field]) -> Option<Self> {
        let algorithm = Algorithm::from_name(name)?;
        match (algorithm, fields) {
            (Algorithm::Nccl, []) => Some(Self::NCCL),
            (Algorithm::Nccl, _) => None,
            (_, &[(blocks, Some(threads))]) => Some(Self { algorithm, blocks, threads }),
            _ => None,
        }
    }

    fn fields(&self) -> (&'static str, Vec<Field>) {
        let Self { algorithm, blocks, threads } = *self;
        let grid = (blocks > 0).then_some((blocks, Some(threads)));
        (algorithm.name(), grid.into_iter().collect())
    }
}

/// What is asked for, and the kernels that can do it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// `None` if no table has the operation: its plan follows from the arguments.
    pub(super) kind: Option<CollectiveKind>,
    pub(super) data_type: DataType,
    /// The length of a message.
    pub(super) bytes: usize,
    /// The slots that a message uses, if it can be sent in one step.
    pub(super) slots: Option<u32>,
    /// The most vectors of a thread; `None` for any number.
    pub(super) rows: Option<u32>,
    /// The most blocks in one step, and threads of a block.
    pub(super) most_blocks: u32,
    pub(super) most_threads: u32,
    /// Threads of a block in one step, if there is no choice.
    pub(super) threads: Option<u32>,
    /// The grid of the kernel that stores to the peers, if it can do the operation.
    pub(super) push: Option<Grid>,
    /// The grid of the kernel that loads from the peers, if it can do the operation.
    pub(super) pull: Option<Grid>,
    /// Why NCCL does what no kernel can, or [`NOT_BY_NCCL`].
    pub(super) nccl: &'static str,
}

/// The reason of a request that a kernel can do: [`Request::model`] does not return it.
pub(super) const NOT_BY_NCCL: &str = "";

/// Blocks and threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// The least and the most blocks for which the workspace has memory and barriers.
    pub(super) allowed: [u32; 2],
}

impl Request {
    /// Returns the request of an operation that only NCCL can do.
    pub(super) fn by_nccl(kind: Option<CollectiveKind>, reason: &'static str) -> Self {
        Self {
            kind,
            data_type: DataType::Uint8,
            bytes: 0,
            slots: None,
            rows: None,
            most_blocks: 0,
            most_threads: 0,
            threads: None,
            push: None,
            pull: None,
            nccl: reason,
        }
    }

    /// Returns the request of an operation that only this plan and NCCL can do.
    pub(super) fn fixed(plan: CollectivePlan) -> Self {
        let CollectivePlan { blocks, threads, .. } = plan;
        Self {
            // A slot for each thread, of which `in_one_step` makes this plan.
            slots: Some(blocks * threads),
            most_blocks: blocks,
            most_threads: threads,
            threads: Some(threads),
            ..Self::by_nccl(None, NOT_BY_NCCL)
        }
    }

    /// Returns the plan that is taken without measurements.
    pub(super) fn model(&self) -> Explanation {
        let long = |algorithm, Grid { blocks, threads, .. }, reason| {
            let plan = CollectivePlan { algorithm, blocks, threads };
            Explanation { plan, reason }
        };
        if let Some(slots) = self.slots {
            let plan = self.in_one_step(slots, threads(slots));
            // If a thread has at most `rows` vectors, the usual threads may be too few for all.
            let plan = match self.can(plan) {
                true => plan,
                false => self.in_one_step(slots, self.most_threads),
            };
            return Explanation { plan, reason: "as the message is short" };
        }
        if let Some(grid) = self.push {
            return long(Algorithm::Push, grid, "as the message is long, and goes to a window");
        }
        if let Some(grid) = self.pull {
            return long(Algorithm::Pull, grid, "as the message is long and in a window");
        }
        Explanation { plan: CollectivePlan::NCCL, reason: self.nccl }
    }

    /// Returns the plan in one step with a thread for each slot, up to the most blocks.
    fn in_one_step(&self, slots: u32, threads: u32) -> CollectivePlan {
        let threads = self.threads.unwrap_or(threads.min(self.most_threads));
        let blocks = slots.div_ceil(threads).min(self.most_blocks);
        CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads }
    }

    /// Returns whether the plan does what is asked for.
    fn can(&self, plan: CollectivePlan) -> bool {
        let CollectivePlan { algorithm, blocks, threads } = plan;
        let fits = |grid: Option<Grid>| {
            grid.is_some_and(|Grid { threads: fixed, allowed: [least, most], .. }| {
                threads == fixed && (least..=most).contains(&blocks)
            })
        };
        match algorithm {
            Algorithm::Lamport => self.slots.is_some_and(|slots| {
                let all_threads = blocks.saturating_mul(threads);
                let most = self.rows.unwrap_or(u32::MAX).saturating_mul(all_threads);
                self.threads.unwrap_or(threads) == threads
                    && threads <= self.most_threads
                    && threads.is_multiple_of(32)
                    && blocks <= self.most_blocks
                    && slots <= most
            }),
            Algorithm::Push => fits(self.push),
            Algorithm::Pull => fits(self.pull),
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
        let in_one_step = self.slots.into_iter().flat_map(|slots| {
            let useful = move |threads: &u32| *threads == 64 || threads / 2 < slots;
            let all = [64, 128, 256, 448, 512].into_iter();
            let all = all.filter(move |threads| *threads <= self.most_threads).filter(useful);
            all.map(move |threads| self.in_one_step(slots, threads))
        });
        plans.extend(in_one_step);
        for (algorithm, grid) in [(Algorithm::Push, self.push), (Algorithm::Pull, self.pull)] {
            if let Some(Grid { blocks, threads, .. }) = grid {
                let sizes = [blocks, 32, 64, 128];
                plans.extend(sizes.map(|blocks| CollectivePlan { algorithm, blocks, threads }));
            }
        }
        plans.push(CollectivePlan::NCCL);
        let mut known = HashSet::new();
        plans.retain(|plan| self.can(*plan) && known.insert(*plan));
        plans
    }
}

/// Returns the threads of a block for this number of slots.
pub(super) fn threads(slots: u32) -> u32 {
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
#[derive(Debug)]
struct Entry {
    kind: CollectiveKind,
    ranks: usize,
    data_type: DataType,
    bytes: usize,
    plan: CollectivePlan,
}

impl Entry {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split('#').next()?.split_whitespace();
        Some(Self {
            kind: CollectiveKind::from_name(words.next()?)?,
            ranks: words.next()?.parse().ok()?,
            data_type: match words.next()? {
                "f32" => DataType::Float32,
                "f16" => DataType::Float16,
                "bf16" => DataType::Bfloat16,
                "u8" => DataType::Uint8,
                _ => return None,
            },
            bytes: words.next()?.parse().ok()?,
            plan: words.next()?.parse().ok()?,
        })
    }
}

impl Table {
    /// Returns the table of GPUs of this name, which is empty if none were measured.
    pub(super) fn of(gpu: &str, ranks: usize) -> Self {
        let table = TABLES.iter().find(|(name, _)| gpu == *name);
        Self::parse(table.map_or("", |(_, text)| text), ranks)
    }

    fn parse(text: &str, ranks: usize) -> Self {
        let mut entries: Vec<_> = text.lines().filter_map(Entry::parse).collect();
        entries.retain(|entry| entry.ranks == ranks);
        entries.sort_by_key(|entry| entry.bytes);
        Self(entries)
    }

    /// Returns the plan of the next larger message that was measured.
    pub(super) fn find(&self, request: &Request) -> Option<CollectivePlan> {
        let Request { kind, data_type, bytes, .. } = *request;
        let is_for = |entry: &&Entry| {
            Some(entry.kind) == kind && entry.data_type == data_type && entry.bytes >= bytes
        };
        self.0.iter().find(is_for).and_then(|entry| request.adapt(entry.plan))
    }
}

#[cfg(test)]
mod tests {
    use devcomm_kernels::collectives::room;

    use super::*;
    use crate::CollectivesOptions;

    /// Returns the request of a message of `vectors`, which a kernel for long ones can push too.
    fn request(vectors: u32) -> Request {
        let grid = Grid { blocks: 48, threads: 512, allowed: [32, 64] };
        Request {
            bytes: 16 * vectors as usize,
            slots: (vectors <= 1000).then_some(vectors),
            most_blocks: 4,
            most_threads: 512,
            push: Some(grid),
            ..Request::by_nccl(Some(CollectiveKind::AllToAll), "")
        }
    }

    fn plan(text: &str) -> CollectivePlan {
        text.parse().unwrap()
    }

    #[test]
    fn tables_have_nothing_but_entries_and_comments() {
        for (gpu, table) in TABLES {
            for line in table.lines() {
                let comment = line.trim().is_empty() || line.starts_with('#');
                assert!(comment || Entry::parse(line).is_some(), "{gpu}: {line}");
            }
        }
    }

    #[test]
    fn plans_are_read_as_they_are_written() {
        for text in ["nccl", "lamport:16x128", "push:64x512", "pull:128x128"] {
            assert_eq!(plan(text).to_string(), text);
        }
        for wrong in ["", "lamport", "nccl:1x32", "push:0x32", "pull:1", "ring:1x32"] {
            let error = wrong.parse::<CollectivePlan>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
        }
    }

    #[test]
    fn short_messages_are_sent_in_one_step_and_others_by_the_kernels_that_can() {
        assert_eq!(request(3).model().plan, plan("lamport:1x64"));
        assert_eq!(request(1000).model().plan, plan("lamport:4x128"));
        assert_eq!(request(1001).model().plan, plan("push:48x512"));
        let by_nccl = Request::by_nccl(None, "as it must").model();
        assert_eq!(by_nccl.to_string(), "nccl, as it must");
        let candidates =
            request(300).candidates(None).iter().map(ToString::to_string).collect::<Vec<_>>();
        let all =
            ["lamport:3x128", "lamport:4x64", "lamport:2x256", "lamport:1x448", "lamport:1x512"];
        assert_eq!(
            candidates,
            [&all[..], &["push:48x512", "push:32x512", "push:64x512", "nccl"]].concat()
        );
        let measured = request(300).candidates(Some(plan("lamport:2x256")));
        assert_eq!(measured[..2], [plan("lamport:2x256"), plan("lamport:3x128")]);
        assert_eq!(measured.len(), candidates.len());
    }

    #[test]
    fn plans_of_several_objects_leave_room_for_each_other() {
        const MULTIPROCESSORS: u32 = 132;
        for (objects, (_, room)) in (2..=4).flat_map(|n| room::ALL.map(|kernel| (n, kernel))) {
            let options = CollectivesOptions::new().concurrent(objects);
            let most_threads = options.threads(room);
            // One launch of an object runs, and the next one waits.
            assert!(most_threads >= 64 && 2 * objects * most_threads <= room);
            let blocks = options.blocks();
            assert!(blocks <= MULTIPROCESSORS);
            let grid = Grid { blocks, threads: most_threads, allowed: [1, blocks] };
            let most_blocks = options.most_blocks(2, MULTIPROCESSORS);
            assert_eq!(most_blocks, MULTIPROCESSORS);
            let fits = |plan: &CollectivePlan| {
                plan.blocks <= MULTIPROCESSORS && plan.threads <= most_threads
            };
            for slots in (0..24).map(|power| 1 << power) {
                let bytes = 16 * slots as usize;
                let request = Request {
                    bytes,
                    slots: Some(slots),
                    most_blocks,
                    most_threads,
                    push: Some(grid),
                    pull: Some(grid),
                    ..Request::by_nccl(Some(CollectiveKind::AllReduce), "")
                };
                for (_, table) in TABLES {
                    for entry in table.lines().filter_map(Entry::parse) {
                        let adapted = request.adapt(entry.plan);
                        assert!(adapted.is_some_and(|plan| fits(&plan)), "{:?}", entry.plan);
                    }
                }
                let candidates = request.candidates(None);
                assert!(candidates.iter().all(fits), "{candidates:?}");
                let long = Request { slots: None, ..request };
                assert!(long.candidates(None).iter().all(fits));
            }
        }
    }

    #[test]
    fn four_h200_sum_long_messages_by_loads_where_these_were_faster() {
        let by = |gpu, ranks, bytes: usize, pull: bool| {
            let slots = (bytes <= 1 << 20).then_some(bytes.div_ceil(16) as u32);
            let grid = |threads| Grid { blocks: 128, threads, allowed: [1, 128] };
            let request = Request {
                data_type: DataType::Float32,
                bytes,
                slots,
                rows: Some(2),
                most_blocks: 132,
                most_threads: 256,
                push: Some(grid(256)),
                pull: pull.then_some(grid(128)),
                ..Request::by_nccl(Some(CollectiveKind::AllReduce), "")
            };
            (Table::of(gpu, ranks).find(&request), request.model().plan)
        };
        // For other sizes, machines and memory the plan is that of the model.
        for bytes in [4, 1024, 1040, 4096, 20_000, 262_144, 300_000, 640 << 10] {
            let (table, model) = by(H200, 4, bytes, true);
            assert_eq!(table, Some(model), "{bytes}");
        }
        for bytes in [700 << 10, 1 << 20, (1 << 20) + 4, 4 << 20] {
            assert_eq!(by(H200, 4, bytes, true).0, Some(plan("pull:128x128")), "{bytes}");
            for (gpu, ranks, pull) in [(H200, 4, false), (H200, 8, true), (H100, 4, true)] {
                let (table, model) = by(gpu, ranks, bytes, pull);
                assert_eq!((table, model.algorithm == Algorithm::Pull), (None, false));
            }
        }
        assert_eq!(by(H200, 4, (4 << 20) + 4, true), (None, plan("push:128x256")));
    }

    #[test]
    fn a_table_decides_for_the_next_larger_message_if_its_plan_can() {
        let table = "all-to-all 2 u8 4096 push:32x512 # 3 us\nall-to-all 2 u8 160 lamport:2x32\n\
                     all-to-all 4 u8 4096 nccl\nbroadcast 2 u8 4096 nccl\n\
                     all-to-all 2 u8 65536 pull:8x128\n";
        let table = Table::parse(table, 2);
        let find = |vectors| table.find(&request(vectors));
        assert_eq!(find(10), Some(plan("lamport:1x32")));
        assert_eq!(find(11), Some(plan("push:32x512")));
        // No kernel does the plan `pull`, and no larger message was measured.
        assert_eq!((find(257), find(10_000)), (None, None));
    }

    #[test]
    fn a_plan_with_any_numbers_is_adapted_or_refused() {
        let adapt = |blocks, threads| {
            request(1000).adapt(CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads })
        };
        assert_eq!(adapt(u32::MAX, u32::MAX), Some(plan("lamport:2x512")));
        assert_eq!(
            [(0, 0), (0, 64), (1, 0)].map(|(blocks, threads)| adapt(blocks, threads)),
            [None; 3]
        );
    }
}
