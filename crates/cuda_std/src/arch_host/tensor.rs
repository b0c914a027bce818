//! Tensor cores in plain arithmetic, and `cp.async` copies.

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::copies::{copy, put};
use super::memory::{event, touch};
use super::{Access, Engine, Event, SumsStep, lane_id};
use crate::tile::RegTile;
use crate::warp::FULL_MASK;
use crate::wgmma::Layout;

hooks! {
    /// Returns the words of all lanes of the warp, each of which gives six: the factors of `mma`,
    /// four words of `a` and two of `b`, or fewer and zeros.
    exchange(mine: [u32; 6]) -> [[u32; 6]; 32] = exchange(mine);
    /// Waits for the threads of the warpgroup.
    meet_warpgroup() = meet_warpgroup();
    step(sums: &mut [f32], step: SumsStep) = sums(sums, step);
}

events! {
    commit_copies = Event::Commit(Engine::CpAsync);
    wait_copies<const N: u32> =
        Event::Wait { engine: Engine::CpAsync, pending: N, reads_only: false };
    wgmma_commit = Event::Commit(Engine::Wgmma);
}

#[track_caller]
pub(crate) unsafe fn mma_m16n8k16<T: Factor>(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    let lane = lane_id() as usize;
    let (row, pair) = (lane / 4, lane % 4 * 2);
    let words = exchange([a[0], a[1], a[2], a[3], b[0], b[1]]);
    for (i, sum) in d.iter_mut().enumerate() {
        let column = pair + i % 2;
        for half in 0..2 {
            for quarter in 0..4 {
                let a = words[4 * row + quarter][2 * half + i / 2];
                let b = words[4 * column + quarter][4 + half];
                let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
                *sum += T::value(&a[..2]) * T::value(&b[..2]);
                *sum += T::value(&a[2..]) * T::value(&b[2..]);
            }
        }
    }
}

#[track_caller]
pub(crate) unsafe fn load_matrices<const TRANSPOSED: bool>(row: SharedAddress) -> [u32; 4] {
    let row = touch(row.cast::<u128>(), Access::Read);
    // SAFETY: the caller passes the address of a row in shared memory.
    let [a, b, c, d] = unsafe { row.cast::<[u32; 4]>().read() };
    let words = exchange([a, b, c, d, 0, 0]);
    let element = |matrix: usize, row: usize, column: usize| {
        words[8 * matrix + row][column / 2] >> (column % 2 * 16) & 0xffff
    };
    let lane = lane_id() as usize;
    let (row, pair) = (lane / 4, lane % 4 * 2);
    std::array::from_fn(|matrix| match TRANSPOSED {
        false => element(matrix, row, pair) | element(matrix, row, pair + 1) << 16,
        true => element(matrix, pair, row) | element(matrix, pair + 1, row) << 16,
    })
}

#[track_caller]
pub(crate) unsafe fn store_matrices(row: SharedAddress, words: [u32; 4]) {
    let lane = lane_id() as usize;
    // A lane stores its row of 16 bytes of matrix `lane / 8`, which four lanes have.
    let all = exchange([words[0], words[1], words[2], words[3], 0, 0]);
    let elements = std::array::from_fn(|pair| all[lane % 8 * 4 + pair][lane / 8]);
    let to = touch(row.cast::<u128>(), Access::Write).cast::<[u32; 4]>();
    // SAFETY: the caller passes the address of a row in shared memory that this warp may write.
    unsafe { to.write(elements) }
}

#[track_caller]
pub(crate) unsafe fn store_matrices_transposed<const N: usize>(
    row: SharedAddress,
    words: [u32; N],
) {
    let lane = lane_id() as usize;
    let mine = std::array::from_fn(|i| words.get(i).copied().unwrap_or(0));
    // A lane stores a row of 16 bytes of the transposed matrix `lane / 8`: a column of the
    // fragments, of which each of eight lanes has an element.
    let all = exchange(mine);
    let elements: [u16; 8] = std::array::from_fn(|i| {
        let word = all[4 * i + lane % 8 / 2][lane / 8];
        (word >> (16 * (lane % 2))) as u16
    });
    if lane < 8 * N {
        let to = touch(row.cast::<u128>(), Access::Write).cast::<[u16; 8]>();
        // SAFETY: the caller passes the address of a row in shared memory that this warp may write.
        unsafe { to.write(elements) }
    }
}

