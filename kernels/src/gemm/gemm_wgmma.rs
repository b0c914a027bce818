//! The product of large matrices on Hopper.
//!
//! A block computes tiles of 128 x 256 elements of C, one after the other. One warp loads the
//! factors by TMA into a pipeline of four stages; two warpgroups multiply, 64 rows each, and store
//! their sums by TMA from shared memory. Between two tiles they only round the sums and write half
//! of them there: the stores, and the other half, follow behind the first products of the next
//! tile. The two blocks of a cluster compute tiles that are neighbours in a column: both need the
//! same rows of B, of which each loads half for both.

use core::marker::PhantomData;

use cuda_std::convert::Float;
use cuda_std::prelude::*;
use cuda_std::tile::{
    EmptyStage, IdleWarp, Mainloop, Persistent, SharedTile, TileMemory, Turn, Warpgroup,
};
use cuda_std::wgmma::Factor;
use cuda_std::{cluster, grid, hint, mma, tma};
use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap};

use super::epilogue::{Epilogue, Fragment, Fused};
use super::follow::Follow;
use super::order::{Order, Position};

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
/// Terms of a tile whose products come before the last slices of the previous tile are written, if
/// slices are also sent to a peer: all blocks send at the same time, and shared memory has room for
/// these only when the first ones are on their way. At most half of a tile's terms.
const SENT: u32 = 24 * 64;
/// Further terms whose products come before the previous tile is reported as stored: it is in C by
/// then, so that the wait is short.
const STORED: u32 = 4 * 64;
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
    // Each branch commits its group: behind the branches `ptxas` commits a second, empty one, and a
    // wait for the stage before would be one for this stage too.
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

type A<T> = SharedTile<T, TILE_M>;
type B<T> = SharedTile<T, TILE_N>;
pub(super) type Store<O> = SharedTile<O, STORE_M>;

/// Tiles have as many bytes for every type.
const STAGE_BYTES: u32 = A::<bf16>::BYTES + B::<bf16>::BYTES;
/// Tiles for the stores of each warp.
const STORE_BYTES: u32 = SLICES * MULTIPLYING_WARPS * Store::<bf16>::BYTES;
/// Dynamic shared memory in bytes, with what the alignment takes.
pub const SHARED: u32 = STAGES * STAGE_BYTES + STORE_BYTES + TileMemory::PADDING;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;

/// `C = A x B^T`, with an epilogue, for Hopper: of bf16 or f16 in the same type, of 8-bit floats in
/// bf16.
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
    // SAFETY: the kernel's contract.
    unsafe {
        product::<T, _>([&a, &b, &c], unaligned, [m, n, k], [transposed_a, transposed_b], epilogue)
    }
}

/// As [`gemm_wgmma()`], with C in f32.
///
/// # Safety
///
/// As there.
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
    // SAFETY: the kernel's contract.
    unsafe {
        product::<T, _>([&a, &b, &c], unaligned, [m, n, k], [transposed_a, transposed_b], epilogue)
    }
}

/// The body of [`gemm_wgmma()`] with any epilogue, for kernels with its grid and its block. The
/// attribute is `#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]`.
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
    // SAFETY: the caller's contract.
    unsafe {
        product_and::<T, E>([a, b, c], unaligned, [m, n, k], transposed, epilogue, &());
    }
}

/// As [`product`], with what a kernel does beside it.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn product_and<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
    follow: &impl Follow,
) {
    let c = Output { map: c, by_map: unaligned.is_null(), address: unaligned, m, n };
    let factors = Factors::<T>::new([a, b], transposed);
    // SAFETY: the caller's contract.
    unsafe { Product::new(factors, c, k, epilogue, follow).run() }
}

/// A block's shared memory: the stages, and tiles for the stores of each warp.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    element: PhantomData<T>,
    memory: TileMemory,
}

impl<T: GemmFactor> Shared<T> {
    /// Terms of the sums that a stage has.
    const TILE_K: u32 = A::<T>::COLUMNS;

    pub(super) fn dynamic() -> Self {
        Self { element: PhantomData, memory: TileMemory::dynamic() }
    }

    pub(super) fn a(self, stage: u32) -> A<T> {
        self.memory.tile(stage * STAGE_BYTES)
    }

