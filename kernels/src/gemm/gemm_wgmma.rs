//! The product of large matrices on Hopper.
//!
//! A block computes tiles of 128 x 256 elements of C, one after the other. One warp loads the
//! factors by TMA into a pipeline of four stages; two warpgroups multiply, 64 rows each, and store
//! their sums by TMA from shared memory. Between two tiles they only round the sums and write half
//! of them to shared memory: the stores, and the other half, come after the first products of the
//! next tile. The two blocks of a cluster compute tiles that are neighbours in a column: both need
//! the same rows of B, of which each loads half for both.

pub use super::factors::GemmFactor;
use super::prelude::*;
pub use super::wide_tiles::*;

/// Terms of a tile that are multiplied before the last parts of the previous tile are written, if
/// parts are also sent to a peer. All blocks send at the same time, and shared memory has room for
/// the last parts only after the first ones have left it. At most half of a tile's terms.
const SEND_COST_TERMS: u32 = 24 * 64;
/// Further terms that are multiplied before the previous tile is reported as stored: it is in C by
/// then, so the wait is short.
const STORE_COST_TERMS: u32 = 4 * 64;

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
    maps: [&TensorMap; 3],
    unaligned: *mut E::Output,
    extents: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
) {
    const { assert!(size_of::<E::Output>() > 1, "C has elements of 16 or 32 bits") };
    // SAFETY: the caller passes matrices, grid and block as the kernel needs them.
    unsafe { Product::<T, E, _>::new(maps, unaligned, extents, transposed, epilogue, &()).run() }
}

/// The product's part of the main loop. What it needs to run is what [`product`] does, and what the
/// hooks need.
pub(crate) struct Product<'a, T, E: Epilogue, F> {
    pub(super) memory: TileMemory,
    /// The maps of A, B and C.
    pub(super) maps: [&'a TensorMap; 3],
    /// Whether C's map is used, for whole parts of a tile.
    pub(super) by_map: bool,
    /// C's address, for parts that are stored element by element.
    pub(super) address: *mut E::Output,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    /// Whether A and B are stored transposed.
    pub(super) transposed: [bool; 2],
    pub(super) epilogue: E,
    pub(super) hooks: &'a F,
    /// The order, if it is computed once, as for rows in groups.
    pub(super) order: Option<Order>,
    element: PhantomData<T>,
}

impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Product<'a, T, E, F> {
    /// Returns the product. C is stored by its map if the address is null.
    pub(crate) fn new(
        maps: [&'a TensorMap; 3],
        address: *mut E::Output,
        [m, n, k]: [u32; 3],
        transposed: [bool; 2],
        epilogue: E,
        hooks: &'a F,
    ) -> Self {
        Self {
            memory: TileMemory::dynamic(),
            maps,
            by_map: address.is_null(),
            address,
            m,
            n,
            k,
            transposed: transposed.map(|transposed| T::TRANSPOSABLE && transposed),
            epilogue,
            hooks,
            order: F::GROUPS.then(|| hooks.order([m, n])),
            element: PhantomData,
        }
    }

    pub(super) fn order(&self) -> Order {
        // Opaque: the multiplying warps would keep it in registers for the place of the last tile.
        self.order.unwrap_or_else(|| self.hooks.order([self.m, self.n].map(hint::opaque)))
    }
}

// SAFETY: a stage's loads have as many bytes as `expect` announces, and `compute` only multiplies.
unsafe impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Mainloop for Product<'a, T, E, F> {
    type Schedule = Persistent<CLUSTER>;
    type Registers = F::Registers;
    type Sums = Sums;
    type Source = (&'a TensorMap, u32, u32);
    type State = LastRows<E::Output, Tile, 32>;

    const CLUSTER: u32 = CLUSTER;
    const STEP: u32 = SharedTile::<T, TILE_M>::COLUMNS;
    const INTERLUDES: u32 = if F::REPORTS { 3 } else { 2 };

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<CLUSTER> {
        Persistent { tiles: self.order().count(), steps: self.k }
    }

    /// Waits for the previous kernels before `source`, which calls a hook.
    fn prepare(&self, _: u32) {
        grid::wait_for_previous();
        tma::prefetch_map(self.maps[0]);
        tma::prefetch_map(self.maps[1]);
    }

    fn wait(&self, _: u32) {}

    fn source(&self, _: u32, work: Turn) -> Self::Source {
        let Tile { row, b_row, .. } = self.order().tile(work.number);
        // SAFETY: one thread loads all tiles in their order, and calls this once for each.
        let (a, row) = unsafe { self.hooks.a_tile(self.maps[0], work.before, row) };
        (a, row, b_row)
    }

    fn load(&self, source: &Self::Source, term: u32, stage: &EmptyStage) {
        self.load_factors(source, term, stage);
    }

    fn state(&self, _: &Warpgroup) -> Self::State {
        LastRows::none(Tile::NONE)
    }

    fn compute(
        &self,
        group: &Warpgroup,
        _: &mut Self::State,
        sums: &mut Sums,
        stage: u32,
        first: bool,
    ) {
        let a = self.a(stage).rows::<WARPGROUP_M>(group.index() * WARPGROUP_M);
        let (b, add) = (self.b(stage).rows::<TRANSPOSED>(0), !first);
        let (a_t, b_t) = (T::transposed(a), T::transposed(b));
        // Each branch commits its group: after the branches `ptxas` would commit a second, empty
        // one, and a wait for the previous stage's products would also wait for this stage's.
        match self.transposed {
            [false, false] => group.multiply(sums, a, b, add),
            [false, true] => group.multiply_factors(sums, a.factor(), b_t, add),
            [true, false] => group.multiply_factors(sums, a_t, b.factor(), add),
            [true, true] => group.multiply_factors(sums, a_t, b_t, add),
        }
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
        last.interlude(group, index, self, || {
            let tile = self.order().tile(work.number);
            let row = hint::opaque(tile.row + group.warp() * STORE_M);
            Tile { row, column: hint::opaque(tile.column), ..tile }
        });
    }

    fn finish(&self, group: &Warpgroup, last: &mut Self::State, work: Turn, sums: &mut Sums) {
        if last.tiles() == 0 {
            // The previous kernels may read C.
            grid::wait_for_previous();
        }
        if !self.epilogue.is_identity() {
            self.apply_epilogue(sums, last.place());
        }
        last.round(group, sums, work.before, self);
    }

    fn end(&self, group: &Warpgroup, last: &mut Self::State) {
        last.end(group, self);
        // SAFETY: all lanes of a multiplying warp are here, after its last store.
        unsafe { self.hooks.drain(self.order(), group.warp()) };
    }

    fn idle(&self, warp: &IdleWarp) {
        // SAFETY: all lanes of a warp that neither loads nor multiplies are here, once.
        unsafe { self.hooks.run_idle_warp(self.order(), warp.index()) };
    }
}
