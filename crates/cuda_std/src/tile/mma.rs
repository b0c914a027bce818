//! A block's product by `mma.sync`, from tiles that its threads copy by `cp.async`.

use crate::track_callers;
use core::marker::PhantomData;

use super::{PipelineState, RegTile};
use crate::mma::{self, Factor};
use crate::strided::Strided;
use crate::{arch, async_copy, hint, mem, thread, warp};

/// A row-major matrix of 16-bit elements in global memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<T> {
    /// The first element.
    pub address: *const T,
    /// The rows.
    pub rows: u32,
    /// The columns.
    pub columns: u32,
}

impl<T: Factor> Matrix<T> {
    /// Returns the alignment in bytes that all rows have: 16, 4 or 2.
    #[must_use]
    pub fn row_alignment(self) -> u32 {
        let bytes = self.address.addr() | (2 * self.columns as usize);
        if bytes.is_multiple_of(16) {
            16
        } else if bytes.is_multiple_of(4) {
            4
        } else {
            2
        }
    }

    /// Starts the copy of eight elements, from `row` and `column` on, to shared memory; elements
    /// outside the matrix are zeros. `ALIGN` is at most the rows' alignment; if it is 2, the thread
    /// copies the elements itself.
    ///
    /// # Safety
    ///
    /// `column` is a multiple of 8. `to` is aligned to 16 bytes, and has room for the elements,
    /// which no other thread accesses; [`async_copy`] says until when.
    #[track_caller]
    unsafe fn copy_8<const ALIGN: u32>(self, to: arch::SharedAddress, row: u32, column: u32) {
        let inside = |i: u32| row < self.rows && column + i < self.columns;
        let row = self.address.wrapping_add(row as usize * self.columns as usize);
        let from = |i: u32| row.wrapping_add((column + i) as usize);
        // A row is a whole number of copies, so each is inside as a whole or not at all.
        // SAFETY: the caller's contract; what is not inside is not read.
        unsafe {
            match ALIGN {
                16 => arch::copy_16_async(to, from(0).cast(), inside(0)),
                4 => {
                    for i in Strided::new(0, 8, 2) {
                        let to = arch::shared_offset(to, 2 * i);
                        arch::copy_4_async(to, from(i).cast(), inside(i));
                    }
                }
                _ => {
                    let bits = |i| if inside(i) { mem::load(from(i).cast::<u16>()) } else { 0 };
                    let word = |i| u32::from(bits(i)) | u32::from(bits(i + 1)) << 16;
                    arch::store_shared(to, [word(0), word(2), word(4), word(6)]);
                }
            }
        }
    }
}

/// `ROWS` rows of 32 elements of 16 bits in shared memory. Rows are contiguous (64 bytes), or
/// columns if the tile is `TRANSPOSED`. The 16-byte chunks of row `r` are swizzled: chunk `c` is at
/// `c ^ (r / 2 % 4)`; those of column `k`, at `c ^ (k % 8)`. So `ldmatrix` reads eight of them from
/// different banks.
#[derive(Clone, Copy)]
pub struct MmaTile<T, const ROWS: u32, const TRANSPOSED: bool = false> {
    address: arch::SharedAddress,
    element: PhantomData<T>,
}

#[track_callers]
impl<T: Factor, const ROWS: u32, const TRANSPOSED: bool> MmaTile<T, ROWS, TRANSPOSED> {
    /// Columns of a tile.
    pub const COLUMNS: u32 = 32;
    /// Size of a tile.
    pub const BYTES: u32 = 2 * ROWS * Self::COLUMNS;

    /// Returns the tile at an address in shared memory, a multiple of 16.
    #[must_use]
    pub fn at(address: *mut u8) -> Self {
        Self::at_shared(arch::shared_address(address))
    }

    const fn at_shared(address: arch::SharedAddress) -> Self {
        Self { address, element: PhantomData }
    }

