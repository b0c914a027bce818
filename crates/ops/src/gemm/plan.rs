//! Which kernel computes a product, and how: from a table of measurements, or by a model.

use std::fmt;
use std::str::FromStr;

use devcomm_kernels::gemm::gemm_swapped::Cluster;
use devcomm_kernels::gemm::{gemm_swapped, gemm_wgmma};

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmPlan {
    /// By `gemm_mma`: on every GPU since Ampere, any shape.
    Portable,
    /// By `gemm_wgmma`: on Hopper, tiles of 128 x 256.
    Wide,
    /// By `gemm_swapped`: on Hopper, for few rows.
    Swapped {
        /// Rows of a tile of C.
        rows: u32,
        /// Columns of a tile of C.
        columns: u32,
        /// The blocks of a cluster.
        cluster: Cluster,
    },
}

impl GemmPlan {
    /// Whether A and B may be stored transposed.
    pub(super) fn transposes(self) -> bool {
        !matches!(self, Self::Swapped { .. })
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Portable => f.write_str("portable"),
            Self::Wide => f.write_str("wide"),
            Self::Swapped { rows, columns, cluster: Cluster { splits, across, down } } => {
                write!(f, "swapped:{rows}x{columns}:{splits}")?;
                if across * down > 1 {
                    write!(f, ":{across}x{down}")?;
                }
                Ok(())
            }
        }
    }
}

/// The text is not a plan's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no plan: portable, wide, swapped:<rows>x<columns>:<splits> or \
     swapped:<rows>x<columns>:<splits>:<across>x<down>"
)]
pub struct ParsePlanError(String);

impl FromStr for GemmPlan {
    type Err = ParsePlanError;

    fn from_str(text: &str) -> Result<Self, ParsePlanError> {
        let swapped = || {
            let pair = |text: &str| {
                let (left, right) = text.split_once('x')?;
                Some((left.parse().ok()?, right.parse().ok()?))
            };
            let mut parts = text.strip_prefix("swapped:")?.splitn(3, ':');
            let (rows, columns) = pair(parts.next()?)?;
            let splits = parts.next()?.parse().ok()?;
            let (across, down) = parts.next().map_or(Some((1, 1)), pair)?;
            let cluster = Cluster { splits, across, down };
            let known = gemm_swapped::SHAPES.contains(&(rows, columns))
                && clusters((rows, columns)).any(|known| known == cluster);
            known.then_some(Self::Swapped { rows, columns, cluster })
        };
        match text {
            "portable" => Some(Self::Portable),
            "wide" => Some(Self::Wide),
            _ => swapped(),
        }
        .ok_or_else(|| ParsePlanError(text.to_owned()))
    }
}

/// The clusters of plans with tiles of these rows and columns: at most eight blocks.
pub(crate) fn clusters((rows, columns): (u32, u32)) -> impl Iterator<Item = Cluster> {
    let sizes = || [1, 2, 4, 8].into_iter();
    let all = sizes().flat_map(move |across| {
        sizes().flat_map(move |down| sizes().map(move |splits| Cluster { splits, across, down }))
    });
    let shares = gemm_swapped::shares((rows, columns));
    all.filter(move |cluster| {
        let Cluster { across, down, .. } = *cluster;
        let divides = (rows / 8).is_multiple_of(across) && (columns / 8).is_multiple_of(down);
        cluster.blocks() <= 8 && divides && (shares || across * down == 1)
    })
}

/// How many clusters of 1, 2, 4 and 8 blocks of `gemm_swapped` run on a GPU at the same time. A
/// cluster runs within one part of the GPU: larger ones leave multiprocessors unused, and how many
/// depends on the parts of this GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room(pub(crate) [u32; 4]);

impl Room {
    /// What an H100 has, in proportion to its multiprocessors.
    pub(crate) fn usual(multiprocessors: u32) -> Self {
        let of = |clusters: u64| (u64::from(multiprocessors) * clusters / 132) as u32;
        Self([multiprocessors, of(66), of(30), of(15)])
    }