#[track_caller]
pub(crate) unsafe fn copy_16_async(to: SharedAddress, from: *const u8, pred: bool) {
    // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
    unsafe { copy_async::<u128>(to.cast(), from.cast(), pred) }
}

#[track_caller]
pub(crate) unsafe fn copy_4_async(to: SharedAddress, from: *const u8, pred: bool) {
    // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
    unsafe { copy_async::<u32>(to.cast(), from.cast(), pred) }
}

/// Copies a `W` if `pred`, or else writes zero.
///
/// # Safety
///
/// `to` is valid for writes, and `from`, if `pred`, for reads.
#[track_caller]
unsafe fn copy_async<W: Copy>(to: *mut W, from: *const W, pred: bool) {
    event(Event::Uses(Engine::CpAsync));
    if pred {
        // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
        unsafe { copy(Engine::CpAsync, to, from, Access::Write, None) }
    } else {
        // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
        unsafe { put(Engine::CpAsync, to, 0) }
    }
    event(Event::Uses(Engine::Thread));
}

/// An address in shared memory.
pub(crate) type SharedAddress = *mut u8;

pub(crate) fn shared_address<T>(pointer: *const T) -> SharedAddress {
    pointer.cast_mut().cast()
}

pub(crate) fn shared_offset(address: SharedAddress, bytes: u32) -> SharedAddress {
    address.wrapping_add(bytes as usize)
}

/// The place of a factor of `wgmma`.
#[derive(Clone, Copy)]
pub struct TileAddress {
    /// The first byte.
    first: *const u8,
    /// Bytes from 64 rows of a transposed factor to the next 64; 0 for other factors.
    next_rows: usize,
}

/// Requires an address that is a multiple of 1,024, since the swizzle depends on address bits.
#[track_caller]
pub(crate) fn tile_address(address: SharedAddress) -> TileAddress {
    assert!(address.addr().is_multiple_of(1024), "a tile's address is a multiple of 1,024");
    TileAddress { first: address, next_rows: 0 }
}

#[track_caller]
pub(crate) fn transposed_tile_address(address: SharedAddress, next_rows: u32) -> TileAddress {
    assert!(next_rows.is_multiple_of(1024), "a tile's next rows are at a multiple of 1,024");
    TileAddress { next_rows: next_rows as usize, ..tile_address(address) }
}

pub(crate) fn tile_offset_bytes(tile: TileAddress, bytes: u32) -> TileAddress {
    TileAddress { first: tile.first.wrapping_add(bytes as usize), ..tile }
}

/// Returns the address of a 16-byte piece of a tile after the 128-byte swizzle: bits 4 to 6 xor
/// bits 7 to 9.
pub(super) fn swizzled<T>(address: *const T) -> *const T {
    address.map_addr(|address| address ^ (address >> 7 & 7) << 4)
}

/// An element type of the factors of `wgmma`: `bf16`, `f16`, `F8E4M3` or `F8E5M2`.
pub trait Factor: Copy {
    /// Terms of a product: 32 bytes of a row.
    const TERMS: u32 = 32 / size_of::<Self>() as u32;
    #[doc(hidden)]
    fn value(bytes: &[u8]) -> f32;
}

macro_rules! factors {
    ($($type:ty: |$bytes:ident| $value:expr;)*) => { $(
        impl Factor for $type {
            #[inline(always)]
            fn value($bytes: &[u8]) -> f32 {
                $value.to_f32()
            }
        }
    )* };
}

factors! {
    bf16: |bytes| Self::from_le_bytes([bytes[0], bytes[1]]);
    f16: |bytes| Self::from_le_bytes([bytes[0], bytes[1]]);
    F8E4M3: |bytes| Self::from_bits(bytes[0]);
    F8E5M2: |bytes| Self::from_bits(bytes[0]);
}

