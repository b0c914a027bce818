//! A model of the time that a plan takes, fitted to measurements.

use devcomm_kernels::gemm::gemm_swapped::Cluster;
use devcomm_kernels::gemm::gemm_wgmma;

use super::launches::kernel_of;
use super::plan::{GemmPlan, Tiling};
use super::tile_kernel::ResidentClusters;
use crate::prelude::*;

/// The rounds in which the clusters of `gemm_swapped` compute a product: first whole tiles, while
/// there are some for all blocks. The `across x down` tiles that share loads count as one here.
pub(super) struct Rounds {
    pub(super) tiles: f64,
    full: f64,
    /// The tiles that are left for the last rounds.
    rest: f64,
    /// The rounds in which the rest is computed split, each `1 / splits` as long, or 0.
    pub(super) split: f64,
}

impl Rounds {
    pub(super) fn of(tiling: Tiling, [m, n, _]: [u32; 3], room: ResidentClusters) -> Self {
        let Tiling { rows, columns, cluster, .. } = tiling;
        let Cluster { splits, across, down } = cluster;
        let tiles = f64::from(m.div_ceil(rows * down)) * f64::from(n.div_ceil(columns * across));
        let clusters = room.clusters(cluster.blocks());
        let in_round = clusters * f64::from(splits);
        let full = (tiles / in_round).floor();
        let rest = tiles - full * in_round;
        let split = Some((rest / clusters).ceil()).filter(|rounds| *rounds < f64::from(splits));
        Self { tiles, full, rest, split: split.unwrap_or(0.0) }
    }
}

/// Returns the clocks in which the blocks of a plan of few rows exchange sums with the peers.
/// Fitted to all plans of 122 shapes on two H100.
pub(super) fn exchange(plan: GemmPlan, shape: [u32; 3], room: ResidentClusters) -> f64 {
    /// The cost of an element of C.
    const ELEMENT: f64 = 0.3;
    let GemmPlan::Swapped(tiling) = plan else { return 0.0 };
    let Tiling { rows, columns, cluster, .. } = tiling;
    let Rounds { full, rest, split, .. } = Rounds::of(tiling, shape, room);
    let last = if split > 0.0 { split / f64::from(cluster.splits) } else { rest.min(1.0) };
    ELEMENT * f64::from(rows.min(shape[0])) * f64::from(columns) * (full + last)
}

/// Terms of a step.
const STEP: u32 = 64;

/// Bytes of a row that a step takes.
const ROW: f64 = 2.0 * STEP as f64;
/// Bytes that a block receives in a clock while it multiplies.
const RECEIVED: f64 = 51.9;
/// The clocks from a load to its data, in which other steps are loaded.
const LATENCY: f64 = 2725.0;
/// The clocks of a round of tiles in addition to its steps.
const ROUND: f64 = 440.0;

/// Returns the expected time, in clocks of 1.9 GHz. The constants were fitted to 60 plans of each
/// of 223 shapes on two H200 and of 190 on an H100.
pub(super) fn clocks(plan: GemmPlan, shape: [u32; 3], room: ResidentClusters) -> f64 {
    /// The time of an unswapped product relative to that of the swapped product with the transposed
    /// shape and tiles, for which the model computes the same limits.
    const UNSWAPPED: f64 = 1.028;
    let factor = if matches!(plan, GemmPlan::Unswapped(_)) { UNSWAPPED } else { 1.0 };
    match plan.swapped(shape) {
        Some((tiling, shape)) => match steps(plan, tiling, shape, room) {
            Some(steps) => factor * tiled(tiling, shape, f64::from(steps), room),
            None => f64::INFINITY,
        },
        None if plan == GemmPlan::Wide => wide(shape, room),
        None => f64::INFINITY,
    }
}

