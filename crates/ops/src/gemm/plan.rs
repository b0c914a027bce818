//! Plans of products: the kernel and its tiles.

use devcomm_kernels::gemm::gemm_swapped;
use devcomm_kernels::gemm::gemm_swapped::Cluster;

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmPlan {
    /// `gemm_mma`: on every GPU since Ampere, any shape.
    Portable,
    /// `gemm_wgmma`: on Hopper, tiles of 128 x 256.
    Wide,
    /// `gemm_swapped`: on Hopper, for few rows. The factors change places: rows of B are the 64
    /// rows of a `wgmma`, and rows of A its columns.
    Swapped(Tiling),
    /// `gemm_unswapped`: on Hopper, for few columns, by the same tiles without this exchange.
    Unswapped(Tiling),
}

/// The tiles of C that a kernel computes, and the blocks that share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Rows of a tile of C.
    pub rows: u32,
    /// Columns of a tile of C.
    pub columns: u32,
    /// The blocks of a cluster.
    pub cluster: Cluster,
    /// The clusters that compute a tile together, each a part of the sums, which are added through
    /// the GPU's memory.
    pub slices: u32,
}

impl Tiling {
    pub(super) fn transposed(self) -> Self {
        let Self { rows, columns, cluster: Cluster { splits, across, down }, slices } = self;
        let cluster = Cluster { splits, across: down, down: across };
        Self { rows: columns, columns: rows, cluster, slices }
    }
}

impl GemmPlan {
    /// Returns the tiling and the shape, transposed for an unswapped plan, for [`gemm_swapped`].
    pub(super) fn swapped(self, [m, n, k]: [u32; 3]) -> Option<(Tiling, [u32; 3])> {
        match self {
            Self::Swapped(tiling) => Some((tiling, [m, n, k])),
            Self::Unswapped(tiling) => Some((tiling.transposed(), [n, m, k])),
            Self::Portable | Self::Wide => None,
        }
    }

    /// Returns the plan, swapped or not, that is computed by these tiles of [`gemm_swapped`].
    pub(super) fn of(is_swapped: bool, tiling: Tiling) -> Self {
        if is_swapped { Self::Swapped(tiling) } else { Self::Unswapped(tiling.transposed()) }
    }
}

/// Returns the clusters of plans with tiles of these rows and columns, of at most eight blocks.
pub(crate) fn clusters((rows, columns): (u32, u32)) -> impl Iterator<Item = Cluster> {
    let sizes = || [1, 2, 4, 8].into_iter();
    let all = sizes().flat_map(move |across| {
        sizes().flat_map(move |down| sizes().map(move |splits| Cluster { splits, across, down }))
    });
    let shares = gemm_swapped::shares((rows, columns));
    all.filter(move |cluster| {
        let Cluster { across, down, .. } = *cluster;
        let divides = (rows / 8).is_multiple_of(across) && (columns / 8).is_multiple_of(down);
        cluster.blocks() <= 8 && divides && (shares || across * down == 1)
    })
}
