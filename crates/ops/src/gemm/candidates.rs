//! The plans that a product may have: from a table of measurements, or by the model.

use devcomm_kernels::gemm::gemm_swapped;
use devcomm_kernels::gemm::gemm_swapped::Cluster;

use super::launches::MOST_SLICES;
use super::model::{Rounds, clocks, exchange};
use super::plan::{GemmPlan, Tiling, clusters};
use super::tile_kernel::ResidentClusters;
use crate::plan::{H100, H200};
use crate::prelude::*;
use crate::tuned::parse_entry;

/// All plans for a shape on Hopper with the clocks that the model expects, the least first.
pub(crate) struct Candidates {
    extents: Extents,
    room: ResidentClusters,
    plans: Vec<(f64, GemmPlan)>,
}

/// The times of plans that are measured, relative to the fastest by the model. The plan that was
/// the fastest for 569 x 1368 x 14720 was expected to take 1.39 times as long.
pub(crate) const LIKELY: f64 = 1.5;

/// Bytes in a clock of 1.9 GHz that an all-reduce sends: 330 GB/s.
const SENT: f64 = 174.0;

impl Candidates {
    pub(crate) fn new(extents: Extents, room: ResidentClusters) -> Self {
        let shape @ [m, n, _] = extents.array();
        let mut plans = vec![GemmPlan::Wide];
        // These tiles are stored by TMA, in rows at multiples of 16 bytes.
        if n.is_multiple_of(8) {
            add_tiled(&mut plans, shape, room, true);
            if m > FEW_ROWS {
                add_tiled(&mut plans, shape, room, false);
            }
        }
        let mut plans: Vec<_> =
            plans.into_iter().map(|plan| (clocks(plan, shape, room), plan)).collect();
        plans.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        Self { extents, room, plans }
    }

    fn fastest(&self) -> f64 {
        self.plans[0].0
    }

    fn clocks(&self, plan: GemmPlan) -> f64 {
        clocks(plan, self.extents.array(), self.room)
    }

    /// Returns the plans that are expected to take at most this many times as long as the fastest,
    /// which comes first.
    pub(crate) fn within(&self, times: f64) -> impl Iterator<Item = GemmPlan> {
        let most = times * self.fastest();
        self.plans.iter().take_while(move |(clocks, _)| *clocks <= most).map(|(_, plan)| *plan)
    }

    /// Returns whether a plan is expected to take little more time than the fastest one: little
    /// relative to that time, or to that of an all-reduce in which each GPU sends `bytes`.
    ///
    /// On two H100, fused products for which the model expects 1.15 and 1.09 times the product's
    /// time took 1.19 and 1.38 times as long as two kernels. On two H200, 128 x 28672 x 8192 took
    /// 132 us fused and 143 by two kernels: expected were 7 us more, and 22 for the all-reduce.
    pub(crate) fn costs_little(&self, plan: GemmPlan, bytes: f64) -> bool {
        const MOST: f64 = 1.06;
        const MOST_OF_SENT: f64 = 0.5;
        let (plan, fastest) = (self.clocks(plan), self.fastest());
        plan <= MOST * fastest || plan - fastest <= MOST_OF_SENT * bytes / SENT
    }

    /// Returns whether a product by [`GemmPlan::Wide`], during which each GPU sends `bytes` by
    /// NVLink, is expected to take less time than the fastest product and the same bytes after it.
    pub(crate) fn hides(&self, bytes: f64) -> bool {
        let wide = self.clocks(GemmPlan::Wide);
        wide.max(bytes / SENT) < self.fastest() + bytes / SENT
    }

    /// Returns the plans of few rows for products that are exchanged with the peers, the one that
    /// is expected to be the fastest first; those that split short sums, which is slow, come last.
    pub(crate) fn exchanging(&self) -> Vec<GemmPlan> {
        /// The most terms that are not split.
        const SHORT: u32 = 512;
        let shape @ [_, _, k] = self.extents.array();
        let all = self.plans.iter().filter_map(|&(clocks, plan)| match plan {
            GemmPlan::Swapped(Tiling { cluster, slices: 1, .. }) => {
                let clocks = clocks + exchange(plan, shape, self.room);
                Some((k <= SHORT && cluster.splits > 1, clocks, plan))
            }
            _ => None,
        });
        let mut all: Vec<_> = all.collect();
        all.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        all.into_iter().map(|(.., plan)| plan).collect()
    }

