//! The product in strips: `mma.sync` by warps, on tiles that threads copy by `cp.async`.

use super::exchange::{COLUMNS, Exchange, FIRST_FLAG, STRIPS, TILE_ROWS, Tiles, slot_words};
use super::partial::Partial;
use crate::files::gemm::prelude::*;

const STAGES: u32 = 4;
/// Dynamic shared memory per block, in bytes.
pub const SHARED: u32 = Product::BYTES;
/// Computing threads: 128 for each strip.
const COMPUTING: u32 = 128 * STRIPS;
/// Warps that only reduce.
const REDUCING_WARPS: u32 = 4;
/// Threads per block: exactly this number.
pub const THREADS: u32 = COMPUTING + REDUCING_WARPS * warp::WARP_SIZE;
/// The named barrier of all computing threads.
const COMPUTE_BARRIER: u32 = 1;
/// The named barrier of the first strip's threads; the next strip has the next one.
const STRIP_BARRIER: u32 = 2;

type Product = MmaProduct<bf16, TILE_ROWS, COLUMNS, STAGES, COMPUTING>;

/// The lengths of two windows, through which the ranks exchange sums. All words of `flags` are 0
/// before the first launch; from then on only the kernel writes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmWorkspace {
    /// Length of the window of partial sums, in words of four bytes.
    pub partials: usize,
    /// Length of the window of flags, in `u32`s.
    pub flags: usize,
}

/// Returns the number of tiles of an `m x n` matrix, beyond which more blocks have no work, or
/// `None` if it is too large for the kernel's 32-bit arithmetic.
#[must_use]
pub fn tiles(m: usize, n: usize) -> Option<u32> {
    let tiles = m.div_ceil(TILE_ROWS as usize).checked_mul(n.div_ceil(COLUMNS as usize))?;
    // Strip numbers are 32 bits wide, up to one grid beyond the last strip.
    u32::try_from(tiles).ok().filter(|tiles| *tiles < u32::MAX / 8)
}

/// Returns the workspace for an `m x n` matrix over `n_ranks` ranks that send partial sums as `W`.
/// One for a larger matrix or for more ranks may be used too. Returns `None` if a length overflows.
#[must_use]
pub fn workspace<W: Partial>(m: usize, n: usize, n_ranks: usize) -> Option<GemmWorkspace> {
    let strips = (tiles(m, n)? * STRIPS) as usize;
    let slots = strips.div_ceil(n_ranks.max(1)).checked_mul(n_ranks)?;
    Some(GemmWorkspace {
        partials: slots.checked_mul(slot_words::<W>())?,
        flags: slots.checked_add(FIRST_FLAG)?,
    })
}

/// Computes `C = sum over the ranks of A x B^T`, as the [module](super) describes. Partial sums are
/// sent as `W`.
///
/// Grid: at most as many blocks as the device communicator has LSA barriers, the same in every
/// rank. Block: [`THREADS`] threads, with [`SHARED`] bytes.
///
/// # Safety
///
/// `a` has `m * k` elements and `b` has `n * k`, aligned to 16 bytes; `c` has `m * n` in every
/// rank. `k` is a multiple of 8, and `m`, `n` and `k` are not 0. The windows of the workspace have
/// [`workspace`]'s words for `W`; no other kernel uses them, and their flags were 0 in every rank
/// before the first launch in any. All ranks launch with the same arguments, in the same order.
#[kernel(max_threads = 384, W = [f32, bf16, F8E4M3])]
pub unsafe fn gemm_allreduce_mma<W: Partial>(
    comm: DevComm,
    a: *const bf16,
    b: *const bf16,
    c: Window<bf16>,
    partials: Window<u32>,
    flags: Window<u32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let (tiles, thread) = (Tiles { m, n }, thread::thread_idx_x());
    // SAFETY: the kernel's caller guarantees the windows. A strip is announced once, after its
    // sums. All warps reach `reduce` and `finish`.
    unsafe {
        let exchange = Exchange::<W>::new(&comm, tiles, c, partials, flags);
        thread::sync_threads();
        if thread < COMPUTING {
            let product = Product {
                a: Matrix { address: a, rows: m, columns: k },
                b: Matrix { address: b, rows: n, columns: k },
                memory: shared::dynamic_shared_mem(),
            };
            // A strip is divided among 2 x 2 warps, each with 32 rows and 64 columns.
            let (half, warp) = (thread / 128, thread / warp::WARP_SIZE % 4);
            let (i, j) = (warp / 2 * 2, warp % 2 * 8);
            for tile in thread::blocks_strided(tiles.count()) {
                let part = (half * 64 + i * 16, j * 8);
                let mut sums = product.sums::<16, 2, 8>(tiles.origin(tile), part, || {
                    thread::named_barrier_sync(COMPUTE_BARRIER, COMPUTING);
                });
                let strip = tiles.strip(STRIPS * tile + half);
                exchange.send(strip, (i, j), &mut sums);
                exchange.announce(strip, STRIP_BARRIER + half, thread % 128);
            }
        }
        exchange.reduce();
        exchange.finish();
    }
}

#[cfg(test)]
mod tests;
