//! Tests of clusters: blocks that start together and access each other's shared memory.

use std::sync::Arc;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::{clock, cluster, tma};
use devcomm::sim::{Error, Waiting};
use devcomm::{Element, Simulation, TensorMap, TensorMapDesc};
use devcomm_testing::simulated::{failure, read, simulate};
use devcomm_types::GridConstant;

use crate::tensor::{aligned_shared, in_tile};

/// The number of steps of `halves`, each of which loads 64 columns.
const STEPS: u32 = 3;

/// Each block of a pair loads half of the rows of a tile for both, in several steps that reuse the
/// memory, and copies what has arrived to its part of `out`.
#[kernel(cluster = 2)]
unsafe fn halves(map: GridConstant<TensorMap>, out: *mut u32) {
    let (tile, barriers) = (aligned_shared(), shared_array![u64; 2]);
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let rank = cluster::rank();
    // SAFETY: 64 threads and 16 KiB per block; barriers separate the loads from the accesses.
    unsafe {
        let (full, empty) = (MBarrier::at(barriers), MBarrier::at(barriers.add(1)));
        if t == 0 {
            full.init(1);
            empty.init(2);
            mbarrier::fence_init();
        }
        cluster::sync();
        for step in 0..STEPS {
            if t == 0 {
                full.arrive_expect_tx(128 * 128);
                empty.wait((step + 1) % 2);
                let (half, row) = (tile.add(64 * 128 * rank as usize), 64 * block);
                tma::load_tile_multicast(half, &map, row, 64 * step, full, 0b11);
            }
            full.wait(step % 2);
            let out = out.add(((block * STEPS + step) * 128 * 32) as usize);
            for i in 0..64 {
                let (row, pair) = (t / 32 + 2 * i, t % 32);
                let pair_of_elements = mem::load(in_tile::<u32>(tile, row, pair));
                mem::store(out.add((32 * row + pair) as usize), pair_of_elements);
            }
            thread::sync_threads();
            if t == 0 {
                empty.arrive_in(0);
                empty.arrive_in(1);
            }
        }
        cluster::sync();
    }
}

#[test]
fn both_blocks_get_what_each_loads() {
    const ROWS: u32 = 256;
    let columns = 64 * STEPS;
    let matrix: Vec<u32> = (0..ROWS * columns / 2).collect();
    let simulation = || Simulation::new(1);
    let random = (0..5).flat_map(|s| [simulation().seed(s), simulation().seed(s).preempt(true)]);
    for simulation in random.chain([simulation(), simulation().watch(false)]) {
        let out = simulate(simulation, |gpu| {
            let (from, out) = (gpu.buffer(&matrix)?, gpu.buffer(&vec![0_u32; 2 * matrix.len()])?);
            let address = from.device_address();
            let desc = TensorMapDesc {
                address,
                rows: ROWS,
                columns,
                tile_rows: 64,
                data_type: bf16::DATA_TYPE,
            };
            let halves = halves::args(gpu.context().tensor_map(&desc)?, &out);
            gpu.launch(halves.grid(4).block(64).dynamic_shared((16 << 10) + 1024))?;
            read(&out)
        });
        for (i, got) in (0..).zip(&out[0]) {
            // Both blocks of cluster `c` copy rows from 128 * c.
            let (block, step) = (i / 4096 / STEPS, i / 4096 % STEPS);
            let (row, pair) = (128 * (block / 2) + i % 4096 / 32, 32 * step + i % 32);
            assert_eq!(*got, row * columns / 2 + pair, "block {block} step {step}");
        }
    }
}

/// Block 0 loads a tile into a static of block 1, which block 1 has not accessed before.
#[kernel(cluster = 2)]
unsafe fn loads_ahead(map: GridConstant<TensorMap>, out: *mut u32) {
    let full = shared_array![u64; 1];
    // SAFETY: one thread per block; the array has room for an aligned row of 128 bytes, and the
    // barriers separate the load from the accesses.
    unsafe {
        let full = MBarrier::at(full);
        if cluster::rank() == 1 {
            full.init(1);
            mbarrier::fence_init();
            full.arrive_expect_tx(128);
        }
        cluster::sync();
        if cluster::rank() == 1 {
            full.wait(0);
        }
        let array = shared_array![u8; 1024 + 128];
        let tile = array.add(array.addr().next_multiple_of(1024) - array.addr());
        if cluster::rank() == 0 {
            tma::load_tile_multicast(tile, &map, 0, 0, full, 0b10);
        } else {
            for i in 0..32 {
                mem::store(out.add(i as usize), mem::load(in_tile::<u32>(tile, 0, i)));
            }
        }
        cluster::sync();
    }
}