    /// Returns in how many rounds a plan of few rows computes split tiles.
    pub(crate) fn split_rounds(&self, plan: GemmPlan) -> f64 {
        match plan {
            GemmPlan::Swapped(tiling @ Tiling { slices: 1, .. }) => {
                Rounds::of(tiling, self.extents.array(), self.room).split
            }
            _ => 0.0,
        }
    }
}

/// Adds the plans with tiles, swapped or not, for a shape.
fn add_tiled(plans: &mut Vec<GemmPlan>, shape: [u32; 3], room: ResidentClusters, is_swapped: bool) {
    for tile @ (rows, columns) in gemm_swapped::SHAPES {
        let tiling = |cluster, slices| Tiling { rows, columns, cluster, slices };
        let plan = GemmPlan::of(is_swapped, tiling(Cluster { splits: 1, across: 1, down: 1 }, 1));
        let Some((_, shape)) = plan.swapped(shape).filter(|_| plan.is_known()) else { continue };
        let [m, _, k] = shape;
        // From here on the rows are those of the swapped product. If half of a tile's rows are
        // enough, a smaller tile is a candidate instead.
        let fits = rows == gemm_swapped::SHAPES[0].0 || rows / 2 < m;
        // The same number of smaller tiles is enough.
        let is_too_large = gemm_swapped::SHAPES.iter().any(|other| {
            other.1 == columns && other.0 < rows && m.div_ceil(other.0) == m.div_ceil(rows)
        });
        // Tiles of fewer than 64 rows are for products of fewer rows.
        if !fits || is_too_large || rows < m.min(64) {
            continue;
        }
        // Only tiles that have rows of A share rows of B.
        for cluster in clusters(tile).filter(|cluster| (cluster.down - 1) * rows < m) {
            let whole = tiling(cluster, 1);
            plans.push(GemmPlan::of(is_swapped, whole));
            // All slices of all tiles are computed at the same time.
            let rounds = Rounds::of(whole, shape, room);
            let most = (room.clusters(cluster.blocks()) / rounds.tiles) as u32;
            let most = most.min(k / SLICE).min(MOST_SLICES);
            let sliced = (2..=most).map(|n| GemmPlan::of(is_swapped, tiling(cluster, n)));
            plans.extend(sliced.filter(|plan| plan.is_known()));
        }
    }
}

/// The fewest terms of a slice.
const SLICE: u32 = 512;
/// The most rows of C for which no plan is unswapped: unswapped tiles have at least 64 rows.
const FEW_ROWS: u32 = 64;

/// Returns the plan that was measured for this shape on the GPU of this name, or for a shape with
/// the same `n` and `k` and the same number of groups of 8 rows, of which all tiles consist. For
/// more rows another plan may be twice as fast.
pub(crate) fn measured(gpu: &str, extents: Extents) -> Option<GemmPlan> {
    let [m, n, k] = extents.array();
    let (_, table) = TABLES.iter().find(|(name, _)| gpu == *name)?;
    let entries = table.lines().filter_map(parse_entry);
    let groups = |rows: u32| rows.div_ceil(8);
    let is_same =
        |[rows, columns, terms]: [u32; 3]| [groups(rows), columns, terms] == [groups(m), n, k];
    let same = entries.filter(|(shape, _)| is_same(*shape));
    same.min_by_key(|([rows, ..], _)| rows.abs_diff(m)).map(|(_, plan)| plan)
}

/// Tables that `devcomm-bench tune gemm` wrote, by the name of the GPU on which it ran.
const TABLES: [(&str, &str); 2] =
    [(H200, include_str!("plans/h200.txt")), (H100, include_str!("plans/h100.txt"))];

#[cfg(test)]
mod tests;
