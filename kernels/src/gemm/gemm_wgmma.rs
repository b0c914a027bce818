//! The product of large matrices on Hopper.
//!
//! A block computes tiles of 128 x 256 elements of C, one after the other. One warp loads the
//! factors by TMA into a pipeline of four stages; two warpgroups multiply, 64 rows each, and store
//! their sums by TMA from shared memory. Between two tiles they only round the sums and write half
//! of them there: the stores, and the other half, come after the first products of the next
//! tile. The two blocks of a cluster compute tiles that are neighbours in a column: both need the
//! same rows of B, of which each loads half for both.

use cuda_std::convert::Float;
use cuda_std::prelude::*;
use cuda_std::tile::{
    EmptyStage, IdleWarp, Mainloop, Persistent, SharedTile, TileMemory, Turn, Warpgroup,
};
use cuda_std::wgmma::Factor;
use cuda_std::{grid, hint, mma, tma};
use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap};

use super::epilogue::{Epilogue, Fused};
use super::factors::{Factors, STAGE_BYTES, STORE_BYTES, Shared, Source, Tile};
use super::hooks::Hooks;
use super::order::Order;
use super::stores::{Done, Output, Part, Store};

/// Rows of a tile of C.
pub const TILE_M: u32 = 128;
/// Columns of a tile of C.
pub const TILE_N: u32 = 256;
/// Rows of C that a warp stores at once.
pub const STORE_M: u32 = 16;
/// Slices of a warp's part of a tile that it stores together, each as wide as a tile for stores.
pub(super) const SLICES: u32 = 2;
/// Words of these slices per thread.
pub(super) const SLICES_WORDS: usize = 32;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Stages of the pipeline.
pub const STAGES: u32 = 4;
/// Multiplying warps: two warpgroups.
pub(crate) const MULTIPLYING_WARPS: u32 = 8;
/// Warps that neither load nor multiply.
pub(crate) const IDLE_WARPS: u32 = 3;
/// Terms of a tile that are multiplied before the last slices of the previous tile are written, if
/// slices are also sent to a peer. All blocks send at the same time, and shared memory has room for
/// these slices only after the first ones have left it. At most half of a tile's terms.
const SEND_COST_TERMS: u32 = 24 * 64;
/// Further terms that are multiplied before the previous tile is reported as stored: it is in C by
/// then, so the wait is short.
const STORE_COST_TERMS: u32 = 4 * 64;
/// Rows of a warpgroup.
pub(super) const WARPGROUP_M: u32 = 64;
/// Terms that one load of a transposed factor has, and rows of A or B.
pub const TRANSPOSED: u32 = 64;

/// An element type of A and B.
pub trait GemmFactor: Factor {
    /// The element type of C, of [`gemm_wgmma()`].
    type Output: Float;
    /// Whether A and B may be stored transposed.
    const TRANSPOSABLE: bool = size_of::<Self>() == 2;

    /// Adds the products of a stage, or sets the sums to them if they are the first ones, as a
    /// group. The factors are a warpgroup's rows of A, and the first rows of B.
    fn multiply(
        group: &Warpgroup,
        sums: &mut [f32; 128],
        [a, b]: [SharedTile<Self, TRANSPOSED>; 2],
        transposed: [bool; 2],
        accumulate: bool,
    ) {
        let _: [bool; 2] = transposed;
        group.multiply(sums, a, b, accumulate);
    }
}