#[test]
fn a_static_that_its_block_has_not_accessed_is_at_the_same_place() {
    let row: Vec<u32> = (10..42).collect();
    for seed in 0..10 {
        let out = simulate(Simulation::new(1).seed(seed), |gpu| {
            let (from, out) = (gpu.buffer(&row)?, gpu.buffer(&[0_u32; 32])?);
            let address = from.device_address();
            let desc = TensorMapDesc {
                address,
                rows: 1,
                columns: 64,
                tile_rows: 1,
                data_type: bf16::DATA_TYPE,
            };
            let map = gpu.context().tensor_map(&desc)?;
            gpu.launch(loads_ahead::args(map, &out).grid(2).block(1))?;
            read(&out)
        });
        assert_eq!(out[0], row, "seed {seed}");
    }
}

/// The threads of each cluster count together, and between barriers all see the same count. The
/// last block leaves after the second phase.
#[kernel(cluster = 4)]
unsafe fn counts_in_phases(counts: *mut u32, wrong: *mut u32) {
    let block = thread::block_idx_x() + 8 * thread::block_idx_y();
    // SAFETY: the buffers have one count per cluster, and a word for the number of errors.
    unsafe {
        let count = Atomic::from_ptr(counts.add(block as usize / 4));
        let wrong = Atomic::from_ptr(wrong);
        let mut want = 0;
        for phase in 0..6 {
            let leaves = cluster::rank() == 3;
            if leaves && phase == 2 {
                return;
            }
            count.fetch_add(1, Order::Relaxed, Scope::Gpu);
            cluster::sync();
            want += if phase < 2 { 4 * 33 } else { 3 * 33 };
            if count.load(Order::Relaxed, Scope::Gpu) != want || cluster::rank() != block % 4 {
                wrong.fetch_add(1, Order::Relaxed, Scope::Gpu);
            }
            cluster::sync();
        }
    }
}

#[test]
fn a_clusters_barrier_separates_phases() {
    let random = (0..100).map(|seed| Simulation::new(1).seed(seed).preempt(seed % 4 == 0));
    for simulation in random.chain([Simulation::new(1)]) {
        let words = simulate(simulation, |gpu| {
            let (counts, wrong) = (gpu.buffer(&[0_u32; 4])?, gpu.buffer(&[0_u32])?);
            gpu.launch(counts_in_phases::args(&counts, &wrong).grid((8, 2)).block(33))?;
            Ok((read(&counts)?, read(&wrong)?))
        });
        assert_eq!(words[0], (vec![(2 * 4 + 4 * 3) * 33; 4], vec![0]));
    }
}

#[kernel]
unsafe fn without_cluster(out: *mut u32) {
    // SAFETY: the buffer has one word per block.
    unsafe {
        cluster::sync();
        if thread::thread_idx_x() == 0 {
            mem::store(out.add(thread::block_idx_x() as usize), cluster::rank());
        }
    }
}

#[test]
fn without_clusters_each_block_is_a_cluster() {
    let ranks = simulate(Simulation::new(1), |gpu| {
        let out = gpu.buffer(&[9_u32; 3])?;
        gpu.launch(without_cluster::args(&out).grid(3).block(40))?;
        read(&out)
    });
    assert_eq!(ranks[0], [0; 3]);
}

/// Records how many blocks have started when the blocks of a cluster have met.
#[kernel(cluster = 2)]
unsafe fn counts_starts(started: *mut u32, seen: *mut u32) {
    // SAFETY: the buffers have one word, and one word per block.
    unsafe {
        if thread::thread_idx_x() == 0 {
            Atomic::from_ptr(started).fetch_add(1, Order::Relaxed, Scope::Gpu);
        }
        cluster::sync();
        if thread::thread_idx_x() == 0 {
            let started = Atomic::from_ptr(started).load(Order::Relaxed, Scope::Gpu);
            mem::store(seen.add(thread::block_idx_x() as usize), started);
        }
        cluster::sync();
    }
}

