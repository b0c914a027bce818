//! Tests of tensor cores, TMA and mbarriers: layouts of fragments and tiles, phases of barriers.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::wgmma::{self, Factor, Sums, Tile};
use cuda_std::{async_copy, mma, tma};
use devcomm::{
    Element, F8E4M3, F8E5M2, Kernel, Result, Simulation, SymmetricBuffer, TensorMap, TensorMapDesc,
};
use devcomm_testing::numbers::Number;
use devcomm_testing::simulated::{Gpu, failure, read, simulate};
use devcomm_types::{GridConstant, LaunchArgs};

/// Returns small whole numbers, which all types hold, so that sums of products are exact.
fn numbers<T: Number>(count: usize, seed: usize) -> Vec<T> {
    (0..count).map(|i| T::nearest(((i * 7 + seed) % 13) as f32 - 6.0)).collect()
}

/// Returns `a x b^T` for row-major matrices with `k` columns.
fn product<T: Number>(a: &[T], b: &[T], k: usize) -> Vec<f32> {
    let term = |(x, y): (&T, &T)| (x.value() * y.value()) as f32;
    let dot = |x: &[T], y: &[T]| x.iter().zip(y).map(term).sum();
    a.chunks(k).flat_map(|x| b.chunks(k).map(move |y| dot(x, y))).collect()
}

/// Returns the first multiple of 1,024 bytes in dynamic shared memory, where a tile may start. A
/// launch asks for up to 1,024 bytes more than the tiles have.
pub fn aligned_shared() -> *mut u8 {
    let memory = shared::dynamic_shared_mem::<u8>();
    memory.wrapping_add(memory.addr().next_multiple_of(1024) - memory.addr())
}

/// Returns a map of 32 elements as one row.
pub fn row<T: Element>(gpu: &Gpu<'_>, words: &SymmetricBuffer<T>) -> Result<TensorMap> {
    gpu.context().tensor_map(&TensorMapDesc {
        address: words.device_address(),
        rows: 1,
        columns: 32,
        tile_rows: 1,
        data_type: T::DATA_TYPE,
    })
}

/// Returns the element (`row`, `column`) of a tile with rows of 128 bytes, swizzled by TMA.
pub fn in_tile<T>(tile: *mut u8, row: u32, column: u32) -> *mut T {
    let byte = column as usize * size_of::<T>();
    let chunk = (byte / 16) ^ (row as usize % 8);
    tile.wrapping_add(128 * row as usize + 16 * chunk + byte % 16).cast()
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
        mma::m16n8k16::<bf16>(&mut sums, a, [b[0], b[1]]);
        for (i, sum) in sums.into_iter().enumerate() {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            mem::store(d.add(8 * row + column), sum);
        }
    }
}