    /// Returns its rows from `row` on, a multiple of 8, or of 64 if the tile is transposed.
    #[must_use]
    pub fn rows_from(self, row: u32) -> Self {
        let bytes = if TRANSPOSED { 2 } else { 2 * Self::COLUMNS };
        Self::at_shared(arch::shared_offset(self.address, bytes * row))
    }

    /// Returns the address of eight elements of a row from `column` on, a multiple of 8; or, if the
    /// tile is transposed, of a column from `row` on.
    fn chunk(self, row: u32, column: u32) -> arch::SharedAddress {
        let offset = if TRANSPOSED {
            2 * ROWS * column + 16 * ((row / 8) ^ (column % 8))
        } else {
            2 * Self::COLUMNS * row + 16 * ((column / 8) ^ (row / 2 % 4))
        };
        arch::shared_offset(self.address, offset)
    }

    /// Starts a thread's share of the copies of the elements of `matrix` from `row` and `column`
    /// on, of its transpose if the tile is transposed; elements outside the matrix are zeros.
    /// `ALIGN` is at most the alignment of the matrix's rows.
    ///
    /// # Safety
    ///
    /// `THREADS` threads call it, with `thread` from 0 on. `row` and `column` are multiples of 8.
    /// The matrix is allocated. No thread accesses the tile before these threads have waited for
    /// their copies, and then have met at a barrier.
    pub unsafe fn copy_from<const THREADS: u32, const ALIGN: u32>(
        self,
        matrix: Matrix<T>,
        (row, column): (u32, u32),
        thread: u32,
    ) {
        const CHUNKS: u32 = 4;
        let rows = const {
            assert!(THREADS.is_multiple_of(8 * CHUNKS) && ROWS.is_multiple_of(THREADS / CHUNKS));
            THREADS / CHUNKS
        };
        if TRANSPOSED {
            // A row of the matrix is a column of the tile. By the two assertions the threads copy
            // 8, 16 or 32 columns at a time.
            let columns = const {
                assert!(THREADS.is_multiple_of(ROWS) && ROWS.is_multiple_of(64));
                THREADS / (ROWS / 8)
            };
            let (r, c) = (8 * (thread % (ROWS / 8)), thread / (ROWS / 8));
            for first in Strided::new(0, Self::COLUMNS, columns) {
                let to = self.chunk(r, first + c);
                // SAFETY: the caller's contract; the chunk is in the tile.
                unsafe { matrix.copy_8::<ALIGN>(to, column + first + c, row + r) };
            }
            return;
        }
        let (r, c) = (thread / CHUNKS, 8 * (thread % CHUNKS));
        for first in Strided::new(0, ROWS, rows) {
            let to = self.rows_from(first).chunk(r, c);
            // SAFETY: the caller's contract; the chunk is in the tile.
            unsafe { matrix.copy_8::<ALIGN>(to, row + first + r, column + c) };
        }
    }

    /// Loads 16 rows from `row` on, and 16 columns from `column` on, as a lane's `a` of
    /// [`mma::m16n8k16`].
    ///
    /// # Safety
    ///
    /// All lanes of a warp call it together; the tile is filled and has the elements. `row` and
    /// `column` are multiples of 16.
    #[must_use]
    pub unsafe fn load_a(self, row: u32, column: u32, lane: u32) -> [u32; 4] {
        // Rows 0 to 15 of the first eight columns, then of the next eight.
        // SAFETY: the caller's contract.
        unsafe { self.load(row, lane / 8 % 2 * 8, column + lane / 16 * 8, lane % 8) }
    }

    /// Loads 16 rows from `row` on, and 16 columns from `column` on, as a lane's two `b`s of
    /// [`mma::m16n8k16`], each of eight rows.
    ///
    /// # Safety
    ///
    /// The contract is that of [`load_a`](Self::load_a).
    #[must_use]
    pub unsafe fn load_b(self, row: u32, column: u32, lane: u32) -> [[u32; 2]; 2] {
        // Eight rows, first and next eight columns; then the next eight rows.
        // SAFETY: the caller's contract.
        let [a, b, c, d] =
            unsafe { self.load(row, lane / 16 * 8, column + lane / 8 % 2 * 8, lane % 8) };
        [[a, b], [c, d]]
    }

