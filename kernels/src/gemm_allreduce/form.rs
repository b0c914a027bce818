//! The launch parameters and the workspace of each form of the kernel.

use super::exchange::{FIRST_FLAG, slot_words};
use super::partial::Partial;
use super::tiles::{STRIPS, TILE_ROWS};
use super::{gemm_allreduce_mma, gemm_allreduce_wgmma};

/// The two kernels for `C = sum over the ranks of A x B^T`, a matrix product fused with the
/// all-reduce that follows it, with the launch parameters of each.
///
/// Each rank has `m x k` elements of A and `n x k` of B (as `nn.Linear` keeps its weights), both
/// row-major: its slice of the dimension that is summed over. Every rank gets all `m x n` elements
/// of C, row-major. Elements are bf16; sums are in f32, also over the ranks, and rounded. Partial
/// sums travel in a type that the kernel has as parameter. All ranks get the same bits.
///
/// Any `m` and `n`; `k` is a multiple of 8, so that rows are 16-byte aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmForm {
    /// [`gemm_allreduce_wgmma`](fn@crate::gemm_allreduce_wgmma): Hopper only.
    Wgmma,
    /// [`gemm_allreduce_mma`](fn@crate::gemm_allreduce_mma): every GPU since Ampere.
    Mma,
}

/// The lengths of two windows, through which the ranks exchange sums. All words of `flags` are 0
/// before the first launch; from then on only the kernel writes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmWorkspace {
    /// Length of the window of partial sums, in words of four bytes.
    pub partials: usize,
    /// Length of the window of flags, in `u32`s.
    pub flags: usize,
}

impl GemmForm {
    /// Rows of a tile of C, and of A.
    pub const TILE_ROWS: usize = TILE_ROWS as usize;

    /// Columns of a tile of C, which are rows of B.
    #[must_use]
    pub const fn tile_columns(self) -> usize {
        match self {
            Self::Wgmma => gemm_allreduce_wgmma::COLUMNS as usize,
            Self::Mma => gemm_allreduce_mma::COLUMNS as usize,
        }
    }

    /// Threads per block: exactly this number.
    #[must_use]
    pub const fn threads(self) -> u32 {
        match self {
            Self::Wgmma => gemm_allreduce_wgmma::THREADS,
            Self::Mma => gemm_allreduce_mma::THREADS,
        }
    }

    /// Dynamic shared memory per block, in bytes.
    #[must_use]
    pub const fn dynamic_shared(self) -> u32 {
        match self {
            Self::Wgmma => gemm_allreduce_wgmma::SHARED,
            Self::Mma => gemm_allreduce_mma::SHARED,
        }
    }

    /// Number of tiles of an `m x n` matrix, beyond which more blocks have no work. `None` if it is
    /// too large for the kernel's 32-bit arithmetic.
    #[must_use]
    pub fn tiles(self, m: usize, n: usize) -> Option<u32> {
        let tiles = m.div_ceil(Self::TILE_ROWS).checked_mul(n.div_ceil(self.tile_columns()))?;
        // Strip numbers are 32 bits wide, up to one grid beyond the last strip.
        u32::try_from(tiles).ok().filter(|tiles| *tiles < u32::MAX / 8)
    }

    /// The workspace for an `m x n` matrix over `n_ranks` that send partial sums as `W`. One for a
    /// larger matrix or for more ranks may be used too. `None` if a length overflows.
    #[must_use]
    pub fn workspace<W: Partial>(
        self,
        m: usize,
        n: usize,
        n_ranks: usize,
    ) -> Option<GemmWorkspace> {
        let strips = (self.tiles(m, n)? * STRIPS) as usize;
        let slots = strips.div_ceil(n_ranks.max(1)).checked_mul(n_ranks)?;
        Some(GemmWorkspace {
            partials: slots.checked_mul(slot_words::<W>(self.tile_columns()))?,
            flags: slots.checked_add(FIRST_FLAG)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use devcomm_types::F8E4M3;
    use half::bf16;

    use super::*;

    #[test]
    fn the_workspace_has_a_place_for_each_strip_of_each_rank() {
        // One tile: two strips, one for each of two ranks, each from two ranks.
        let one = GemmForm::Mma.workspace::<f32>(1, 1, 2).unwrap();
        assert_eq!(one, GemmWorkspace { partials: 2 * 64 * 128, flags: 2 + FIRST_FLAG });
        // 32 x 16 tiles of 128 x 256: the size of C in f32, per rank.
        let square = GemmForm::Wgmma.workspace::<f32>(4096, 4096, 4).unwrap();
        assert_eq!(square.partials, 4096 * 4096);
        assert_eq!(square.flags, 1024 + FIRST_FLAG);
    }

    /// Half of the bytes, and a quarter and two bytes for each 64 elements.
    #[test]
    fn smaller_types_take_less_workspace() {
        let words = GemmForm::Wgmma.workspace::<bf16>(4096, 4096, 4).unwrap().partials;
        assert_eq!(words, 4096 * 4096 / 2);
        let words = GemmForm::Wgmma.workspace::<F8E4M3>(4096, 4096, 4).unwrap().partials;
        assert_eq!(words, 4096 * 4096 / 4 + 4096 * 4096 / 128);
    }

    #[test]
    fn what_cannot_be_counted_has_no_workspace() {
        for form in [GemmForm::Wgmma, GemmForm::Mma] {
            assert_eq!(form.workspace::<bf16>(usize::MAX, usize::MAX, 2), None);
            assert_eq!(form.workspace::<bf16>(1 << 31, 1 << 31, 2), None);
        }
    }
}
