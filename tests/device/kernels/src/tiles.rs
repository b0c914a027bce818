//! A plain pipeline, written with `cuda_std::tile` and by hand: its PTX is compared. Products of
//! all layouts of the factors.

use cuda_std::mbarrier::{self, MBarrier};
use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, RegTile, SharedTile, TileMemory};
use cuda_std::wgmma::Layout;
use cuda_std::{mma, tma, wgmma};
use devcomm_types::{GridConstant, TensorMap};

const STAGES: u32 = 4;
const ROWS: u32 = 64;
/// Columns of a tile, and its bytes.
const COLUMNS: u32 = 64;
const TILE: u32 = ROWS * 2 * COLUMNS;

/// Stores the sums of 64 x 64 elements of `A x B^T`: the order of a warpgroup's registers.
unsafe fn store(c: *mut f32, sums: &[f32; 32]) {
    let mut i = 0;
    while i < 32 {
        let at = i * 128 + thread::thread_idx_x() as usize;
        // SAFETY: C has an element for each sum of each thread.
        unsafe { mem::store(c.add(at), sums[i]) };
        i += 1;
    }
}

/// Multiplies 64 x 64 in a warpgroup, for which one warp loads.
#[kernel(arch = "sm_90a", max_threads = 160)]
pub unsafe fn pipeline_of_tiles(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut f32,
    steps: u32,
) {
    type Tile = SharedTile<bf16, ROWS>;
    let memory = TileMemory::dynamic();
    let thread = thread::thread_idx_x();
    // SAFETY: only this pipeline uses the words and the tiles; a stage is loaded when it is empty,
    // and read when it is full.
    unsafe {
        let pipeline = Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES);
        if thread == 0 {
            pipeline.init(1, 1);
        }
        thread::sync_threads();
        let tile = |state: PipelineState, which: u32| -> Tile {
            memory.tile((2 * state.stage + which) * Tile::BYTES)
        };
        let (mut state, mut step) = (PipelineState::FIRST, 0);
        if thread == 128 {
            while step < steps {
                pipeline.wait_empty(state);
                let full = pipeline.full(state);
                full.arrive_expect_tx(2 * Tile::BYTES);
                tile(state, 0).load(&a, 0, step * COLUMNS, full);
                tile(state, 1).load(&b, 0, step * COLUMNS, full);
                (state, step) = (pipeline.next(state), step + 1);
            }
        } else if thread < 128 {
            let mut sums = [0.0; 32];
            while step < steps {
                pipeline.wait_full(state);
                wgmma::fence_operand(&mut sums);
                wgmma::fence();
                let (a, b) = (tile(state, 0).factor(), tile(state, 1).factor());
                wgmma::multiply(&mut sums, a, b, step > 0);
                wgmma::commit_group();
                wgmma::wait_groups::<0>();
                wgmma::fence_operand(&mut sums);
                if thread == 0 {
                    pipeline.empty(state).arrive();
                }
                (state, step) = (pipeline.next(state), step + 1);
            }
            store(c, &sums);
        }
    }
}

/// Does the same as `pipeline_of_tiles`.
#[kernel(arch = "sm_90a", max_threads = 160)]
pub unsafe fn pipeline_by_hand(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut f32,
    steps: u32,
) {
    let memory = shared::dynamic_shared_mem::<u8>();
    let memory = memory.wrapping_add(memory.addr().wrapping_neg() % 1024);
    let words = shared_array![u64; 2 * STAGES as usize];
    let thread = thread::thread_idx_x();
    // SAFETY: only this pipeline uses the words and the tiles; a stage is loaded when it is empty,
    // and read when it is full.
    unsafe {
        let full = |stage: u32| MBarrier::at(words.add(stage as usize));
        let empty = |stage: u32| MBarrier::at(words.add((STAGES + stage) as usize));
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                full(stage).init(1);
                empty(stage).init(1);
                stage += 1;
            }
            mbarrier::fence_init();
        }
        thread::sync_threads();
        let tile = |stage: u32, which: u32| memory.add(((2 * stage + which) * TILE) as usize);
        let (mut stage, mut parity, mut step) = (0, 0, 0);
        if thread == 128 {
            while step < steps {
                empty(stage).wait(parity ^ 1);
                let full = full(stage);
                full.arrive_expect_tx(2 * TILE);
                tma::load_tile(tile(stage, 0), &a, 0, step * COLUMNS, full);
                tma::load_tile(tile(stage, 1), &b, 0, step * COLUMNS, full);
                (stage, step) = (stage + 1, step + 1);
                if stage == STAGES {
                    (stage, parity) = (0, parity ^ 1);
                }
            }
        } else if thread < 128 {
            let mut sums = [0.0; 32];
            while step < steps {
                full(stage).wait(parity);
                wgmma::fence_operand(&mut sums);
                wgmma::fence();
                let a = wgmma::Tile::<bf16>::at(tile(stage, 0));
                let b = wgmma::Tile::<bf16>::at(tile(stage, 1));
                wgmma::multiply(&mut sums, a, b, step > 0);
                wgmma::commit_group();
                wgmma::wait_groups::<0>();
                wgmma::fence_operand(&mut sums);
                if thread == 0 {
                    empty(stage).arrive();
                }
                (stage, step) = (stage + 1, step + 1);
                if stage == STAGES {
                    (stage, parity) = (0, parity ^ 1);
                }
            }
            store(c, &sums);
        }
    }
}

