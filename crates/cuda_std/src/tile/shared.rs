//! Tiles in shared memory.

use crate::track_callers;
use core::marker::PhantomData;

use crate::convert::{Float, Half};
use crate::mbarrier::MBarrier;
use crate::vector::Vec16;
use crate::{arch, mma, shared, wgmma};
use devcomm_types::TensorMap;

/// Alignment of a tile in bytes: the swizzle's pattern has eight rows of 128 bytes.
const ALIGN: usize = 1024;

/// The block's dynamic shared memory, from the first address on at which a tile may begin.
#[derive(Clone, Copy)]
pub struct TileMemory(arch::SharedAddress);

#[track_callers]
impl TileMemory {
    /// The maximum number of bytes of dynamic shared memory that the alignment takes.
    pub const PADDING: u32 = ALIGN as u32;

    /// Returns the dynamic shared memory of the launch.
    #[must_use]
    pub fn dynamic() -> Self {
        let memory = shared::dynamic_shared_mem::<u8>();
        // The generic address, used here, has the low bits of the address in shared memory.
        let aligned = memory.wrapping_add(memory.addr().wrapping_neg() % ALIGN);
        Self(arch::shared_address(aligned))
    }

    /// Returns the tile at an offset in bytes, a multiple of 1,024.
    #[must_use]
    pub fn tile<T, const ROWS: u32>(self, offset: u32) -> SharedTile<T, ROWS> {
        SharedTile::of(arch::shared_offset(self.0, offset))
    }

    /// Reads 16 bytes at an offset. PTX: `ld.shared.v4.u32`.
    ///
    /// # Safety
    ///
    /// The offset is a multiple of 16. The 16 bytes lie in the launch's dynamic shared memory, and
    /// no thread writes them at the same time.
    pub unsafe fn read<T>(self, offset: u32) -> Vec16<T> {
        // SAFETY: the caller passes an offset within the memory, of bytes that no thread writes
        // meanwhile.
        Vec16::from_bits(unsafe { arch::load_shared(arch::shared_offset(self.0, offset)) })
    }

    /// Writes 16 bytes at an offset. PTX: `st.shared.v4.u32`.
    ///
    /// # Safety
    ///
    /// The offset is a multiple of 16. The 16 bytes lie in the launch's dynamic shared memory, and
    /// no other thread accesses them at the same time.
    pub unsafe fn write<T>(self, offset: u32, value: Vec16<T>) {
        // SAFETY: the caller passes an offset within the memory, of bytes for this thread alone.
        unsafe { arch::store_shared(arch::shared_offset(self.0, offset), value.to_bits()) }
    }

    /// Writes 16 bytes at an offset in the memory of block `block` of the cluster, asynchronously:
    /// the barrier of that block at the place that `barrier` has in this block counts 16 bytes when
    /// they have arrived. PTX: `st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32`.
    ///
    /// # Safety
    ///
    /// The contract of [`write`](Self::write) holds for that block's memory until the bytes have
    /// arrived, and that block has not ended by then.
    pub unsafe fn send<T>(self, offset: u32, block: u32, value: Vec16<T>, barrier: MBarrier) {
        let to = arch::shared_offset(self.0, offset);
        // SAFETY: the caller passes an offset within the memory of a running block.
        unsafe { arch::send_shared(to, block, value.to_bits(), barrier.address()) }
    }
}

/// `ROWS` rows of 128 bytes in shared memory: 32 elements of 32 bits, 64 of 16, or 128 of 8. The
/// 16-byte chunks of row `r` are swizzled: chunk `c` is at `c ^ (r % 8)`.
///
/// The maps of copies from and to a tile of an [`arena!`](crate::arena) have tiles of as many rows,
/// which simulated runs check.
pub struct SharedTile<T, const ROWS: u32> {
    address: arch::SharedAddress,
    /// Whether the tiles of maps must have `ROWS` rows.
    #[cfg(not(target_arch = "nvptx64"))]
    has_its_rows: bool,
    element: PhantomData<T>,
}

