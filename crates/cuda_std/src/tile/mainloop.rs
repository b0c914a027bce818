//! The main loop of products on Hopper.

use devcomm_types::TensorMap;

use super::{Pipeline, PipelineState, RegTile, RegisterSplit, Scheduler, SharedTile};
use crate::convert::Half;
use crate::mbarrier::MBarrier;
use crate::wgmma::{self, Factor, Layout, Sums};
use crate::{cluster, grid, shared_array, thread, tma, warp};

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// The most stages of a main loop.
pub const MAX_STAGES: u32 = 24;

/// A stage that the calling thread of a loading warp fills: it is empty in all blocks of the
/// cluster. Only [`Mainloop::run`] makes one.
pub struct EmptyStage {
    number: u32,
    loader: u32,
    full: MBarrier,
}

impl EmptyStage {
    /// Returns the stage's number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of the loading warp.
    #[must_use]
    pub fn loader(&self) -> u32 {
        self.loader
    }

    /// Says how many bytes the loads of this warp bring to this block's stage, also those that
    /// other blocks of the cluster begin. PTX: `mbarrier.arrive.expect_tx`.
    #[track_caller]
    pub fn expect(&self, bytes: u32) {
        self.full.arrive_expect_tx(bytes);
    }

    /// Copies a tile of a matrix to one of the stage, as [`SharedTile::load`].
    #[track_caller]
    pub fn load<T, const R: u32>(&self, to: SharedTile<T, R>, map: &TensorMap, row: u32, col: u32) {
        // SAFETY: the contract of `Mainloop`: the tile is the stage's, which is empty, and nobody
        // reads it before its barrier says that it is full.
        unsafe { to.load(map, row, col, self.full) }
    }

    /// Does the same as [`load`](Self::load), of what no other block reads:
    /// [`SharedTile::load_once`].
    #[track_caller]
    pub fn load_once<T, const R: u32>(
        &self,
        to: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        col: u32,
    ) {
        // SAFETY: the tile is a stage's, which is empty; the bytes are among those that are
        // expected.
        unsafe { to.load_once(map, row, col, self.full) }
    }

    /// Does the same as [`load`](Self::load), to the stage of each of `blocks` of the cluster, bits
    /// of their ranks: [`SharedTile::load_multicast`].
    #[track_caller]
    pub fn load_multicast<T, const R: u32>(
        &self,
        to: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        col: u32,
        blocks: u16,
    ) {
        // SAFETY: as in `load`, in each of the blocks.
        unsafe { to.load_multicast(map, row, col, self.full, blocks) }
    }
}

/// A computing warpgroup, whose 128 threads call its methods together. Only [`Mainloop::run`] makes
/// one.
#[derive(Debug)]
pub struct Warpgroup(());

impl Warpgroup {
    /// Returns the warpgroup's number in the block.
    #[must_use]
    pub fn index(&self) -> u32 {
        thread::thread_idx_x() / WARPGROUP
    }

    /// Returns the calling thread's number in the warpgroup.
    #[must_use]
    pub fn thread(&self) -> u32 {
        thread::thread_idx_x() % WARPGROUP
    }

    /// Returns the calling thread's warp in the block.
    #[must_use]
    pub fn warp(&self) -> u32 {
        thread::thread_idx_x() / warp::WARP_SIZE
    }

    /// Waits for all threads of the warpgroup: the named barrier of its number and one.
    #[track_caller]
    pub fn sync(&self) {
        thread::named_barrier_sync(1 + self.index(), WARPGROUP);
    }

    /// Adds the products of 64 rows of A and all rows of B, of the columns of a tile, to the sums,
    /// or sets the sums to them: a group of [`wgmma`] that is committed and not waited for.
    #[track_caller]
    pub fn multiply<T: Factor, D: Sums, const N: u32>(
        &self,
        sums: &mut D,
        a: SharedTile<T, 64>,
        b: SharedTile<T, N>,
        accumulate: bool,
    ) {
        self.multiply_factors(sums, a.factor(), b.factor(), accumulate);
    }

