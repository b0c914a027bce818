//! Tests of tensor cores, TMA and mbarriers: layouts of fragments and tiles, phases of barriers.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::wgmma::{self, Tile};
use cuda_std::{async_copy, mma, tma};
use devcomm::{Simulation, TensorMap, TensorMapDesc};
use devcomm_testing::simulated::{failure, read, simulate};
use devcomm_types::GridConstant;

/// Small whole numbers, so that sums of products are exact.
fn numbers(count: usize, seed: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(((i * 7 + seed) % 13) as f32 - 6.0)).collect()
}

/// `a x b^T` for row-major matrices with `k` columns.
fn product(a: &[bf16], b: &[bf16], k: usize) -> Vec<f32> {
    let dot = |x: &[bf16], y: &[bf16]| x.iter().zip(y).map(|(x, y)| x.to_f32() * y.to_f32()).sum();
    a.chunks(k).flat_map(|x| b.chunks(k).map(move |y| dot(x, y))).collect()
}

/// Computes a 16 x 8 tile with k = 16, with operands in shared memory.
#[kernel]
unsafe fn fragment(a: *const bf16, b: *const bf16, d: *mut f32) {
    let (tile_a, tile_b) = (shared_array![bf16; 256], shared_array![bf16; 128]);
    let lane = warp::lane_id() as usize;
    // SAFETY: the block is one warp; the matrices have 256, 128 and 128 elements.
    unsafe {
        async_copy::copy_16(tile_a.add(8 * lane), a.add(8 * lane), true);
        // B has 16 chunks of 16 bytes, so only half of the lanes copy one.
        if lane < 16 {
            async_copy::copy_16(tile_b.add(8 * lane), b.add(8 * lane), true);
        }
        async_copy::commit_group();
        async_copy::wait_groups::<0>();
        thread::sync_threads();
        let a = mma::load_matrices(tile_a.add(lane % 16 * 16 + lane / 16 * 8));
        let b = mma::load_matrices(tile_b.add(lane % 8 * 16 + lane / 8 % 2 * 8));
        let mut sums = [0.5; 4];
        mma::m16n8k16_bf16(&mut sums, a, [b[0], b[1]]);
        for (i, sum) in sums.into_iter().enumerate() {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            mem::store(d.add(8 * row + column), sum);
        }
    }
}

#[test]
fn a_warps_fragments_are_where_ptx_says() {
    let (a, b) = (numbers(256, 1), numbers(128, 4));
    let want: Vec<f32> = product(&a, &b, 16).iter().map(|sum| sum + 0.5).collect();
    for simulation in [Simulation::new(1), Simulation::new(1).seed(5)] {
        let got = simulate(simulation, |gpu| {
            let d = gpu.buffer(&[0_f32; 128])?;
            gpu.launch(fragment::args(&gpu.buffer(&a)?, &gpu.buffer(&b)?, &d).grid(1).block(32))?;
            read(&d)
        });
        assert_eq!(got[0], want);
    }
}

#[kernel]
unsafe fn copy_some(from: *const u32, to: *mut u32) {
    let tile = shared_array![u32; 128];
    let t = thread::thread_idx_x() as usize;
    // SAFETY: 32 threads, 128 elements; a skipped source is not read.
    unsafe {
        let from = if t < 20 { from.add(4 * t) } else { from };
        async_copy::copy_16(tile.add(4 * t), from, t < 20);
        async_copy::commit_group();
        async_copy::wait_groups::<0>();
        mem::store_vec(to.add(4 * t), mem::load_vec(tile.add(4 * t)));
    }
}

#[test]
fn a_copy_that_takes_nothing_brings_zeros() {
    let copied = simulate(Simulation::new(1), |gpu| {
        let to = gpu.buffer(&[1_u32; 128])?;
        // 20 threads copy 16 bytes each, the others zeros.
        gpu.launch(copy_some::args(&gpu.buffer(&[7_u32; 80])?, &to).grid(1).block(32))?;
        read(&to)
    });
    assert_eq!(copied[0], [[7; 80].as_slice(), &[0; 48]].concat());
}

/// Bytes of a tile of A (64 rows) and a tile of B (256 rows), with rows of 128 bytes.
const BYTES: u32 = (64 + 256) * 128;