    pub(super) fn b(self, stage: u32) -> B<T> {
        self.memory.tile(stage * STAGE_BYTES + A::<T>::BYTES)
    }

    /// One of a warp's tiles for stores.
    fn store<O>(self, warp: u32, which: u32) -> Store<O> {
        self.memory.tile(STAGES * STAGE_BYTES + (SLICES * warp + which) * Store::<O>::BYTES)
    }
}

/// A tile of this block.
#[derive(Clone, Copy)]
struct Tile {
    /// Its first row and column in C.
    row: u32,
    column: u32,
    /// The row of B that is the first column's.
    of_b: u32,
    /// The rows of its group end here.
    end: u32,
}

impl Tile {
    fn at(order: Order, number: u32) -> Self {
        let Position { row, column, group } = order.position(number);
        let (row, column) = ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N);
        Self { row: group.first + row, column, of_b: group.of_b + column, end: group.end }
    }
}

/// The row and column of C from which this block computes the tile.
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
    a: &'a TensorMap,
    row: u32,
    of_b: u32,
}

impl<'a, T: GemmFactor> Factors<'a, T> {
    pub(super) fn new(maps: [&'a TensorMap; 2], transposed: [bool; 2]) -> Self {
        let transposed = transposed.map(|transposed| T::TRANSPOSABLE && transposed);
        Self { shared: Shared::dynamic(), maps, transposed }
    }

    /// Where the factors of one of this cluster's tiles are.
    pub(super) fn source(&self, order: Order, number: u32) -> Source<'a> {
        let Tile { row, of_b, .. } = Tile::at(order, number);
        Source { a: self.maps[0], row, of_b }
    }

    pub(super) fn prefetch(&self) {
        tma::prefetch_map(self.maps[0]);
        tma::prefetch_map(self.maps[1]);
    }

    /// Loads a step's tile of A, and this block's half of B's to both blocks of the cluster.
    pub(super) fn load(&self, source: &Source<'_>, term: u32, stage: &EmptyStage) {
        const HALF: u32 = TILE_N / CLUSTER;
        const BOTH: u16 = (1 << CLUSTER) - 1;
        let half = cluster::rank() * HALF;
        let (&Source { a, row, of_b }, [_, b]) = (source, self.maps);
        let (a_tile, b_half) =
            (self.shared.a(stage.number()), self.shared.b(stage.number()).rows::<HALF>(half));
        let of_b = of_b + half;
        stage.expect(STAGE_BYTES);
        // A part of the other layout has as many bytes as as many rows of this one.
        if self.transposed[0] {
            let mut part = 0;
            while part < TILE_M {
                stage.load(a_tile.rows::<TRANSPOSED>(part), a, term, row + part);
                part += TRANSPOSED;
            }
        } else {
            stage.load(a_tile, a, row, term);
        }
        if self.transposed[1] {
            let mut part = 0;
            while part < HALF {
                let to = b_half.rows::<TRANSPOSED>(part);
                stage.load_multicast(to, b, term, of_b + part, BOTH);
                part += TRANSPOSED;
            }
        } else {
            stage.load_multicast(b_half, b, of_b, term, BOTH);
        }
    }
}

/// What is this product's own in the main loop.
pub(super) struct Product<'a, T, E: Epilogue, F> {
    factors: Factors<'a, T>,
    c: Output<'a, E::Output>,
    k: u32,
    epilogue: E,
    follow: &'a F,
    /// With groups.
    order: Option<Order>,
}

impl<'a, T: GemmFactor, E: Epilogue, F: Follow> Product<'a, T, E, F> {
    pub(super) fn new(
        factors: Factors<'a, T>,
        c: Output<'a, E::Output>,
        k: u32,
        epilogue: E,
        follow: &'a F,
    ) -> Self {
        let order = if F::GROUPS { Some(follow.order_of(c.m, c.n)) } else { None };
        Self { factors, c, k, epilogue, follow, order }
    }

    fn order(&self) -> Order {
        // Opaque: the multiplying warps would keep it in registers for `last`.
        self.order
            .unwrap_or_else(|| self.follow.order_of(hint::opaque(self.c.m), hint::opaque(self.c.n)))
    }

    /// If C has 16 bits, the last slices wait in registers: those before them are written at once.
    const SLICES: u32 = TILE_N / Store::<E::Output>::COLUMNS;
    const AT_ONCE: u32 =
        if size_of::<E::Output>() == 2 { Self::SLICES - SLICES } else { Self::SLICES };

