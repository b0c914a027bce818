//! The shapes of the tiles of [`gemm_swapped`](super::gemm_swapped), and the division of the work
//! among clusters.

use cuda_std::tile::MAX_STAGES;

use super::prelude::*;

/// Columns of C of a warpgroup: rows of B in one of its tiles.
pub const WARPGROUP_N: u32 = 64;
/// Terms of the sums that a tile in shared memory has.
pub(super) const TILE_K: u32 = SharedTile::<bf16, WARPGROUP_N>::COLUMNS;
/// Rows of C that one instruction stores.
pub const STORE_M: u32 = 8;
/// Groups of eight rows that a warpgroup stores together.
pub(super) const STORE_EIGHTS: u32 = 4;
/// The number of bytes above which the sums of a split tile lie over the stages if they can: the
/// memory of larger ones is worth more as stages.
const LARGE_SUMS: u32 = 32 << 10;
/// Threads that do not multiply: a warpgroup, of which two warps load.
const LOADING: u32 = 128;

type Eight<O> = SharedTile<O, STORE_M>;

/// Returns the quotient of a division by a power of two.
pub(super) fn quotient(number: u32, power: u32) -> u32 {
    number >> power.trailing_zeros()
}

/// Returns the remainder of a division by a power of two.
pub(super) fn remainder(number: u32, power: u32) -> u32 {
    number & (power - 1)
}

/// The shape of a tile of C.
pub trait Shape {
    /// A thread's sums: for each eight rows of C, four.
    type Sums: wgmma::Sums + AsRef<[f32]> + AsMut<[f32]> + Copy;
    /// Sums that are all 0.
    const ZERO: Self::Sums;
    /// Rows of C.
    const M: u32;
    /// Columns of C: [`WARPGROUP_N`] for each warpgroup.
    const N: u32;
    /// Tiles of 64 terms in a stage: more for small tiles, for which barriers take long.
    const DEPTH: u32;
    /// Whether blocks of a cluster may share their loads: code that makes every launch longer.
    const SHARES: bool;
    /// Terms of a stage.
    const K: u32 = Self::DEPTH * TILE_K;
    /// Bytes of a stage.
    const STAGE: u32 = Self::DEPTH * (Self::M + Self::N) * 128; // A row of a tile has 128 bytes.
    /// Bytes of the buffers for stores: two for each warpgroup.
    const STORE: u32 = Self::N / WARPGROUP_N * 2 * STORE_EIGHTS * Eight::<bf16>::BYTES;
    /// Threads per block.
    const THREADS: u32 = 2 * Self::N + LOADING; // 128 multiply for 64 columns.

    /// Bytes of the sums of a split tile that a block receives, its own among them.
    fn received(splits: u32) -> u32 {
        splits * (Self::M / 8).div_ceil(splits) * Self::N * 32 // Eight f32 of a column.
    }
}

/// The division of the registers, which gives more of them to the sums of tall tiles.
pub(super) struct RaisedRegisters<S>(PhantomData<S>);

impl<S: Shape> RegisterSplit for RaisedRegisters<S> {
    const REGISTERS: Option<[u32; 2]> = if S::M > 128 { Some([232, 40]) } else { None };

    unsafe fn raise() {
        if S::M > 128 {
            // SAFETY: the caller is a whole multiplying warpgroup. A kernel of at most 384 threads
            // launches with 168 registers each: 2 * 232 + 40 is 3 * 168; 232 + 40 is less than two.
            unsafe { wgmma::raise_registers::<232>() }
        }
    }

    unsafe fn lower() {
        if S::M > 128 {
            // SAFETY: the caller is the whole warpgroup that loads, which needs no more.
            unsafe { wgmma::lower_registers::<40>() }
        }
    }
}

macro_rules! shapes {
    ($($name:ident: $m:literal x $n:literal, $depth:literal, $shares:literal;)*) => {
        /// Rows and columns of all shapes.
        pub const SHAPES: [(u32, u32); [$($m),*].len()] = [$(($m, $n)),*];

        /// Returns [`Shape::SHARES`] of the shape with these rows and columns.
        #[must_use]
        pub fn shares(tile: (u32, u32)) -> bool {
            $($shares && tile == ($m, $n))||*
        }

        $(
        #[doc = concat!("A tile of ", stringify!($m), " rows and ", stringify!($n), " columns.")]
        pub struct $name;

        impl Shape for $name {
            type Sums = [f32; $m / 2];
            const ZERO: Self::Sums = [0.0; $m / 2];
            const M: u32 = $m;
            const N: u32 = $n;
            const DEPTH: u32 = $depth;
            const SHARES: bool = $shares;
        }
        )*
    };
}