/// Computes a 64 x 256 tile with one warpgroup for any `k`, with operands loaded by TMA.
#[kernel(arch = "sm_90a")]
unsafe fn warpgroup(a: GridConstant<TensorMap>, b: GridConstant<TensorMap>, d: *mut f32, k: u32) {
    let memory = shared::dynamic_shared_mem::<u8>();
    let tile_a = memory.wrapping_add(memory.addr().next_multiple_of(1024) - memory.addr());
    let tile_b = tile_a.wrapping_add(64 * 128);
    let t = thread::thread_idx_x();
    // SAFETY: the block is one warpgroup, with shared memory for the tiles, which are reloaded
    // after all products have read them.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        if t == 0 {
            full.init(1);
            mbarrier::fence_init();
        }
        thread::sync_threads();
        let mut sums = [0.0; 128];
        for step in 0..k.div_ceil(64) {
            if t == 0 {
                tma::prefetch_map(&a);
                full.arrive_expect_tx(BYTES);
                tma::load_tile(tile_a, &a, 0, 64 * step, full);
                tma::load_tile(tile_b, &b, 0, 64 * step, full);
            }
            full.wait(step % 2);
            wgmma::fence();
            for k in [0, 16, 32, 48] {
                let (a, b) = (Tile::at(tile_a), Tile::at(tile_b));
                wgmma::m64n256k16_bf16(&mut sums, a.columns_from(k), b.columns_from(k));
            }
            wgmma::commit_group();
            wgmma::wait_groups::<0>();
            thread::sync_threads();
        }
        let (row, column) = (t / 32 * 16 + t % 32 / 4, t % 4 * 2);
        for (i, sum) in (0..).zip(sums) {
            let (row, column) = (row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2);
            mem::store(d.add((256 * row + column) as usize), sum);
        }
    }
}

#[test]
fn a_warpgroups_tiles_are_where_the_copy_engine_puts_them() {
    for (rows, columns, k) in [(64, 256, 64), (64, 256, 128), (3, 250, 72), (64, 1, 8)] {
        let (a, b) = (numbers(rows * k, 3), numbers(columns * k, 8));
        let got = simulate(Simulation::new(1), |gpu| {
            let (a, b) = (gpu.buffer(&a)?, gpu.buffer(&b)?);
            let d = gpu.buffer(&[0_f32; 64 * 256])?;
            let map = |address, rows: usize, tile_rows| {
                let (rows, columns) = (rows as u32, k as u32);
                gpu.context().tensor_map(&TensorMapDesc { address, rows, columns, tile_rows })
            };
            let map_a = map(a.device_address(), rows, 64)?;
            let map_b = map(b.device_address(), columns, 256)?;
            let product = warpgroup::args(map_a, map_b, &d, k as u32);
            gpu.launch(product.grid(1).block(128).dynamic_shared(BYTES + 1024))?;
            read(&d)
        });
        let (got, want) = (&got[0], product(&a, &b, k));
        for (i, row) in got.chunks(256).enumerate() {
            for (j, sum) in row.iter().enumerate() {
                // Elements outside of the matrices are zeros.
                let inside = i < rows && j < columns;
                let want = if inside { want[i * columns + j] } else { 0.0 };
                assert_eq!(*sum, want, "{rows} x {columns} x {k}: {i}, {j}");
            }
        }
    }
}

/// A producer and a consumer share a slot: each waits for the phase that the other completes.
#[kernel]
unsafe fn hand_over(out: *mut u32, rounds: u32) {
    let (barriers, slot) = (shared_array![u64; 2], shared_array![u32; 1]);
    let t = thread::thread_idx_x();
    // SAFETY: the mbarriers are initialised before use; one thread at a time uses the slot.
    unsafe {
        let (full, empty) = (MBarrier::at(barriers), MBarrier::at(barriers.add(1)));
        if t == 0 {
            full.init(1);
            empty.init(1);
            mbarrier::fence_init();
        }
        thread::sync_threads();
        for round in 0..rounds {
            if t == 0 {
                empty.wait((round + 1) % 2);
                mem::store(slot, 10 * round);
                full.arrive();
            } else if t == 40 {
                full.wait(round % 2);
                mem::store(out.add(round as usize), mem::load(slot));
                empty.arrive();
            }
        }
    }
}

#[test]
fn a_barriers_phases_alternate() {
    for seed in 0..5 {
        let out = simulate(Simulation::new(1).seed(seed), |gpu| {
            let out = gpu.buffer(&[0_u32; 9])?;
            gpu.launch(hand_over::args(&out, 9_u32).grid(1).block(64))?;
            read(&out)
        });
        assert_eq!(out[0], (0..9).map(|round| 10 * round).collect::<Vec<_>>());
    }
}

#[kernel]
unsafe fn no_map(map: GridConstant<TensorMap>) {
    let memory = shared::dynamic_shared_mem::<u8>();
    let to = memory.wrapping_add(memory.addr().next_multiple_of(1024) - memory.addr());
    // SAFETY: the simulator refuses the map before it copies.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        full.init(1);
        tma::load_tile(to, &map, 0, 0, full);
    }
}

#[test]
fn a_map_of_the_drivers_is_refused_with_what_to_do() {
    let error = failure(Simulation::new(1), |gpu| {
        let no_map = no_map::args(TensorMap { words: [3; 16] });
        gpu.launch(no_map.grid(1).block(1).dynamic_shared(16 << 10))
    });
    assert!(error.to_string().contains("Context::tensor_map"), "{error}");
}