/// Returns the steps that a block loads at the same time, if the plan is possible: those of all
/// stages of its shared memory. The kernel's `depth` is the number of steps of a stage.
fn steps(plan: GemmPlan, tiling: Tiling, shape: [u32; 3], room: ResidentClusters) -> Option<u32> {
    /// Dynamic shared memory that a block of any of these kernels may have on Hopper: static memory
    /// takes at most 1 of the block's 227 KiB.
    const SHARED: u32 = 226 << 10;
    let Tiling { rows, columns, cluster, slices } = tiling;
    let kernel = kernel_of(plan, (rows, columns), bf16::DATA_TYPE)?;
    let clusters = room.clusters(cluster.blocks()) as u32;
    let (division, _) = (kernel.divide)(shape, cluster, slices, [clusters, SHARED])?;
    Some(division.stages * kernel.depth)
}

/// Returns the bytes in a clock from the L2 cache. For each step, a row that begins within a line
/// of 128 bytes takes parts of two; one that begins within a sector of 32 bytes, of five sectors.
fn from_l2(k: u32) -> f64 {
    if k.is_multiple_of(STEP) {
        7090.0
    } else if k.is_multiple_of(16) {
        4910.0
    } else {
        3400.0
    }
}

/// Returns a step's clocks from its limits': little more than the largest if `power` is high.
fn combined(limits: &[f64], power: f64) -> f64 {
    limits.iter().map(|limit| limit.powf(power)).sum::<f64>().powf(power.recip())
}

/// The powers of [`combined`]: for most limits, and for these together with that of the memory.
const POWER: f64 = 12.0;
const POWER_OF_MEMORY: f64 = 4.32;

/// [`clocks`] of [`GemmPlan::Wide`].
fn wide([m, n, k]: [u32; 3], room: ResidentClusters) -> f64 {
    /// The multiply-adds of a multiprocessor in a clock of 1.9 GHz: fewer than the 2,048 that its
    /// tensor cores can do, as a GPU that multiplies all the time lowers its clock.
    const MULTIPLIED: f64 = 2048.0 / 1.28;
    const LAUNCH: f64 = 4800.0;
    /// The L2 cache's rate for these tiles, relative to [`from_l2`], if rows begin within lines.
    const UNALIGNED: f64 = 0.963;
    let rows = f64::from(gemm_wgmma::CLUSTER * gemm_wgmma::TILE_M);
    let columns = f64::from(gemm_wgmma::TILE_N);
    let tiles = (f64::from(m) / rows).ceil() * (f64::from(n) / columns).ceil();
    let clusters = room.clusters(gemm_wgmma::CLUSTER);
    let sent = from_l2(k) * if k.is_multiple_of(STEP) { 1.0 } else { UNALIGNED };
    // Each block loads its rows of A, and half of the rows of B for both.
    let round = |tiles: f64| {
        let multiply = rows / 2.0 * columns * f64::from(STEP) / MULTIPLIED;
        let receive = ROW * (rows / 2.0 + columns) / RECEIVED;
        let shared = ROW * (rows + columns) * tiles / sent;
        let limits = [multiply, receive, shared, LATENCY / f64::from(gemm_wgmma::STAGES)];
        combined(&limits, POWER) * f64::from(k.div_ceil(STEP)) + ROUND
    };
    let full_rounds = (tiles / clusters).floor();
    let rest = tiles - full_rounds * clusters;
    let last = if rest > 0.0 { round(rest) } else { 0.0 };
    full_rounds * round(clusters) + last + LAUNCH
}