// Not derived, as `T` need not be `Copy`.
impl<T, const ROWS: u32> Clone for SharedTile<T, ROWS> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const ROWS: u32> Copy for SharedTile<T, ROWS> {}

#[track_callers]
impl<T, const ROWS: u32> SharedTile<T, ROWS> {
    /// Columns of a tile.
    pub const COLUMNS: u32 = 128 / size_of::<T>() as u32;
    /// Size of a tile.
    pub const BYTES: u32 = {
        assert!(matches!(size_of::<T>(), 1 | 2 | 4), "elements of a tile have 8, 16 or 32 bits");
        assert!(ROWS.is_multiple_of(8), "the rows of a tile are a multiple of 8");
        ROWS * 128
    };

    /// Returns the tile at an address in shared memory, a multiple of 1,024.
    #[must_use]
    pub fn at(address: *mut u8) -> Self {
        Self::of(arch::shared_address(address))
    }

    fn of(address: arch::SharedAddress) -> Self {
        Self {
            address,
            #[cfg(not(target_arch = "nvptx64"))]
            has_its_rows: false,
            element: PhantomData,
        }
    }

    /// Returns the tile, to and from which only maps with tiles of `ROWS` rows copy.
    #[doc(hidden)]
    #[must_use]
    pub fn with_its_rows(self) -> Self {
        Self {
            #[cfg(not(target_arch = "nvptx64"))]
            has_its_rows: true,
            ..self
        }
    }

    /// Returns the tile of `N` rows of this tile, from row `row` on, which is a multiple of 8.
    #[must_use]
    pub fn rows<const N: u32>(self, row: u32) -> SharedTile<T, N> {
        SharedTile {
            #[cfg(not(target_arch = "nvptx64"))]
            has_its_rows: self.has_its_rows,
            ..SharedTile::of(arch::shared_offset(self.address, 128 * row))
        }
    }

    /// Requires a map whose tiles have the rows of this one, an arena's, in simulated runs.
    fn check(self, map: &TensorMap) {
        #[cfg(not(target_arch = "nvptx64"))]
        if self.has_its_rows {
            arch::check_rows(map, ROWS);
        }
        let _ = map;
    }

    /// Copies a tile of a matrix to this tile, as [`tma::load_tile`](crate::tma::load_tile) does.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::load_tile`](crate::tma::load_tile).
    pub unsafe fn load(self, map: &TensorMap, row: u32, column: u32, full: MBarrier) {
        self.check(map);
        // SAFETY: the caller keeps the tile for this load alone until the barrier's phase ends.
        unsafe { arch::load_tile(self.address, map, row, column, full.address()) }
    }

    /// Does the same as [`load`](Self::load), for data that no other block reads: the L2 cache
    /// evicts it first. PTX: `cp.async.bulk.tensor` with `.L2::cache_hint`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`load`](Self::load).
    pub unsafe fn load_once(self, map: &TensorMap, row: u32, column: u32, full: MBarrier) {
        self.check(map);
        // SAFETY: the caller keeps the tile for this load alone until the barrier's phase ends.
        unsafe { arch::load_tile_once(self.address, map, row, column, full.address()) }
    }

    /// Copies a tile of a matrix to the place of this tile in each of `blocks`, as
    /// [`tma::load_tile_multicast`](crate::tma::load_tile_multicast) does.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::load_tile_multicast`](crate::tma::load_tile_multicast).
    pub unsafe fn load_multicast(
        self,
        map: &TensorMap,
        row: u32,
        column: u32,
        full: MBarrier,
        blocks: u16,
    ) {
        self.check(map);
        // SAFETY: the caller keeps the tile for this load alone until the barrier's phase ends.
        unsafe {
            arch::load_tile_multicast(self.address, map, row, column, full.address(), blocks);
        }
    }

