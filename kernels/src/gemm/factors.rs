//! The factors of a product of large matrices: their place in shared memory, and their loads.

use cuda_std::mma;
use cuda_std::wgmma::Factor;

use super::gemm_wgmma::TRANSPOSED;
use super::prelude::*;
use super::stores::PARTS;

/// A warp's sums of its rows of a tile.
pub(super) type Sums = RegTile<f32, 32>;

/// An element type of A and B.
pub trait GemmFactor: Factor {
    /// The element type of C in [`gemm_wgmma`](super::gemm_wgmma).
    type Output: Float;
    /// Whether A and B may be stored transposed.
    const TRANSPOSABLE: bool = size_of::<Self>() == 2;

    /// Adds the products of a stage, or sets the sums to them if they are the first ones, as a
    /// group. The factors are a warpgroup's rows of A, and the first rows of B.
    fn multiply(
        group: &Warpgroup,
        sums: &mut Sums,
        [a, b]: [SharedTile<Self, TRANSPOSED>; 2],
        _transposed: [bool; 2],
        accumulate: bool,
    ) {
        group.multiply(sums, a, b, accumulate);
    }
}

/// Adds the products of a stage of factors that may be transposed. It is no part of the macro, so
/// that the simulator's reports name its lines.
fn multiply_transposable<T: Factor + mma::Factor>(
    group: &Warpgroup,
    sums: &mut Sums,
    [a, b]: [SharedTile<T, TRANSPOSED>; 2],
    transposed: [bool; 2],
    accumulate: bool,
) {
    // Each branch commits its group: after the branches `ptxas` would commit a second, empty one,
    // and a wait for the previous stage's products would also wait for this stage's.
    let (a_t, b_t) = (a.transposed_factor(), b.transposed_factor());
    match transposed {
        [false, false] => group.multiply(sums, a, b, accumulate),
        [false, true] => group.multiply_factors(sums, a.factor(), b_t, accumulate),
        [true, false] => group.multiply_factors(sums, a_t, b.factor(), accumulate),
        [true, true] => group.multiply_factors(sums, a_t, b_t, accumulate),
    }
}

macro_rules! transposable {
    ($($type:ident)*) => { $(
        impl GemmFactor for $type {
            type Output = Self;

            fn multiply(
                group: &Warpgroup,
                sums: &mut Sums,
                tiles: [SharedTile<Self, TRANSPOSED>; 2],
                transposed: [bool; 2],
                accumulate: bool,
            ) {
                multiply_transposable(group, sums, tiles, transposed, accumulate);
            }
        }
    )* };
}

transposable! { bf16 f16 }

impl GemmFactor for F8E4M3 {
    type Output = bf16;
}

impl GemmFactor for F8E5M2 {
    type Output = bf16;
}

type A<T> = SharedTile<T, TILE_M>;
type B<T> = SharedTile<T, TILE_N>;

/// Bytes of a stage, which are the same for every type.
pub(super) const STAGE_BYTES: u32 = A::<bf16>::BYTES + B::<bf16>::BYTES;
/// Bytes of the tiles for the stores of all warps.
pub(super) const STORE_BYTES: u32 = PARTS * MULTIPLYING_WARPS * Store::<bf16>::BYTES;
/// A block's shared memory: the stages, and tiles for the stores of each warp.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    element: PhantomData<T>,
    memory: TileMemory,
}

impl<T: GemmFactor> Shared<T> {
    /// Terms of the sums that a stage has.
    pub(super) const TILE_K: u32 = A::<T>::COLUMNS;

    pub(super) fn dynamic() -> Self {
        Self { element: PhantomData, memory: TileMemory::dynamic() }
    }

    pub(super) fn a(self, stage: u32) -> A<T> {
        self.memory.tile(stage * STAGE_BYTES)
    }

    pub(super) fn b(self, stage: u32) -> B<T> {
        self.memory.tile(stage * STAGE_BYTES + A::<T>::BYTES)
    }

    /// Returns one of a warp's tiles for stores.
    pub(super) fn store<O>(self, warp: u32, which: u32) -> Store<O> {
        self.memory.tile(STAGES * STAGE_BYTES + (PARTS * warp + which) * Store::<O>::BYTES)
    }
}

/// A tile of this block.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The first row and column in C.
    pub(super) row: u32,
    pub(super) column: u32,
    /// The row of B for the first column.
    b_row: u32,
    /// The end of the rows of the tile's group.
    pub(super) end: u32,
}

impl Tile {
    /// Returns this block's tile of a cluster's tile.
    pub(super) fn at(order: Order, number: u32) -> Self {
        let Position { row, column, group } = order.position(number);
        let (row, column) = ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N);
        Self { row: group.first + row, column, b_row: group.b_row + column, end: group.end }
    }
}

/// Returns the first row and column in C of this block's tile.
pub(crate) fn origin(order: Order, number: u32) -> (u32, u32) {
    let Tile { row, column, .. } = Tile::at(order, number);
    (row, column)
}

/// The factors of a product, as TMA loads them.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a, T> {
    pub(super) shared: Shared<T>,
    pub(super) maps: [&'a TensorMap; 2],
    /// Whether A and B are stored transposed.
    pub(super) transposed: [bool; 2],
}

/// The first rows of A and B of a tile, and the map of A.
pub(super) struct Source<'a> {
    pub(super) a: &'a TensorMap,
    pub(super) row: u32,
    pub(super) b_row: u32,
}

impl<'a, T: GemmFactor> Factors<'a, T> {
    pub(super) fn new(maps: [&'a TensorMap; 2], shared: Shared<T>, transposed: [bool; 2]) -> Self {
        let transposed = transposed.map(|transposed| T::TRANSPOSABLE && transposed);
        Self { shared, maps, transposed }
    }

    /// Returns where the factors of one of this cluster's tiles are.
    pub(super) fn source(&self, order: Order, number: u32) -> Source<'a> {
        let Tile { row, b_row, .. } = Tile::at(order, number);
        Source { a: self.maps[0], row, b_row }
    }

    pub(super) fn prefetch(&self) {
        tma::prefetch_map(self.maps[0]);
        tma::prefetch_map(self.maps[1]);
    }

    /// Loads a step's tile of A, and half of its tile of B to both blocks of the cluster.
    pub(super) fn load(&self, source: &Source<'_>, term: u32, stage: &EmptyStage) {
        const HALF: u32 = TILE_N / CLUSTER;
        const CLUSTER_MASK: u16 = (1 << CLUSTER) - 1;
        let half = cluster::rank() * HALF;
        let (&Source { a, row, b_row }, [_, b]) = (source, self.maps);
        let (a_tile, b_half) =
            (self.shared.a(stage.number()), self.shared.b(stage.number()).rows::<HALF>(half));
        let b_row = b_row + half;
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
