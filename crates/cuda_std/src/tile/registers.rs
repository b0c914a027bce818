//! Tiles in registers.

use core::marker::PhantomData;

use super::SharedTile;
use crate::convert::{Float, Half};
use crate::thread;
use crate::warp::{self, WarpShuffleValue};

/// A tile of 16 rows and `8 * BLOCKS` columns in the registers of a warp, as
/// [`mma::m16n8k16`](crate::mma::m16n8k16) and [`wgmma::multiply`](crate::wgmma::multiply) leave
/// sums there. The four warps of a warpgroup have 16 rows each of 64.
///
/// A lane has four elements of each block of 8 columns: two neighbours of row `lane / 4`, from
/// column `2 * (lane % 4)` on, and the two below them in row `lane / 4 + 8`. The methods hide this:
/// they give rows and columns of the tile, reduce over them, and combine tiles element by element.
///
/// The methods that reduce are `unsafe`, as the lanes of the warp call them together.
///
/// # Example
///
/// ```
/// use cuda_std::math;
/// use cuda_std::tile::RegTile;
///
/// /// Returns the softmax of the rows of a tile.
/// ///
/// /// # Safety
/// ///
/// /// All lanes of the warp call this together.
/// unsafe fn softmax(scores: RegTile<f32, 8>) -> RegTile<f32, 8> {
///     // SAFETY: the caller's contract.
///     unsafe {
///         let largest = scores.reduce_rows(f32::max);
///         let powers = scores.zip_rows(largest, |score, largest| math::exp(score - largest));
///         powers.zip_rows(powers.reduce_rows(|a, b| a + b), |power, sum| power / sum)
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct RegTile<T, const BLOCKS: usize>([[T; 4]; BLOCKS]);

/// A value for each row of a [`RegTile`], in the registers of the warp.
#[derive(Clone, Copy, Debug)]
pub struct RegRows<T>([T; 2]);

/// A value for each column of a [`RegTile`], in the registers of the warp.
#[derive(Clone, Copy, Debug)]
pub struct RegColumns<T, const BLOCKS: usize>([[T; 2]; BLOCKS]);

impl<T: Copy> RegRows<T> {
    /// Returns the same value for each row.
    #[must_use]
    pub fn filled(value: T) -> Self {
        Self([value; 2])
    }