    fn clusters(self, of_blocks: u32) -> f64 {
        let [one, two, four, eight] = self.0;
        let clusters = match of_blocks {
            1 => one,
            2 => two,
            4 => four,
            _ => eight,
        };
        f64::from(clusters.max(1))
    }
}

/// Plans for a shape on Hopper, the one that the model expects to be fastest first.
pub(crate) fn candidates(shape: [u32; 3], room: Room) -> Vec<GemmPlan> {
    with_clocks(shape, room).into_iter().map(|(_, plan)| plan).collect()
}

/// Those of them that the model expects to take at most half as long again as the first: it
/// expected 1.39 times as long of the fastest of 569 x 1368 x 14720.
pub(crate) fn likely(shape: [u32; 3], room: Room) -> Vec<GemmPlan> {
    let plans = with_clocks(shape, room);
    let most = 1.5 * plans[0].0;
    plans.into_iter().take_while(|(clocks, _)| *clocks <= most).map(|(_, plan)| plan).collect()
}

/// How many times as long as the best plan a plan takes, by the model.
pub(crate) fn slowdown(plan: GemmPlan, shape: [u32; 3], room: Room) -> f64 {
    clocks(plan, shape, room) / with_clocks(shape, room)[0].0
}

/// Whether a product by [`GemmPlan::Wide`] is expected to take less time than the fastest one and,
/// after it, so many bytes that each GPU sends by NVLink.
pub(crate) fn hides(shape: [u32; 3], room: Room, bytes: f64) -> bool {
    /// Bytes in a clock that an all-reduce sends: 330 GB/s.
    const SENT: f64 = 174.0;
    let wide = clocks(GemmPlan::Wide, shape, room);
    wide.max(bytes / SENT) < with_clocks(shape, room)[0].0 + bytes / SENT
}

/// All plans for a shape on Hopper with the expected clocks, the least first.
fn with_clocks(shape @ [m, n, _]: [u32; 3], room: Room) -> Vec<(f64, GemmPlan)> {
    let mut plans = vec![GemmPlan::Wide];
    // C's rows are stored by TMA.
    if n.is_multiple_of(8) {
        for (rows, columns) in gemm_swapped::SHAPES {
            // A smaller tile does, or a larger one reads B less often.
            let fits = rows == gemm_swapped::SHAPES[0].0 || rows / 2 < m;
            // As many tiles of fewer rows do.
            let is_too_large = gemm_swapped::SHAPES.iter().any(|other| {
                other.1 == columns && other.0 < rows && m.div_ceil(other.0) == m.div_ceil(rows)
            });
            if fits && !is_too_large && rows >= m.min(64) {
                // Rows of B are shared by tiles that have rows of A.
                let useful = clusters((rows, columns));
                let useful = useful.filter(|cluster| (cluster.down - 1) * rows < m);
                plans.extend(useful.map(|cluster| GemmPlan::Swapped { rows, columns, cluster }));
            }
        }
    }
    let mut plans: Vec<_> =
        plans.into_iter().map(|plan| (clocks(plan, shape, room), plan)).collect();
    plans.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    plans
}

/// The rounds in which the clusters of `gemm_swapped` compute what they compute together, of tiles
/// that share what they load: first whole tiles, as long as there are some for all blocks.
struct Rounds {
    full: f64,
    /// What is left for the last rounds.
    rest: f64,
    /// In how many rounds the rest is computed split, each `1 / splits` as long. 0 if it is not.
    split: f64,
}

impl Rounds {
    fn of([rows, columns]: [u32; 2], cluster: Cluster, [m, n]: [f64; 2], room: Room) -> Self {
        let Cluster { splits, across, down } = cluster;
        let together =
            (m / f64::from(rows * down)).ceil() * (n / f64::from(columns * across)).ceil();
        let clusters = room.clusters(cluster.blocks());
        let in_round = clusters * f64::from(splits);
        let full = (together / in_round).floor();
        let rest = together - full * in_round;
        let split = Some((rest / clusters).ceil()).filter(|rounds| *rounds < f64::from(splits));
        Self { full, rest, split: split.unwrap_or(0.0) }
    }
}

