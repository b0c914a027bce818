//! Tests of plans of products.

use super::*;
use crate::Gemm;

/// The clusters of an H100.
const ROOM: ResidentClusters = ResidentClusters([132, 66, 30, 15]);

fn on(room: ResidentClusters, shape: [u32; 3]) -> Candidates {
    Candidates::new(Extents::new(shape.map(|extent| extent as usize)).unwrap(), room)
}

fn candidates(shape: [u32; 3]) -> Vec<GemmPlan> {
    on(ROOM, shape).within(f64::INFINITY).collect()
}

#[test]
fn tables_have_nothing_but_entries_and_comments() {
    for (gpu, table) in TABLES {
        for line in table.lines() {
            let comment = line.trim().is_empty() || line.starts_with('#');
            assert!(comment || parse_entry::<GemmPlan>(line).is_some(), "{gpu}: {line}");
        }
    }
}

#[test]
fn plans_are_read_as_they_are_written() {
    let one_block = Cluster { splits: 1, across: 1, down: 1 };
    let tiling = |rows, columns, cluster, slices| Tiling { rows, columns, cluster, slices };
    for plan in [
        GemmPlan::Portable,
        GemmPlan::Wide,
        GemmPlan::Swapped(tiling(128, 64, Cluster { splits: 4, ..one_block }, 1)),
        GemmPlan::Swapped(tiling(128, 128, Cluster { across: 2, down: 2, ..one_block }, 1)),
        GemmPlan::Swapped(tiling(96, 128, one_block, 2)),
        GemmPlan::Unswapped(tiling(128, 208, Cluster { down: 2, ..one_block }, 4)),
    ] {
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
        "swapped:96x128:1:1x1:9",
        "swapped:96x128:2:1x1:2",
        "swapped:64x128:1:1x1:2",
        "swapped:256x128:1:1x1:2",
        "swapped:96x128:1:1x1:2:2",
        "unswapped:208x128:1",
        "unswapped:128x64:1",
    ] {
        let error = wrong.parse::<GemmPlan>().unwrap_err();
        assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
    }
}

#[test]
fn few_rows_are_swapped_and_many_are_not() {
    let first = |shape| candidates(shape)[0];
    for shape in [[4096, 4096, 4096], [8192, 8192, 1024], [2048, 8192, 4096]] {
        assert_eq!(first(shape), GemmPlan::Wide, "{shape:?}");
    }
    let swapped = |rows, columns, splits| {
        let cluster = Cluster { splits, across: 1, down: 1 };
        GemmPlan::Swapped(Tiling { rows, columns, cluster, slices: 1 })
    };
    assert_eq!(first([1, 4096, 4096]), swapped(8, 64, 2));
    assert_eq!(first([16, 8192, 4096]), swapped(16, 64, 1));
    assert_eq!(first([513, 8192, 3584]), swapped(176, 128, 2));
    assert_eq!(first([1, 28672, 8192]), swapped(8, 64, 2));
    assert_eq!(candidates([7, 1001, 64]), [GemmPlan::Wide]);
    // Any shape on any GPU has plans.
    let most = i32::MAX as u32 - 512;
    let even = most / 8 * 8;
    for shape in [[1, 8, 8], [most; 3], [most, 8, 8], [1, even, 1], [even; 3]] {
        for multiprocessors in [0, 1, 2, 132, u32::MAX] {
            assert!(
                on(ResidentClusters::usual(multiprocessors), shape)
                    .within(f64::INFINITY)
                    .next()
                    .is_some()
            );
        }
    }
}

#[test]
fn the_model_has_most_measured_plans_among_its_first() {
    // For an H100 it has 74 % among them, and expects more to be nearly as fast.
    let (_, table) = TABLES[0];
    let (mut found, mut entries) = (0, 0);
    for (shape, plan) in table.lines().filter_map(parse_entry::<GemmPlan>) {
        let first = &candidates(shape)[..];
        found += usize::from(first[..first.len().min(3)].contains(&plan));
        entries += 1;
    }
    assert!(10 * found >= 9 * entries, "{found} of {entries}");
}

#[test]
fn most_measured_plans_are_expected_to_be_nearly_the_fastest() {
    for (gpu, table) in TABLES {
        let (mut near, mut entries) = (0, 0);
        for (shape, plan) in table.lines().filter_map(parse_entry::<GemmPlan>) {
            near += usize::from(relative_to_first(plan, shape) <= 1.04);
            entries += 1;
        }
        assert!(5 * near >= 4 * entries, "{gpu}: {near} of {entries}");
    }
}

/// Returns the expected time of a plan, relative to that of the first plan.
fn relative_to_first(plan: GemmPlan, shape: [u32; 3]) -> f64 {
    clocks(plan, shape, ROOM) / on(ROOM, shape).fastest()
}

