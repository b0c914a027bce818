//! The product of large matrices on Hopper.
//!
//! A block computes tiles of 128 x 256 elements of C, one after the other. One warp loads the
//! factors by TMA into a pipeline of four stages; two warpgroups multiply, 64 rows each, and store
//! their sums by TMA from shared memory. Between two tiles they only round the sums and write half
//! of them to shared memory: the stores, and the other half, come after the first products of the
//! next tile. The two blocks of a cluster compute tiles that are neighbours in a column: both need
//! the same rows of B, of which each loads half for both.

pub use super::factors::GemmFactor;
use super::factors::{STAGE_BYTES, STORE_BYTES};
use super::prelude::*;

/// Rows of a tile of C.
pub const TILE_M: u32 = 128;
/// Columns of a tile of C.
pub const TILE_N: u32 = 256;
/// Rows of C that a warp stores at once.
pub const STORE_M: u32 = 16;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Stages of the pipeline.
pub const STAGES: u32 = 4;
/// Multiplying warps: two warpgroups.
pub(crate) const MULTIPLYING_WARPS: u32 = 8;
/// Warps that neither load nor multiply.
pub(crate) const IDLE_WARPS: u32 = 3;
/// Terms of a tile that are multiplied before the last parts of the previous tile are written, if
/// parts are also sent to a peer. All blocks send at the same time, and shared memory has room for
/// the last parts only after the first ones have left it. At most half of a tile's terms.
const SEND_COST_TERMS: u32 = 24 * 64;
/// Further terms that are multiplied before the previous tile is reported as stored: it is in C by
/// then, so the wait is short.
const STORE_COST_TERMS: u32 = 4 * 64;
pub(super) const WARPGROUP_M: u32 = 64;
/// Terms, and rows of A or B, that one load of a transposed factor has.
pub const TRANSPOSED: u32 = 64;

/// Dynamic shared memory in bytes, with padding for the alignment.
pub const SHARED: u32 = STAGES * STAGE_BYTES + STORE_BYTES + TileMemory::PADDING;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;

/// Computes `C = A x B^T`, with an epilogue, for Hopper. C has the type of bf16 or f16 factors, and
/// is bf16 for 8-bit factors.
///
/// `transposed_a` and `transposed_b` say that A is stored as `k x m`, or B as `k x n`; not for
/// 8-bit factors, which `wgmma` does not transpose.
///
/// `a` and `b` are tensor maps with tiles of 128 rows, or of [`TRANSPOSED`] if stored transposed.
/// `c` is a map with tiles of [`STORE_M`] rows. `unaligned` is null, or C's address, which is used
/// instead of the map if rows of C do not begin at multiples of 16 bytes.
///
/// Grid: a multiple of [`CLUSTER`] blocks, at most one per multiprocessor. Block: [`THREADS`]
/// threads, with [`SHARED`] bytes. Dependent launch: allowed.
///
/// # Safety
///
/// The matrices of the maps are allocated, and have `m x k`, `n x k` and `m x n` elements. No other
/// kernel writes A, B or what the epilogue reads, or accesses C, but those before a dependent
/// launch.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, T = [bf16, f16, F8E4M3, F8E5M2])]
pub unsafe fn gemm_wgmma<T: GemmFactor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    unaligned: *mut <T as GemmFactor>::Output,
    m: u32,
    n: u32,
    k: u32,
    transposed_a: bool,
    transposed_b: bool,
    epilogue: Fused<<T as GemmFactor>::Output>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe {
        product::<T, _>([&a, &b, &c], unaligned, [m, n, k], [transposed_a, transposed_b], epilogue)
    }
}

/// Computes what [`gemm_wgmma()`] does, with C in f32.
///
/// # Safety
///
/// The conditions are those of [`gemm_wgmma()`].
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, T = [bf16, f16, F8E4M3, F8E5M2])]
pub unsafe fn gemm_wgmma_f32<T: GemmFactor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    unaligned: *mut f32,
    m: u32,
    n: u32,
    k: u32,
    transposed_a: bool,
    transposed_b: bool,
    epilogue: Fused<f32>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe {
        product::<T, _>([&a, &b, &c], unaligned, [m, n, k], [transposed_a, transposed_b], epilogue)
    }
}

/// Computes what [`gemm_wgmma()`] does, with any epilogue, in a kernel with its grid and block. The
/// kernel's attribute is `#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]`. C has
/// elements of 16 or 32 bits.
///
/// # Safety
///
/// As for [`gemm_wgmma()`], and what the epilogue needs.
pub unsafe fn product<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
) {
    const { assert!(size_of::<E::Output>() > 1, "C has elements of 16 or 32 bits") };
    // SAFETY: the caller passes what a product without hooks needs.
    unsafe {
        product_with::<T, E>([a, b, c], unaligned, [m, n, k], transposed, epilogue, &());
    }
}

