//! Tests of launch attributes: clusters and dependent launches; of transposed stores and added
//! tiles.

use cuda_std::{bf16, f16};
use devcomm::sim;
use devcomm::{
    Element, Error, LaunchConfig, LaunchError, LaunchRefusal, Rank, Simulation, TensorMap,
    TensorMapDesc,
};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels;
use devcomm_device_tests::kernels::launches::{THREADS, TILE_SHARED};
use devcomm_testing::machines::Gpus;
use devcomm_testing::numbers::Number;
use devcomm_testing::simulated::{failure, read, simulate};

/// Runs `body` on one GPU; on a simulated one for several seeds.
fn on_a_gpu(name: &str, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
    let gpus = Gpus::from(Simulation::new(1)).with_kernels(&KERNELS);
    gpus.run_seeds(name, 0..20, |rank, _| {
        rank.load(&KERNELS)?;
        body(rank)
    });
}

fn refusal(result: Result<(), Error>) -> LaunchRefusal {
    match result {
        Err(Error::Launch(LaunchError::Refused { refusal, .. })) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

const BLOCKS: u32 = 24;

/// Launches one of the two kernels that pass numbers on (the one with clusters of two if `fixed`),
/// and checks what the blocks of clusters of `size` got.
fn pass_on(rank: &Rank, config: LaunchConfig, fixed: bool, size: u32) -> Result<(), Error> {
    let stream = rank.stream()?;
    let out = rank.communicator()?.mem_alloc::<f32>((BLOCKS * THREADS * 4) as usize)?;
    // SAFETY: `out` has four elements per thread.
    unsafe {
        match fixed {
            true => kernels::pairs_pass_on::args(&out).config(config).launch(&stream),
            false => kernels::passes_on::args(&out).config(config).launch(&stream),
        }
    }?;
    stream.synchronize()?;
    for (i, got) in (0..).zip(read(&out)?.chunks(4)) {
        let (block, t) = (i / THREADS, i % THREADS);
        let from = (block % size + size - 1) % size;
        let want = [block / size * size + from, from, size, t].map(|number| number as f32);
        assert_eq!(got, want, "block {block} of clusters of {size}");
    }
    Ok(())
}

#[test]
fn a_launch_gives_the_clusters_their_size() {
    on_a_gpu("a_launch_gives_the_clusters_their_size", |rank| {
        let config = LaunchConfig::new(BLOCKS, THREADS);
        pass_on(rank, config, false, 1)?;
        for size in [1, 2, 3, 4, 8] {
            pass_on(rank, config.with_cluster(size), false, size)?;
        }
        pass_on(rank, config, true, 2)?;
        pass_on(rank, config.with_cluster(2), true, 2)
    });
}

#[test]
fn blocks_of_a_cluster_add_up_their_sums() {
    const CALLS: u32 = 5;
    on_a_gpu("blocks_of_a_cluster_add_up_their_sums", |rank| {
        let stream = rank.stream()?;
        let clusters = [(None, 512), (Some(1), 32), (Some(2), 512), (Some(8), 128)];
        for (size, threads) in clusters {
            let in_grid = 8 * threads;
            let out = rank.communicator()?.mem_alloc::<f32>((CALLS * in_grid) as usize)?;
            let config = LaunchConfig::new(8, threads).with_dependent();
            let config = size.map_or(config, |size| config.with_cluster(size));
            for _ in 0..3 {
                let launch = kernels::sums_clusters::args(&out, CALLS).config(config);
                // SAFETY: `out` has an element for each thread and call.
                unsafe { launch.launch(&stream) }?;
            }
            stream.synchronize()?;
            let members = size.unwrap_or(1) * threads;
            for (i, got) in (0..).zip(read(&out)?) {
                let (call, first) = (i / in_grid, i % in_grid / members * members);
                let want = members * (call + first) + members * (members - 1) / 2;
                assert_eq!(got, want as f32, "call {call}, thread {first}, clusters of {size:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn clusters_that_cannot_be_are_refused() {
    on_a_gpu("clusters_that_cannot_be_are_refused", |rank| {
        let launch = |grid: u32, cluster, fixed| {
            let config = LaunchConfig::new(grid, THREADS).with_cluster(cluster);
            refusal(pass_on(rank, config, fixed, cluster))
        };
        for blocks in [0, 9] {
            // The grid is a multiple of 9.
            let refused = launch(72, blocks, false);
            assert_eq!(refused, LaunchRefusal::ClusterSize { blocks, limit: 8 });
        }
        for blocks in [1, 4] {
            let refused = launch(BLOCKS, blocks, true);
            assert_eq!(refused, LaunchRefusal::OtherCluster { blocks, fixed: 2.into() });
        }
        for fixed in [true, false] {
            let refused = launch(7, 2, fixed);
            let (grid, cluster) = (7.into(), 2.into());
            assert_eq!(refused, LaunchRefusal::PartialCluster { grid, cluster });
        }
        pass_on(rank, LaunchConfig::new(BLOCKS, THREADS).with_cluster(4), false, 4)
    });
}

#[test]
fn as_many_clusters_are_resident_as_fit() {
    on_a_gpu("as_many_clusters_are_resident_as_fit", |rank| {
        let stream = rank.stream()?;
        let context = stream.context();
        // A block of this much shared memory has a multiprocessor for itself.
        let shared = 200 << 10;
        let blocks = context.resident_blocks::<kernels::passes_on>(THREADS, shared)?;
        assert_eq!(blocks, context.limits().multiprocessors);
        let clusters =
            |size| context.resident_clusters::<kernels::passes_on>(size, THREADS, shared);
        for size in [1, 2, 4, 8] {
            // Some multiprocessors of a real GPU may belong to no cluster.
            let (found, most) = (clusters(size)?, blocks / size);
            assert!(found > most / 2 && found <= most, "{found} clusters of {size}");
            assert!(!rank.is_simulated() || found == most, "{found} clusters of {size}");
        }
        assert!(matches!(clusters(9), Err(Error::Launch(LaunchError::Refused { .. }))));
        let pairs = context.resident_clusters::<kernels::pairs_pass_on>(2, THREADS, shared)?;
        assert_eq!(pairs, clusters(2)?);
        Ok(())
    });
}

/// Grid of the dependent kernels.
const GRID: u32 = 8;
/// Dependent launches in a row.
const IN_A_ROW: u32 = 5;

/// Launches a kernel that writes late, and dependent ones that add to its results.
fn chain(rank: &Rank, capture: bool, waits: bool) -> Result<Vec<u32>, Error> {
    let stream = rank.stream()?;
    let data = rank.communicator()?.mem_alloc::<u32>((GRID * THREADS) as usize)?;
    data.fill_bytes(0)?;
    let launches = || {
        let config = LaunchConfig::new(GRID, THREADS);
        // SAFETY: `data` has an element per thread.
        unsafe {
            kernels::writes_late::args(&data, 1000).config(config).launch(&stream)?;
            (0..IN_A_ROW).try_for_each(|_| {
                let adds = kernels::adds::args(&data, 7, waits).config(config);
                adds.dependent().launch(&stream)
            })
        }
    };
    if capture {
        let graph = stream.capture(launches)?;
        assert_eq!(graph.len(), 1 + IN_A_ROW as usize);
        for _ in 0..3 {
            graph.launch(&stream)?;
        }
        stream.synchronize()?;
    } else {
        launches()?;
        stream.synchronize()?;
    }
    read(&data)
}

fn in_order() -> Vec<u32> {
    (0..GRID * THREADS).map(|i| 1000 + i + 7 * IN_A_ROW).collect()
}

#[test]
fn a_dependent_launch_sees_what_the_previous_kernel_wrote() {
    on_a_gpu("a_dependent_launch_sees_what_the_previous_kernel_wrote", |rank| {
        for _ in 0..10 {
            assert_eq!(chain(rank, false, true)?, in_order());
        }
        Ok(())
    });
}

#[test]
fn dependent_launches_are_captured() {
    on_a_gpu("dependent_launches_are_captured", |rank| {
        assert_eq!(chain(rank, true, true)?, in_order());
        Ok(())
    });
}

/// The test is on simulated GPUs only, and without the detection of races: a GPU may begin a
/// dependent launch as late as any other.
#[test]
fn a_kernel_that_does_not_wait_for_the_previous_one_is_found_out_by_some_seed() {
    for capture in [false, true] {
        let is_found = |seed: &u64| {
            let simulation = Simulation::new(1).seed(*seed).races(false);
            simulate(simulation, |gpu| chain(gpu, capture, false))[0] != in_order()
        };
        let found = (0..20).filter(is_found).count();
        assert!(found > 10, "{found} of 20");
    }
}

#[test]
fn a_kernel_that_does_not_wait_for_the_previous_one_is_a_race_in_any_order() {
    for capture in [false, true] {
        for seed in 0..5 {
            let failure =
                failure(Simulation::new(1).seed(seed), |gpu| chain(gpu, capture, false).map(drop));
            assert!(matches!(*failure, sim::Error::Race(_)), "{failure}");
        }
    }
}

#[test]
fn matrices_are_stored_transposed() {
    on_a_gpu("matrices_are_stored_transposed", |rank| {
        let stream = rank.stream()?;
        let out = rank.communicator()?.mem_alloc::<u32>(192)?;
        // SAFETY: `out` has 192 words.
        unsafe { kernels::stores_transposed::args(&out).grid(1).block(32).launch(&stream)? };
        stream.synchronize()?;
        // Element (r, c) of matrix `m` is `100 * m + 8 * r + c`, and is at (c, r) in memory.
        let element = |m: u32, r: u32, c: u32| 100 * m + 8 * r + c;
        for (i, word) in (0..).zip(read(&out)?) {
            let (m, c, r) = (i / 32, i % 32 / 4, i % 4 * 2);
            assert_eq!(word, element(m, r, c) | element(m, r + 1, c) << 16, "word {i}");
        }
        Ok(())
    });
}

/// Adds the tiles of three blocks to a matrix of ones, and checks it.
fn add_tiles<T: Element + Number>(
    rank: &Rank,
    add: impl Fn(TensorMap, [u32; 2], LaunchConfig) -> Result<(), Error>,
) -> Result<(), Error> {
    const ROWS: u32 = 20;
    const COLUMNS: u32 = 72;
    const BLOCKS: u32 = 3;
    let (row, column, columns) = (8, 16, 128 / size_of::<T>() as u32);
    let comm = rank.communicator()?;
    let matrix = comm.mem_alloc::<T>((ROWS * COLUMNS) as usize)?;
    matrix.copy_from_host(&vec![T::nearest(1.0); matrix.len()])?;
    let map = rank.context().tensor_map(&TensorMapDesc {
        address: matrix.device_address(),
        rows: ROWS,
        columns: COLUMNS,
        tile_rows: 16,
        data_type: T::DATA_TYPE,
    })?;
    let config = LaunchConfig::new(BLOCKS, THREADS).with_dynamic_shared(TILE_SHARED);
    add(map, [row, column], config)?;
    for (i, got) in (0..).zip(read(&matrix)?) {
        let (r, c) = (i / COLUMNS, i % COLUMNS);
        let is_added = r >= row && (column..column + columns).contains(&c);
        let added = if is_added { BLOCKS * (r - row + c - column) } else { 0 };
        assert_eq!(got, T::nearest(1.0 + added as f32), "{} at {r}, {c}", T::NAME);
    }
    Ok(())
}

#[test]
fn tiles_are_added_to_a_matrix() {
    on_a_gpu("tiles_are_added_to_a_matrix", |rank| {
        let stream = rank.stream()?;
        // SAFETY: the map's matrix is allocated; only this kernel accesses it.
        add_tiles::<f16>(rank, |map, [row, column], config| unsafe {
            kernels::adds_tile::<f16>::args(map, row, column).config(config).launch(&stream)?;
            stream.synchronize()
        })?;
        // SAFETY: the map is of a matrix in which the tile lies.
        add_tiles::<bf16>(rank, |map, [row, column], config| unsafe {
            kernels::adds_tile::<bf16>::args(map, row, column).config(config).launch(&stream)?;
            stream.synchronize()
        })?;
        // SAFETY: the map is of a matrix in which the tile lies.
        add_tiles::<f32>(rank, |map, [row, column], config| unsafe {
            kernels::adds_tile::<f32>::args(map, row, column).config(config).launch(&stream)?;
            stream.synchronize()
        })
    });
}
