//! The main loop of products on Hopper.

use devcomm_types::TensorMap;

use super::warpgroup::{WARPGROUP, Warpgroup};
use super::{Pipeline, PipelineState, RegisterSplit, Scheduler, SharedTile};
use crate::mbarrier::MBarrier;
use crate::wgmma::{self, Sums};
use crate::{cluster, grid, shared_array, thread, warp};

/// The most stages of a main loop.
pub const MAX_STAGES: u32 = 24;

/// A stage for the calling thread of a loading warp to fill, empty in all blocks of the cluster.
/// Only [`Mainloop::run`] makes one.
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

    /// Sets the number of bytes that arrive in this block's stage from the loads of this warp and
    /// of the same warp in the other blocks of the cluster. It is the warp's arrival at the stage's
    /// barrier, so that a step has one call. PTX: `mbarrier.arrive.expect_tx`.
    #[track_caller]
    pub fn expect(&self, bytes: u32) {
        self.full.arrive_expect_tx(bytes);
    }

    /// Copies a tile of a matrix to one of the stage, as [`SharedTile::load`].
    #[track_caller]
    pub fn load<T, const R: u32>(&self, to: SharedTile<T, R>, map: &TensorMap, row: u32, col: u32) {
        // SAFETY: the implementation of `Mainloop` promises that the tile is the stage's. The stage
        // is empty, and no thread reads it before its barrier says that it is full.
        unsafe { to.load(map, row, col, self.full) }
    }

    /// Does the same as [`load`](Self::load) for data that no other block reads:
    /// [`SharedTile::load_once`].
    #[track_caller]
    pub fn load_once<T, const R: u32>(
        &self,
        to: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        col: u32,
    ) {
        // SAFETY: the implementation of `Mainloop` promises that the tile is the stage's, which is
        // empty, and that the barrier expects the bytes.
        unsafe { to.load_once(map, row, col, self.full) }
    }

    /// Does the same as [`load`](Self::load), to the stage of each block of the cluster whose bit
    /// is set in `blocks`: [`SharedTile::load_multicast`].
    #[track_caller]
    pub fn load_multicast<T, const R: u32>(
        &self,
        to: SharedTile<T, R>,
        map: &TensorMap,
        row: u32,
        col: u32,
        blocks: u16,
    ) {
        // SAFETY: the implementation of `Mainloop` promises that the tile is the stage's, which is
        // empty in each of the blocks.
        unsafe { to.load_multicast(map, row, col, self.full, blocks) }
    }
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

/// The kernel's part of the main loop of a product on Hopper. [`run`](Self::run) has the rest: the
/// roles of the warps, the stages and their barriers, and the loops.
///
/// The first [`COMPUTING`](Self::COMPUTING) warpgroups of a block compute, each its rows of every
/// tile. In the last warpgroup, the first [`LOADING`](Self::LOADING) warps load, and the others are
/// idle. All take the same tiles from the [`Scheduler`].
///
/// A warpgroup can store a part of a tile between the steps of its next tile, while the tensor
/// cores have work: in [`interlude`](Self::interlude).
///
/// The methods are safe, since only the main loop has an [`EmptyStage`], a [`Warpgroup`] or an
/// [`IdleWarp`] to call them with.
///
/// # Safety
///
/// * The tiles that an implementation passes to the methods of [`EmptyStage`] belong to that stage,
///   lie in the launch's dynamic shared memory, and overlap no tile of another stage. The maps are
///   those of allocated matrices.
/// * The factors that it passes to the methods of [`Warpgroup`] are tiles of the stage that
///   [`compute`](Self::compute) is called with. The memory that it stores through, also that of the
///   parts of a [`StoresRows`](super::StoresRows), belongs to the warpgroup, and the maps are those
///   of matrices that the kernel may write.
/// * [`load`](Self::load) calls [`EmptyStage::expect`] once, with exactly the bytes that arrive.
/// * `schedule` and `source` read no memory that previous kernels write, unless the calling thread
///   has waited for these kernels: before [`run`](Self::run), or for `source` in
///   [`prepare`](Self::prepare).
/// * There are at most [`MAX_STAGES`] [`stages`](Self::stages), and [`arrivals`](Self::arrivals) is
///   the number of arrivals of all [`release`](Self::release)s of a stage.
/// * `compute` does not access the sums after it has begun products, unless it
///   [waits for them](Self::COMPLETES).
pub unsafe trait Mainloop {
    /// The order of the block's tiles.
    type Schedule: Scheduler;
    /// The division of the registers among the warps.
    type Registers: RegisterSplit;
    /// The sums of a warpgroup's rows of a tile.
    type Sums: Sums;
    /// The place of a tile's factors, for a loading warp.
    type Source;
    /// The state of a computing warpgroup's threads from tile to tile.
    type State;

