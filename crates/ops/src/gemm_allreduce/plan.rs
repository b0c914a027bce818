//! How a product and its all-reduce are done.

use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, TILE_M, TILE_N};

use super::swapped;
use crate::plan::{Field, PlanText, plan_text};
use crate::prelude::*;
use crate::{GemmPlan, Tiling};

/// How [`GemmAllReduce`](super::GemmAllReduce) does a product. As text: `strips`, `wide`,
/// `unfused`, or `swapped:8x64:2` with a tile and the number of blocks that share its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmAllReducePlan {
    /// One kernel, for any number of ranks: strips of partial sums go to the rank that owns them,
    /// in any type ([`Wire`](crate::Wire)), and the sums go to all ranks. The workspace has the
    /// partial sums of the largest product, `m * n` in their type.
    Strips,
    /// One kernel, for large matrices on 2, 4 or 8 Hopper GPUs: every rank's product is rounded to
    /// bf16 (with two ranks, also to 8-bit floats, as [`Wire`](crate::Wire) says), and its tiles
    /// are sent while the next ones are multiplied. A sum is rounded again. Two ranks send each
    /// other all tiles; with more ranks each tile has an owner, which adds all ranks' parts in the
    /// order of the ranks and sends the sums to all. The workspace takes up to `4 * m * n` bytes.
    Wide,
    /// One kernel, for few rows on Hopper GPUs: every rank's product is rounded to bf16 and sent to
    /// all others before it is stored. The sum, in the order of the ranks, is rounded again. The
    /// tiles are those of [`GemmPlan::Swapped`], without slices. The workspace takes `8 * m * n`
    /// bytes for up to 256 rows; with more than two ranks, for each rank.
    Swapped(Tiling),
    /// [`Gemm`](crate::Gemm), and then [`Collectives::all_reduce`](crate::Collectives), with the
    /// workspaces of both.
    Unfused,
}

impl GemmAllReducePlan {
    /// Returns the tiles of a plan of few rows.
    pub(super) fn tiling(self) -> Option<Tiling> {
        if let Self::Swapped(tiling) = self { Some(tiling) } else { None }
    }

    /// Returns the fused plan with the tiles of a plan of few rows.
    pub(super) fn of_few_rows(plan: GemmPlan) -> Option<Self> {
        let GemmPlan::Swapped(tiling) = plan else { return None };
        swapped::kernel_of(tiling, 2).map(|_| Self::Swapped(tiling))
    }
}

/// The waves of tiles from which on most tiles are exchanged while others are multiplied. Fused
/// products were measured to be faster from 1.7 waves on.
pub(crate) const MIN_WAVES: f64 = 1.5;

/// Returns how many times the tiles of a product of `m x n` fill a GPU.
pub(crate) fn waves([m, n]: [usize; 2], multiprocessors: u32) -> f64 {
    let [rows, columns] = [m.div_ceil((CLUSTER * TILE_M) as usize), n.div_ceil(TILE_N as usize)];
    rows as f64 * columns as f64 / f64::from(multiprocessors / CLUSTER)
}

/// Returns whether a product of few rows has enough terms to hide what its kernel exchanges. If
/// not, two kernels were up to 10 % faster on two H100 and two H200: for one or two rows, and for a
/// C of 480 KiB to 1.5 MiB, which all multiprocessors should send.
pub(super) fn hides_few_rows(extents: Extents) -> bool {
    let [m, n, k] = extents.lengths();
    let bytes = m.saturating_mul(n).saturating_mul(size_of::<bf16>());
    let should_all_send = (480 << 10..=3 << 19).contains(&bytes);
    (m > 2 || m.saturating_mul(k) > 4096) && (k > 768 || !should_all_send)
}

plan_text!(GemmAllReducePlan);

impl PlanText for GemmAllReducePlan {
    const FORMS: &'static str = "strips, wide, unfused, or swapped:<rows>x<columns>:<splits>";

    const NAMES: &'static [(&'static str, Self)] =
        &[("strips", Self::Strips), ("wide", Self::Wide), ("unfused", Self::Unfused)];

    fn from_fields(name: &str, fields: &[Field]) -> Option<Self> {
        GemmPlan::from_fields(name, fields).and_then(Self::of_few_rows)
    }

    fn fields(self) -> (&'static str, Vec<Field>) {
        self.tiling().map(|tiling| GemmPlan::Swapped(tiling).fields()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
