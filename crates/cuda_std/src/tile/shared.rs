//! Tiles in shared memory.

use core::marker::PhantomData;

use crate::convert::Half;
use crate::{mma, wgmma};

/// Alignment of a tile in bytes: the swizzle's pattern has eight rows of 128 bytes.
const ALIGN: usize = 1024;

/// The first address from `memory` on that a tile can have, at most 1,023 bytes further.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[must_use]
pub fn align_shared(memory: *mut u8) -> *mut u8 {
    memory.wrapping_add(memory.addr().wrapping_neg() % ALIGN)
}

/// `ROWS` rows of 64 elements of 16 bits (128 bytes) in shared memory. The 16-byte chunks of row
/// `r` are swizzled: chunk `c` is at `c ^ (r % 8)`.
#[derive(Clone, Copy)]
pub struct SharedTile<T, const ROWS: u32> {
    address: *mut u8,
    element: PhantomData<T>,
}

impl<T, const ROWS: u32> SharedTile<T, ROWS> {
    /// Columns of a tile.
    pub const COLUMNS: u32 = 64;
    /// Size of a tile.
    pub const BYTES: u32 = {
        assert!(size_of::<T>() == 2, "elements of a tile have 16 bits");
        assert!(ROWS.is_multiple_of(8), "the rows of a tile are a multiple of 8");
        ROWS * 128
    };

    /// The tile at an address in shared memory, a multiple of 1,024 ([`align_shared`]).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub const fn at(address: *mut u8) -> Self {
        Self { address, element: PhantomData }
    }

    /// Its address.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub const fn address(self) -> *mut u8 {
        self.address
    }

    /// `N` of its rows, from `row` on, a multiple of 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub const fn rows<const N: u32>(self, row: u32) -> SharedTile<T, N> {
        SharedTile::at(self.address.wrapping_add((row * 128) as usize))
    }

    /// The tile as a factor of [`wgmma::multiply`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    #[must_use]
    pub fn factor(self) -> wgmma::Tile {
        wgmma::Tile::at(self.address)
    }
}

impl<T: Half> SharedTile<T, 16> {
    /// Stores 16 x 64 sums of a warp, as `wgmma` leaves them in registers: `sums[4 * j..]` of a
    /// lane are those of columns from `8 * j` on.
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together; no other thread accesses the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn store_sums(self, lane: u32, sums: impl Fn(usize) -> f32) {
        // A lane gives the address of a row of one of four matrices: eight rows, the eight below
        // them, then the same of the next eight columns.
        let row = lane % 16;
        let mut pair = 0;
        while pair < 4 {
            let chunk = 2 * pair + lane / 16;
            let offset = row * 128 + ((chunk ^ (row % 8)) << 4);
            let first = 8 * pair as usize;
            let word = |i: usize| T::pack([sums(first + 2 * i), sums(first + 2 * i + 1)]);
            // SAFETY: the caller's contract; the chunk lies in the tile.
            unsafe {
                mma::store_matrices(
                    self.address.wrapping_add(offset as usize),
                    [word(0), word(1), word(2), word(3)],
                );
            }
            pair += 1;
        }
    }
}