    /// As [`multiply`](Self::multiply), of factors that may be
    /// [transposed](SharedTile::transposed_factor), of as many columns as a tile has.
    #[track_caller]
    pub fn multiply_factors<T: Factor, A: Layout<T>, B: Layout<T>, D: Sums>(
        &self,
        sums: &mut D,
        a: wgmma::Tile<T, A>,
        b: wgmma::Tile<T, B>,
        accumulate: bool,
    ) {
        // SAFETY: the warpgroup calls this together. The contract of `Mainloop`: the tiles are
        // those of a full stage, and nothing else accesses the sums until the main loop has waited.
        unsafe {
            order_sums();
            let mut term = 0;
            while term < SharedTile::<T, 64>::COLUMNS {
                let (a, b) = (a.columns_from(term), b.columns_from(term));
                wgmma::multiply(sums, a, b, accumulate || term > 0);
                term += T::TERMS;
            }
            wgmma::commit_group();
        }
    }

    /// Stores the sums of the warpgroup's rows of a tile, rounded to `T`, to a matrix by TMA,
    /// transposed: columns of `sums` become rows from `row` on, and their 64 rows columns from
    /// `column` on. What the matrix does not have is left out. The sums pass through a tile of
    /// shared memory, of which the map's tiles have the rows; the store is a group of the first
    /// thread's, which may be pending on return.
    #[track_caller]
    pub fn store_transposed<T: Half, const BLOCKS: usize, const R: u32>(
        &self,
        sums: &RegTile<f32, BLOCKS>,
        through: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        column: u32,
    ) {
        const { assert!(R == 8 * BLOCKS as u32, "the tile has a row for each column of the sums") };
        if self.thread() == 0 {
            tma::wait_stores_read::<0>();
        }
        self.sync();
        let mut block = 0;
        while block < BLOCKS {
            let rows = through.rows::<8>(8 * block as u32);
            // SAFETY: the warpgroup calls this together, and the tile is its own: the contract of
            // `Mainloop`. The previous store has read it.
            unsafe { sums.store_transposed(block, rows) };
            block += 1;
        }
        tma::fence_async_shared();
        self.sync();
        if self.thread() == 0 {
            // SAFETY: the tile is written, and stays until the next call has waited; the matrix is
            // the implementation's to write: the contract of `Mainloop`.
            unsafe { through.store(map, row, column) };
            tma::commit_stores();
        }
    }

    /// Waits until TMA has read all that the calling warp's first lane has stored from shared
    /// memory: it may be written again.
    #[track_caller]
    pub fn wait_until_read(&self) {
        if warp::lane_id() == 0 {
            tma::wait_stores_read::<0>();
        }
        // SAFETY: the lanes of the warp call it together.
        unsafe { warp::sync() };
    }

    /// Calls `store` with one lane of the warp, which stores by TMA what all lanes have written to
    /// shared memory, and commits these stores as a group.
    #[track_caller]
    pub fn store(&self, store: impl FnOnce()) {
        publish_shared();
        if warp::lane_id() == 0 {
            store();
            tma::commit_stores();
        }
    }
}

/// Orders accesses of the sums before the products that follow. It has a line of its own in
/// reports, apart from the products.
///
/// # Safety
///
/// A warpgroup calls this together.
unsafe fn order_sums() {
    // SAFETY: the caller's contract.
    unsafe { wgmma::fence() };
}

/// Shows TMA what the lanes of a warp have written to shared memory. All of them call it.
fn publish_shared() {
    tma::fence_async_shared();
    // SAFETY: the lanes of the warp call it together.
    unsafe { warp::sync() };
}

/// A warp that neither loads nor computes: its 32 lanes call its methods together.
#[derive(Debug)]
pub struct IdleWarp {
    index: u32,
}

impl IdleWarp {
    /// Returns the warp's number among those of the block that neither load nor compute.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }
}