    /// Stores slices of the previous tile.
    fn store_slices(&self, group: &Warpgroup, state: &State, slice: u32) {
        let shared = self.factors.shared;
        if slice == Self::AT_ONCE {
            state.done.write::<T, E::Output>(group, shared, |i| state.rest[i]);
        }
        state.done.send(group, &self.c, shared, slice, self.follow);
    }

    /// Reports the parts of tiles that the warp has stored, when these are in C.
    fn report(&self, group: &Warpgroup, state: &State) {
        if warp::lane_id() == 0 {
            // The last group is what is on its way to a peer.
            tma::wait_stores::<1>();
            self.follow.stored(group.warp(), state.tiles);
        }
    }
}

/// What a multiplying warp keeps of its previous tile.
pub(super) struct State {
    done: Done,
    /// The last slices, rounded.
    rest: [u32; SLICES_WORDS],
    /// The number of tiles that are computed.
    tiles: u32,
}

// SAFETY: the tiles are a stage's, and as many bytes are expected. `compute` only multiplies.
unsafe impl<'a, T: GemmFactor, E: Epilogue, F: Follow> Mainloop for Product<'a, T, E, F> {
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
        let Source { a, row, of_b } = self.factors.source(self.order(), work.number);
        // SAFETY: the kernel's contract.
        let (a, row) = unsafe { self.follow.source(a, work.before, row) };
        Source { a, row, of_b }
    }

    fn load(&self, source: &Source<'a>, term: u32, stage: &EmptyStage) {
        self.factors.load(source, term, stage);
    }

    fn state(&self, _: &Warpgroup) -> State {
        let done = Done { row: 0, column: 0, end: u32::MAX };
        State { done, rest: [0; SLICES_WORDS], tiles: 0 }
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

    /// After the first products; after the next ones, or those with which messages have left; and
    /// when what was stored is in C.
    fn pause(&self, index: u32) -> u32 {
        let sent = if F::SENDS { SENT.min(self.k / 2) } else { Self::STEP };
        match index {
            0 => 1,
            1 => sent + 1,
            _ => sent + 1 + STORED,
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
        // Unknown: nothing is computed from it before the loop, where registers are few.
        let own = hint::opaque(warp::lane_id());
        let (row, column) = (done.row + own / 4, done.column + own % 4 * 2);
        if !self.epilogue.is_identity() {
            let end = (done.end.min(c.m), c.n);
            self.epilogue.apply(&mut Part { sums: &mut *sums, row, column, end });
        }
        let mut slice = 0;
        while slice < Self::SLICES {
            let first = (slice / SLICES) as usize * SLICES_WORDS;
            let word = |i| self.follow.word(E::Output::word(first + i, |i| sums[i]));
            if slice < Self::AT_ONCE {
                if slice > 0 {
                    done.send(group, c, shared, slice - SLICES, self.follow);
                }
                done.write::<T, E::Output>(group, shared, word);
            } else {
                let mut i = 0;
                while i < state.rest.len() {
                    state.rest[i] = word(i);
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
        // SAFETY: the kernel's contract.
        unsafe { self.follow.last(self.order(), group.warp()) };
    }

    fn idle(&self, warp: &IdleWarp) {
        // SAFETY: the kernel's contract.
        unsafe { self.follow.beside(self.order(), warp.index()) };
    }
}

/// A thread's sums of a tile, from `row` and `column` on.
pub(super) struct Part<'a> {
    pub(super) sums: &'a mut [f32; 128],
    pub(super) row: u32,
    pub(super) column: u32,
    pub(super) end: (u32, u32),
}

impl Fragment for Part<'_> {
    const ROWS: u32 = 2;
    const COLUMNS: u32 = 64;
    const PAIRS: bool = true;

    fn row(&self, i: u32) -> u32 {
        self.row + 8 * i
    }

    fn column(&self, j: u32) -> u32 {
        self.column + 8 * (j / 2) + j % 2
    }

    fn end(&self) -> (u32, u32) {
        self.end
    }

    fn sum(&mut self, i: u32, j: u32) -> &mut f32 {
        &mut self.sums[(4 * (j / 2) + 2 * i + j % 2) as usize]
    }
}

/// A warp's part of a tile that is computed.
pub(super) struct Done {
    pub(super) row: u32,
    pub(super) column: u32,
    /// The rows of its group end here.
    pub(super) end: u32,
}

impl Done {
    /// Writes [`SLICES`] slices to the shared memory, of which a thread has the words.
    pub(super) fn write<T: GemmFactor, O: Float>(
        &self,
        group: &Warpgroup,
        shared: Shared<T>,
        word: impl Fn(usize) -> u32,
    ) {
        group.wait_until_read();
        let mut which = 0;
        while which < SLICES {
            let first = which as usize * (SLICES_WORDS / SLICES as usize);
            // SAFETY: the lanes of the warp call this together, and the tiles are the warp's.
            unsafe {
                let tile = shared.store::<O>(group.warp(), which);
                tile.store_words(warp::lane_id(), |i| word(first + i));
            }
            which += 1;
        }
    }

    /// Stores the slices that were written, from the tile's `slice`-th on.
    pub(super) fn send<T: GemmFactor, O: Float, F: Follow>(
        &self,
        group: &Warpgroup,
        c: &Output<'_, O>,
        shared: Shared<T>,
        slice: u32,
        follow: &F,
    ) {
        // A map would store the rows of the next group too.
        let is_cut = F::GROUPS && self.end.saturating_sub(self.row) < STORE_M;
        if is_cut || !c.by_map {
            // SAFETY: the lanes of the warp call this together. C is as the kernel's contract says.
            unsafe {
                warp::sync();
                self.each(group, shared, slice, |column, from| {
                    c.store((self.row, self.end), column, from);
                });
            }
            return;
        }
        // SAFETY: the kernel's contract. Each slice is stored and sent once.
        group.store(|| unsafe {
            self.each(group, shared, slice, |column, from: Store<O>| {
                follow.keep(c.map, self.row, column, from);
            });
            if F::SENDS {
                tma::commit_stores();
                self.each(group, shared, slice, |column, from: Store<O>| {
                    follow.send(self.row, column, from);
                });
            }
        });
    }

    /// Calls `store` with the column of each slice, from the tile's `slice`-th on, and its tile.
    fn each<T: GemmFactor, O>(
        &self,
        group: &Warpgroup,
        shared: Shared<T>,
        slice: u32,
        store: impl Fn(u32, Store<O>),
    ) {
        let mut which = 0;
        while which < SLICES {
            let column = self.column + (slice + which) * Store::<O>::COLUMNS;
            store(column, shared.store::<O>(group.warp(), which));
            which += 1;
        }
    }
}

/// Where the sums go.
pub(super) struct Output<'a, O> {
    pub(super) map: &'a TensorMap,
    /// Whether the map is used, for whole parts of a tile.
    pub(super) by_map: bool,
    /// C's address, for parts that are stored element by element.
    pub(super) address: *mut O,
    pub(super) m: u32,
    pub(super) n: u32,
}

impl<O: Float> Output<'_, O> {
    /// Stores a warp's tile up to row `end`, element by element.
    ///
    /// # Safety
    ///
    /// `address` is C's. The lanes of a warp call this together, and write the tile again
    /// after a barrier.
    unsafe fn store(&self, (row, end): (u32, u32), column: u32, tile: Store<O>) {
        const ROWS: u32 = 4;
        let lane = warp::lane_id();
        let m = self.m.min(end);
        let halves = Store::<O>::COLUMNS / warp::WARP_SIZE;
        // Not unrolled as a whole, which would take more registers than are left.
        let end = hint::opaque(m.saturating_sub(row).min(STORE_M));
        let mut first = 0;
        while first < end {
            let mut i = 0;
            while i < ROWS * halves {
                let (r, column_in_tile) = (first + i / halves, i % halves * warp::WARP_SIZE + lane);
                let (row, column) = (row + r, column + column_in_tile);
                if row < m && column < self.n {
                    let at = row as usize * self.n as usize + column as usize;
                    // SAFETY: the element lies in C.
                    unsafe {
                        let bits = tile.bits(r, column_in_tile);
                        match size_of::<O>() {
                            2 => mem::store(self.address.cast::<u16>().add(at), bits as u16),
                            _ => mem::store(self.address.cast::<u32>().add(at), bits),
                        }
                    }
                }
                i += 1;
            }
            first += ROWS;
        }
    }
}