    /// The number of warpgroups that compute.
    const COMPUTING: u32 = 2;
    /// Warps that load, at most 3. One thread of each issues the loads.
    const LOADING: u32 = 1;
    /// The number of blocks of a cluster, each of which may load for all of them; 1 without
    /// clusters.
    const CLUSTER: u32 = 1;
    /// The increment of a step's number: 1, or the terms of a stage if steps are numbered by their
    /// first terms.
    const STEP: u32 = 1;
    /// Whether [`compute`](Self::compute) waits for its products, so that the stage is released at
    /// once. Otherwise the stage is released when the products of the next stage have begun.
    const COMPLETES: bool = false;
    /// The number of calls of [`interlude`](Self::interlude) in a tile, at most 3.
    const INTERLUDES: u32 = 0;

    /// Returns the number of the pipeline's stages, at most [`MAX_STAGES`]. There are at least two,
    /// unless it [`COMPLETES`](Self::COMPLETES): a stage is released in the next step.
    fn stages(&self) -> u32;

    /// Returns the order of the block's tiles. Each computing thread and the first lane of each
    /// loading warp call it once.
    fn schedule(&self) -> Self::Schedule;

    /// Returns the number of arrivals that release a stage.
    fn arrivals(&self) -> u32 {
        Self::COMPUTING * Self::CLUSTER
    }

    /// Releases a stage. Each thread of a computing warpgroup calls it; by default the first
    /// threads arrive, one for each block of the cluster.
    #[track_caller]
    fn release(&self, group: &Warpgroup, _state: &Self::State, empty: MBarrier) {
        let thread = group.thread();
        if thread < Self::CLUSTER {
            if Self::CLUSTER == 1 { empty.arrive() } else { empty.arrive_in(thread) }
        }
    }

    /// Initialises the kernel's own mbarriers, in thread 0 before [`sync`](Self::sync).
    fn init(&self) {}

    /// Executes a barrier of all threads that use the mbarriers: by default the cluster's, which
    /// orders no other accesses.
    #[track_caller]
    fn sync(&self) {
        if Self::CLUSTER > 1 {
            // SAFETY: the caller of `run` promises that all threads of the cluster are here.
            unsafe { cluster::sync_relaxed() };
        } else {
            thread::sync_threads();
        }
    }

    /// Runs first in loading warp `loader`.
    fn prepare(&self, _loader: u32) {}

    /// Runs once in loading warp `loader`, after the first [`source`](Self::source) and before the
    /// first [`load`](Self::load), if the block has a tile. It waits until the warp's factors are
    /// written: by default, until the previous kernels of the stream have ended.
    fn wait(&self, _loader: u32) {
        grid::wait_for_previous();
    }

    /// Returns the place of a tile's factors for loading warp `loader`.
    fn source(&self, loader: u32, work: WorkOf<Self>) -> Self::Source;

    /// Begins the loads of a step into a stage.
    fn load(&self, source: &Self::Source, step: u32, stage: &EmptyStage);

    /// Returns the state of a computing warpgroup before its first tile.
    fn state(&self, group: &Warpgroup) -> Self::State;

    /// Prepares the sums of a tile, before its first step.
    fn start(&self, _group: &Warpgroup, _state: &mut Self::State, _work: WorkOf<Self>) {}

    /// Adds the products of stage `stage` to the sums, or sets the sums to them in the `first` step
    /// of a tile. The products are one group of [`wgmma`], as [`Warpgroup::multiply`] commits.
    fn compute(
        &self,
        group: &Warpgroup,
        state: &mut Self::State,
        sums: &mut Self::Sums,
        stage: u32,
        first: bool,
    );

    /// Returns the step of a tile before which interlude `index` runs. The steps ascend.
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

    /// Runs at the end in the warps that do not compute. The threads of a warp call it together.
    fn loaded(&self) {}

    /// Runs at the end in all threads of the block. By default no block ends before the others of
    /// its cluster, which write to its shared memory.
    fn leave(&self) {
        if Self::CLUSTER > 1 {
            // SAFETY: the caller of `run` promises that all threads of the cluster are here.
            unsafe { cluster::sync() };
        }
    }