#[test]
fn the_first_plan_is_the_fastest_that_was_measured() {
    // Of up to 150 plans on an H100, or 70 on an H200.
    for (shape, plan) in [
        ([1, 4560, 9496], "swapped:8x64:8"),
        ([38, 2192, 4256], "swapped:48x128:4"),
        ([569, 1368, 14_720], "swapped:144x128:1:1x2:3"),
        ([2019, 392, 13_480], "unswapped:128x208:1:1x2:4"),
        ([4050, 784, 2488], "unswapped:128x208:1:1x2"),
        ([5431, 1456, 4040], "wide"),
    ] {
        assert_eq!(candidates(shape)[0].to_string(), plan, "{shape:?}");
    }
    // One with clusters of half the blocks is expected to be as fast.
    let plan = "unswapped:128x208:1:4x2".parse().unwrap();
    let ratio = relative_to_first(plan, [7051, 776, 2392]);
    assert!(ratio <= 1.002, "{ratio}");
}

#[test]
fn the_rest_of_the_tiles_is_split() {
    let of = |plan: &str, shape| on(ROOM, shape).split_rounds(plan.parse().unwrap());
    // 15 clusters of eight blocks compute 72 tiles; 30 clusters of four compute 120 whole tiles,
    // and then 21 split ones.
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
        let plans = on(ROOM, shape).exchanging();
        assert_eq!(plans[0].to_string(), plan, "{shape:?}");
        // No plan that exchanges is missing.
        let all = candidates(shape);
        let exchanges =
            |plan: &GemmPlan| matches!(plan, GemmPlan::Swapped(Tiling { slices: 1, .. }));
        assert!(all.iter().filter(|plan| exchanges(plan)).all(|plan| plans.contains(plan)));
    }
    // TMA cannot store rows of this C.
    assert_eq!(on(ROOM, [7, 1001, 64]).exchanging(), []);
}

#[test]
fn a_plan_takes_longer_than_the_best_where_its_tiles_do_not_fit() {
    // One tile of 176 rows is enough instead of two tiles of 128.
    let plan = "swapped:128x128:2:1x2".parse().unwrap();
    assert!(relative_to_first(plan, [161, 2392, 8224]) > 1.2);
    // A tile is no candidate where the same number of tiles with fewer rows is enough.
    let rows = |m| {
        candidates([m, 4512, 12384]).into_iter().filter_map(|plan| match plan {
            GemmPlan::Swapped(Tiling { rows, columns: 128, .. }) => Some(rows),
            _ => None,
        })
    };
    assert!(rows(533).any(|rows| rows == 192) && !rows(513).any(|rows| rows == 256));
}

#[test]
fn slower_tiles_cost_little_if_they_are_little_slower_or_much_is_sent() {
    let little = |plan: &str, shape @ [m, n, _]: [u32; 3]| {
        on(ROOM, shape).costs_little(plan.parse().unwrap(), 2.0 * f64::from(m * n))
    };
    assert!(little("swapped:128x128:4", [128, 28672, 8192]));
    assert!(little("swapped:16x64:1", [16, 8192, 4096]));
    assert!(!little("swapped:64x128:1", [107, 5576, 5616]));
    assert!(!little("swapped:64x128:2", [161, 2392, 8224]));
}

/// Two H100 took 142 us for the fused product of the first shape, and 125 us for product and
/// all-reduce by two kernels; for the second shape it was 664 and 699 us.
#[test]
fn tiles_that_do_not_fit_take_longer_than_the_collective() {
    let hidden = |shape @ [m, n, _]: [u32; 3]| on(ROOM, shape).hides(2.0 * f64::from(m * n));
    assert!(!hidden([795, 8824, 3824]));
    for shape in [[1275, 10904, 13496], [695, 12840, 3616], [8192, 8192, 1024]] {
        assert!(hidden(shape), "{shape:?}");
    }
}

#[test]
fn a_table_decides_for_as_many_groups_of_8_rows() {
    let (shape, plan) = parse_entry::<GemmPlan>("64 8192 1024 swapped:64x64:1 # 5.6 us").unwrap();
    assert_eq!((shape, plan.to_string()), ([64, 8192, 1024], "swapped:64x64:1".to_owned()));
    let on = |gpu, m| measured(gpu, Extents::new([m, 8192, 1024]).unwrap());
    let of = |m| on("NVIDIA H200", m);
    assert!(of(64).is_some_and(|plan| of(57) == Some(plan)));
    assert_eq!([of(56), of(65)], [None, None]);
    // Cards with fewer multiprocessors, other clocks or another link.
    for other in ["NVIDIA H100 NVL", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"] {
        assert_eq!(on(other, 64), None);
    }
}

#[test]
fn a_portable_plan_that_was_kept_is_used_and_listed_first() {
    let run = |rank: &devcomm_host::Rank| {
        let (stream, shape) = (rank.stream()?, [256, 256, 64]);
        assert_ne!(Gemm::new(&stream)?.plan(shape)?, GemmPlan::Portable);
        let gemm = Gemm::new(&stream)?;
        let by_default = gemm.plans(shape)?;
        gemm.tuned.lock().insert(Extents::new(shape)?, GemmPlan::Portable);
        assert_eq!(gemm.plan(shape)?, GemmPlan::Portable);
        let (portable, others) = by_default.split_last().unwrap();
        assert_eq!(gemm.plans(shape)?, [&[*portable], others].concat());
        Ok::<_, devcomm_host::Error>(())
    };
    devcomm_host::World::simulated(1).unwrap().run(run).unwrap();
}