/// Columns of `product_of_layouts`.
pub const PRODUCT_N: u32 = 128;

/// Writes, in a warpgroup, 64 x [`PRODUCT_N`] sums of products of 64 terms, row-major. A and B are
/// stored with the terms side by side, or transposed; tiles of the maps have 64 rows.
#[kernel(arch = "sm_90a", max_threads = 128, T = [bf16, f16])]
pub unsafe fn product_of_layouts<T: mma::Factor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut f32,
    transposed_a: bool,
    transposed_b: bool,
) {
    let memory = TileMemory::dynamic();
    let (thread, bytes) = (thread::thread_idx_x(), SharedTile::<T, ROWS>::BYTES);
    // SAFETY: only this barrier uses the word. There is memory for three tiles, which are read when
    // they have arrived, and C has an element for each sum.
    unsafe {
        let full = MBarrier::at(shared_array![u64; 1]);
        if thread == 0 {
            full.init(1);
            mbarrier::fence_init();
        }
        thread::sync_threads();
        let tile = |which: u32| memory.tile::<T, ROWS>(which * bytes);
        if thread == 0 {
            full.arrive_expect_tx(3 * bytes);
            tile(0).load(&a, 0, 0, full);
            tile(1).load(&b, 0, 0, full);
            let (row, column) = if transposed_b { (0, 64) } else { (64, 0) };
            tile(2).load(&b, row, column, full);
        }
        full.wait(0);
        let mut sums = RegTile::<f32, { PRODUCT_N as usize / 8 }>::filled(0.0);
        wgmma::fence_operand(&mut sums);
        match (transposed_a, transposed_b) {
            (false, false) => multiply(&mut sums, tile(0).factor(), tile(1).factor()),
            (false, true) => multiply(&mut sums, tile(0).factor(), tile(1).transposed_factor()),
            (true, false) => multiply(&mut sums, tile(0).transposed_factor(), tile(1).factor()),
            (true, true) => {
                let (a, b) = (tile(0).transposed_factor(), tile(1).transposed_factor());
                multiply(&mut sums, a, b);
            }
        }
        wgmma::wait_groups::<0>();
        wgmma::fence_operand(&mut sums);
        let first_row = thread / 32 * 16;
        sums.for_each_pair(|row, column, [left, right]| {
            let to = c.add((PRODUCT_N * (first_row + row) + column) as usize);
            mem::store(to, left);
            mem::store(to.add(1), right);
        });
    }
}

/// Commits the products of 64 terms as a group.
///
/// # Safety
///
/// The contract is that of [`wgmma::multiply`].
unsafe fn multiply<T: mma::Factor, A: Layout<T>, B: Layout<T>>(
    sums: &mut RegTile<f32, { PRODUCT_N as usize / 8 }>,
    a: wgmma::Tile<T, A>,
    b: wgmma::Tile<T, B>,
) {
    // SAFETY: the test passes matrices of these sizes.
    unsafe {
        wgmma::fence();
        let mut term = 0;
        while term < COLUMNS {
            wgmma::multiply(sums, a.columns_from(term), b.columns_from(term), term > 0);
            term += T::TERMS;
        }
        wgmma::commit_group();
    }
}

/// Columns of [`combines_a_tile()`]'s tile, which has 16 rows.
pub const REG_COLUMNS: u32 = 24;

/// Stores to `out` three times `x`, minus the largest element of its row, plus the sum of its
/// column. The block is one warp.
#[kernel(max_threads = 32)]
pub unsafe fn combines_a_tile(x: *const f32, out: *mut f32) {
    let at = |row, column| (row * REG_COLUMNS + column) as usize;
    // SAFETY: `x` and `out` have an element for each of the tile's; all lanes take part.
    unsafe {
        let places = RegTile::<u8, { REG_COLUMNS as usize / 8 }>::filled(0);
        let tile = places.map_at(|row, column, _| mem::load(x.add(at(row, column))));
        let largest = tile.reduce_rows(f32::max);
        let sums = tile.reduce_columns(|a, b| a + b);
        let combined = tile.zip_rows(largest, |x, largest| x - largest);
        let combined = combined.zip_columns(sums, |x, sum| x + sum);
        let twice = tile.map(|x| 2.0 * x);
        combined.zip(twice, |x, twice| x + twice).for_each_pair(|row, column, [left, right]| {
            mem::store(out.add(at(row, column)), left);
            mem::store(out.add(at(row, column) + 1), right);
        });
    }
}
