//! Kernels that test clusters, dependent launches, transposed stores and added tiles. Each has its
//! own parameters.

use cuda_std::convert::Float;
use cuda_std::prelude::*;
use cuda_std::tile::{SharedTile, TileMemory};
use cuda_std::{clock, cluster, grid, mma, tma};
use devcomm_types::{GridConstant, TensorMap};

/// Threads per block of these kernels.
pub const THREADS: u32 = 32;

/// Sends four numbers per thread to the next block of its cluster, and writes the received ones.
unsafe fn pass_on(out: *mut f32) {
    let (rank, size) = (cluster::rank(), cluster::size());
    let (block, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let sent = [block, rank, size, t].map(|number| number as f32);
    // SAFETY: a thread has a slot, and the caller four elements of `out` for it. The barriers order
    // the store after the start of the receiver, and before its load.
    unsafe {
        let slot = shared_array![[f32; 4]; 32].add(t as usize);
        cluster::sync();
        cluster::store(slot, (rank + 1) % size, sent);
        cluster::sync();
        let out = out.add(4 * (block * THREADS + t) as usize);
        for (i, number) in mem::load(slot).into_iter().enumerate() {
            mem::store(out.add(i), number);
        }
    }
}

/// Passes numbers on in clusters of the size that the launch gives.
#[kernel]
pub unsafe fn passes_on(out: *mut f32) {
    // SAFETY: the test passes four elements for each thread.
    unsafe { pass_on(out) }
}

/// Passes numbers on in clusters of two.
#[kernel(cluster = 2)]
pub unsafe fn pairs_pass_on(out: *mut f32) {
    // SAFETY: the test passes four elements for each thread.
    unsafe { pass_on(out) }
}

/// Sums `call` plus the index of each thread over the threads of its cluster, `calls` times; each
/// thread writes the sums.
#[kernel(max_threads = 512, min_blocks = 1)]
pub unsafe fn sums_clusters(out: *mut f32, calls: u32) {
    let (i, threads) = (thread::index_1d(), thread::grid_dim_x() * thread::block_dim_x());
    grid::launch_next();
    // SAFETY: `out` has an element for each thread and call.
    unsafe {
        let mut cluster = ClusterSum::new();
        grid::wait_for_previous();
        for call in 0..calls {
            let mine = (call + i) as f32;
            let [sum, twice] = cluster.sum([mine, 2.0 * mine]);
            let sum = if twice == 2.0 * sum { sum } else { f32::NAN };
            mem::store(out.add((call * threads + i) as usize), sum);
        }
    }
}

/// Lets the next kernel begin, and some time later writes `value` plus its index to each element.
#[kernel]
pub unsafe fn writes_late(data: *mut u32, value: u32) {
    grid::launch_next();
    if thread::thread_idx_x() == 0 {
        for _ in 0..200 {
            clock::globaltimer();
        }
    }
    thread::sync_threads();
    let i = thread::index_1d();
    // SAFETY: `data` has an element per thread.
    unsafe { mem::store(data.add(i as usize), value + i) }
}

/// Adds `value` to what the previous kernel wrote, or, if not `waits`, maybe to older values.
#[kernel]
pub unsafe fn adds(data: *mut u32, value: u32, waits: bool) {
    grid::launch_next();
    if waits {
        grid::wait_for_previous();
    }
    // SAFETY: `data` has an element per thread.
    unsafe {
        let element = data.add(thread::index_1d() as usize);
        mem::store(element, mem::load(element) + value);
    }
}

/// Stores four matrices transposed, then two of them, and copies what is in memory to `out`.
#[kernel]
pub unsafe fn stores_transposed(out: *mut u32) {
    let matrices = shared_array![u32; 192];
    let lane = warp::lane_id();
    let word = |matrix: u32| (100 * matrix + 2 * lane) | (100 * matrix + 2 * lane + 1) << 16;
    // SAFETY: the block is one warp, `out` has 192 words. A lane passes a row of four words; with
    // two matrices, the last 16 addresses are not used.
    unsafe {
        let row = |first: u32| matrices.add((first + 4 * lane) as usize).cast();
        mma::store_matrices_transposed(row(0), [word(0), word(1), word(2), word(3)]);
        mma::store_matrices_transposed(row(128), [word(4), word(5)]);
        warp::sync();
        let mut i = lane as usize;
        while i < 192 {
            mem::store(out.add(i), mem::load(matrices.add(i)));
            i += 32;
        }
    }
}

/// Bytes of dynamic shared memory of `adds_tile`.
pub const TILE_SHARED: u32 = SharedTile::<bf16, 16>::BYTES + TileMemory::PADDING;

/// Adds, in each block, a tile of 16 rows to a matrix, from `row` and `column` on: an element of
/// the tile is the sum of its row and its column.
#[kernel(T = [f16, bf16, f32])]
pub unsafe fn adds_tile<T: Float>(matrix: GridConstant<TensorMap>, row: u32, column: u32) {
    let lane = warp::lane_id();
    // SAFETY: the block is one warp, with shared memory for the tile.
    unsafe {
        let tile: SharedTile<T, 16> = TileMemory::dynamic().tile(0);
        let sum = |i: usize| {
            let i = i as u32;
            let (row, column) = (lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
            (row + column) as f32
        };
        tile.store_words(lane, |word| T::word(word, sum));
        tma::fence_async_shared();
        warp::sync();
        if lane == 0 {
            tile.reduce_add(&matrix, row, column);
            tma::commit_stores();
            tma::wait_stores::<0>();
        }
    }
}