    /// Loads four matrices of eight rows and columns. The matrix of which this lane gives the
    /// address of a row begins at `row + eight` and `column`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`load_a`](Self::load_a).
    unsafe fn load(self, row: u32, eight: u32, column: u32, lane: u32) -> [u32; 4] {
        let from = match TRANSPOSED {
            false => self.rows_from(row).chunk(eight + lane, column),
            true => self.chunk(row + eight, column + lane),
        };
        // SAFETY: the caller's tile has this row and column, and all lanes take part.
        unsafe { arch::load_matrices::<TRANSPOSED>(from) }
    }
}

/// Tiles of `M` x `N` elements of `a x b^T` (`a` is `m x k`, `b` is `n x k`), computed by the first
/// `THREADS` threads of a block through `STAGES` stages in shared memory, 2 to 4. With `TA` the
/// matrix `a` is the transpose, `k x m`; with `TB`, `b` is `k x n`. Needs sm_80.
#[derive(Clone, Copy)]
pub struct MmaProduct<
    T,
    const M: u32,
    const N: u32,
    const STAGES: u32,
    const THREADS: u32,
    const TA: bool = false,
    const TB: bool = false,
> {
    /// The left factor.
    pub a: Matrix<T>,
    /// The right factor; its rows are the product's columns.
    pub b: Matrix<T>,
    /// [`BYTES`](Self::BYTES) of shared memory, aligned to 16.
    pub memory: *mut u8,
}

impl<
    T: Factor,
    const M: u32,
    const N: u32,
    const STAGES: u32,
    const THREADS: u32,
    const TA: bool,
    const TB: bool,
> MmaProduct<T, M, N, STAGES, THREADS, TA, TB>
{
    /// Bytes of shared memory.
    pub const BYTES: u32 = STAGES * (MmaTile::<T, M>::BYTES + MmaTile::<T, N>::BYTES);
    const TERMS: u32 = MmaTile::<T, M>::COLUMNS;

    /// Returns the number of terms of a sum.
    const fn terms(self) -> u32 {
        if TA { self.a.rows } else { self.a.columns }
    }

    /// Returns this warp's sums of the tile whose first row and column are `origin`: `16 * I` rows
    /// and `8 * J` columns, from row and column `part` of the tile on, as a register tile for each
    /// 16 rows. Sums outside the product have no meaning.
    ///
    /// `ALIGN` (16, 4 or 2) is at most both factors' [`row_alignment`](Matrix::row_alignment): the
    /// copies are faster, the larger it is. `sync` is a barrier of the `THREADS` threads.
    ///
    /// # Safety
    ///
    /// The first `THREADS` threads of the block call it, with the same `origin`. Both factors are
    /// allocated, and nothing writes them meanwhile; no other thread accesses `memory`.
    #[track_caller]
    pub unsafe fn sums<const ALIGN: u32, const I: usize, const J: usize>(
        self,
        origin: (u32, u32),
        part: (u32, u32),
        sync: impl Fn(),
    ) -> [RegTile<f32, J>; I] {
        // These are read once here: the compiler does not move the reads out of the loop.
        let stages = Stages {
            product: self,
            memory: arch::shared_address(self.memory),
            thread: thread::thread_idx_x(),
            lane: warp::lane_id(),
        };
        let mut sums = [RegTile::filled(0.0); I];
        let (mut filled, mut read) = (PipelineState::FIRST, PipelineState::FIRST);
        let (mut next, mut term) = (0, 0);
        // SAFETY: the caller's contract. A stage is refilled after a barrier that follows all
        // threads' reads.
        unsafe {
            // An opaque bound keeps the loop from being unrolled.
            let last = hint::opaque(STAGES - 1);
            while filled.stage < last {
                stages.fill::<ALIGN>(filled, origin, next);
                filled = filled.next(STAGES);
                next += Self::TERMS;
            }
            while term < self.terms() {
                // Each fill commits one group. The newest `STAGES - 2` are of later stages than
                // this step's, which has arrived then.
                match STAGES {
                    2 => async_copy::wait_groups::<0>(),
                    3 => async_copy::wait_groups::<1>(),
                    4 => async_copy::wait_groups::<2>(),
                    _ => const { assert!(STAGES >= 2 && STAGES <= 4, "2 to 4 stages") },
                }
                sync();
                stages.fill::<ALIGN>(filled, origin, next);
                filled = filled.next(STAGES);
                next += Self::TERMS;
                stages.multiply(&mut sums, read, part);
                read = read.next(STAGES);
                term += Self::TERMS;
            }
            // The caller may write the memory now.
            sync();
        }
        sums
    }
}