/// Does the same as [`product`], with hooks, under the conditions of both.
pub(crate) unsafe fn product_with<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
    hooks: &impl Hooks,
) {
    let stores = Stores::new(c, unaligned, [m, n], hooks);
    let factors = Factors::new([a, b], stores.shared, transposed);
    // SAFETY: the caller passes matrices, grid and block as the kernel needs them.
    unsafe { Product::<T, _, _>::new(factors, stores, k, epilogue).run() }
}

/// The product's part of the main loop.
pub(super) struct Product<'a, T, E: Epilogue, F> {
    factors: Factors<'a, T>,
    stores: Stores<'a, T, E::Output, F>,
    k: u32,
    epilogue: E,
    /// The order, if the rows are in groups: it is computed once.
    order: Option<Order>,
}

impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Product<'a, T, E, F> {
    pub(super) fn new(
        factors: Factors<'a, T>,
        stores: Stores<'a, T, E::Output, F>,
        k: u32,
        epilogue: E,
    ) -> Self {
        let order = if F::GROUPS { Some(stores.hooks.order_of(stores.m, stores.n)) } else { None };
        Self { factors, stores, k, epilogue, order }
    }

    fn order(&self) -> Order {
        // Opaque: the multiplying warps would keep it in registers for the place of the last tile.
        let Stores { hooks, m, n, .. } = self.stores;
        self.order.unwrap_or_else(|| hooks.order_of(hint::opaque(m), hint::opaque(n)))
    }
}

// SAFETY: a stage's loads have as many bytes as `expect` announces, and `compute` only multiplies.
unsafe impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Mainloop for Product<'a, T, E, F> {
    type Schedule = Persistent<CLUSTER>;
    type Registers = F::Registers;
    type Sums = Sums;
    type Source = Source<'a>;
    type State = LastRows<E::Output, Place, 32>;

    const CLUSTER: u32 = CLUSTER;
    const STEP: u32 = Shared::<T>::TILE_K;
    const INTERLUDES: u32 = if F::REPORTS { 3 } else { 2 };

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<CLUSTER> {
        Persistent { tiles: self.order().count(), steps: self.k }
    }

    fn prepare(&self, _: u32) {
        grid::wait_for_previous();
        self.factors.prefetch();
    }

    fn source(&self, _: u32, work: Turn) -> Source<'a> {
        let Source { a, row, b_row } = self.factors.source(self.order(), work.number);
        // SAFETY: one thread loads all tiles in their order, and calls this once for each.
        let (a, row) = unsafe { self.stores.hooks.a_tile(a, work.before, row) };
        Source { a, row, b_row }
    }

    fn load(&self, source: &Source<'a>, term: u32, stage: &EmptyStage) {
        self.factors.load(source, term, stage);
    }

    fn state(&self, _: &Warpgroup) -> Self::State {
        LastRows::none(Place::NONE)
    }

    fn compute(
        &self,
        group: &Warpgroup,
        _: &mut Self::State,
        sums: &mut Sums,
        stage: u32,
        first: bool,
    ) {
        let Factors { shared, transposed, .. } = self.factors;
        let tiles = [shared.a(stage).rows(group.index() * WARPGROUP_M), shared.b(stage).rows(0)];
        T::multiply(group, sums, tiles, transposed, !first);
    }

    /// The previous tile's parts in registers are written after the first products. Its last parts
    /// are written when the messages before them have left, and reported when they are in C.
    fn pause(&self, index: u32) -> u32 {
        let sent = if F::SENDS { SEND_COST_TERMS.min(self.k / 2) } else { Self::STEP };
        match index {
            0 => 1,
            1 => sent + 1,
            _ => sent + 1 + STORE_COST_TERMS,
        }
    }

    fn interlude(&self, group: &Warpgroup, last: &mut Self::State, index: u32, work: Turn) {
        // Computed in an interlude, where no product waits for it: the position needs divisions.
        last.interlude(group, index, &self.stores, || {
            let Tile { row, column, end, .. } = Tile::at(self.order(), work.number);
            let row = hint::opaque(row + group.warp() * STORE_M);
            Place { row, column: hint::opaque(column), end }
        });
    }

    fn finish(&self, group: &Warpgroup, last: &mut Self::State, work: Turn, sums: &mut Sums) {
        if last.tiles() == 0 {
            // The previous kernels may read C.
            grid::wait_for_previous();
        }
        if !self.epilogue.is_identity() {
            self.epilogue.apply(&mut self.stores.sums(sums, last.place()));
        }
        last.round(group, sums, work.before, &self.stores);
    }

    fn end(&self, group: &Warpgroup, last: &mut Self::State) {
        last.end(group, &self.stores);
        // SAFETY: all lanes of a multiplying warp are here, after its last store.
        unsafe { self.stores.hooks.drain(self.order(), group.warp()) };
    }

    fn idle(&self, warp: &IdleWarp) {
        // SAFETY: all lanes of a warp that neither loads nor multiplies are here, once.
        unsafe { self.stores.hooks.run_idle_warp(self.order(), warp.index()) };
    }
}
