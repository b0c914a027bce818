//! The product of groups of rows on Hopper, each with a B of its own, for groups of up to a few
//! hundred rows: the experts of a layer.
//!
//! Reading the groups' B takes most of the time. So, as in [`gemm_swapped`](super::gemm_swapped),
//! the 64 rows of a `wgmma` are rows of B, a tile of C is no taller than most groups, and most of
//! the shared memory is for rows of B on their way. One warp loads A, another one B; two warpgroups
//! multiply, and store their sums from registers, as a tile ends where its group does.

use cuda_std::tile::{SharedTile, Warpgroup};
use cuda_std::wgmma::Factor;

use super::prelude::*;
pub use super::shapes::{M64N128, M128N128, Shape};
use super::shapes::{TILE_K, WARPGROUP_N};
use super::swapped_stores::Part;

/// Shared memory for the stages; the rest is for the counts of the groups' tiles.
const STAGES_BYTES: u32 = 216 << 10;
/// The number of the warp that loads A; the other loading warp loads B.
const LOADS_A: u32 = 1;
/// Rows of a group's tiles that are computed at the same time.
const ORDER: u32 = 8;

/// Returns the stages of a launch.
const fn stages<S: Shape>() -> u32 {
    STAGES_BYTES / S::STAGE
}

/// Returns the dynamic shared memory of a launch, in bytes.
#[must_use]
pub const fn shared<S: Shape>() -> u32 {
    stages::<S>() * S::STAGE + TileMemory::PADDING
}

/// Computes what [`gemm_grouped`](super::gemm_grouped::gemm_grouped()) does, by tiles of a shape.
///
/// `a` is a tensor map with tiles of [`Shape::M`] rows, `b` with tiles of [`Shape::N`]; `c` is C's
/// address. Grid: any, all resident. Block: [`Shape::THREADS`] threads, with [`shared()`] bytes.
/// Dependent launch: allowed.
///
/// # Safety
///
/// The conditions are those of [`gemm_grouped`](super::gemm_grouped::gemm_grouped()).
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [M64N128, M128N128])]
pub unsafe fn gemm_grouped_swapped<T: Half + Factor, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut T,
    groups: Groups,
    m: u32,
    n: u32,
    k: u32,
    epilogue: Fused<T>,
) {
    const { assert!(S::DEPTH == 1 && S::N == 2 * WARPGROUP_N) };
    // This is before the groups are counted, which waits for the previous kernels.
    grid::launch_next();
    grid::wait_for_previous();
    // SAFETY: the kernel's caller passes the groups, and what the main loop needs; all threads of
    // the block are here, once.
    unsafe {
        let tiles = GroupTiles::new(groups, S::M, [m, n], n.div_ceil(S::N));
        let memory = TileMemory::dynamic();
        Product { a: &a, b: &b, c, tiles, memory, n, k, epilogue, shape: PhantomData::<S> }.run();
    }
}

/// The product's part of the main loop.
struct Product<'a, T, S> {
    a: &'a TensorMap,
    b: &'a TensorMap,
    c: *mut T,
    tiles: GroupTiles<ORDER>,
    memory: TileMemory,
    n: u32,
    k: u32,
    epilogue: Fused<T>,
    shape: PhantomData<S>,
}

/// The first row and column of a tile of C, and the group of its rows.
struct Place {
    row: u32,
    column: u32,
    group: Group,
}

impl<T, S: Shape> Product<'_, T, S> {
    fn place(&self, turn: Turn) -> Place {
        // SAFETY: the kernel's caller lets nothing write the groups; the number is a tile's.
        let (group, (row, column)) = unsafe { self.tiles.position(turn.number) };
        Place { row: group.first + row * S::M, column: column * S::N, group }
    }

    /// Returns the rows of a stage from the `first` on: those of B, and then those of A.
    fn tile(&self, stage: u32, first: u32) -> SharedTile<T, WARPGROUP_N> {
        self.memory.tile(stage * S::STAGE + first * SharedTile::<T, 8>::BYTES / 8)
    }
}

// SAFETY: each stage has tiles of its own, and `load` copies the bytes that the barrier expects.
unsafe impl<T: Half + Factor, S: Shape> Mainloop for Product<'_, T, S> {
    type Schedule = Persistent<1>;
    type Registers = ();
    type Sums = S::Sums;
    type Source = Place;
    type State = ();

    const LOADING: u32 = 2;

    fn stages(&self) -> u32 {
        stages::<S>()
    }

    fn schedule(&self) -> Persistent<1> {
        let tiles = self.tiles.rows * self.tiles.columns;
        Persistent { tiles, steps: self.k.div_ceil(TILE_K) }
    }

    fn prepare(&self, loader: u32) {
        tma::prefetch_map(if loader == LOADS_A { self.a } else { self.b });
    }

    /// Waits for nothing: the groups were counted after the previous kernels.
    fn wait(&self, _: u32) {}

    fn source(&self, _: u32, turn: Turn) -> Place {
        self.place(turn)
    }

    fn load(&self, &Place { row, column, group }: &Place, step: u32, stage: &EmptyStage) {
        let (number, term) = (stage.number(), step * TILE_K);
        if stage.loader() == LOADS_A {
            stage.expect(S::M * 128);
            stage.load(self.tile(number, S::N), self.a, row, term);
        } else {
            stage.expect(S::N * 128);
            let (to, row) = (self.tile(number, 0), group.b_row + column);
            if group.end - group.first <= S::M {
                stage.load_once(to, self.b, row, term);
            } else {
                stage.load(to, self.b, row, term);
            }
        }
    }

    fn state(&self, _: &Warpgroup) {}

    fn compute(&self, group: &Warpgroup, (): &mut (), sums: &mut S::Sums, stage: u32, first: bool) {
        let b = self.tile(stage, WARPGROUP_N * group.index());
        group.multiply(sums, b, self.tile(stage, S::N), !first);
    }

    fn finish(&self, group: &Warpgroup, (): &mut (), turn: Turn, sums: &mut S::Sums) {
        let Place { row, column, group: rows } = self.place(turn);
        let origin = (row, column + WARPGROUP_N * group.index());
        let mut part = Part::<S, _>::of_thread(*sums, 0, origin, (rows.end, self.n));
        self.epilogue.apply(&mut part);
        // SAFETY: the kernel's caller passes C. Each thread has elements of its own.
        part.update_in_c(|sum, row, column| unsafe {
            let to = row as usize * self.n as usize + column as usize;
            mem::store(self.c.wrapping_add(to), T::from_f32(sum));
            sum
        });
    }
}
