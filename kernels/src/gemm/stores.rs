//! The stores of a product of large matrices: from registers through shared memory to C.

use core::array;

use super::prelude::*;
use super::wide_tiles::{PARTS, STAGE_BYTES, STORE_M};

/// A part of a warp's rows, in shared memory.
pub(crate) type Store<O> = SharedTile<O, STORE_M>;

impl<T: GemmFactor, E: Epilogue, F: Hooks> Product<'_, T, E, F> {
    /// Applies the epilogue to a warp's sums of these rows of a tile.
    pub(super) fn apply_epilogue(&self, sums: &mut Sums, Tile { row, column, end, .. }: Tile) {
        let end = (end.min(self.m), self.n);
        self.epilogue.apply(&mut Part::of_warp(array::from_mut(sums), (row, column), end));
    }

    /// Calls `store` with the column and the memory of each part, from the tile's `first`-th on.
    fn each_part(
        &self,
        group: &Warpgroup,
        column: u32,
        first: u32,
        store: impl Fn(u32, Store<E::Output>),
    ) {
        for which in 0..PARTS {
            store(column + (first + which) * Store::<E::Output>::COLUMNS, self.part(group, which));
        }
    }

    /// Stores a part up to row `end`, element by element. `address` is C's. The lanes of a warp
    /// call this together, and write the part again only after a barrier.
    unsafe fn store_elements(&self, (row, end): (u32, u32), column: u32, part: Store<E::Output>) {
        const ROWS: u32 = 4;
        let lane = warp::lane_id();
        let m = self.m.min(end);
        let halves = Store::<E::Output>::COLUMNS / warp::WARP_SIZE;
        // Opaque, so that the loop is not unrolled as a whole, for which registers are too few.
        let end = hint::opaque(m.saturating_sub(row).min(STORE_M));
        for first in Strided::new(0, end, ROWS) {
            for i in 0..ROWS * halves {
                let (r, c) = (first + i / halves, i % halves * warp::WARP_SIZE + lane);
                let (row, column) = (row + r, column + c);
                if row < m && column < self.n {
                    let at = row as usize * self.n as usize + column as usize;
                    // SAFETY: the element lies in C, the address of which the caller guarantees.
                    unsafe {
                        let bits = part.bits(r, c);
                        match size_of::<E::Output>() {
                            2 => mem::store(self.address.cast::<u16>().add(at), bits as u16),
                            _ => mem::store(self.address.cast::<u32>().add(at), bits),
                        }
                    }
                }
            }
        }
    }
}

impl<T: GemmFactor, E: Epilogue, F: Hooks> StoresRows for Product<'_, T, E, F> {
    type Element = E::Output;
    type Place = Tile;

    const REPORTS: bool = F::REPORTS;

    fn part(&self, group: &Warpgroup, which: u32) -> Store<E::Output> {
        let index = PARTS * group.warp() + which;
        self.memory.tile(STAGES * STAGE_BYTES + index * Store::<E::Output>::BYTES)
    }

    fn encode(&self, word: u32) -> u32 {
        self.hooks.encode(word)
    }

    fn store(&self, group: &Warpgroup, Tile { row, column, end, .. }: Tile, first: u32) {
        // A map would store the rows of the next group too.
        let is_cut = F::GROUPS && end.saturating_sub(row) < STORE_M;
        if is_cut || !self.by_map {
            // SAFETY: the lanes of the warp call this together. The kernel's caller guarantees C.
            unsafe {
                warp::sync();
                self.each_part(group, column, first, |column, part| {
                    self.store_elements((row, end), column, part);
                });
            }
            return;
        }
        // SAFETY: the kernel's caller guarantees C. Each part is stored and sent once.
        group.store(|| unsafe {
            self.each_part(group, column, first, |column, part| {
                self.hooks.store_part(self.maps[2], row, column, part);
            });
            if F::SENDS {
                tma::commit_stores();
                self.each_part(group, column, first, |column, part| {
                    self.hooks.send_part(row, column, part);
                });
            }
        });
    }

    fn stored(&self, warp: u32, tiles: u32) {
        self.hooks.on_stored(warp, tiles);
    }
}