#[test]
fn a_cluster_starts_when_all_of_it_fits() {
    let run = |simulation: Simulation| {
        simulate(simulation.multiprocessors(1), |gpu| {
            let (started, seen) = (gpu.buffer(&[0_u32])?, gpu.buffer(&[0_u32; 6])?);
            // Three blocks of 640 threads fit, so one cluster.
            gpu.launch(counts_starts::args(&started, &seen).grid(6).block(640))?;
            read(&seen)
        })
    };
    assert_eq!(run(Simulation::new(1)), [[2, 2, 4, 4, 6, 6]]);
    assert_eq!(run(Simulation::new(1).seed(7)), [[2, 2, 4, 4, 6, 6]]);
}

#[test]
fn a_cluster_that_never_fits_and_a_grid_that_is_no_multiple_are_refused() {
    simulate(Simulation::new(1).multiprocessors(1), |gpu| {
        let (counts, wrong) = (gpu.buffer(&[0_u32; 4])?, gpu.buffer(&[0_u32])?);
        let refusal = |grid: (u32, u32), block| {
            let launch = counts_in_phases::args(&counts, &wrong).grid(grid).block(block);
            gpu.launch(launch).unwrap_err().to_string()
        };
        let error = refusal((6, 2), 32);
        assert!(error.contains("6x2x1 blocks") && error.contains("clusters of 4"), "{error}");
        let error = refusal((8, 2), 1024);
        assert!(error.contains("4 blocks") && error.contains("at most 2"), "{error}");
        assert!(error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
        // The context can still be used.
        gpu.launch(counts_in_phases::args(&counts, &wrong).grid((8, 2)).block(33))
    });
}

#[kernel(cluster = 2)]
unsafe fn one_block_diverges() {
    // SAFETY: the divergence is intended.
    unsafe {
        if cluster::rank() == 1 && thread::thread_idx_x() > 0 {
            thread::sync_threads();
        }
        cluster::sync();
    }
}

#[test]
fn a_deadlock_names_the_clusters_barrier() {
    for simulation in [Simulation::new(1), Simulation::new(1).seed(3)] {
        let error =
            failure(simulation, |gpu| gpu.launch(one_block_diverges::args().grid(2).block(32)));
        let Error::Deadlock(stall) = &*error else { panic!("{error}") };
        let mut groups: Vec<_> = stall.waiters.iter().map(|w| (w.block, w.threads)).collect();
        groups.sort_unstable();
        assert_eq!(groups, [(0, 32), (1, 1), (1, 31)]);
        let at_cluster = stall.waiters.iter().filter(|w| w.what == Waiting::Cluster);
        assert_eq!(at_cluster.map(|w| w.threads).sum::<u32>(), 33);
        let line = "rank 0 block 0: 32 threads wait for cluster::sync, at tests/sim/clusters.rs";
        assert!(error.to_string().contains(line), "{error}");
    }
}

/// Arrives at a barrier in block `rank`, in shared memory or not; block 1 has left by then.
#[kernel(cluster = 2)]
unsafe fn arrives(barrier: *mut u64, in_shared: bool, rank: u32) {
    let own = shared_array![u64; 1];
    // SAFETY: one thread per block; the simulator reports an invalid barrier.
    unsafe {
        MBarrier::at(own).init(1);
        cluster::sync();
        if cluster::rank() == 1 {
            return;
        }
        // Each read of the clock lets other threads run.
        for _ in 0..1000 {
            clock::globaltimer();
        }
        MBarrier::at(if in_shared { own } else { barrier }).arrive_in(rank);
    }
}

fn arrival(in_shared: bool, rank: u32) -> Arc<Error> {
    failure(Simulation::new(1), |gpu| {
        gpu.launch(arrives::args(&gpu.buffer(&[0_u64])?, in_shared, rank).grid(2).block(1))
    })
}

#[test]
fn what_is_not_in_the_clusters_shared_memory_is_reported() {
    for (in_shared, rank, why) in [
        (false, 0, "is not in the shared memory of the thread's block"),
        (true, 2, "there is no block 2 in a cluster of 2"),
        (true, 1, "block 1 of the cluster has ended"),
    ] {
        let error = arrival(in_shared, rank);
        let Error::Misuse { thread, what, at, .. } = &*error else { panic!("{error}") };
        assert!(what.contains(why), "{error}");
        assert_eq!((thread.block, at.file().ends_with("clusters.rs")), (0, true), "{error}");
    }
}