    /// Runs the main loop. A dependent launch may begin as soon as all blocks have called this.
    ///
    /// # Panics
    ///
    /// In simulated runs, if the block has another number of threads. `requires(block.x == ..)` of
    /// the kernel refuses it at the launch.
    ///
    /// # Safety
    ///
    /// All threads of the one-dimensional block call this, once: those of
    /// [`COMPUTING`](Self::COMPUTING) warpgroups and of one more, in whole clusters of
    /// [`CLUSTER`](Self::CLUSTER) blocks. The kernel's `max_threads` is their number, by which the
    /// launch divides the registers. The kernel may access what the methods access.
    unsafe fn run(&self) {
        const {
            let threads = (Self::COMPUTING + 1) * WARPGROUP;
            if let Some([computing, other]) = Self::Registers::REGISTERS {
                // The registers of a thread, as a launch divides the block's 65536, and as the
                // warpgroups want them, each added up over the warpgroups.
                let launched = 65536 / threads / 8 * 8 * (Self::COMPUTING + 1);
                let wanted = Self::COMPUTING * computing + other;
                assert!(
                    wanted <= launched,
                    "the block would wait for registers forever: with `Registers<c, o>` and n = \
                     COMPUTING, n * c + o is at most 512 for n = 1 or 3 (256 or 512 threads), and \
                     504 for n = 2 (384 threads)"
                );
            }
            assert!(Self::LOADING <= 3 && Self::INTERLUDES <= 3);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        check_block((Self::COMPUTING + 1) * WARPGROUP);
        grid::launch_next();
        let barriers = shared_array![u64; Pipeline::words(MAX_STAGES)];
        // SAFETY: only this pipeline uses the words; it is initialised first.
        let pipeline = unsafe { Pipeline::at(barriers, self.stages()) };
        debug_assert!((2 - u32::from(Self::COMPLETES)..=MAX_STAGES).contains(&self.stages()));
        let thread = thread::thread_idx_x();
        let warp = thread / warp::WARP_SIZE;
        if thread == 0 {
            self.init();
            // SAFETY: no thread uses the pipeline before the barrier below. The fence in `init`
            // precedes that barrier.
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
                // Each loading warp has code of its own, since `loader` is a constant there.
                match other {
                    0 => load_tiles(self, 0, pipeline),
                    1 if Self::LOADING > 1 => load_tiles(self, 1, pipeline),
                    2 if Self::LOADING > 2 => load_tiles(self, 2, pipeline),
                    _ => {}
                }
            }
            // SAFETY: all lanes come here: the first one may have loaded, while the others did not.
            unsafe { warp::sync() };
            self.loaded();
        }
        self.leave();
    }
}

/// Requires a block of this number of threads, in simulated runs.
#[cfg(not(target_arch = "nvptx64"))]
fn check_block(threads: u32) {
    let found = thread::block_dim().element_product();
    assert!(found == threads, "the block has {found} threads, and the main loop is for {threads}");
}

/// A tile of the main loop `M`, as its scheduler describes it.
pub type WorkOf<M> = <<M as Mainloop>::Schedule as Scheduler>::Work;

/// Loads the factors of all tiles, in one thread of a loading warp.
fn load_tiles<M: Mainloop + ?Sized>(main: &M, loader: u32, pipeline: Pipeline) {
    main.prepare(loader);
    let schedule = main.schedule();
    let (mut work, mut state) = (schedule.first(), PipelineState::FIRST);
    let mut is_first = true;
    while let Some(tile) = work {
        let source = main.source(loader, tile);
        let (mut step, end) = schedule.steps(tile);
        if is_first {
            main.wait(loader);
            is_first = false;
        }
        while step < end {
            pipeline.wait_empty(state);
            let full = pipeline.full(state);
            main.load(&source, step, &EmptyStage { number: state.stage, loader, full });
            (state, step) = (pipeline.next(state), step + M::STEP);
        }
        work = schedule.next(tile);
    }
}

/// Computes all tiles, in all threads of a warpgroup.
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
        // This is written out: LLVM may not unroll a loop around the loops of `compute_until`.
        if M::INTERLUDES > 0 {
            steps.compute_until(&mut state, &mut sums, main.pause(0).min(end));
            main.interlude(group, &mut state, 0, tile);
        }
        if M::INTERLUDES > 1 {
            steps.compute_until(&mut state, &mut sums, main.pause(1).min(end));
            main.interlude(group, &mut state, 1, tile);
        }
        if M::INTERLUDES > 2 {
            steps.compute_until(&mut state, &mut sums, main.pause(2).min(end));
            main.interlude(group, &mut state, 2, tile);
        }
        steps.compute_until(&mut state, &mut sums, end);
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
    /// The stage of the previous step, which is released when its products have ended.
    last: PipelineState,
    step: u32,
    first: u32,
}

impl<M: Mainloop + ?Sized> Steps<'_, M> {
    /// Computes the steps before `end`.
    fn compute_until(&mut self, state: &mut M::State, sums: &mut M::Sums, end: u32) {
        while self.step < end {
            let is_first = self.step == self.first;
            self.pipeline.wait_full(self.stage);
            self.main.compute(self.group, state, sums, self.stage.stage, is_first);
            if M::COMPLETES {
                self.release(state, self.stage);
            } else {
                // SAFETY: the warpgroup calls it together. It waits for the previous products.
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
