//! The stores of a product of large matrices: from registers through shared memory to C.

use cuda_std::convert::Float;
use cuda_std::prelude::*;
use cuda_std::tile::{SharedTile, Warpgroup};
use cuda_std::{hint, tma};
use devcomm_types::TensorMap;

use super::epilogue::Fragment;
use super::factors::Shared;
use super::gemm_wgmma::{GemmFactor, SLICES, SLICES_WORDS, STORE_M};
use super::hooks::Hooks;

/// A tile in shared memory that a warp stores at once.
pub(super) type Store<O> = SharedTile<O, STORE_M>;

/// A thread's sums of a tile, from `row` and `column` on.
pub(super) struct Part<'a> {
    pub(super) sums: &'a mut [f32; 128],
    pub(super) row: u32,
    pub(super) column: u32,
    pub(super) end: (u32, u32),
}

impl Fragment for Part<'_> {
    const ROWS: u32 = 2;
    const COLUMNS: u32 = 64;
    const PAIRS: bool = true;

    fn row(&self, i: u32) -> u32 {
        self.row + 8 * i
    }

    fn column(&self, j: u32) -> u32 {
        self.column + 8 * (j / 2) + j % 2
    }

    fn end(&self) -> (u32, u32) {
        self.end
    }

    fn sum(&mut self, i: u32, j: u32) -> &mut f32 {
        &mut self.sums[(4 * (j / 2) + 2 * i + j % 2) as usize]
    }
}

/// A warp's part of a tile that is computed.
pub(super) struct Done {
    pub(super) row: u32,
    pub(super) column: u32,
    /// The rows of its group end here.
    pub(super) end: u32,
}

impl Done {
    /// Writes [`SLICES`] slices to the shared memory, of which a thread has the words.
    pub(super) fn write<T: GemmFactor, O: Float>(
        &self,
        group: &Warpgroup,
        shared: Shared<T>,
        word: impl Fn(usize) -> u32,
    ) {
        group.wait_until_read();
        let mut which = 0;
        while which < SLICES {
            let first = which as usize * (SLICES_WORDS / SLICES as usize);
            // SAFETY: the lanes of the warp call this together, and the tiles are the warp's.
            unsafe {
                let tile = shared.store::<O>(group.warp(), which);
                tile.store_words(warp::lane_id(), |i| word(first + i));
            }
            which += 1;
        }
    }

    /// Stores the slices that were written, from the tile's `slice`-th on.
    pub(super) fn send<T: GemmFactor, O: Float, F: Hooks>(
        &self,
        group: &Warpgroup,
        c: &Output<'_, O>,
        shared: Shared<T>,
        slice: u32,
        hooks: &F,
    ) {
        // A map would store the rows of the next group too.
        let is_cut = F::GROUPS && self.end.saturating_sub(self.row) < STORE_M;
        if is_cut || !c.by_map {
            // SAFETY: the lanes of the warp call this together. C is as the kernel's contract says.
            unsafe {
                warp::sync();
                self.each(group, shared, slice, |column, from| {
                    c.store((self.row, self.end), column, from);
                });
            }
            return;
        }
        // SAFETY: the kernel's contract. Each slice is stored and sent once.
        group.store(|| unsafe {
            self.each(group, shared, slice, |column, from: Store<O>| {
                hooks.store_slice(c.map, self.row, column, from);
            });
            if F::SENDS {
                tma::commit_stores();
                self.each(group, shared, slice, |column, from: Store<O>| {
                    hooks.send_slice(self.row, column, from);
                });
            }
        });
    }

    /// Calls `store` with the column of each slice, from the tile's `slice`-th on, and its tile.
    fn each<T: GemmFactor, O>(
        &self,
        group: &Warpgroup,
        shared: Shared<T>,
        slice: u32,
        store: impl Fn(u32, Store<O>),
    ) {
        let mut which = 0;
        while which < SLICES {
            let column = self.column + (slice + which) * Store::<O>::COLUMNS;
            store(column, shared.store::<O>(group.warp(), which));
            which += 1;
        }
    }
}

/// Where the sums go.
pub(super) struct Output<'a, O> {
    pub(super) map: &'a TensorMap,
    /// Whether the map is used, for whole parts of a tile.
    pub(super) by_map: bool,
    /// C's address, for parts that are stored element by element.
    pub(super) address: *mut O,
    pub(super) m: u32,
    pub(super) n: u32,
}

impl<O: Float> Output<'_, O> {
    /// Stores a warp's tile up to row `end`, element by element.
    ///
    /// # Safety
    ///
    /// `address` is C's. The lanes of a warp call this together, and write the tile again
    /// after a barrier.
    unsafe fn store(&self, (row, end): (u32, u32), column: u32, tile: Store<O>) {
        const ROWS: u32 = 4;
        let lane = warp::lane_id();
        let m = self.m.min(end);
        let halves = Store::<O>::COLUMNS / warp::WARP_SIZE;
        // Not unrolled as a whole, which would take more registers than are left.
        let end = hint::opaque(m.saturating_sub(row).min(STORE_M));
        let mut first = 0;
        while first < end {
            let mut i = 0;
            while i < ROWS * halves {
                let (r, column_in_tile) = (first + i / halves, i % halves * warp::WARP_SIZE + lane);
                let (row, column) = (row + r, column + column_in_tile);
                if row < m && column < self.n {
                    let at = row as usize * self.n as usize + column as usize;
                    // SAFETY: the element lies in C.
                    unsafe {
                        let bits = tile.bits(r, column_in_tile);
                        match size_of::<O>() {
                            2 => mem::store(self.address.cast::<u16>().add(at), bits as u16),
                            _ => mem::store(self.address.cast::<u32>().add(at), bits),
                        }
                    }
                }
                i += 1;
            }
            first += ROWS;
        }
    }
}