/// Adds the products of a stage of factors that may be transposed.
fn multiply_transposable<T: Factor + mma::Factor>(
    group: &Warpgroup,
    sums: &mut [f32; 128],
    [a, b]: [SharedTile<T, TRANSPOSED>; 2],
    transposed: [bool; 2],
    accumulate: bool,
) {
    // Each branch commits its group: after the branches `ptxas` would commit a second, empty one,
    // and a wait for the stage before would be one for this stage too.
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
                sums: &mut [f32; 128],
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

/// Dynamic shared memory in bytes, with what the alignment takes.
pub const SHARED: u32 = STAGES * STAGE_BYTES + STORE_BYTES + TileMemory::PADDING;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;

/// Computes `C = A x B^T`, with an epilogue, for Hopper. C has the type of bf16 or f16 factors, and
/// is bf16 for 8-bit factors.
///
/// `transposed_a` and `transposed_b` say that A is stored as `k x m`, or B as `k x n`; not for
/// 8-bit factors, which `wgmma` does not transpose.
///
/// `a` and `b` are tensor maps with tiles of 128 rows, or of [`TRANSPOSED`] if stored so. `c` is a
/// map with tiles of [`STORE_M`], which is used only if `unaligned` is null: C's address otherwise,
/// for rows of C that do not begin at multiples of 16 bytes.
///
/// Grid: a multiple of [`CLUSTER`] blocks, at most one per multiprocessor. Block: [`THREADS`]
/// threads, with [`SHARED`] bytes. May be a dependent launch.
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
/// kernel's attribute is `#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]`.
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
    // SAFETY: the caller passes what a product without hooks needs.
    unsafe {
        product_with::<T, E>([a, b, c], unaligned, [m, n, k], transposed, epilogue, &());
    }
}

/// Computes what [`product`] does, and runs a kernel's hooks.
///
/// # Safety
///
/// The conditions are those of [`product`] and of the hooks.
pub(crate) unsafe fn product_with<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
    hooks: &impl Hooks,
) {
    let c = Output { map: c, by_map: unaligned.is_null(), address: unaligned, m, n };
    let factors = Factors::<T>::new([a, b], transposed);
    // SAFETY: the caller passes matrices, grid and block as the kernel needs them.
    unsafe { Product::new(factors, c, k, epilogue, hooks).run() }
}

/// The product's part of the main loop.
pub(super) struct Product<'a, T, E: Epilogue, F> {
    factors: Factors<'a, T>,
    c: Output<'a, E::Output>,
    k: u32,
    epilogue: E,
    hooks: &'a F,
    /// The order, if the rows are in groups: it is computed once.
    order: Option<Order>,
}

impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Product<'a, T, E, F> {
    pub(super) fn new(
        factors: Factors<'a, T>,
        c: Output<'a, E::Output>,
        k: u32,
        epilogue: E,
        hooks: &'a F,
    ) -> Self {
        let order = if F::GROUPS { Some(hooks.order_of(c.m, c.n)) } else { None };
        Self { factors, c, k, epilogue, hooks, order }
    }

    fn order(&self) -> Order {
        // Opaque: the multiplying warps would keep it in registers for `last`.
        self.order
            .unwrap_or_else(|| self.hooks.order_of(hint::opaque(self.c.m), hint::opaque(self.c.n)))
    }

    /// If C has 16 bits, the last slices wait in registers: those before them are written at once.
    const SLICES: u32 = TILE_N / Store::<E::Output>::COLUMNS;
    const AT_ONCE: u32 =
        if size_of::<E::Output>() == 2 { Self::SLICES - SLICES } else { Self::SLICES };

    /// Stores slices of the previous tile.
    fn store_slices(&self, group: &Warpgroup, state: &State, slice: u32) {
        let shared = self.factors.shared;
        if slice == Self::AT_ONCE {
            state.done.write::<T, E::Output>(group, shared, |i| state.pending[i]);
        }
        state.done.send(group, &self.c, shared, slice, self.hooks);
    }

    /// Waits until the warp's parts of tiles are in C, and reports their number.
    fn report(&self, group: &Warpgroup, state: &State) {
        if warp::lane_id() == 0 {
            // The last group of stores may still be on its way to a peer.
            tma::wait_stores::<1>();
            self.hooks.on_stored(group.warp(), state.tiles);
        }
    }
}

/// A multiplying warp's previous tile, of which slices may wait to be stored.
pub(super) struct State {
    done: Done,
    /// The words of the last slices, rounded.
    pending: [u32; SLICES_WORDS],
    /// The number of tiles that are computed.
    tiles: u32,
}