    /// Copies this tile to a matrix, as [`tma::store_tile`](crate::tma::store_tile) does.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::store_tile`](crate::tma::store_tile).
    pub unsafe fn store(self, map: &TensorMap, row: u32, column: u32) {
        self.check(map);
        // SAFETY: the caller keeps the tile as it is until the store has read it.
        unsafe { arch::store_tile(map, row, column, self.address) }
    }

    /// Copies this tile in the order that it has here, which is [swizzled](Self), as
    /// [`tma::store_words`](crate::tma::store_words) does: a receiver may poll each word.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::store_words`](crate::tma::store_words), for
    /// [`BYTES`](Self::BYTES) bytes.
    pub unsafe fn store_swizzled(self, to: *mut u32) {
        // SAFETY: the caller keeps the tile as it is until the store has read it.
        unsafe { arch::store_words(to, self.address, Self::BYTES) }
    }

    /// Copies this tile in the order that it has here, which is [swizzled](Self), to memory that no
    /// thread polls, as [`tma::store_bulk`](crate::tma::store_bulk) does.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::store_bulk`](crate::tma::store_bulk), for
    /// [`BYTES`](Self::BYTES) bytes.
    pub unsafe fn store_bulk(self, to: *mut u32) {
        // SAFETY: the caller keeps the tile as it is until the store has read it.
        unsafe { arch::store_bulk(to.cast(), self.address, Self::BYTES) }
    }
}

impl<T: Float, const ROWS: u32> SharedTile<T, ROWS> {
    /// Adds this tile to a matrix of `T`, as [`tma::reduce_add_tile`](crate::tma::reduce_add_tile)
    /// does.
    ///
    /// # Safety
    ///
    /// The contract is that of [`tma::reduce_add_tile`](crate::tma::reduce_add_tile).
    #[track_caller]
    pub unsafe fn reduce_add(self, map: &TensorMap, row: u32, column: u32) {
        self.check(map);
        // SAFETY: the caller keeps the tile as it is until the store has read it.
        unsafe { arch::reduce_add_tile(map, row, column, self.address) }
    }
}

impl<T: wgmma::Factor, const ROWS: u32> SharedTile<T, ROWS> {
    /// Returns the tile as a factor of [`wgmma::multiply`].
    #[track_caller]
    #[must_use]
    pub fn factor(self) -> wgmma::Tile<T> {
        wgmma::Tile::at_shared(self.address)
    }
}

impl<T: mma::Factor, const ROWS: u32> SharedTile<T, ROWS> {
    /// Returns the factor of [`wgmma::multiply`] that is stored transposed in this tile and the
    /// tiles after it in memory. The factor has `ROWS` columns: row `r` of a tile is a part of
    /// column `r`. The factor's first 64 rows are the columns of this tile, the next 64 rows are
    /// those of the next tile, and so on.
    #[track_caller]
    #[must_use]
    pub fn transposed_factor(self) -> wgmma::Tile<T, wgmma::MnMajor> {
        wgmma::Tile::transposed_at_shared(self.address, Self::BYTES)
    }
}

impl<T: Float, const ROWS: u32> SharedTile<T, ROWS> {
    /// Reads the bits of an element of 16 or 32 bits. PTX: `ld.shared.u16` or `ld.shared.u32`.
    ///
    /// # Safety
    ///
    /// The tile has the row and the column, was written, and no other thread writes it. Elements
    /// do not have 8 bits.
    #[track_caller]
    pub unsafe fn bits(self, row: u32, column: u32) -> u32 {
        debug_assert!(size_of::<T>() > 1, "elements that are read have 16 or 32 bits");
        let byte = column * size_of::<T>() as u32;
        let offset = row * 128 + (((byte / 16) ^ (row % 8)) << 4) + byte % 16;
        let from = arch::shared_offset(self.address, offset);
        // SAFETY: the caller passes a row and a column of the tile, which no thread writes.
        unsafe {
            match size_of::<T>() {
                2 => arch::load_shared_u16(from).into(),
                _ => arch::load_shared_u32(from),
            }
        }
    }
}

