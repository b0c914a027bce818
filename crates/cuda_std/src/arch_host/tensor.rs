//! Tensor cores in plain arithmetic, and copies by threads, which happen at once.

use std::cell::UnsafeCell;
use std::panic::Location;

use half::bf16;

use super::memory::touch;
use super::{Access, current, lane_id, shared_static};
use crate::warp::{FULL_MASK, WARP_SIZE};

const LANES: usize = WARP_SIZE as usize;

/// What each lane of a warp shows to the others: six words.
type Shown = [[u32; 6]; LANES];

/// Stands for the places where warps show their words, one a warp of a block.
struct Places([UnsafeCell<Shown>; 32]);

// SAFETY: only addresses are taken of it.
unsafe impl Sync for Places {}

static PLACES: Places = Places([const { UnsafeCell::new([[0; 6]; LANES]) }; 32]);

/// Shows `mine` to the warp, calls `f` with what all lanes show, and lets no lane show another
/// value before all have seen.
#[track_caller]
fn exchange<R>(mine: [u32; 6], f: impl FnOnce(&Shown) -> R) -> R {
    let (thread, context) = current();
    let at = Location::caller();
    let warp = (crate::thread::index_in_block() / WARP_SIZE) as usize;
    let shown: *mut Shown = shared_static(PLACES.0[warp % 32].get());
    let lane = lane_id() as usize;
    // SAFETY: the simulator gives the bytes asked for, aligned to 16, alive while the block runs. A
    // lane writes its own words only, before the first barrier; between the barriers all only read.
    unsafe {
        (&raw mut (*shown)[lane]).write(mine);
        (context.ops.sync_warp)(thread, FULL_MASK, at);
        let result = f(&*shown);
        (context.ops.sync_warp)(thread, FULL_MASK, at);
        result
    }
}

fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xffff_0000)
}

#[track_caller]
pub(crate) unsafe fn mma_m16n8k16_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    let lane = lane_id() as usize;
    let (row, pair) = (lane / 4, lane % 4 * 2);
    exchange([a[0], a[1], a[2], a[3], b[0], b[1]], |shown| {
        for (i, sum) in d.iter_mut().enumerate() {
            let column = pair + i % 2;
            for half in 0..2 {
                for quarter in 0..4 {
                    let a = shown[4 * row + quarter][2 * half + i / 2];
                    let b = shown[4 * column + quarter][4 + half];
                    *sum += low(a) * low(b);
                    *sum += high(a) * high(b);
                }
            }
        }
    });
}

#[track_caller]
pub(crate) unsafe fn load_matrices(row: *const bf16) -> [u32; 4] {
    touch(row.cast::<u128>(), Access::Read);
    let address = row.expose_provenance() as u64;
    let lane = lane_id() as usize;
    exchange([address as u32, (address >> 32) as u32, 0, 0, 0, 0], |shown| {
        std::array::from_fn(|matrix| {
            let [low, high, ..] = shown[8 * matrix + lane / 4];
            let address = u64::from(low) | u64::from(high) << 32;
            let row = std::ptr::with_exposed_provenance::<u32>(address as usize);
            // SAFETY: the caller's: every lane's address is that of 16 bytes.
            unsafe { row.add(lane % 4).read() }
        })
    })
}

#[track_caller]
pub(crate) unsafe fn copy_16_async(to: *mut u8, from: *const u8, pred: bool) {
    touch(to.cast::<u128>(), Access::Write);
    let value = if pred {
        touch(from.cast::<u128>(), Access::Read);
        // SAFETY: the caller's.
        unsafe { from.cast::<u128>().read() }
    } else {
        0
    };
    // SAFETY: the caller's.
    unsafe { to.cast::<u128>().write(value) }
}

#[track_caller]
pub(crate) fn commit_copies() {
    current();
}

#[track_caller]
pub(crate) fn wait_copies<const N: u32>() {
    current();
}

/// Where the tile is; the swizzle depends on the address, so that of a tile is a multiple of
/// 1,024.
pub(crate) type TileAddress = *const u8;

pub(crate) fn tile_address(address: *const u8) -> TileAddress {
    assert!(address.addr().is_multiple_of(1024), "a tile's address is a multiple of 1,024");
    address
}

pub(crate) fn tile_offset_bytes(tile: TileAddress, bytes: u32) -> TileAddress {
    tile.wrapping_add(bytes as usize)
}

/// The place of a 16-byte piece of a tile swizzled by 128 bytes: bits 4 to 6 of the
/// address, xor bits 7 to 9.
pub(super) fn swizzled<T>(address: *const T) -> *const T {
    address.map_addr(|address| address ^ (address >> 7 & 7) << 4)
}

/// Sixteen columns of row `row` of a tile.
///
/// # Safety
///
/// The tile has the row.
#[track_caller]
unsafe fn columns(tile: TileAddress, row: usize) -> [f32; 16] {
    let row = tile.wrapping_add(128 * row);
    let mut values = [0.0; 16];
    for piece in 0..2 {
        let from = swizzled(row.wrapping_add(16 * piece));
        touch(from.cast::<u128>(), Access::Read);
        // SAFETY: the caller's.
        let words = unsafe { from.cast::<[u32; 4]>().read() };
        for (i, word) in words.into_iter().enumerate() {
            values[8 * piece + 2 * i] = low(word);
            values[8 * piece + 2 * i + 1] = high(word);
        }
    }
    values
}

#[track_caller]
pub(crate) unsafe fn wgmma_m64n256k16_bf16(d: &mut [f32; 128], a: TileAddress, b: TileAddress) {
    let thread = crate::thread::index_in_block() as usize % 128;
    let (row, pair) = (thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2);
    // SAFETY: the caller's.
    let rows = unsafe { [columns(a, row), columns(a, row + 8)] };
    for (j, sums) in d.chunks_exact_mut(4).enumerate() {
        for side in 0..2 {
            // SAFETY: the caller's.
            let column = unsafe { columns(b, 8 * j + pair + side) };
            for (half, row) in rows.iter().enumerate() {
                let products = row.iter().zip(&column).map(|(a, b)| a * b);
                sums[2 * half + side] = products.fold(sums[2 * half + side], |sum, x| sum + x);
            }
        }
    }
}

/// The warp meets: its lanes execute the instruction together, so none is ahead of those that still
/// read the tiles.
#[track_caller]
pub(crate) fn wgmma_fence() {
    super::sync_warp(FULL_MASK);
}

#[track_caller]
pub(crate) fn wgmma_commit() {
    current();
}

/// As [`wgmma_fence`]: what a lane does behind it, it does for all.
#[track_caller]
pub(crate) fn wgmma_wait<const N: u32>() {
    super::sync_warp(FULL_MASK);
}

#[track_caller]
pub(crate) fn wgmma_fence_operand(_sums: &mut [f32; 128]) {
    current();
}
