//! The factors of a product of large matrices: their place in shared memory, and their loads.

use cuda_std::wgmma::{Factor, KMajor, Layout, MnMajor};

use super::prelude::*;
use super::wide_tiles::{A_BYTES, STAGE_BYTES, TRANSPOSED};

/// A warp's sums of its rows of a tile.
pub(super) type Sums = RegTile<f32, 32>;

/// An element type of A and B.
pub trait GemmFactor: Factor {
    /// The element type of C in [`gemm_wgmma`](super::gemm_wgmma).
    type Output: Float;
    /// The layout of a factor that is stored transposed, if it may be.
    type Transposed: Layout<Self>;
    /// Whether A and B may be stored transposed.
    const TRANSPOSABLE: bool = size_of::<Self>() == 2;

    /// Returns a factor of a stage, which is stored transposed if it may be.
    fn transposed(tile: SharedTile<Self, TRANSPOSED>) -> wgmma::Tile<Self, Self::Transposed>;
}

macro_rules! factors {
    ($($type:ident: $output:ident, $layout:ident, $factor:ident;)*) => { $(
        impl GemmFactor for $type {
            type Output = $output;
            type Transposed = $layout;

            fn transposed(tile: SharedTile<Self, TRANSPOSED>) -> wgmma::Tile<Self, $layout> {
                tile.$factor()
            }
        }
    )* };
}

factors! {
    bf16: bf16, MnMajor, transposed_factor;
    f16: f16, MnMajor, transposed_factor;
    F8E4M3: bf16, KMajor, factor;
    F8E5M2: bf16, KMajor, factor;
}

impl<T: GemmFactor, E: Epilogue, F> Product<'_, T, E, F> {
    /// Returns the rows of A in a stage.
    pub(super) fn a(&self, stage: u32) -> SharedTile<T, TILE_M> {
        self.memory.tile(stage * STAGE_BYTES)
    }

    /// Returns the rows of B in a stage.
    pub(super) fn b(&self, stage: u32) -> SharedTile<T, TILE_N> {
        self.memory.tile(stage * STAGE_BYTES + A_BYTES)
    }

    /// Loads a step's tile of A, and half of its tile of B to both blocks of the cluster. The
    /// source is the map of A, and the first rows of A and B.
    pub(super) fn load_factors(
        &self,
        &(a, row, b_row): &(&TensorMap, u32, u32),
        term: u32,
        stage: &EmptyStage,
    ) {
        const HALF: u32 = TILE_N / CLUSTER;
        const CLUSTER_MASK: u16 = (1 << CLUSTER) - 1;
        let half = cluster::rank() * HALF;
        let (b, b_row) = (self.maps[1], b_row + half);
        let a_tile = self.a(stage.number());
        let b_half = self.b(stage.number()).rows::<HALF>(half);
        stage.expect(STAGE_BYTES);
        // Either layout has the same number of bytes for these rows.
        if self.transposed[0] {
            for part in Strided::new(0, TILE_M, TRANSPOSED) {
                stage.load(a_tile.rows::<TRANSPOSED>(part), a, term, row + part);
            }
        } else {
            stage.load(a_tile, a, row, term);
        }
        if self.transposed[1] {
            for part in Strided::new(0, HALF, TRANSPOSED) {
                let to = b_half.rows::<TRANSPOSED>(part);
                stage.load_multicast(to, b, term, b_row + part, CLUSTER_MASK);
            }
        } else {
            stage.load_multicast(b_half, b, b_row, term, CLUSTER_MASK);
        }
    }
}
