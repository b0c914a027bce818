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
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory};
use cuda_std::wgmma::{Factor, Layout};
use cuda_std::{cluster, grid, hint, tma, wgmma};
use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap};

use super::epilogue::{Epilogue, Fragment, Fused};
use super::follow::{Beside, Follow};
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

    /// Adds the products of a stage, or sets the sums to them if they are the `first`, as a group.
    /// The factors are a warpgroup's rows of A, and the first rows of B.
    ///
    /// # Safety
    ///
    /// As [`wgmma::multiply`].
    #[inline(always)]
    unsafe fn multiply(
        sums: &mut [f32; 128],
        [a, b]: [SharedTile<Self, TRANSPOSED>; 2],
        transposed: [bool; 2],
        first: bool,
    ) {
        let _: [bool; 2] = transposed;
        // SAFETY: the caller's contract.
        unsafe { multiply_factors(sums, a.factor(), b.factor(), first) }
    }
}

macro_rules! transposable {
    ($($type:ident)*) => { $(
        impl GemmFactor for $type {
            type Output = Self;

            #[inline(always)]
            unsafe fn multiply(
                sums: &mut [f32; 128],
                [a, b]: [SharedTile<Self, TRANSPOSED>; 2],
                transposed: [bool; 2],
                first: bool,
            ) {
                // SAFETY: the caller's contract.
                unsafe {
                    match transposed {
                        [false, false] => multiply_factors(sums, a.factor(), b.factor(), first),
                        [false, true] => {
                            multiply_factors(sums, a.factor(), b.transposed_factor(), first)
                        }
                        [true, false] => {
                            multiply_factors(sums, a.transposed_factor(), b.factor(), first)
                        }
                        [true, true] => {
                            let (a, b) = (a.transposed_factor(), b.transposed_factor());
                            multiply_factors(sums, a, b, first);
                        }
                    }
                }
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

/// Adds the products of a stage, or sets the sums to them if they are the `first`, as a group.
///
/// # Safety
///
/// As [`wgmma::multiply`].
#[inline(always)]
unsafe fn multiply_factors<T: Factor, A: Layout<T>, B: Layout<T>>(
    sums: &mut [f32; 128],
    a: wgmma::Tile<T, A>,
    b: wgmma::Tile<T, B>,
    first: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        wgmma::fence();
        let mut term = 0;
        while term < SharedTile::<T, TRANSPOSED>::COLUMNS {
            let (a, b) = (a.columns_from(term), b.columns_from(term));
            wgmma::multiply(sums, a, b, !first || term > 0);
            term += T::TERMS;
        }
        // Not behind the branches of the layouts: there `ptxas` commits a second, empty group, and
        // a wait for the stage before would be one for this stage too.
        wgmma::commit_group();
    }
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
#[inline(always)]
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
#[inline(always)]
pub(crate) unsafe fn product_and<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
    follow: &impl Follow,
) {
    let multiply = |shared: Shared<T>, order| {
        // SAFETY: the caller's contract.
        unsafe {
            let c = Output { map: c, by_map: unaligned.is_null(), address: unaligned, m, n };
            multiply(c, shared, order, k, epilogue, follow);
        }
    };
    // SAFETY: the caller's contract.
    unsafe { run::<T, _>([a, b], [m, n, k], transposed, multiply, follow) }
}

/// Loads the tiles of A and B, and lets the multiplying warps call `multiply`.
///
/// # Safety
///
/// As for [`gemm_wgmma`]. `multiply` releases each stage once for each tile and step, in order.
#[inline(always)]
pub(super) unsafe fn run<T: GemmFactor, F: Follow>(
    [a, b]: [&TensorMap; 2],
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    multiply: impl FnOnce(Shared<T>, Order),
    follow: &F,
) {
    grid::launch_next();
    let order = |m: u32, n: u32| follow.order(m.div_ceil(CLUSTER * TILE_M), n.div_ceil(TILE_N));
    let of_groups = if F::GROUPS { Some(order(m, n)) } else { None };
    // Opaque: the multiplying warps would keep it in registers for `last`.
    let order = || of_groups.unwrap_or_else(|| order(hint::opaque(m), hint::opaque(n)));
    // SAFETY: only this pipeline uses the words; it is initialised first.
    let shared = unsafe {
        Shared::<T> {
            element: PhantomData,
            transposed: transposed.map(|transposed| T::TRANSPOSABLE && transposed),
            memory: TileMemory::dynamic(),
            pipeline: Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES),
        }
    };
    let warp = thread::thread_idx_x() / warp::WARP_SIZE;
    // SAFETY: the kernel's contract. All threads of the cluster reach its barriers.
    unsafe {
        if thread::thread_idx_x() == 0 {
            // The two warpgroups of each block release a stage.
            shared.pipeline.init(1, CLUSTER * 2);
        }
        cluster::sync_relaxed();
        if warp < MULTIPLYING_WARPS {
            raise_registers(follow);
            multiply(shared, order());
            follow.last(order(), warp);
        } else {
            lower_registers(follow);
            if warp > MULTIPLYING_WARPS {
                follow.beside(order(), warp - MULTIPLYING_WARPS - 1);
            } else if warp::lane_id() == 0 {
                grid::wait_for_previous();
                load([a, b], shared, order(), k, follow);
            }
        }
        // No block ends while the other one still writes to its shared memory.
        cluster::sync();
    }
}

/// Registers of a thread that multiplies, and of another one, which may have more to do
/// ([`Beside`]). Three warpgroups share what the launch gave them: 168 for each thread.
const REGISTERS: [[u32; 2]; 3] = [[232, 40], [208, 88], [192, 120]];

const _: () = {
    let mut i = 0;
    while i < REGISTERS.len() {
        let [multiplying, other] = REGISTERS[i];
        assert!(2 * multiplying + other <= 3 * 168, "the block waits for registers forever");
        i += 1;
    }
};

/// Takes a multiplying warpgroup's registers.
///
/// # Safety
///
/// As [`wgmma::raise_registers`].
#[inline(always)]
unsafe fn raise_registers<F: Follow>(_: &F) {
    // SAFETY: the caller's contract.
    unsafe {
        match F::BESIDE {
            Beside::Nothing => wgmma::raise_registers::<{ REGISTERS[0][0] }>(),
            Beside::Copies => wgmma::raise_registers::<{ REGISTERS[1][0] }>(),
            Beside::Sums | Beside::SumsOfMessages => {
                wgmma::raise_registers::<{ REGISTERS[2][0] }>();
            }
        }
    }
}

/// Leaves them to it.
///
/// # Safety
///
/// As [`wgmma::lower_registers`].
#[inline(always)]
unsafe fn lower_registers<F: Follow>(_: &F) {
    // SAFETY: the caller's contract.
    unsafe {
        match F::BESIDE {
            Beside::Nothing => wgmma::lower_registers::<{ REGISTERS[0][1] }>(),
            Beside::Copies => wgmma::lower_registers::<{ REGISTERS[1][1] }>(),
            Beside::Sums | Beside::SumsOfMessages => {
                wgmma::lower_registers::<{ REGISTERS[2][1] }>();
            }
        }
    }
}

/// The block's shared memory.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    element: PhantomData<T>,
    /// Whether A and B are stored transposed.
    transposed: [bool; 2],
    memory: TileMemory,
    pub(super) pipeline: Pipeline,
}

impl<T: GemmFactor> Shared<T> {
    /// Terms of the sums that a stage has.
    const TILE_K: u32 = A::<T>::COLUMNS;

    #[inline(always)]
    pub(super) fn a(self, state: PipelineState) -> A<T> {
        self.memory.tile(state.stage * STAGE_BYTES)
    }

    #[inline(always)]
    pub(super) fn b(self, state: PipelineState) -> B<T> {
        self.memory.tile(state.stage * STAGE_BYTES + A::<T>::BYTES)
    }

    /// Adds a stage's products of 64 rows, or sets the sums to them if they are the first; waits
    /// for those of the stage before, `last`, and releases it.
    ///
    /// # Safety
    ///
    /// A warpgroup calls this; [`wgmma::multiply`] says what else.
    #[inline(always)]
    unsafe fn step(
        self,
        sums: &mut [f32; 128],
        state: PipelineState,
        last: PipelineState,
        (warpgroup, rank): (u32, u32),
        first: bool,
    ) {
        self.pipeline.wait_full(state);
        let factors = [self.a(state).rows(warpgroup * WARPGROUP_M), self.b(state).rows(0)];
        // SAFETY: the caller's contract.
        unsafe {
            T::multiply(sums, factors, self.transposed, first);
            wgmma::wait_groups::<1>();
        }
        if !first {
            self.release(last, rank);
        }
    }

    /// Releases a stage that this warpgroup has read: one thread for each block of the cluster.
    #[inline(always)]
    pub(super) fn release(self, state: PipelineState, rank: u32) {
        if rank < CLUSTER {
            self.pipeline.empty(state).arrive_in(rank);
        }
    }

    /// One of a warp's tiles for stores.
    #[inline(always)]
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
    #[inline(always)]
    fn at(order: Order, number: u32) -> Self {
        let Position { row, column, group } = order.position(number);
        let (row, column) = ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N);
        Self { row: group.first + row, column, of_b: group.of_b + column, end: group.end }
    }
}

/// The row and column of C from which this block computes the tile.
#[inline(always)]
pub(crate) fn origin(order: Order, number: u32) -> (u32, u32) {
    let Tile { row, column, .. } = Tile::at(order, number);
    (row, column)
}

/// Loads the factors of this cluster's tiles.
///
/// # Safety
///
/// The kernel's contract, and one thread of each block calls it.
#[inline(always)]
unsafe fn load<T: GemmFactor>(
    [a, b]: [&TensorMap; 2],
    shared: Shared<T>,
    order: Order,
    k: u32,
    follow: &impl Follow,
) {
    const HALF: u32 = TILE_N / CLUSTER;
    const BOTH: u16 = (1 << CLUSTER) - 1;
    let [transposed_a, transposed_b] = shared.transposed;
    tma::prefetch_map(a);
    tma::prefetch_map(b);
    let half = cluster::rank() * HALF;
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x() / CLUSTER;
    let mut tiles = 0;
    while tile < order.count() {
        let Tile { row, of_b, .. } = Tile::at(order, tile);
        // SAFETY: the caller's contract.
        let (a, row) = unsafe { follow.source(a, tiles, row) };
        let mut term = 0;
        while term < k {
            shared.pipeline.wait_empty(state);
            let full = shared.pipeline.full(state);
            full.arrive_expect_tx(STAGE_BYTES);
            let (a_tile, b_half) = (shared.a(state), shared.b(state).rows::<HALF>(half));
            let of_b = of_b + half;
            // SAFETY: the stage is empty in both blocks, and no thread reads it before it is full.
            unsafe {
                // A part of the other layout has as many bytes as as many rows of this one.
                if transposed_a {
                    let mut part = 0;
                    while part < TILE_M {
                        let to = a_tile.rows::<TRANSPOSED>(part);
                        to.load(a, term, row + part, full);
                        part += TRANSPOSED;
                    }
                } else {
                    a_tile.load(a, row, term, full);
                }
                if transposed_b {
                    let mut part = 0;
                    while part < HALF {
                        let to = b_half.rows::<TRANSPOSED>(part);
                        to.load_multicast(b, term, of_b + part, full, BOTH);
                        part += TRANSPOSED;
                    }
                } else {
                    b_half.load_multicast(b, of_b, term, full, BOTH);
                }
            }
            state = shared.pipeline.next(state);
            term += Shared::<T>::TILE_K;
        }
        tile += thread::grid_dim_x() / CLUSTER;
        tiles += 1;
    }
}

/// Computes 64 rows of each of this block's tiles, and stores them while it computes the next one.
///
/// # Safety
///
/// The kernel's contract, and the first [`MULTIPLYING_WARPS`] warps of the block call it.
#[inline(always)]
pub(super) unsafe fn multiply<T: GemmFactor, E: Epilogue, F: Follow>(
    c: Output<'_, E::Output>,
    shared: Shared<T>,
    order: Order,
    k: u32,
    epilogue: E,
    follow: &F,
) {
    // If C has 16 bits, the last slices wait in registers.
    let slices = TILE_N / Store::<E::Output>::COLUMNS;
    let at_once = if size_of::<E::Output>() == 2 { slices - SLICES } else { slices };
    let thread = thread::thread_idx_x();
    let (warp, lane) = (thread / warp::WARP_SIZE, warp::lane_id());
    let (warpgroup, rank) = (thread / 128, thread % 128);
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x() / CLUSTER;
    let mut done = Done { row: 0, column: 0, end: u32::MAX };
    // The last slices, rounded.
    let mut rest = [0; SLICES_WORDS];
    let mut any_done = false;
    let mut tiles = 0;
    while tile < order.count() {
        let mut sums = [0.0; 128];
        let (mut term, mut last) = (0, state);
        // SAFETY: the caller's contract. No other code accesses the sums between the two operand
        // fences.
        unsafe {
            wgmma::fence_operand(&mut sums);
            // What is left of the previous tile is stored between the first products of this one,
            // which do not wait for it.
            let mut slice = at_once - SLICES;
            let mut until = 0;
            while slice < at_once + SLICES {
                while term < k && term <= until {
                    shared.step(&mut sums, state, last, (warpgroup, rank), term == 0);
                    (state, last, term) =
                        (shared.pipeline.next(state), state, term + Shared::<T>::TILE_K);
                }
                until = if F::BESIDE.is_sums() { SENT.min(k / 2) } else { term };
                if any_done && slice < slices {
                    if slice == at_once {
                        done.write::<T, E::Output>(shared, warp, lane, |i| rest[i]);
                    }
                    done.send(&c, shared, (warp, lane), slice, follow);
                }
                slice += SLICES;
            }
            // Computed here, where no product waits for it: the position needs divisions.
            let Tile { row, column, end, .. } = Tile::at(order, tile);
            let row = hint::opaque(row + warp * STORE_M);
            done = Done { row, column: hint::opaque(column), end };
            let mut reports = F::BESIDE.is_reported() && any_done;
            let mut until = if F::BESIDE.is_reported() { k.min(term + STORED) } else { k };
            loop {
                while term < until {
                    shared.step(&mut sums, state, last, (warpgroup, rank), term == 0);
                    (state, last, term) =
                        (shared.pipeline.next(state), state, term + Shared::<T>::TILE_K);
                }
                if reports {
                    report(follow, lane, warp, tiles);
                    reports = false;
                }
                if until == k {
                    break;
                }
                until = k;
            }
            wgmma::wait_groups::<0>();
            wgmma::fence_operand(&mut sums);
            shared.release(last, rank);
        }
        if !any_done {
            // The previous kernels may read C.
            grid::wait_for_previous();
            any_done = true;
        }
        // Unknown: nothing is computed from it before the loop, where registers are few.
        let own = hint::opaque(lane);
        let (row, column) = (done.row + own / 4, done.column + own % 4 * 2);
        if !epilogue.is_identity() {
            let end = (done.end.min(c.m), c.n);
            epilogue.apply(&mut Part { sums: &mut sums, row, column, end });
        }
        let mut slice = 0;
        while slice < slices {
            let first = (slice / SLICES) as usize * SLICES_WORDS;
            let word = |i| follow.word(E::Output::word(first + i, |i| sums[i]));
            if slice < at_once {
                // SAFETY: the caller's contract.
                unsafe {
                    if slice > 0 {
                        done.send(&c, shared, (warp, lane), slice - SLICES, follow);
                    }
                    done.write::<T, E::Output>(shared, warp, lane, word);
                }
            } else {
                let mut i = 0;
                while i < rest.len() {
                    rest[i] = word(i);
                    i += 1;
                }
            }
            slice += SLICES;
        }
        tile += thread::grid_dim_x() / CLUSTER;
        tiles += 1;
    }
    if any_done {
        // SAFETY: the caller's contract.
        unsafe {
            done.send(&c, shared, (warp, lane), at_once - SLICES, follow);
            if at_once < slices {
                done.write::<T, E::Output>(shared, warp, lane, |i| rest[i]);
                done.send(&c, shared, (warp, lane), at_once, follow);
            }
        }
    }
    if F::BESIDE.is_reported() {
        report(follow, lane, warp, tiles);
    }
    tma::wait_stores::<0>();
}

/// Reports the parts of tiles that the warp has stored, when these are in C.
#[inline(always)]
fn report(follow: &impl Follow, lane: u32, warp: u32, tiles: u32) {
    if lane == 0 {
        // What is on its way to a peer is behind the last store, a group for each slice.
        tma::wait_stores::<SLICES>();
        follow.stored(warp, tiles);
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

    #[inline(always)]
    fn row(&self, i: u32) -> u32 {
        self.row + 8 * i
    }

    #[inline(always)]
    fn column(&self, j: u32) -> u32 {
        self.column + 8 * (j / 2) + j % 2
    }

    #[inline(always)]
    fn end(&self) -> (u32, u32) {
        self.end
    }

    #[inline(always)]
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
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together, and then [`send`](Self::send).
    #[inline(always)]
    pub(super) unsafe fn write<T: GemmFactor, O: Float>(
        &self,
        shared: Shared<T>,
        warp: u32,
        lane: u32,
        word: impl Fn(usize) -> u32,
    ) {
        // SAFETY: the caller's contract. TMA has read the tiles before the warp writes them again.
        unsafe {
            if lane == 0 {
                tma::wait_stores_read::<0>();
            }
            warp::sync();
            let mut which = 0;
            while which < SLICES {
                let first = which as usize * (SLICES_WORDS / SLICES as usize);
                shared.store::<O>(warp, which).store_words(lane, |i| word(first + i));
                which += 1;
            }
        }
    }

    /// Stores the slices that were written, from the tile's `slice`-th on.
    ///
    /// # Safety
    ///
    /// As [`write`](Self::write).
    #[inline(always)]
    pub(super) unsafe fn send<T: GemmFactor, O: Float, F: Follow>(
        &self,
        c: &Output<'_, O>,
        shared: Shared<T>,
        (warp, lane): (u32, u32),
        slice: u32,
        follow: &F,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            tma::fence_async_shared();
            warp::sync();
            let tile = |which: u32| {
                let column = self.column + (slice + which) * Store::<O>::COLUMNS;
                (column, shared.store::<O>(warp, which))
            };
            let mut which = 0;
            // A map would store the rows of the next group too.
            let is_cut = F::GROUPS && self.end.saturating_sub(self.row) < STORE_M;
            if is_cut || !c.by_map {
                while which < SLICES {
                    let (column, from) = tile(which);
                    c.store(lane, (self.row, self.end), column, from);
                    which += 1;
                }
            } else if lane == 0 {
                while which < SLICES {
                    let (column, from) = tile(which);
                    follow.keep(c.map, self.row, column, from);
                    which += 1;
                }
                tma::commit_stores();
                which = 0;
                while which < SLICES {
                    let (column, from) = tile(which);
                    follow.send(self.row, column, from);
                    which += 1;
                }
            }
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
    #[inline(always)]
    unsafe fn store(&self, lane: u32, (row, end): (u32, u32), column: u32, tile: Store<O>) {
        const ROWS: u32 = 4;
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