shapes! {
    M8N64: 8 x 64, 2, false;
    M16N64: 16 x 64, 2, false;
    M32N64: 32 x 64, 2, false;
    M64N64: 64 x 64, 2, false;
    M96N64: 96 x 64, 1, true;
    M112N64: 112 x 64, 1, true;
    M128N64: 128 x 64, 1, false;
    M256N64: 256 x 64, 1, false;
    M8N128: 8 x 128, 1, false;
    M16N128: 16 x 128, 1, false;
    M32N128: 32 x 128, 1, false;
    M48N128: 48 x 128, 1, false;
    M64N128: 64 x 128, 1, false;
    M80N128: 80 x 128, 1, true;
    M96N128: 96 x 128, 1, true;
    M112N128: 112 x 128, 1, true;
    M128N128: 128 x 128, 1, true;
    M144N128: 144 x 128, 1, true;
    M160N128: 160 x 128, 1, true;
    M176N128: 176 x 128, 1, true;
    M192N128: 192 x 128, 1, true;
    M208N128: 208 x 128, 1, true;
    M224N128: 224 x 128, 1, true;
    M256N128: 256 x 128, 1, true;
}

/// The blocks of a cluster: `splits * across * down`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cluster {
    /// Blocks over which a tile is split.
    pub splits: u32,
    /// Tiles side by side, which share rows of A. Divides [`Shape::M`] / 8.
    pub across: u32,
    /// Tiles one below the other, which share rows of B. Divides [`Shape::N`] / 8.
    pub down: u32,
}

impl Cluster {
    /// Returns the number of blocks.
    #[must_use]
    pub const fn blocks(self) -> u32 {
        self.splits * self.across * self.down
    }
}

/// How a launch divides the work.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Division {
    /// See [`Cluster::across`].
    pub across: u32,
    /// See [`Cluster::down`].
    pub down: u32,
    /// Stages of the pipeline, from 2 to [`MAX_STAGES`].
    pub stages: u32,
    /// Tiles that one block computes, as [`Schedule::whole`].
    pub whole: u32,
    /// The offset of the sums of split tiles in dynamic shared memory, in bytes: after the stages
    /// and the buffers for stores, or 0, over the stages, if no cluster splits more than one tile.
    pub sums: u32,
    /// Whether no kernel before this one in the stream, which may still run, writes A. A dependent
    /// launch then reads A before it waits for those kernels.
    pub constant_a: bool,
    /// The same for B.
    pub constant_b: bool,
}

impl Division {
    /// Returns the division of a product among clusters, of which `clusters` are resident, with the
    /// number of clusters and the bytes of dynamic shared memory to launch with, at most `shared`.
    /// Returns `None` if `shared` is too small, if the shape cannot share loads, or if slices are
    /// combined with splits or have no cluster each.
    #[must_use]
    pub fn of<S: Shape>(
        [m, n, k]: [u32; 3],
        Cluster { splits, across, down }: Cluster,
        slices: u32,
        clusters: u32,
        shared: u32,
    ) -> Option<(Self, u32, u32)> {
        if across * down > 1 && !S::SHARES {
            return None;
        }
        let rows = m.div_ceil(S::M).div_ceil(down);
        let tiles = rows.checked_mul(n.div_ceil(S::N).div_ceil(across))?.checked_mul(slices)?;
        if slices > 1 && (splits > 1 || tiles > clusters) {
            return None;
        }
        let clusters = clusters.min(tiles);
        if clusters == 0 {
            return None;
        }
        let whole =
            if splits == 1 { tiles } else { Schedule::whole_tiles(tiles, clusters, splits) };
        // Without split tiles, each block of a cluster has tiles of its own.
        let clusters = if whole == tiles { clusters.min(tiles.div_ceil(splits)) } else { clusters };
        let sums = if whole == tiles { 0 } else { S::received(splits) };
        // After the stages, a tile's sums do not delay the loads for the next tile.
        let one_round = tiles - whole <= clusters;
        let apart = if one_round && sums > LARGE_SUMS { 0 } else { sums };
        let room = shared.checked_sub(S::STORE + TileMemory::PADDING + apart)?;
        let steps = k.div_ceil(S::K).div_ceil(slices);
        // A block uses no more stages than it has steps, but sums over the stages need their room.
        let needed = tiles.div_ceil(clusters).saturating_mul(steps).max(2);
        let stages = (room / S::STAGE).min(MAX_STAGES).min(needed);
        let stages = stages.max((sums - apart).div_ceil(S::STAGE));
        if stages < 2 || stages * S::STAGE > room {
            return None;
        }
        let end = stages * S::STAGE + S::STORE;
        let sums = if apart == sums { end } else { 0 };
        let (constant_a, constant_b) = (false, false); // The caller may set them.
        let division = Self { across, down, stages, whole, sums, constant_a, constant_b };
        Some((division, clusters, end + apart + TileMemory::PADDING))
    }
}