/// Plans of few rows for products that are exchanged with the peers, the one that the model expects
/// to be fastest first. Those that split short sums, which takes longer than it saves, come last.
pub(crate) fn exchanging(shape @ [_, _, k]: [u32; 3], room: Room) -> Vec<GemmPlan> {
    /// The most terms that are not split.
    const SHORT: u32 = 512;
    let all = with_clocks(shape, room).into_iter().filter_map(|(clocks, plan)| match plan {
        GemmPlan::Swapped { cluster: Cluster { splits, .. }, .. } => {
            Some((k <= SHORT && splits > 1, clocks + exchange(plan, shape, room), plan))
        }
        _ => None,
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    all.into_iter().map(|(.., plan)| plan).collect()
}

/// The clocks in which the blocks of a plan of few rows exchange what they have summed with the
/// peers: after a round of split tiles each block has a part of one. Fitted to all plans of 122
/// shapes on two H100.
fn exchange(plan: GemmPlan, [m, n, _]: [u32; 3], room: Room) -> f64 {
    /// For an element of C.
    const ELEMENT: f64 = 0.3;
    let GemmPlan::Swapped { rows, columns, cluster } = plan else { return 0.0 };
    let Rounds { full, rest, split } =
        Rounds::of([rows, columns], cluster, [m, n].map(f64::from), room);
    let last = if split > 0.0 { split / f64::from(cluster.splits) } else { rest.min(1.0) };
    ELEMENT * f64::from(rows.min(m)) * f64::from(columns) * (full + last)
}

/// In how many rounds a plan of few rows computes tiles split. After each a block has sums, sooner
/// than of a whole tile.
pub(crate) fn split_rounds(plan: GemmPlan, [m, n, _]: [u32; 3], room: Room) -> f64 {
    match plan {
        GemmPlan::Swapped { rows, columns, cluster } => {
            Rounds::of([rows, columns], cluster, [m, n].map(f64::from), room).split
        }
        _ => 0.0,
    }
}

/// Terms of a step.
const STEP: u32 = 64;

/// The expected time, in clocks of 1.9 GHz. The constants were fitted to 13,000 measurements on an
/// H100 and an H200, up to 150 plans of each of 200 random shapes, and to the tables; those of rows
/// beyond the end and of the L2 cache to 48 plans of each of 260 shapes more on an H200.
fn clocks(plan: GemmPlan, [m, n, k]: [u32; 3], room: Room) -> f64 {
    /// Bytes of a row that a step takes.
    const ROW: f64 = 2.0 * STEP as f64;
    /// Products of two terms by a multiprocessor in a clock, of each kernel: fewer than its 2,048,
    /// as a GPU that multiplies all the time lowers its clock.
    const MULTIPLIED: f64 = 2048.0 / 1.226;
    const MULTIPLIED_WIDE: f64 = 2048.0 / 1.215;
    /// Bytes that a block receives in a clock, alone and as one of several that share rows.
    const RECEIVED: [f64; 2] = [93.5, 77.4];
    /// Clocks that a row of A beyond its end takes a block besides.
    const BEYOND: f64 = 0.8;
    /// Bytes of B in a clock from the GPU's memory: for each multiprocessor if all read, and the
    /// most that one gets.
    const FROM_MEMORY: [f64; 2] = [28.2, 31.0];
    /// The clocks of a round of tiles beside its steps, and those of a launch of each kernel.
    const ROUND: f64 = 907.0;
    const LAUNCH: f64 = 5040.0;
    const LAUNCH_WIDE: f64 = 5970.0;
    /// The clocks until blocks that share rows have met, and for each block of a cluster.
    const SHARE: f64 = 1270.0;
    const BLOCK: f64 = 31.8;
    /// The clocks of an exchange of sums, and of each sum that a block gets from others.
    const EXCHANGE: [f64; 2] = [276.0, 0.319];
    // Bytes in a clock. Rows that begin amid lines of the L2 cache take parts of two lines for each
    // step.
    let from_l2 = if k.is_multiple_of(STEP) { 10_200.0 } else { 4520.0 };
    let (steps, terms) = (f64::from(k.div_ceil(STEP)), f64::from(STEP));
    let [m, n, multiprocessors] = [m, n, room.0[0].max(1)].map(f64::from);
    // What limits a step adds up in part.
    let together = |limits: &[f64]| {
        limits.iter().map(|limit| limit.powf(3.3)).sum::<f64>().powf(3.3_f64.recip())
    };
    let (rows, columns, cluster) = match plan {
        GemmPlan::Portable => return f64::INFINITY,
        GemmPlan::Wide => {
            let rows = f64::from(gemm_wgmma::CLUSTER * gemm_wgmma::TILE_M);
            let columns = f64::from(gemm_wgmma::TILE_N);
            let tiles = (m / rows).ceil() * (n / columns).ceil();
            let clusters = room.clusters(gemm_wgmma::CLUSTER);
            // Each block loads its rows of A, and half of the rows of B for both.
            let round = |tiles: f64| {
                let multiply = rows / 2.0 * columns * terms / MULTIPLIED_WIDE;
                let receive = ROW * (rows / 2.0 + columns) / RECEIVED[1];
                let shared = ROW * (rows + columns) * tiles / from_l2;
                together(&[multiply, receive, shared]) * steps + ROUND
            };
            let full_rounds = (tiles / clusters).floor();
            let rest = tiles - full_rounds * clusters;
            let last = if rest > 0.0 { round(rest) } else { 0.0 };
            return full_rounds * round(clusters) + last + LAUNCH_WIDE;
        }
        GemmPlan::Swapped { rows, columns, cluster } => (rows, columns, cluster),
    };
    let rounds = Rounds::of([rows, columns], cluster, [m, n], room);
    let [rows, columns] = [rows, columns].map(f64::from);
    let blocks = f64::from(cluster.blocks());
    let clusters = room.clusters(cluster.blocks());
    let Cluster { splits, across, down } = cluster;
    let shares = across * down > 1;
    let received = RECEIVED[usize::from(shares)];
    let [splits, across, down] = [splits, across, down].map(f64::from);
    let tiles = (m / rows).ceil();
    let beyond = (tiles * rows - m).min(rows / across);
    // So many clusters multiply, receive their factors, and share the memory and the L2 cache.
    let round = |clusters: f64, steps: f64| {
        let multiply = rows * columns * terms / MULTIPLIED;
        let receive = ROW * (rows + columns) / received + BEYOND * beyond;
        let all = clusters * blocks;
        let read = ROW * columns / tiles;
        let read = read * (all / multiprocessors / FROM_MEMORY[0]).max(FROM_MEMORY[1].recip());
        let shared = ROW * (rows.min(m) / across + columns / down) * all / from_l2;
        together(&[multiply, receive, read, shared]) * steps + ROUND
    };
    let mut all = rounds.full * round(clusters, steps);
    if rounds.rest > 0.0 {
        let clusters = rounds.rest.min(clusters);
        all += if rounds.split > 0.0 {
            // After each round the blocks exchange their sums: each gets its part of the tile.
            let exchange = EXCHANGE[0] + EXCHANGE[1] * rows * columns * (1.0 - splits.recip());
            rounds.split * (round(clusters, (steps / splits).ceil()) + exchange)
        } else {
            round(clusters, steps)
        };
    }
    all + LAUNCH + BLOCK * (blocks - 1.0) + if shares { SHARE } else { 0.0 }
}

/// The plan of a measurement for this shape on the GPU of this name: one of the same `n` and `k`,
/// and as many groups of 8 rows, which all tiles consist of. Of more rows another plan may be twice
/// as fast.
pub(crate) fn measured(gpu: &str, [m, n, k]: [u32; 3]) -> Option<GemmPlan> {
    let (_, table) = TABLES.iter().find(|(name, _)| gpu.contains(name))?;
    let entries = table.lines().filter_map(Entry::parse);
    let groups = |rows: u32| rows.div_ceil(8);
    let same = entries.filter(|entry| entry.n == n && entry.k == k && groups(entry.m) == groups(m));
    same.min_by_key(|entry| entry.m.abs_diff(m)).map(|entry| entry.plan)
}

/// Tables that `devcomm-bench tune gemm` wrote, each for the GPUs whose name contains a text.
const TABLES: [(&str, &str); 2] =
    [("H200", include_str!("plans/h200.txt")), ("H100", include_str!("plans/h100.txt"))];

/// A line of a table: `m n k plan`, and a comment behind `#`. `bench/src/versus/tune.rs` writes it.
struct Entry {
    m: u32,
    n: u32,
    k: u32,
    plan: GemmPlan,
}

impl Entry {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split('#').next()?.split_whitespace();
        let mut number = || words.next()?.parse().ok();
        let (m, n, k) = (number()?, number()?, number()?);
        Some(Self { m, n, k, plan: words.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H100's.
    const ROOM: Room = Room([132, 66, 30, 15]);

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
        let swapped = |splits, across, down| {
            let cluster = Cluster { splits, across, down };
            GemmPlan::Swapped { rows: 128, columns: 128, cluster }
        };
        for plan in [GemmPlan::Portable, GemmPlan::Wide, swapped(4, 1, 1), swapped(1, 2, 2)] {
            assert_eq!(plan.to_string().parse(), Ok(plan));
        }
        for wrong in [
            "",
            "tall",
            "swapped:64x128",
            "swapped:63x128:2",
            "swapped:64x128:3",
            "swapped:128x128:8:2x1",
            "swapped:64x128:1:2x1",
        ] {
            let error = wrong.parse::<GemmPlan>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
        }
    }

    #[test]
    fn few_rows_are_swapped_and_many_are_not() {
        let first = |shape| candidates(shape, ROOM)[0];
        for shape in [[4096, 4096, 4096], [8192, 8192, 1024], [2048, 8192, 4096]] {
            assert_eq!(first(shape), GemmPlan::Wide, "{shape:?}");
        }
        let swapped = |rows, columns, splits| {
            let cluster = Cluster { splits, across: 1, down: 1 };
            GemmPlan::Swapped { rows, columns, cluster }
        };
        assert_eq!(first([1, 4096, 4096]), swapped(8, 64, 2));
        assert_eq!(first([16, 8192, 4096]), swapped(16, 64, 1));
        assert_eq!(first([513, 8192, 3584]), swapped(176, 128, 2));
        assert_eq!(first([1, 28672, 8192]), swapped(8, 64, 2));
        assert_eq!(candidates([7, 1001, 64], ROOM), [GemmPlan::Wide]);
        // Any shape on any GPU has plans.
        for shape in [[1, 8, 8], [u32::MAX; 3], [u32::MAX, 8, 8], [1, u32::MAX - 7, 1]] {
            for multiprocessors in [0, 1, 2, 132, u32::MAX] {
                assert!(!candidates(shape, Room::usual(multiprocessors)).is_empty());
            }
        }
    }

    #[test]
    fn the_model_has_most_measured_plans_among_its_first() {
        for (gpu, table) in TABLES {
            let (mut found, mut entries) = (0, 0);
            for Entry { m, n, k, plan } in table.lines().filter_map(Entry::parse) {
                let first = &candidates([m, n, k], ROOM)[..];
                found += usize::from(first[..first.len().min(3)].contains(&plan));
                entries += 1;
            }
            assert!(5 * found >= 4 * entries, "{gpu}: {found} of {entries}");
        }
    }

    #[test]
    fn the_first_plan_is_the_fastest_that_was_measured() {
        // Of up to 150 plans on an H100, or 70 on an H200.
        for (shape, plan) in [
            ([38, 2192, 4256], "swapped:48x128:4"),
            ([161, 2392, 8224], "swapped:176x128:4"),
            ([227, 1472, 2768], "swapped:128x128:4"),
            ([299, 5688, 2904], "swapped:160x128:1:4x2"),
            ([4564, 6280, 8984], "wide"),
        ] {
            assert_eq!(candidates(shape, ROOM)[0].to_string(), plan, "{shape:?}");
        }
    }

    #[test]
    fn the_rest_of_the_tiles_is_split() {
        let of = |plan: &str, shape| split_rounds(plan.parse().unwrap(), shape, ROOM);
        // 15 clusters of eight blocks compute 72 tiles; 30 of four 120 whole ones, and then 21.
        assert_eq!(of("swapped:8x64:8", [1, 4560, 9496]), 5.0);
        assert_eq!(of("swapped:8x64:4", [4, 8968, 2312]), 1.0);
        // One more round would be as long as those of whole tiles.
        assert_eq!(of("swapped:8x64:2", [1, 8192, 4096]), 0.0);
        assert_eq!(of("swapped:8x64:1", [8, 6440, 8784]), 0.0);
    }

    #[test]
    fn short_sums_that_are_exchanged_are_not_split_and_large_parts_are() {
        // The fastest of all plans on two H100.
        for (shape, plan) in [
            ([13, 3032, 368], "swapped:16x64:1"),
            ([27, 1320, 472], "swapped:32x64:1"),
            ([87, 488, 632], "swapped:64x64:4"),
            ([208, 288, 696], "swapped:64x64:4"),
            ([8, 3928, 2360], "swapped:8x64:2"),
        ] {
            let plans = exchanging(shape, ROOM);
            assert_eq!(plans[0].to_string(), plan, "{shape:?}");
            // None is missing.
            let all = candidates(shape, ROOM);
            assert!(all.iter().all(|plan| *plan == GemmPlan::Wide || plans.contains(plan)));
        }
        // There are no rows of C that TMA stores.
        assert_eq!(exchanging([7, 1001, 64], ROOM), []);
    }

    #[test]
    fn a_plan_takes_longer_than_the_best_where_its_tiles_do_not_fit() {
        let of = |plan: &str, shape| slowdown(plan.parse().unwrap(), shape, ROOM);
        // One tile of 176 rows does what two of 128 do.
        assert!(of("swapped:128x128:2:1x2", [161, 2392, 8224]) > 1.2);
        let best = of("swapped:160x128:1:4x2", [299, 5688, 2904]);
        assert!((best - 1.0).abs() < 1e-9, "{best}");
        // Nor is a tile a candidate where as many of fewer rows do.
        let rows = |m| {
            candidates([m, 4512, 12384], ROOM).into_iter().filter_map(|plan| match plan {
                GemmPlan::Swapped { rows, columns: 128, .. } => Some(rows),
                _ => None,
            })
        };
        assert!(rows(533).any(|rows| rows == 192) && !rows(513).any(|rows| rows == 256));
    }

    /// On two H100 the fused product of the first shape took 142 us, the two kernels 125; of the
    /// second one 664 and 699.
    #[test]
    fn tiles_that_do_not_fit_take_longer_than_the_collective() {
        let hidden = |shape @ [m, n, _]: [u32; 3]| hides(shape, ROOM, 2.0 * f64::from(m * n));
        assert!(!hidden([795, 8824, 3824]));
        for shape in [[1275, 10904, 13496], [695, 12840, 3616], [8192, 8192, 1024]] {
            assert!(hidden(shape), "{shape:?}");
        }
    }

    #[test]
    fn a_table_decides_for_as_many_groups_of_8_rows() {
        let entry = Entry::parse("64 8192 1024 swapped:64x64:1 # 5.6 us").unwrap();
        assert_eq!((entry.m, entry.n, entry.k), (64, 8192, 1024));
        assert_eq!(entry.plan.to_string(), "swapped:64x64:1");
        let of = |m| measured("NVIDIA H200", [m, 8192, 1024]);
        assert!(of(64).is_some_and(|plan| of(57) == Some(plan)));
        assert_eq!([of(56), of(65)], [None, None]);
        assert_eq!(measured("a GPU of another kind", [64, 8192, 1024]), None);
    }
}
