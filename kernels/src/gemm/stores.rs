//! The stores of a product of large matrices: from registers through shared memory to C.

use core::array;

use super::gemm_wgmma::STORE_M;
use super::prelude::*;

/// A part of a warp's rows, in shared memory.
pub(crate) type Store<O> = SharedTile<O, STORE_M>;
/// The number of parts of a warp's rows in shared memory.
pub(super) const PARTS: u32 = 2;

/// The place of a warp's rows of a tile.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) column: u32,
    /// The end of the rows of its group.
    pub(super) end: u32,
}

impl Place {
    pub(super) const NONE: Self = Self { row: 0, column: 0, end: u32::MAX };
}

/// The matrix C, and how it is stored.
pub(super) struct Stores<'a, T, O, F> {
    pub(super) shared: Shared<T>,
    map: &'a TensorMap,
    /// Whether the map is used, for whole parts of a tile.
    pub(super) by_map: bool,
    /// C's address, for parts that are stored element by element.
    address: *mut O,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) hooks: &'a F,
}

impl<'a, T: GemmFactor, O: Float, F: Hooks> Stores<'a, T, O, F> {
    /// Returns the stores to a matrix of `m x n` elements: by its map if the address is null.
    pub(super) fn new(map: &'a TensorMap, address: *mut O, [m, n]: [u32; 2], hooks: &'a F) -> Self {
        Self { shared: Shared::dynamic(), map, by_map: address.is_null(), address, m, n, hooks }
    }

    /// Returns a warp's sums of a tile, of the rows at this place.
    pub(super) fn sums<'s>(&self, sums: &'s mut Sums, place: Place) -> Part<'s, 1, 32> {
        let end = (place.end.min(self.m), self.n);
        Part::of_warp(array::from_mut(sums), (place.row, place.column), end)
    }

    /// Calls `store` with the column and the memory of each part, from the tile's `first`-th on.
    fn each_part(&self, group: &Warpgroup, column: u32, first: u32, store: impl Fn(u32, Store<O>)) {
        for which in 0..PARTS {
            store(column + (first + which) * Store::<O>::COLUMNS, self.part(group, which));
        }
    }

    /// Stores a part up to row `end`, element by element. `address` is C's. The lanes of a warp
    /// call this together, and write the part again only after a barrier.
    unsafe fn store_elements(&self, (row, end): (u32, u32), column: u32, part: Store<O>) {
        const ROWS: u32 = 4;
        let lane = warp::lane_id();
        let m = self.m.min(end);
        let halves = Store::<O>::COLUMNS / warp::WARP_SIZE;
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
                        match size_of::<O>() {
                            2 => mem::store(self.address.cast::<u16>().add(at), bits as u16),
                            _ => mem::store(self.address.cast::<u32>().add(at), bits),
                        }
                    }
                }
            }
        }
    }
}

impl<T: GemmFactor, O: Float, F: Hooks> StoresRows for Stores<'_, T, O, F> {
    type Element = O;
    type Place = Place;

    const REPORTS: bool = F::REPORTS;

    fn part(&self, group: &Warpgroup, which: u32) -> Store<O> {
        self.shared.store(group.warp(), which)
    }

    fn encode(&self, word: u32) -> u32 {
        self.hooks.encode(word)
    }

    fn store(&self, group: &Warpgroup, Place { row, column, end }: Place, first: u32) {
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
                self.hooks.store_slice(self.map, row, column, part);
            });
            if F::SENDS {
                tma::commit_stores();
                self.each_part(group, column, first, |column, part| {
                    self.hooks.send_slice(row, column, part);
                });
            }
        });
    }

    fn stored(&self, warp: u32, tiles: u32) {
        self.hooks.on_stored(warp, tiles);
    }
}