/// The parts of the main loop of a product on Hopper that are a kernel's own. [`run`](Self::run)
/// gives the rest: the roles of the warps, the stages and their barriers, and the loops.
///
/// The first [`COMPUTING`](Self::COMPUTING) warpgroups of a block compute, each its rows of every
/// tile. Of the last warpgroup, the first [`LOADING`](Self::LOADING) warps load, and the others are
/// idle. All take the same tiles from the [`Scheduler`].
///
/// What a warpgroup stores of a tile can follow between the steps of its next tile, while the
/// tensor cores have work: in [`interlude`](Self::interlude).
///
/// The methods are safe, as nothing but the main loop has an [`EmptyStage`], a [`Warpgroup`] or an
/// [`IdleWarp`] to call them with.
///
/// # Safety
///
/// An implementation passes to the methods of [`EmptyStage`] tiles of that stage, which no two
/// stages share and which lie in the launch's dynamic shared memory, and maps of matrices that are
/// allocated; to those of [`Warpgroup`] only tiles of the stage that [`compute`](Self::compute) is
/// called with or, to store, of memory that is the warpgroup's, and maps of matrices that the
/// kernel may write. [`source`](Self::source) and [`load`](Self::load) expect as many bytes as are
/// loaded. `compute` leaves the sums alone once it has begun products, unless it
/// [waits for them](Self::COMPLETES).
pub unsafe trait Mainloop {
    /// The order of the block's tiles.
    type Schedule: Scheduler;
    /// How the registers are divided.
    type Registers: RegisterSplit;
    /// The sums of a warpgroup's rows of a tile.
    type Sums: Sums;
    /// Where a loading warp finds the factors of a tile.
    type Source;
    /// What the threads of a computing warpgroup keep from tile to tile.
    type State;

    /// Warpgroups that compute.
    const COMPUTING: u32 = 2;
    /// Warps that load, at most 3: one thread of each does.
    const LOADING: u32 = 1;
    /// Blocks of a cluster, each of which may load for all; 1 without clusters.
    const CLUSTER: u32 = 1;
    /// The distance of two steps: 1, or the terms of a stage if steps are numbered by their first
    /// terms.
    const STEP: u32 = 1;
    /// Whether [`compute`](Self::compute) waits for its products, so that the stage is released at
    /// once; otherwise it is when the products of the next one are under way.
    const COMPLETES: bool = false;
    /// How often [`interlude`](Self::interlude) is called in a tile, at most 3.
    const INTERLUDES: u32 = 0;

    /// Returns the stages of the pipeline, at most [`MAX_STAGES`].
    fn stages(&self) -> u32;

    /// Returns the order of the block's tiles. Each thread calls it once.
    fn schedule(&self) -> Self::Schedule;

    /// Arrivals that release a stage.
    fn arrivals(&self) -> u32 {
        Self::COMPUTING * Self::CLUSTER
    }

    /// Releases a stage, as each thread of a computing warpgroup: by default the first threads
    /// arrive, one for each block of the cluster.
    #[track_caller]
    fn release(&self, group: &Warpgroup, _state: &Self::State, empty: MBarrier) {
        let thread = group.thread();
        if thread < Self::CLUSTER {
            if Self::CLUSTER == 1 { empty.arrive() } else { empty.arrive_in(thread) }
        }
    }

    /// Initialises further mbarriers, as thread 0, before [`sync`](Self::sync).
    fn init(&self) {}

    /// Executes a barrier of all threads that use the mbarriers: by default the cluster's, which
    /// orders no other accesses.
    #[track_caller]
    fn sync(&self) {
        if Self::CLUSTER > 1 {
            // SAFETY: all threads of the cluster call it: the contract of `run`.
            unsafe { cluster::sync_relaxed() };
        } else {
            thread::sync_threads();
        }
    }

    /// Prepares loading warp `loader`: by default it waits for the previous kernels of the stream.
    fn prepare(&self, _loader: u32) {
        grid::wait_for_previous();
    }

    /// Returns where loading warp `loader` finds the factors of a tile.
    fn source(&self, loader: u32, work: WorkOf<Self>) -> Self::Source;

    /// Begins the loads of a step into a stage.
    fn load(&self, source: &Self::Source, step: u32, stage: &EmptyStage);

    /// Returns what a computing warpgroup keeps, before its first tile.
    fn state(&self, group: &Warpgroup) -> Self::State;