/// A product, with the numbers of the calling thread and lane.
#[derive(Clone, Copy)]
struct Stages<
    T,
    const M: u32,
    const N: u32,
    const STAGES: u32,
    const THREADS: u32,
    const TA: bool,
    const TB: bool,
> {
    product: MmaProduct<T, M, N, STAGES, THREADS, TA, TB>,
    memory: arch::SharedAddress,
    thread: u32,
    lane: u32,
}

impl<
    T: Factor,
    const M: u32,
    const N: u32,
    const STAGES: u32,
    const THREADS: u32,
    const TA: bool,
    const TB: bool,
> Stages<T, M, N, STAGES, THREADS, TA, TB>
{
    fn tiles(self, state: PipelineState) -> (MmaTile<T, M, TA>, MmaTile<T, N, TB>) {
        let bytes = MmaTile::<T, M>::BYTES + MmaTile::<T, N>::BYTES;
        let a = arch::shared_offset(self.memory, state.stage * bytes);
        let b = arch::shared_offset(a, MmaTile::<T, M>::BYTES);
        (MmaTile::at_shared(a), MmaTile::at_shared(b))
    }

    /// Starts the copies of a stage, from column `term` of the factors on, and commits them: an
    /// empty group if there is no such column.
    ///
    /// # Safety
    ///
    /// The contract is that of [`sums`](Self::sums); no thread reads the stage.
    #[track_caller]
    unsafe fn fill<const ALIGN: u32>(
        self,
        state: PipelineState,
        (row, column): (u32, u32),
        term: u32,
    ) {
        let MmaProduct { a, b, .. } = self.product;
        if term < self.product.terms() {
            let (to_a, to_b) = self.tiles(state);
            // SAFETY: the caller passes rows that the matrices have, and all threads of the block
            // take part.
            unsafe {
                to_a.copy_from::<THREADS, ALIGN>(a, (row, term), self.thread);
                to_b.copy_from::<THREADS, ALIGN>(b, (column, term), self.thread);
            }
        }
        async_copy::commit_group();
    }

    /// Adds a stage's products.
    ///
    /// # Safety
    ///
    /// The contract is that of [`sums`](Self::sums); the stage is filled.
    #[track_caller]
    unsafe fn multiply<const I: usize, const J: usize>(
        self,
        sums: &mut [RegTile<f32, J>; I],
        state: PipelineState,
        (row, column): (u32, u32),
    ) {
        const { assert!(J.is_multiple_of(2), "columns are loaded in groups of 16") };
        let (a, b) = self.tiles(state);
        for term in Strided::new(0, MmaTile::<T, M>::COLUMNS, 16) {
            // SAFETY: the caller passes rows that the matrices have, and all threads of the block
            // take part.
            unsafe {
                let mut rows = [[0; 4]; I];
                for i in 0..I {
                    rows[i] = a.load_a(row + 16 * i as u32, term, self.lane);
                }
                for j in Strided::new(0, J, 2) {
                    let [left, right] = b.load_b(column + 8 * j as u32, term, self.lane);
                    for i in 0..I {
                        let sums = sums[i].blocks_mut();
                        mma::m16n8k16::<T>(&mut sums[j], rows[i], left);
                        mma::m16n8k16::<T>(&mut sums[j + 1], rows[i], right);
                    }
                }
            }
        }
    }
}
