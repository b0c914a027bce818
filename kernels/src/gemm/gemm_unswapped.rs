//! The product of few columns on Hopper.
//!
//! The kernel is [`gemm_swapped`](super::gemm_swapped) with A and B exchanged: rows of A are the 64
//! rows of a `wgmma`, and a tile is as wide as C's columns need. So here the rows of a [`Shape`], a
//! [`Cluster`] and a [`Division`] are columns of C, and their columns are rows. Rows of C are
//! stored from registers.

use cuda_std::wgmma::Factor;

use super::gemm_swapped::compute;
use super::prelude::*;
use super::shapes::*;
use super::swapped_stores::{Groups, Part, Target};
use super::swapped_tiles::Block;

/// Computes `C = A x B^T` in bf16 or f16, with an epilogue, for few columns of C, on Hopper.
///
/// `m`, `n` and `k` are those of the product. The maps, the grid and the block are those of
/// [`gemm_swapped`](super::gemm_swapped::gemm_swapped()) for the product of B and A, of `n x m`
/// elements: the tiles of `b` have [`Shape::M`] rows. `c` begins at a multiple of 16 bytes, and `n`
/// is a multiple of 8. Dependent launch: allowed.
///
/// # Safety
///
/// As for [`gemm_swapped`](super::gemm_swapped::gemm_swapped()) of B and A; `c` has `m x n`
/// elements.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M96N64, M112N64, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128, M176N128, M192N128,
    M208N128, M224N128, M256N128
])]
pub unsafe fn gemm_unswapped<T: Half + Factor + Element, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut T,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    epilogue: Fused<T>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { compute::<T, S, _, _>([&b, &a], Rows(c), [n, m, k], division, None, epilogue) }
}

/// Computes what [`gemm_unswapped()`] does, with the terms divided among clusters. Wider tiles
/// leave it too few registers.
///
/// # Safety
///
/// As for [`gemm_unswapped()`]. The memory of the slices is as [`Slices`] says.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M96N64, M112N64, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128, M176N128, M192N128,
    M208N128, M224N128
])]
pub unsafe fn gemm_unswapped_sliced<T: Half + Factor + Element, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut T,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    slices: Slices,
    epilogue: Fused<T>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { compute::<T, S, _, _>([&b, &a], Rows(c), [n, m, k], division, Some(slices), epilogue) }
}

/// The address of C, as the target of a product that stores whole rows.
#[derive(Clone, Copy)]
struct Rows<T>(*mut T);

impl<C: Half + Element> Target for Rows<C> {
    fn prefetch(self) {}

    unsafe fn store<T: Factor, S: Shape, E: Epilogue<Output: Half>, P: Epilogue<Output: Half>>(
        self,
        block: &Block<T, S, E>,
        Groups { first, count, origin: (column, _), mut part }: Groups<S>,
        epilogue: P,
    ) {
        let (n, m) = block.end; // Of the product of B and A.
        let (lane, row, end) = (warp::lane_id(), part.column, part.end.0);
        part.end = (m, n);
        let eights = if count - first < STORE_EIGHTS { count - first } else { STORE_EIGHTS };
        let mut part = Columns { part, eights };
        epilogue.apply(&mut part);
        let sums = part.part.sums;
        // Of each eight columns of a row, the four lanes of a quad have two each: they exchange
        // them, so that each has all eight of one group.
        let [upper, lower] = [0, 2].map(|half| {
            [0, 4, 8, 12].map(|eight| P::Output::pack([sums[eight + half], sums[eight + half + 1]]))
        });
        let group = lane % 4;
        let column = column + 8 * (first + group);
        let store = |words, row: u32| {
            // SAFETY: the caller has all lanes here; eight columns are in C if the first is.
            unsafe {
                let vector = transpose(words, group);
                if row < m && column < end && group < eights {
                    let to = self.0.wrapping_add(row as usize * n as usize + column as usize);
                    mem::store_vec(to, Vec16::from_bits(vector));
                }
            }
        };
        store(upper, row);
        store(lower, row + 8);
    }
}

/// Returns the `place`-th words of all four lanes of a quad, each of which has four words; `place`
/// is the lane's place in the quad. All lanes of the warp call it.
unsafe fn transpose(words: [u32; 4], place: u32) -> [u32; 4] {
    let [a, b, c, d] = words;
    let (odd, high) = (place & 1 != 0, place & 2 != 0);
    let swap = |own, other, distance, upper| {
        // SAFETY: the caller has all lanes of the warp here.
        let got = unsafe { warp::shuffle_xor(if upper { own } else { other }, distance) };
        if upper { [got, other] } else { [own, got] }
    };
    // Lanes exchange words with their neighbour, then with the other pair of lanes.
    let [a, b] = swap(a, b, 1, odd);
    let [c, d] = swap(c, d, 1, odd);
    let [a, c] = swap(a, c, 2, high);
    let [b, d] = swap(b, d, 2, high);
    [a, b, c, d]
}

/// A thread's sums of `eights` groups of eight columns: a part with rows and columns exchanged.
struct Columns<S> {
    part: Part<S>,
    eights: u32,
}

impl<S: Shape> Fragment for Columns<S> {
    const ROWS: u32 = Part::<S>::COLUMNS;
    const COLUMNS: u32 = 2 * STORE_EIGHTS;
    const PAIRS: bool = true;

    fn row(&self, i: u32) -> u32 {
        self.part.column(i)
    }

    fn column(&self, j: u32) -> u32 {
        // Columns of groups after the thread's last one belong to other blocks.
        if j / 2 < self.eights { self.part.row(j) } else { self.part.end.1 }
    }

    fn end(&self) -> (u32, u32) {
        self.part.end
    }

    fn sum(&mut self, i: u32, j: u32) -> &mut f32 {
        self.part.sum(j, i)
    }
}