#[test]
fn a_warps_fragments_are_where_ptx_says() {
    let (a, b) = (numbers::<bf16>(256, 1), numbers::<bf16>(128, 4));
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
fn a_copy_with_a_false_predicate_writes_zeros() {
    let copied = simulate(Simulation::new(1), |gpu| {
        let to = gpu.buffer(&[1_u32; 128])?;
        // 20 threads copy 16 bytes each, the others zeros.
        gpu.launch(copy_some::args(&gpu.buffer(&[7_u32; 80])?, &to).grid(1).block(32))?;
        read(&to)
    });
    assert_eq!(copied[0], [[7; 80].as_slice(), &[0; 48]].concat());
}

/// The bytes of a tile of A (64 rows) and a tile of B (256 rows), with rows of 128 bytes.
const BYTES: u32 = (64 + 256) * 128;

/// Computes a 64 x 256 tile with one warpgroup for any `k`, with operands loaded by TMA.
#[kernel(arch = "sm_90a")]
unsafe fn warpgroup(a: GridConstant<TensorMap>, b: GridConstant<TensorMap>, d: *mut f32, k: u32) {
    let tile_a = aligned_shared();
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
            wgmma::fence_operand(&mut sums);
            wgmma::fence();
            for k in [0, 16, 32, 48] {
                let (a, b) = (Tile::<bf16>::at(tile_a), Tile::<bf16>::at(tile_b));
                wgmma::multiply(&mut sums, a.columns_from(k), b.columns_from(k), true);
            }
            wgmma::commit_group();
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
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
fn a_warpgroups_tiles_are_where_tma_puts_them() {
    for (rows, columns, k) in [(64, 256, 64), (64, 256, 128), (3, 250, 72), (64, 1, 8)] {
        let (a, b) = (numbers::<bf16>(rows * k, 3), numbers::<bf16>(columns * k, 8));
        let got = simulate(Simulation::new(1), |gpu| {
            let (a, b) = (gpu.buffer(&a)?, gpu.buffer(&b)?);
            let d = gpu.buffer(&[0_f32; 64 * 256])?;
            let map = |address, rows: usize, tile_rows| {
                let (rows, columns) = (rows as u32, k as u32);
                gpu.context().tensor_map(&TensorMapDesc {
                    address,
                    rows,
                    columns,
                    tile_rows,
                    data_type: bf16::DATA_TYPE,
                })
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

/// Returns the number of columns of a tile of `T`.
const fn tile_columns<T>() -> u32 {
    128 / size_of::<T>() as u32
}

/// Multiplies all columns of the tiles `a` and `b` in shared memory: `d = a * b`.
///
/// # Safety
///
/// The threads of a warpgroup call this; `d` has 64 rows.
unsafe fn multiply<T: Factor, D: Sums>(mut sums: D, a: *mut u8, b: *mut u8, d: *mut f32) {
    let t = thread::thread_idx_x();
    // SAFETY: the test passes tiles in shared memory and room for the sums.
    unsafe {
        wgmma::fence_operand(&mut sums);
        wgmma::fence();
        for k in (0..tile_columns::<T>()).step_by(T::TERMS as usize) {
            let (a, b) = (Tile::<T>::at(a), Tile::<T>::at(b));
            wgmma::multiply(&mut sums, a.columns_from(k), b.columns_from(k), k > 0);
        }
        wgmma::commit_group();
        wgmma::wait_groups::<0>();
        wgmma::fence_operand(&mut sums);
        let (row, column) = (t / 32 * 16 + t % 32 / 4, t % 4 * 2);
        let columns = sums.as_mut().len() as u32 * 2;
        for (i, sum) in (0..).zip(sums.as_mut()) {
            let (row, column) = (row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2);
            mem::store(d.add((columns * row + column) as usize), *sum);
        }
    }
}

/// Computes a 64 x `n` tile. A sum has a term for each column of the operands' tiles, which the
/// threads write to shared memory.
#[kernel(T = [bf16, f16, F8E4M3, F8E5M2])]
unsafe fn narrow<T: Factor>(a: *const T, b: *const T, d: *mut f32, n: u32) {
    let tile_a = aligned_shared();
    let tile_b = tile_a.wrapping_add(64 * 128);
    // SAFETY: the block is one warpgroup, with shared memory for the tiles.
    unsafe {
        for (matrix, tile, rows) in [(a, tile_a, 64), (b, tile_b, n)] {
            let columns = tile_columns::<T>();
            for i in (thread::thread_idx_x()..columns * rows).step_by(128) {
                let to = in_tile(tile, i / columns, i % columns);
                mem::store(to, mem::load(matrix.add(i as usize)));
            }
        }
        tma::fence_async_shared();
        thread::sync_threads();
        // The first product replaces what is in the sums.
        match n {
            8 => multiply::<T, _>([9.0; 4], tile_a, tile_b, d),
            _ => multiply::<T, _>([9.0; 32], tile_a, tile_b, d),
        }
    }
}

/// Returns what kernel `K` computes from two matrices that are as wide as a tile.
fn sums_of<K: Kernel, T: Element>(simulation: &Simulation, a: &[T], b: &[T]) -> Vec<f32>
where
    for<'a> (&'a SymmetricBuffer<T>, &'a SymmetricBuffer<T>, &'a SymmetricBuffer<f32>, u32):
        LaunchArgs<K::Args>,
{
    let n = b.len() as u32 / tile_columns::<T>();
    let sums = simulate(simulation.clone(), |gpu| {
        let (a, b, d) =
            (gpu.buffer(a)?, gpu.buffer(b)?, gpu.buffer(&vec![0_f32; 64 * n as usize])?);
        let product = K::with_args((&a, &b, &d, n)).grid(1).block(128);
        gpu.launch(product.dynamic_shared((64 + n) * 128 + 1024))?;
        read(&d)
    });
    sums.concat()
}

/// Checks that kernel `K` multiplies a tile of 64 rows and one of `n`.
fn multiplies<K: Kernel, T: Element + Number>(simulation: &Simulation, n: usize)
where
    for<'a> (&'a SymmetricBuffer<T>, &'a SymmetricBuffer<T>, &'a SymmetricBuffer<f32>, u32):
        LaunchArgs<K::Args>,
{
    let k = tile_columns::<T>() as usize;
    let (a, b) = (numbers::<T>(64 * k, 1), numbers::<T>(n * k, 5));
    assert_eq!(sums_of::<K, T>(simulation, &a, &b), product(&a, &b, k), "{}", T::NAME);
}

#[test]
fn a_warpgroups_sums_are_where_ptx_says_for_any_type_and_width() {
    for n in [8, 64] {
        for simulation in [Simulation::new(1), Simulation::new(1).seed(2)] {
            multiplies::<narrow<bf16>, bf16>(&simulation, n);
            multiplies::<narrow<f16>, f16>(&simulation, n);
            multiplies::<narrow<F8E4M3>, F8E4M3>(&simulation, n);
            multiplies::<narrow<F8E5M2>, F8E5M2>(&simulation, n);
        }
    }
}

/// Stores four matrices, copies what is in memory to `out`, then what a load returns.
#[kernel]
unsafe fn stores_matrices(out: *mut u32) {
    let matrices = shared_array![u32; 128];
    let lane = warp::lane_id();
    // SAFETY: the block is one warp, `out` has 256 words; each lane passes a row of four words.
    unsafe {
        let row = matrices.add(4 * lane as usize);
        mma::store_matrices(row.cast(), [0, 1, 2, 3].map(|matrix| 100 * matrix + lane));
        warp::sync();
        mem::store_vec(out.add(4 * lane as usize), mem::load_vec(row));
        let loaded = mma::load_matrices(row.cast::<bf16>());
        for (i, word) in loaded.into_iter().enumerate() {
            mem::store(out.add(128 + 32 * i + lane as usize), word);
        }
    }
}

#[test]
fn stored_matrices_are_where_ptx_says_and_loaded_as_they_were() {
    // Lane `4 * r + p` has row `r`, words `p`.
    let want: Vec<u32> = (0..4).flat_map(|matrix| (0..32).map(move |i| 100 * matrix + i)).collect();
    for simulation in [Simulation::new(1), Simulation::new(1).seed(1)] {
        let out = simulate(simulation, |gpu| {
            let out = gpu.buffer(&[0_u32; 256])?;
            gpu.launch(stores_matrices::args(&out).grid(1).block(32))?;
            read(&out)
        });
        assert_eq!(out[0].split_at(128), (&want[..], &want[..]));
    }
}

/// Copies the tile at `from_at` of a matrix to `to_at` of another.
#[kernel]
pub unsafe fn copies_tile(
    from: GridConstant<TensorMap>,
    to: GridConstant<TensorMap>,
    from_at: u32,
    to_at: u32,
) {
    let tile = aligned_shared();
    // SAFETY: the block is one thread, with shared memory for a tile.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        full.init(1);
        mbarrier::fence_init();
        full.arrive_expect_tx(64 * 128);
        tma::load_tile(tile, &from, from_at, from_at, full);
        full.wait(0);
        tma::fence_async_shared();
        tma::store_tile(&to, to_at, to_at, tile);
        tma::commit_stores();
        tma::wait_stores_read::<0>();
        tma::wait_stores::<0>();
    }
}

/// Checks copies of a tile, for each pair of the row and column that it comes from and goes to.
fn copies_tiles<T: Element + Number>(places: &[(i32, i32)]) {
    // A tile has 64 rows, so one that begins at row 8 or later is in part outside of the matrix.
    const ROWS: usize = 70;
    let tile_columns = tile_columns::<T>() as usize;
    let columns = tile_columns + 16;
    let matrix = numbers::<T>(ROWS * columns, 2);
    let untouched = vec![T::nearest(40.0); ROWS * columns];
    for &(from_at, to_at) in places {
        let got = simulate(Simulation::new(1), |gpu| {
            let (from, to) = (gpu.buffer(&matrix)?, gpu.buffer(&untouched)?);
            let map = |address| {
                gpu.context().tensor_map(&TensorMapDesc {
                    address,
                    rows: ROWS as u32,
                    columns: columns as u32,
                    tile_rows: 64,
                    data_type: T::DATA_TYPE,
                })
            };
            let (map_from, map_to) = (map(from.device_address())?, map(to.device_address())?);
            let copy = copies_tile::args(map_from, map_to, from_at as u32, to_at as u32);
            gpu.launch(copy.grid(1).block(1).dynamic_shared(64 * 128 + 1024))?;
            read(&to)
        });
        for (at, got) in got[0].iter().enumerate() {
            let (i, j) = (at / columns, at % columns);
            // Numbers below zero are large ones.
            let in_tile = [i, j].map(|at| at.wrapping_sub(to_at as usize));
            let [row, column] = in_tile.map(|at| at.wrapping_add(from_at as usize));
            let want = if in_tile[0] >= 64 || in_tile[1] >= tile_columns {
                untouched[at]
            } else if row >= ROWS || column >= columns {
                T::nearest(0.0)
            } else {
                matrix[row * columns + column]
            };
            assert_eq!(*got, want, "{} from {from_at} to {to_at}: {i}, {j}", T::NAME);
        }
    }
}

#[test]
fn a_stored_tile_is_what_was_loaded_and_nothing_is_stored_outside() {
    copies_tiles::<bf16>(&[(0, 0), (64, 64), (0, 64), (16, 8), (64, 0), (72, 0), (0, 72)]);
    copies_tiles::<F8E4M3>(&[(0, 0), (64, 64), (0, 64), (16, 48), (64, 0), (80, 0), (0, 80)]);
}

#[test]
fn a_tile_may_begin_before_the_first_row_and_column() {
    copies_tiles::<bf16>(&[(-8, 0), (0, -8), (-64, 0), (-72, -72)]);
    copies_tiles::<F8E4M3>(&[(-16, 0), (0, -16), (-32, -48)]);
}

/// A producer (thread 0) and a consumer (thread 40, in another warp) share a slot: each waits for
/// the phase that the other completes.
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

/// Multiplies zeros. The sums are read after the wait and the operand fence (`form` 0), without the
/// wait (1), without the fence (2).
#[kernel(arch = "sm_90a")]
unsafe fn reads_sums(out: *mut f32, form: u32) {
    let tile = aligned_shared();
    let t = thread::thread_idx_x();
    // SAFETY: the block is one warpgroup, with shared memory for a tile; an element per thread.
    unsafe {
        for i in (t..64 * 64).step_by(128) {
            mem::store(tile.cast::<bf16>().add(i as usize), bf16::ZERO);
        }
        tma::fence_async_shared();
        thread::sync_threads();
        let mut sums = [0.0; 4];
        let zeros = Tile::<bf16>::at(tile);
        wgmma::fence_operand(&mut sums);
        wgmma::fence();
        wgmma::multiply(&mut sums, zeros, zeros, false);
        wgmma::commit_group();
        if form != 1 {
            wgmma::wait_groups::<0>();
        }
        if form != 2 {
            wgmma::fence_operand(&mut sums);
        }
        mem::store(out.add(t as usize), sums[0]);
    }
}

#[test]
fn sums_are_there_only_after_the_wait_for_their_products() {
    let launch = |gpu: &Gpu<'_>, form| {
        let out = gpu.buffer(&[1_f32; 128])?;
        gpu.launch(reads_sums::args(&out, form).grid(1).block(128).dynamic_shared(BYTES))?;
        read(&out)
    };
    assert_eq!(simulate(Simulation::new(1), |gpu| launch(gpu, 0)), [[0.0; 128]]);
    for form in [1, 2] {
        let error = failure(Simulation::new(1), |gpu| launch(gpu, form).map(drop)).to_string();
        assert!(error.starts_with("reads_sums: rank 0 block 0 thread "), "{error}");
        assert!(error.contains("tensor.rs:") && error.contains("without the sums"), "{error}");
    }
}