    /// Combines the values of each row with those of `other`.
    #[must_use]
    pub fn zip<U: Copy, V>(self, other: RegRows<U>, f: impl Fn(T, U) -> V) -> RegRows<V> {
        RegRows([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
}

impl<T: Copy, const BLOCKS: usize> RegTile<T, BLOCKS> {
    /// The number of rows.
    pub const ROWS: u32 = 16;
    /// The number of columns.
    pub const COLUMNS: u32 = 8 * BLOCKS as u32;

    /// Returns a tile with the same value everywhere.
    #[must_use]
    pub const fn filled(value: T) -> Self {
        Self([[value; 4]; BLOCKS])
    }

    /// Returns the lane's elements of each block of 8 columns.
    #[must_use]
    pub fn blocks(&self) -> &[[T; 4]; BLOCKS] {
        &self.0
    }

    /// Does the same as [`blocks`](Self::blocks), mutably.
    pub fn blocks_mut(&mut self) -> &mut [[T; 4]; BLOCKS] {
        &mut self.0
    }

    /// Returns the lane's elements, of all blocks.
    #[cfg(target_arch = "nvptx64")]
    pub(crate) fn elements_mut<const N: usize>(&mut self) -> &mut [T; N] {
        const { assert!(N == 4 * BLOCKS, "a block has four elements") };
        // SAFETY: both types are arrays of the same number of elements without padding.
        unsafe { &mut *core::ptr::from_mut(&mut self.0).cast() }
    }

    /// Calls `f` with the row, the first column and the elements of each of the lane's pairs of
    /// neighbours: columns are even.
    pub fn for_each_pair(&self, mut f: impl FnMut(u32, u32, [T; 2])) {
        let (row, column) = lane_origin();
        for block in 0..BLOCKS {
            let ([a, b, c, d], column) = (self.0[block], column + 8 * block as u32);
            f(row, column, [a, b]);
            f(row + 8, column, [c, d]);
        }
    }

    /// Returns the tile whose elements are `f` of the row, the column and the element here.
    #[must_use]
    pub fn map_at<U: Copy>(self, f: impl Fn(u32, u32, T) -> U) -> RegTile<U, BLOCKS> {
        let (row, column) = lane_origin();
        self.map_indexed(|block, i, element| {
            let (row, column) = (row + 8 * (i / 2) as u32, column + (i % 2) as u32);
            f(row, column + 8 * block as u32, element)
        })
    }

    /// Returns the tile whose elements are `f` of those here.
    #[must_use]
    pub fn map<U: Copy>(self, f: impl Fn(T) -> U) -> RegTile<U, BLOCKS> {
        self.map_indexed(|_, _, element| f(element))
    }

    /// Combines the elements with those of `other`.
    #[must_use]
    pub fn zip<U: Copy, V: Copy>(
        self,
        other: RegTile<U, BLOCKS>,
        f: impl Fn(T, U) -> V,
    ) -> RegTile<V, BLOCKS> {
        self.map_indexed(|block, i, element| f(element, other.0[block][i]))
    }

    /// Combines each element with the value of its row.
    #[must_use]
    pub fn zip_rows<U: Copy, V: Copy>(
        self,
        rows: RegRows<U>,
        f: impl Fn(T, U) -> V,
    ) -> RegTile<V, BLOCKS> {
        self.map_indexed(|_, i, element| f(element, rows.0[i / 2]))
    }

    /// Combines each element with the value of its column.
    #[must_use]
    pub fn zip_columns<U: Copy, V: Copy>(
        self,
        columns: RegColumns<U, BLOCKS>,
        f: impl Fn(T, U) -> V,
    ) -> RegTile<V, BLOCKS> {
        self.map_indexed(|block, i, element| f(element, columns.0[block][i % 2]))
    }

    /// Returns the tile whose elements are `f` of a block's number, an index in it, and the element
    /// here.
    fn map_indexed<U: Copy>(self, f: impl Fn(usize, usize, T) -> U) -> RegTile<U, BLOCKS> {
        let mapped = |block: usize| {
            let [a, b, c, d] = self.0[block];
            [f(block, 0, a), f(block, 1, b), f(block, 2, c), f(block, 3, d)]
        };
        // The methods of arrays would leave large arrays on the stack.
        let mut result = [mapped(0); BLOCKS];
        for block in 1..BLOCKS {
            result[block] = mapped(block);
        }
        RegTile(result)
    }
}

impl<T, const BLOCKS: usize> AsMut<[T]> for RegTile<T, BLOCKS> {
    fn as_mut(&mut self) -> &mut [T] {
        self.0.as_flattened_mut()
    }
}

/// Returns the row and the column of the lane's first element.
fn lane_origin() -> (u32, u32) {
    let lane = warp::lane_id();
    (lane / 4, lane % 4 * 2)
}

impl<T: WarpShuffleValue, const BLOCKS: usize> RegTile<T, BLOCKS> {
    /// Returns each row's elements combined by `op`, which is associative and commutative. All
    /// lanes that have elements of a row get the same value.
    ///
    /// # Safety
    ///
    /// All lanes of the warp call this together.
    #[track_caller]
    #[must_use]
    pub unsafe fn reduce_rows(&self, op: impl Fn(T, T) -> T) -> RegRows<T> {
        let [a, b, c, d] = self.0[0];
        let mut rows = [op(a, b), op(c, d)];
        for block in 1..BLOCKS {
            let [a, b, c, d] = self.0[block];
            rows = [op(rows[0], op(a, b)), op(rows[1], op(c, d))];
        }
        // The four lanes of a row are neighbours.
        // SAFETY: the caller's contract.
        RegRows(rows.map(|row| unsafe { exchange(exchange(row, 1, &op), 2, &op) }))
    }

    /// Returns each column's elements of the warp's 16 rows combined by `op`, which is associative
    /// and commutative. All lanes that have elements of a column get the same value.
    ///
    /// # Safety
    ///
    /// All lanes of the warp call this together.
    #[track_caller]
    #[must_use]
    pub unsafe fn reduce_columns(&self, op: impl Fn(T, T) -> T) -> RegColumns<T, BLOCKS> {
        let mut columns = [[self.0[0][0]; 2]; BLOCKS];
        for block in 0..BLOCKS {
            let [a, b, c, d] = self.0[block];
            columns[block] = [op(a, c), op(b, d)].map(|column| {
                // Lanes of the same columns are four apart.
                // SAFETY: the caller's contract.
                unsafe { exchange(exchange(exchange(column, 4, &op), 8, &op), 16, &op) }
            });
        }
        RegColumns(columns)
    }
}

/// Combines a lane's value with that of the lane whose number differs by `distance`.
///
/// # Safety
///
/// All lanes of the warp call this together.
#[track_caller]
unsafe fn exchange<T: WarpShuffleValue>(mine: T, distance: u32, op: &impl Fn(T, T) -> T) -> T {
    // SAFETY: all lanes of the caller's warp exchange at this point.
    op(mine, unsafe { warp::shuffle_xor(mine, distance) })
}

impl<const BLOCKS: usize> RegTile<f32, BLOCKS> {
    /// Stores columns from `column` on, a multiple of 8, to a tile in shared memory, rounded to a
    /// `T` of 16 or 32 bits: 64 of 16 bits, or 32 of 32. PTX: `stmatrix` for 16 bits,
    /// `st.shared.v2.u32` for 32.
    ///
    /// # Safety
    ///
    /// All lanes of the warp call this together; no other thread accesses the shared memory.
    #[track_caller]
    pub unsafe fn store<T: Float>(&self, to: SharedTile<T, 16>, column: u32) {
        const { assert!(size_of::<T>() > 1, "elements that are stored have 16 or 32 bits") }
        // A lane has four elements of each 8 columns; a word has 4 bytes.
        let first = (column / 8) as usize * 4 * size_of::<T>() / 4;
        let element = |i: usize| self.0[i / 4][i % 4];
        // SAFETY: the caller's warp stores together, to a tile with these columns that nothing else
        // accesses.
        unsafe { to.store_words(warp::lane_id(), |i| T::word(first + i, element)) }
    }

    /// Stores a block of 8 columns of the 64 rows of a warpgroup, rounded to `T`, transposed: as
    /// the 8 rows of a tile in shared memory. PTX: `stmatrix.trans`.
    ///
    /// # Safety
    ///
    /// All threads of the warpgroup call this together; no other thread accesses the shared memory.
    #[track_caller]
    pub unsafe fn store_transposed<T: Half>(&self, block: usize, to: SharedTile<T, 8>) {
        let warp = thread::thread_idx_x() / warp::WARP_SIZE % 4;
        // SAFETY: the caller's warpgroup is here together, and no other thread accesses the tile.
        unsafe { to.store_transposed(warp, warp::lane_id(), self.0[block]) }
    }

    /// Returns columns `16 * terms` to `16 * terms + 15`, rounded to `T`, as the left factor `a` of
    /// [`mma::m16n8k16`](crate::mma::m16n8k16), for a product of this tile with another matrix.
    #[must_use]
    pub fn factor<T: Half>(&self, terms: usize) -> [u32; 4] {
        let ([a, b, c, d], [e, f, g, h]) = (self.0[2 * terms], self.0[2 * terms + 1]);
        [T::pack([a, b]), T::pack([c, d]), T::pack([e, f]), T::pack([g, h])]
    }
}

/// Columns of a [`RegTile`], rounded to `T` of 16 bits: two neighbours in a word of a register.
#[derive(Clone, Copy, Debug)]
pub struct RegPairs<T, const BLOCKS: usize>([[u32; 2]; BLOCKS], PhantomData<T>);

impl<const BLOCKS: usize> RegTile<f32, BLOCKS> {
    /// Returns `N` blocks of 8 columns, from the `first` block on, rounded.
    #[must_use]
    pub fn round<T: Half, const N: usize>(&self, first: usize) -> RegPairs<T, N> {
        let mut pairs = RegPairs::ZERO;
        for block in 0..N {
            let [a, b, c, d] = self.0[first + block];
            pairs.0[block] = [T::pack([a, b]), T::pack([c, d])];
        }
        pairs
    }
}

impl<T: Half, const BLOCKS: usize> RegPairs<T, BLOCKS> {
    /// Zero in every column.
    pub const ZERO: Self = Self([[0; 2]; BLOCKS], PhantomData);

    /// Returns the tile whose words are `f` of those here: each has two neighbours, the left one in
    /// its low half.
    #[must_use]
    pub fn map_words(mut self, f: impl Fn(u32) -> u32) -> Self {
        for block in 0..BLOCKS {
            let [upper, lower] = self.0[block];
            self.0[block] = [f(upper), f(lower)];
        }
        self
    }

    /// Stores 64 columns from `column` on, a multiple of 8, to a tile in shared memory. PTX:
    /// `stmatrix`.
    ///
    /// # Safety
    ///
    /// All lanes of the warp call this together; no other thread accesses the shared memory.
    #[track_caller]
    pub unsafe fn store(&self, to: SharedTile<T, 16>, column: u32) {
        let first = (column / 8) as usize;
        // SAFETY: the caller's warp stores together, to a tile with these columns that nothing else
        // accesses.
        unsafe { to.store_words(warp::lane_id(), |i| self.0[first + i / 2][i % 2]) }
    }
}
