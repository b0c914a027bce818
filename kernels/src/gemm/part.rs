//! A warp's sums of a tile of C, in registers.

use super::prelude::*;

/// A thread's part of a warp's sums of `16 * I` rows and `8 * J` columns of C, from `row` and
/// `column` on. `end` has the end of the rows and that of the columns of C.
pub(crate) struct Part<'a, const I: usize, const J: usize> {
    sums: &'a mut [RegTile<f32, J>; I],
    row: u32,
    column: u32,
    end: (u32, u32),
}

impl<'a, const I: usize, const J: usize> Part<'a, I, J> {
    /// Returns the part of a warp whose first row and column are these, in a C that ends at `end`.
    pub(crate) fn of_warp(
        sums: &'a mut [RegTile<f32, J>; I],
        (row, column): (u32, u32),
        end: (u32, u32),
    ) -> Self {
        // Opaque: so nothing is computed from it before the products, where registers are few.
        let lane = hint::opaque(warp::lane_id());
        Self { sums, row: row + lane / 4, column: column + lane % 4 * 2, end }
    }

    /// Rounds and stores the sums that are in C, the elements of which no other thread accesses.
    pub(crate) unsafe fn store<O: Float>(mut self, c: *mut O) {
        let (m, n) = self.end;
        let aligned = n.is_multiple_of(2) && c.addr().is_multiple_of(size_of::<O::Pair>());
        for i in 0..Self::ROWS {
            let row = self.row(i);
            if row < m {
                let to = c.wrapping_add(row as usize * n as usize);
                for j in Strided::new(0, Self::COLUMNS, 2) {
                    let column = self.column(j);
                    let pair = [*self.sum(i, j), *self.sum(i, j + 1)];
                    let to = to.wrapping_add(column as usize);
                    // SAFETY: the caller guarantees C. If `aligned`, C has both columns or none.
                    unsafe {
                        if aligned {
                            if column < n {
                                mem::store(to.cast(), O::pack(pair));
                            }
                        } else {
                            if column < n {
                                mem::store(to, O::from_f32(pair[0]));
                            }
                            if column + 1 < n {
                                mem::store(to.wrapping_add(1), O::from_f32(pair[1]));
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<const I: usize, const J: usize> Fragment for Part<'_, I, J> {
    const ROWS: u32 = 2 * I as u32;
    const COLUMNS: u32 = 2 * J as u32;
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
        let blocks = self.sums[(i / 2) as usize].blocks_mut();
        &mut blocks[(j / 2) as usize][(i % 2 * 2 + j % 2) as usize]
    }
}