/// [`clocks`] of plans with tiles of [`gemm_swapped`](devcomm_kernels::gemm::gemm_swapped). A block
/// loads `in_flight` steps at the same time.
fn tiled(
    tiling @ Tiling { rows, columns, cluster, slices }: Tiling,
    shape @ [m, n, k]: [u32; 3],
    in_flight: f64,
    room: ResidentClusters,
) -> f64 {
    /// The multiply-adds of a multiprocessor in a clock of 1.9 GHz.
    const MULTIPLIED: f64 = 2048.0 / 1.317;
    /// Clocks that a block takes for each row of its tile beyond the end of A.
    const BEYOND: f64 = 1.135;
    /// Bytes from the GPU's memory in a clock: for each multiprocessor if all read, and the most
    /// that one of them gets.
    const FROM_MEMORY: [f64; 2] = [18.7, 24.0];
    /// The L2 cache sends once what neighbouring multiprocessors read at the same time. Blocks that
    /// compute whole tiles of the same column read the same rows of B: what is sent of B is divided
    /// by 1 plus this number for each doubling of [`Cluster::splits`].
    const SAME_COLUMN: f64 = 0.077;
    /// Neighbouring blocks that compute parts of one tile read different terms: the cache's rate is
    /// multiplied by 1 minus this number for each doubling of the number of parts.
    const OTHER_TERMS: f64 = 0.051;
    const LAUNCH: f64 = 3236.0;
    /// The clocks for each further block of a cluster, and until blocks that share rows have met.
    const BLOCK: f64 = 31.8;
    const SHARE: f64 = 1123.0;
    /// The clocks of an exchange of sums, and of each sum that a block gets from others; and the
    /// part of them that the loads of the next round do not hide.
    const EXCHANGE: [f64; 2] = [1925.0, 0.457];
    const NOT_HIDDEN: f64 = 0.2;
    /// The clocks of adding slices, and of each sum of a tile: once, and for each slice.
    const SLICES: [f64; 3] = [5874.0, 0.0854, 0.0983];
    let steps = f64::from(k.div_ceil(STEP));
    let [m, n, multiprocessors] = [m, n, room.0[0].max(1)].map(f64::from);
    let rounds = Rounds::of(tiling, shape, room);
    let [rows, columns] = [rows, columns].map(f64::from);
    let blocks = f64::from(cluster.blocks());
    let clusters = room.clusters(cluster.blocks());
    let Cluster { splits, across, down } = cluster;
    let shares = across * down > 1;
    let [splits, across, down] = [splits, across, down].map(f64::from);
    let [tile_rows, tile_columns] = [(m / rows).ceil(), (n / columns).ceil()];
    let beyond = (tile_rows * rows - m).min(rows / across);
    // The clocks of a round in which `clusters` clusters multiply, receive their factors, and share
    // the memory and the L2 cache. Neighbouring blocks multiply `parts` parts of the terms.
    let round = |clusters: f64, steps: f64, parts: f64| {
        let multiply = rows * columns * f64::from(STEP) / MULTIPLIED;
        let receive = ROW * (rows + columns) / RECEIVED + BEYOND * beyond;
        let all = clusters * blocks;
        let read = ROW * (columns / tile_rows + rows / tile_columns);
        let read = read * (all / multiprocessors / FROM_MEMORY[0]).max(FROM_MEMORY[1].recip());
        let same_column = if parts > 1.0 { 1.0 } else { 1.0 + SAME_COLUMN * splits.log2() };
        let other_terms = 1.0 - OTHER_TERMS * parts.log2();
        let sent = ROW * (rows.min(m) / across + columns / down / same_column) * all;
        let limits = [multiply, receive, sent / (from_l2(k) * other_terms), LATENCY / in_flight];
        combined(&[combined(&limits, POWER), read], POWER_OF_MEMORY) * steps + ROUND
    };
    let launch = LAUNCH + BLOCK * (blocks - 1.0) + if shares { SHARE } else { 0.0 };
    if slices > 1 {
        // All slices of a tile are computed at the same time; the last block adds them.
        let slices = f64::from(slices);
        let add = SLICES[0] + rows * columns * (SLICES[1] + SLICES[2] * slices);
        let parts = if shares { 1.0 } else { slices };
        return round(rounds.tiles * slices, (steps / slices).ceil(), parts) + add + launch;
    }
    let mut all = rounds.full * round(clusters, steps, 1.0);
    if rounds.rest > 0.0 {
        let clusters = rounds.rest.min(clusters);
        all += if rounds.split > 0.0 {
            // After each round the blocks exchange their sums: each gets its part of the tile.
            let exchange = EXCHANGE[0] + EXCHANGE[1] * rows * columns * (1.0 - splits.recip());
            let exchanges = exchange * (1.0 + NOT_HIDDEN * (rounds.split - 1.0));
            rounds.split * round(clusters, (steps / splits).ceil(), splits) + exchanges
        } else {
            round(clusters, steps, 1.0)
        };
    }
    all + launch
}