    /// Prepares the sums of a tile, before its first step.
    fn start(&self, _group: &Warpgroup, _state: &mut Self::State, _work: WorkOf<Self>) {}

    /// Adds the products of a stage, by its number, to the sums, or sets the sums to them if they
    /// are the `first` of a tile: as one group of [`wgmma`], such as [`Warpgroup::multiply`].
    fn compute(
        &self,
        group: &Warpgroup,
        state: &mut Self::State,
        sums: &mut Self::Sums,
        stage: u32,
        first: bool,
    );

    /// Returns the step of a tile before which the `index`-th interlude comes; they ascend.
    fn pause(&self, _index: u32) -> u32 {
        0
    }

    /// Runs in a computing warpgroup between the steps of a tile, while products are pending.
    fn interlude(
        &self,
        _group: &Warpgroup,
        _state: &mut Self::State,
        _index: u32,
        _work: WorkOf<Self>,
    ) {
    }

    /// Stores the sums of a tile, whose products have ended.
    fn finish(
        &self,
        group: &Warpgroup,
        state: &mut Self::State,
        work: WorkOf<Self>,
        sums: &mut Self::Sums,
    );

    /// Runs in a computing warpgroup after its last tile.
    fn end(&self, _group: &Warpgroup, _state: &mut Self::State) {}

    /// Runs in a warp that neither loads nor computes.
    fn idle(&self, _warp: &IdleWarp) {}

    /// Runs at the end in all warps that do not compute: their threads call it apart.
    fn loaded(&self) {}

    /// Runs at the end in all threads of the block: by default no block ends before those of its
    /// cluster, which write to its shared memory.
    fn leave(&self) {
        if Self::CLUSTER > 1 {
            // SAFETY: all threads of the cluster call it: the contract of `run`.
            unsafe { cluster::sync() };
        }
    }

    /// Runs the main loop. Dependent launches may begin at once.
    ///
    /// # Safety
    ///
    /// All threads of the one-dimensional block call this, once: those of
    /// [`COMPUTING`](Self::COMPUTING) warpgroups and of one more, in whole clusters of
    /// [`CLUSTER`](Self::CLUSTER) blocks. The kernel's `max_threads` is at least their number. What
    /// the methods access is theirs, as the kernel's contract says.
    unsafe fn run(&self) {
        const {
            let threads = (Self::COMPUTING + 1) * WARPGROUP;
            if let Some([computing, other]) = Self::Registers::REGISTERS {
                let launched = 65536 / threads / 8 * 8 * (Self::COMPUTING + 1);
                let wanted = Self::COMPUTING * computing + other;
                assert!(wanted <= launched, "the block would wait for registers forever");
            }
            assert!(Self::LOADING <= 3 && Self::INTERLUDES <= 3);
        }
        grid::launch_next();
        let barriers = shared_array![u64; Pipeline::words(MAX_STAGES)];
        // SAFETY: only this pipeline uses the words; it is initialised first.
        let pipeline = unsafe { Pipeline::at(barriers, self.stages()) };
        let thread = thread::thread_idx_x();
        let warp = thread / warp::WARP_SIZE;
        if thread == 0 {
            self.init();
            // SAFETY: no thread uses the pipeline before the barrier. The fence is for all of them.
            unsafe { pipeline.init(Self::LOADING, self.arrivals()) };
        }
        self.sync();
        if warp < 4 * Self::COMPUTING {
            // SAFETY: the warpgroup calls it together, and the block's registers suffice.
            unsafe { Self::Registers::raise() };
            compute_tiles(self, &Warpgroup(()), pipeline);
        } else {
            // SAFETY: the last warpgroup calls it together; its code needs no more registers.
            unsafe { Self::Registers::lower() };
            let other = warp - 4 * Self::COMPUTING;
            if other >= Self::LOADING {
                self.idle(&IdleWarp { index: other - Self::LOADING });
            } else if warp::lane_id() == 0 {
                // The code of each loading warp is its own.
                match other {
                    0 => load_tiles(self, 0, pipeline),
                    1 if Self::LOADING > 1 => load_tiles(self, 1, pipeline),
                    2 if Self::LOADING > 2 => load_tiles(self, 2, pipeline),
                    _ => {}
                }
            }
            self.loaded();
        }
        self.leave();
    }
}