// SAFETY: a stage's loads have as many bytes as `expect` announces, and `compute` only multiplies.
unsafe impl<'a, T: GemmFactor, E: Epilogue, F: Hooks> Mainloop for Product<'a, T, E, F> {
    type Schedule = Persistent<CLUSTER>;
    type Registers = F::Registers;
    type Sums = [f32; 128];
    type Source = Source<'a>;
    type State = State;

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
        let (a, row) = unsafe { self.hooks.a_tile(a, work.before, row) };
        Source { a, row, b_row }
    }

    fn load(&self, source: &Source<'a>, term: u32, stage: &EmptyStage) {
        self.factors.load(source, term, stage);
    }

    fn state(&self, _: &Warpgroup) -> State {
        let done = Done { row: 0, column: 0, end: u32::MAX };
        State { done, pending: [0; SLICES_WORDS], tiles: 0 }
    }

    fn compute(
        &self,
        group: &Warpgroup,
        _: &mut State,
        sums: &mut [f32; 128],
        stage: u32,
        first: bool,
    ) {
        let Factors { shared, transposed, .. } = self.factors;
        let tiles = [shared.a(stage).rows(group.index() * WARPGROUP_M), shared.b(stage).rows(0)];
        T::multiply(group, sums, tiles, transposed, !first);
    }

    /// The slices in registers are written after the first products. The ones after them are
    /// written when the messages before have left, and reported when they are in C.
    fn pause(&self, index: u32) -> u32 {
        let sent = if F::SENDS { SEND_COST_TERMS.min(self.k / 2) } else { Self::STEP };
        match index {
            0 => 1,
            1 => sent + 1,
            _ => sent + 1 + STORE_COST_TERMS,
        }
    }

    fn interlude(&self, group: &Warpgroup, state: &mut State, index: u32, work: Turn) {
        let slice = Self::AT_ONCE - SLICES + index * SLICES;
        if state.tiles == 0 {
            // There is no previous tile.
        } else if index == 2 {
            self.report(group, state);
        } else if slice < Self::SLICES {
            self.store_slices(group, state, slice);
        }
        if index == 1 {
            // Computed here, where no product waits for it: the position needs divisions.
            let Tile { row, column, end, .. } = Tile::at(self.order(), work.number);
            let row = hint::opaque(row + group.warp() * STORE_M);
            state.done = Done { row, column: hint::opaque(column), end };
        }
    }

    fn finish(&self, group: &Warpgroup, state: &mut State, work: Turn, sums: &mut [f32; 128]) {
        if state.tiles == 0 {
            // The previous kernels may read C.
            grid::wait_for_previous();
        }
        state.tiles = work.before + 1;
        let (c, done, shared) = (&self.c, &state.done, self.factors.shared);
        // Opaque: so nothing is computed from it before the loop, where registers are few.
        let own = hint::opaque(warp::lane_id());
        let (row, column) = (done.row + own / 4, done.column + own % 4 * 2);
        if !self.epilogue.is_identity() {
            let end = (done.end.min(c.m), c.n);
            self.epilogue.apply(&mut Part { sums: &mut *sums, row, column, end });
        }
        let mut slice = 0;
        while slice < Self::SLICES {
            let first = (slice / SLICES) as usize * SLICES_WORDS;
            let word = |i| self.hooks.encode(E::Output::word(first + i, |i| sums[i]));
            if slice < Self::AT_ONCE {
                if slice > 0 {
                    done.send(group, c, shared, slice - SLICES, self.hooks);
                }
                done.write::<T, E::Output>(group, shared, word);
            } else {
                let mut i = 0;
                while i < state.pending.len() {
                    state.pending[i] = word(i);
                    i += 1;
                }
            }
            slice += SLICES;
        }
    }

    fn end(&self, group: &Warpgroup, state: &mut State) {
        if state.tiles > 0 {
            self.store_slices(group, state, Self::AT_ONCE - SLICES);
            if Self::AT_ONCE < Self::SLICES {
                self.store_slices(group, state, Self::AT_ONCE);
            }
        }
        if F::REPORTS {
            self.report(group, state);
        }
        tma::wait_stores::<0>();
        // SAFETY: all lanes of a multiplying warp are here, after its last store.
        unsafe { self.hooks.drain(self.order(), group.warp()) };
    }

    fn idle(&self, warp: &IdleWarp) {
        // SAFETY: all lanes of a warp that neither loads nor multiplies are here, once.
        unsafe { self.hooks.run_idle_warp(self.order(), warp.index()) };
    }
}