impl<T: Half> SharedTile<T, 8> {
    /// Stores 64 x 8 sums of a warpgroup, transposed: each column of eight becomes a row of this
    /// tile. `sums` are the four of them that `wgmma` leaves in the registers of this lane. PTX:
    /// `stmatrix.trans`.
    ///
    /// # Safety
    ///
    /// The threads of a warpgroup call this together. `warp` is the number of the thread's warp in
    /// the warpgroup, from 0, and `lane` that of the thread in its warp. No other thread accesses
    /// the tile.
    #[track_caller]
    pub unsafe fn store_transposed(self, warp: u32, lane: u32, sums: [f32; 4]) {
        let (row, chunk) = (lane % 8, 2 * warp + lane / 8 % 2);
        let to = arch::shared_offset(self.address, row * 128 + ((chunk ^ row) << 4));
        let words = [T::pack([sums[0], sums[1]]), T::pack([sums[2], sums[3]])];
        // SAFETY: the caller's contract; the chunk lies in the tile.
        unsafe { arch::store_matrices_transposed(to, words) }
    }
}

impl<T: Float> SharedTile<T, 16> {
    /// Stores 16 rows of a warp's sums, as `wgmma` leaves them in registers. A lane has 16 words of
    /// these sums: `word(i)` returns its `i`-th one, as [`Float::word`] makes it of the lane's
    /// sums. PTX: `stmatrix` for 16 bits, `st.shared.v2.u32` for 32.
    ///
    /// A word of four 8-bit elements is stored in the place that a word of two 16-bit elements
    /// has. Two of the four are in one row of the sums and two in the row eight below it, so the
    /// tile then has no rows: it must be read by words, as they were stored.
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together, and `lane` is the number of a thread in it. No other
    /// thread accesses the tile.
    #[track_caller]
    pub unsafe fn store_words(self, lane: u32, word: impl Fn(usize) -> u32) {
        if size_of::<T>() == 4 {
            // SAFETY: the caller's warp stores together, to a tile that nothing else accesses.
            return unsafe { self.store_pairs(lane, word) };
        }
        // Each lane gives the address of one row of 16 bytes of one of four matrices: the first
        // eight rows, the eight rows below them, and the same rows of the next eight columns.
        let row = lane % 16;
        for pair in 0..4 {
            let chunk = 2 * pair + lane / 16;
            let offset = row * 128 + ((chunk ^ (row % 8)) << 4);
            let first = 4 * pair as usize;
            // SAFETY: the caller's contract; the chunk lies in the tile.
            unsafe {
                let to = arch::shared_offset(self.address, offset);
                let words = [word(first), word(first + 1), word(first + 2), word(first + 3)];
                arch::store_matrices(to, words);
            }
        }
    }

    /// Does the same as [`store_words`](Self::store_words), for 32-bit elements.
    ///
    /// # Safety
    ///
    /// The contract is that of [`store_words`](Self::store_words).
    #[track_caller]
    unsafe fn store_pairs(self, lane: u32, word: impl Fn(usize) -> u32) {
        // Words `4 * j` and `4 * j + 1` are neighbours in the `j`-th eight columns; the two words
        // after them are the neighbours eight rows below.
        for pair in 0..8 {
            let row = lane / 4 + 8 * (pair % 2);
            let chunk = pair / 2 * 2 + lane % 4 / 2;
            let offset = row * 128 + ((chunk ^ (row % 8)) << 4) + lane % 2 * 8;
            let first = 2 * pair as usize;
            // SAFETY: the caller's contract; the chunk lies in the tile.
            unsafe {
                let to = arch::shared_offset(self.address, offset);
                arch::store_shared_pair(to, [word(first), word(first + 1)]);
            }
        }
    }
}