/// A tile of a main loop.
pub type WorkOf<M> = <<M as Mainloop>::Schedule as Scheduler>::Work;

/// Loads the factors of all tiles, as one thread of a loading warp.
fn load_tiles<M: Mainloop + ?Sized>(main: &M, loader: u32, pipeline: Pipeline) {
    main.prepare(loader);
    let schedule = main.schedule();
    let (mut work, mut state) = (schedule.first(), PipelineState::FIRST);
    while let Some(tile) = work {
        let source = main.source(loader, tile);
        let (mut step, end) = schedule.steps(tile);
        while step < end {
            pipeline.wait_empty(state);
            let full = pipeline.full(state);
            main.load(&source, step, &EmptyStage { number: state.stage, loader, full });
            (state, step) = (pipeline.next(state), step + M::STEP);
        }
        work = schedule.next(tile);
    }
}

/// Computes all tiles, as the threads of a warpgroup.
fn compute_tiles<M: Mainloop + ?Sized>(main: &M, group: &Warpgroup, pipeline: Pipeline) {
    let schedule = main.schedule();
    let mut work = schedule.first();
    let mut state = main.state(group);
    let mut stage = PipelineState::FIRST;
    while let Some(tile) = work {
        let (first, end) = schedule.steps(tile);
        let mut steps = Steps { main, group, pipeline, stage, last: stage, step: first, first };
        let mut sums = M::Sums::ZERO;
        main.start(group, &mut state, tile);
        if !M::COMPLETES {
            wgmma::fence_operand(&mut sums);
        }
        // Written out: a loop of loops may not be unrolled.
        if M::INTERLUDES > 0 {
            steps.until(&mut state, &mut sums, main.pause(0).min(end));
            main.interlude(group, &mut state, 0, tile);
        }
        if M::INTERLUDES > 1 {
            steps.until(&mut state, &mut sums, main.pause(1).min(end));
            main.interlude(group, &mut state, 1, tile);
        }
        if M::INTERLUDES > 2 {
            steps.until(&mut state, &mut sums, main.pause(2).min(end));
            main.interlude(group, &mut state, 2, tile);
        }
        steps.until(&mut state, &mut sums, end);
        if !M::COMPLETES {
            // SAFETY: the warpgroup calls it together.
            unsafe { wgmma::wait_groups::<0>() };
            wgmma::fence_operand(&mut sums);
            // A tile of no steps has used no stage.
            if first < end {
                steps.release(&state, steps.last);
            }
        }
        stage = steps.stage;
        main.finish(group, &mut state, tile, &mut sums);
        work = schedule.next(tile);
    }
    main.end(group, &mut state);
}

/// The steps of a tile that a warpgroup computes.
struct Steps<'a, M: ?Sized> {
    main: &'a M,
    group: &'a Warpgroup,
    pipeline: Pipeline,
    stage: PipelineState,
    /// The stage of the step before, which is released when its products have ended.
    last: PipelineState,
    step: u32,
    first: u32,
}

impl<M: Mainloop + ?Sized> Steps<'_, M> {
    /// Computes the steps before `end`.
    fn until(&mut self, state: &mut M::State, sums: &mut M::Sums, end: u32) {
        while self.step < end {
            let is_first = self.step == self.first;
            self.pipeline.wait_full(self.stage);
            self.main.compute(self.group, state, sums, self.stage.stage, is_first);
            if M::COMPLETES {
                self.release(state, self.stage);
            } else {
                // SAFETY: the warpgroup calls it together. The products of the step before end.
                unsafe { wgmma::wait_groups::<1>() };
                if !is_first {
                    self.release(state, self.last);
                }
            }
            (self.last, self.stage) = (self.stage, self.pipeline.next(self.stage));
            self.step += M::STEP;
        }
    }

    fn release(&self, state: &M::State, stage: PipelineState) {
        self.main.release(self.group, state, self.pipeline.empty(stage));
    }
}
