//! The main loop of [`gemm_swapped`](super::gemm_swapped): two warps load a factor each, perhaps
//! parts of it for several blocks, and one or two warpgroups multiply.

use cuda_std::tile::{Scheduler, Work};
use cuda_std::wgmma::Factor;

use super::prelude::*;
use super::shapes::{Division, RaisedRegisters, Shape, TILE_K, WARPGROUP_N, quotient};
use super::slices::SlicedSchedule;
use super::swapped_stores::{Target, WARPGROUP_BARRIER};
use super::swapped_tiles::Block;

/// The product's part of the main loop.
pub(super) struct Product<'a, T, S, E, C> {
    pub(super) block: Block<T, S, E>,
    /// The maps of B and A.
    pub(super) maps: [&'a TensorMap; 2],
    pub(super) target: C,
}

/// The blocks of a cluster that load the same rows of a factor, each a part for all.
#[derive(Clone, Copy)]
struct Share {
    blocks: u32,
    /// This block's place among them.
    index: u32,
    /// The ranks of these blocks in the cluster, as bits.
    ranks: u16,
}

impl Share {
    /// Returns the share of the block with this `index`. The ranks of the blocks are `distance`
    /// apart, a power of two.
    fn of(blocks: u32, index: u32, distance: u32) -> Self {
        // A byte with every `distance`-th bit, for the distances 1, 2, 4 and 8 from the lowest byte
        // on. A `match` would be a table in global memory, which delays the first load.
        let pattern = 0x01_11_55_ff_u32 >> (8 * distance.trailing_zeros()) & 0xff;
        let first = cluster::rank() - index * distance;
        let ranks = ((pattern & ((1 << (blocks * distance)) - 1)) << first) as u16;
        Self { blocks, index, ranks }
    }
}

/// The rows of its factor that a loading warp loads, and their place in a stage.
pub(super) struct Source {
    row: u32,
    /// Rows of the other factor before this one's in each stage, and rows of this factor there.
    skipped: u32,
    height: u32,
    share: Share,
    /// Whether no other block needs the rows.
    once: bool,
}

/// The state of a thread that multiplies.
pub(super) struct State<T, E> {
    epilogue: E,
    /// The warpgroup's rows of B, and those of A, in stage 0.
    factors: [wgmma::Tile<T>; 2],
    /// The first threads of a warpgroup release a stage, each to one of the blocks that load for
    /// this block: the blocks in its row, then the other blocks in its column.
    releasing: bool,
    releases: u32, // The rank in the cluster of that block.
    /// The row and the column of the block's tile.
    origin: (u32, u32),
    /// Split tiles before this one.
    split: u32,
    /// Whether the previous kernels have ended, which may read C.
    waited: bool,
}