/// Returns the first [`Factor::TERMS`] columns of row `row` of a factor, read by `access`.
///
/// # Safety
///
/// The factor has the row.
#[track_caller]
unsafe fn columns<T: Factor, L: Layout<T>>(
    tile: TileAddress,
    row: usize,
    access: Access,
) -> [f32; 32] {
    let mut values = [0.0; 32];
    if L::TRANSPOSED {
        // Elements have 16 bits: `Layout` has no other transposed factors.
        let row = tile.first.wrapping_add(row / 64 * tile.next_rows + row % 64 * size_of::<T>());
        for (k, value) in values.iter_mut().take(T::TERMS as usize).enumerate() {
            let from = swizzled(row.wrapping_add(128 * k));
            let from = touch(from.cast::<u16>(), access);
            // SAFETY: the caller passes the address of a row that has these columns.
            *value = T::value(&unsafe { from.cast::<[u8; 2]>().read() });
        }
        return values;
    }
    let row = tile.first.wrapping_add(128 * row);
    for (values, chunk) in values.chunks_exact_mut(T::TERMS as usize / 2).zip([0, 16]) {
        let from = swizzled(row.wrapping_add(chunk));
        let from = touch(from.cast::<u128>(), access);
        // SAFETY: the caller passes the address of a row that has these columns.
        let bytes = unsafe { from.cast::<[u8; 16]>().read() };
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
            *value = T::value(bytes);
        }
    }
    values
}

/// The sums of `wgmma` in a thread's registers: `N / 2` of them for 64 x `N` of a warpgroup.
pub trait Sums: AsMut<[f32]> {
    /// No products added yet.
    const ZERO: Self;
    #[doc(hidden)]
    #[track_caller]
    unsafe fn wgmma<T: Factor, LA: Layout<T>, LB: Layout<T>>(
        &mut self,
        a: TileAddress,
        b: TileAddress,
        accumulate: bool,
    ) {
        event(Event::Uses(Engine::Wgmma));
        step(self.as_mut(), SumsStep::Begin);
        let thread = crate::thread::index_in_block() as usize % 128;
        let (row, pair) = (thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2);
        // SAFETY: the caller's warpgroup calls this together, with tiles in shared memory that no
        // thread writes.
        let rows = unsafe {
            [columns::<T, LA>(a, row, Access::Read), columns::<T, LA>(a, row + 8, Access::Read)]
        };
        // The same column is read by 32 threads, of which this is number `reader`; at least one of
        // them reports it. A thread reads `columns_each` columns.
        let (reader, columns_each) = (thread / 4, self.as_mut().len() / 2);
        for (j, sums) in self.as_mut().as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for side in 0..2 {
                let is_reader = (2 * j + side) % 32 == reader % columns_each;
                let access = if is_reader { Access::Read } else { Access::ReadByOther };
                // SAFETY: the caller's warpgroup calls this together, with tiles in shared memory
                // that no thread writes.
                let column = unsafe { columns::<T, LB>(b, 8 * j + pair + side, access) };
                for (half, row) in rows.iter().enumerate() {
                    let sum = &mut sums[2 * half + side];
                    let first = if accumulate { *sum } else { 0.0 };
                    let terms = row.iter().zip(&column).take(T::TERMS as usize);
                    *sum = terms.fold(first, |sum, (a, b)| sum + a * b);
                }
            }
        }
        step(self.as_mut(), SumsStep::End);
        event(Event::Uses(Engine::Thread));
    }

    #[doc(hidden)]
    #[track_caller]
    fn fence_operand(&mut self) {
        step(self.as_mut(), SumsStep::Fence);
    }
}

macro_rules! widths {
    ($($sums:literal)*) => { $(
        impl Sums for [f32; $sums] {
            const ZERO: Self = [0.0; $sums];
        }
        impl Sums for RegTile<f32, { $sums / 4 }> {
            const ZERO: Self = Self::filled(0.0);
        }
    )* };
}

widths! { 4 8 16 24 32 40 48 56 64 72 80 88 96 104 112 128 }

/// Lets the lanes of the warp meet, since a warp executes the instruction together: no lane runs
/// ahead and writes tiles that others have still to read. The vote orders no accesses.
#[track_caller]
pub(crate) fn wgmma_fence() {
    super::ballot(FULL_MASK, false);
    event(Event::RegisterFence);
}

/// Waits for the threads of the warpgroup first: a product is of all its warps, so that it does not
/// end before each warp has begun it.
#[track_caller]
pub(crate) fn wgmma_wait<const N: u32>() {
    meet_warpgroup();
    event(Event::Wait { engine: Engine::Wgmma, pending: N, reads_only: false });
}