// SAFETY: a stage's loads have as many bytes as `expect` announces, and `compute` only multiplies.
unsafe impl<T: Factor, S: Shape, E: Epilogue<Output: Half>, C: Target> Mainloop
    for Product<'_, T, S, E, C>
{
    type Schedule = SlicedSchedule;
    type Registers = RaisedRegisters<S>;
    type Sums = S::Sums;
    type Source = Source;
    type State = State<T, E>;

    const COMPUTING: u32 = S::N / WARPGROUP_N;
    const LOADING: u32 = 2;

    fn stages(&self) -> u32 {
        self.block.division.stages
    }

    fn schedule(&self) -> SlicedSchedule {
        SlicedSchedule { schedule: self.block.schedule, slices: self.block.slices }
    }

    fn arrivals(&self) -> u32 {
        // The blocks in this block's row and column of the cluster multiply what it loads.
        let Division { across, down, .. } = self.block.division;
        (across + down - 1) * Self::COMPUTING
    }

    #[track_caller]
    fn release(&self, _: &Warpgroup, state: &State<T, E>, empty: MBarrier) {
        let Division { across, down, .. } = self.block.division;
        if state.releasing {
            if across + down == 2 { empty.arrive() } else { empty.arrive_in(state.releases) }
        }
    }

    fn init(&self) {
        // SAFETY: thread 0 calls this, before a barrier.
        unsafe {
            self.block.received.init(1);
            self.block.drained.init(self.block.schedule.splits * Self::COMPUTING);
        }
    }

    #[track_caller]
    fn sync(&self) {
        if cluster::size() > 1 {
            // SAFETY: all threads of the cluster call it.
            unsafe { cluster::sync_relaxed() };
        } else {
            thread::sync_threads();
        }
    }

    fn prepare(&self, loader: u32) {
        tma::prefetch_map(self.maps[loader as usize]);
    }

    fn wait(&self, loader: u32) {
        let Division { constant_a, constant_b, .. } = self.block.division;
        if ![constant_b, constant_a][loader as usize] {
            grid::wait_for_previous();
        }
    }

    fn source(&self, loader: u32, work: Work) -> Source {
        let Block { division, schedule, row, column, end, .. } = self.block;
        let Division { across, down, .. } = division;
        let origin = self.block.origin(work.tile);
        if loader == 0 {
            let share = Share::of(down, row, schedule.splits * across);
            let (row, _) = self.block.loaded_b(origin.1);
            Source { row, skipped: 0, height: S::N, share, once: end.0 <= S::M }
        } else {
            let share = Share::of(across, column, schedule.splits);
            // A tile beyond C is multiplied too, by rows that exist.
            let row = if origin.0 < end.0 { origin.0 } else { 0 };
            Source { row, skipped: S::N, height: S::M, share, once: false }
        }
    }

    fn load(&self, source: &Source, step: u32, stage: &EmptyStage) {
        let &Source { row, skipped, height, share, once } = source;
        let factor = self.maps[stage.loader() as usize];
        let part = share.index * quotient(height, share.blocks);
        stage.expect(S::DEPTH * height * 128);
        for depth in 0..S::DEPTH {
            let to = self.block.tile(stage.number(), skipped, height, depth);
            let term = step * S::K + depth * TILE_K;
            if share.blocks > 1 {
                let to = to.rows::<8>(part);
                stage.load_multicast(to, factor, row + part, term, share.ranks);
            } else if once {
                stage.load_once(to, factor, row, term);
            } else {
                stage.load(to, factor, row, term);
            }
        }
    }

    fn state(&self, group: &Warpgroup) -> State<T, E> {
        let Block { division, schedule, row, column, epilogue, .. } = &self.block;
        let (across, thread) = (division.across, group.thread());
        let above = thread.wrapping_sub(across); // Used by the threads from `across` on.
        let place = if thread < across {
            row * across + thread
        } else {
            (above + u32::from(above >= *row)) * across + column
        };
        State {
            epilogue: epilogue.begin(),
            releasing: thread < across + division.down - 1,
            releases: place * schedule.splits + schedule.rank,
            factors: [self.block.tile(0, S::N, S::M, 0).factor(); 2],
            origin: (0, 0),
            split: 0,
            waited: false,
        }
    }

    fn start(&self, group: &Warpgroup, state: &mut State<T, E>, work: Work) {
        let (row, column) = self.block.origin(work.tile);
        let (_, before) = self.block.loaded_b(column);
        let warpgroup = group.index() * WARPGROUP_N;
        // A warpgroup whose columns are beyond C multiplies by any rows.
        let b = self.block.tile(0, 0, S::N, 0).rows::<WARPGROUP_N>((before + warpgroup) % S::N);
        state.factors[0] = b.factor();
        state.origin = (row, column + warpgroup);
    }

    fn compute(
        &self,
        _: &Warpgroup,
        state: &mut State<T, E>,
        sums: &mut S::Sums,
        stage: u32,
        first: bool,
    ) {
        let [b, a] = state.factors.map(|factor| factor.offset_bytes(stage * S::STAGE));
        // SAFETY: a whole warpgroup computes a stage that has arrived.
        unsafe {
            wgmma::fence();
            for term in Strided::new(0, S::K, T::TERMS) {
                let (depth, column) = (term / TILE_K, term % TILE_K);
                let [b, a] = [(b, S::N), (a, S::M)].map(|(factor, rows)| {
                    factor.offset_bytes(depth * rows * 128).columns_from(column)
                });
                wgmma::multiply(sums, b, a, !first || term > 0);
            }
            wgmma::commit_group();
        }
    }

    fn finish(&self, group: &Warpgroup, state: &mut State<T, E>, work: Work, sums: &mut S::Sums) {
        let Self { block, target, .. } = self;
        if !state.waited {
            grid::wait_for_previous();
            state.waited = true;
        }
        let split = work.split.then_some(state.split);
        // SAFETY: a whole warpgroup has the sums of the tile, and all blocks of the cluster come
        // here.
        unsafe {
            if work.split {
                block.send(sums.as_ref(), state.split);
            }
            if !block.has_all(work.tile, sums) {
                // Another block stores the tile.
            } else if block.is_plain {
                let plain = Identity::<E::Output>::new();
                block.store_tile(*target, sums, split, state.origin, plain);
            } else {
                block.store_tile(*target, sums, split, state.origin, state.epilogue);
            }
        }
        if work.split {
            state.split += 1;
            let thread = group.thread();
            // Nothing is sent to a block that may have ended.
            if block.schedule.next(work).is_some() {
                // All warps have read the slots, which are written again after this.
                thread::named_barrier_sync(WARPGROUP_BARRIER + group.index(), 128);
                if thread < block.schedule.splits {
                    block.drained.arrive_in(block.first_split + thread);
                }
            }
        }
    }

    fn end(&self, _: &Warpgroup, state: &mut State<T, E>) {
        state.epilogue.end(2 * S::N); // The threads that multiply: 128 for 64 columns.
        tma::wait_stores::<0>();
    }

    fn idle(&self, warp: &IdleWarp) {
        if warp.index() == 0 && warp::lane_id() == 0 {
            self.target.prefetch();
        }
    }

    fn loaded(&self) {
        if self.block.division.sums == 0 && self.block.schedule.splits_any() {
            // SAFETY: all warps that load or idle call this; those that multiply synchronise in
            // `send`.
            unsafe { cluster::sync_relaxed() };
        }
    }

    /// Waits for the other blocks of the cluster if they load for this block or release its stages.
    /// Otherwise this block may end before them: it has received all sums that they send to it.
    fn leave(&self) {
        let Division { across, down, .. } = self.block.division;
        if across * down > 1 {
            // SAFETY: all threads of the cluster come here, once, at the end.
            unsafe { cluster::sync() };
        }
    }
}
