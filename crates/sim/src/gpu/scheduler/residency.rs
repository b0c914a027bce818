//! Assigns blocks to multiprocessors: grids start in launch order, as resources permit.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use cuda_std::arch::ThreadCtx;

use super::{Fiber, Scheduler};
use crate::base::error::{Error, Result};
use crate::base::ids::GridId;
use crate::base::simulation::Simulation;
use crate::gpu::barrier::BlockBarrier;
use crate::gpu::cluster::Cluster;
use crate::gpu::gpus::{Gpus, Launch};
use crate::gpu::hooks::OPS;
use crate::gpu::polls::RepeatedLoads;
use crate::gpu::shared::{MAX_SHARED, SharedMemory};
use crate::gpu::thread::{Block, Grid, Thread, Wait};
use crate::gpu::warp::{WARP, Warp};
use crate::race::{GridClock, MAX_BLOCKS};

/// Maximum threads of a block in each dimension.
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
const MAX_BLOCK_THREADS: u64 = 1024;
/// Maximum blocks of a grid in each dimension.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
/// Maximum number of concurrent threads: each needs at least four pages of stack.
const MAX_THREADS: usize = 1 << 22;

/// Resources of a multiprocessor: the free ones, or those that a block needs.
#[derive(Clone, Copy)]
struct SmResources {
    threads: u32,
    blocks: u32,
    /// Bytes of shared memory.
    shared: usize,
}

impl SmResources {
    /// Returns all resources of a Hopper multiprocessor, with the number of threads of the
    /// simulated compute capability.
    fn whole(settings: &Simulation) -> Self {
        Self { threads: settings.multiprocessor_threads(), blocks: 32, shared: 228 << 10 }
    }

    /// Returns what a block needs: whole warps, its dynamic shared memory, and the 1 KiB that CUDA
    /// reserves. (Its static shared memory is not known before it runs.)
    fn of_block(threads: u32, dynamic_shared: usize) -> Self {
        // No multiprocessor has as many threads as the largest multiple of a warp.
        let threads = threads.max(1).checked_next_multiple_of(WARP).unwrap_or(u32::MAX);
        Self { threads, blocks: 1, shared: dynamic_shared.saturating_add(1 << 10) }
    }

    /// Returns the number of `block`s that fit.
    fn holds(self, block: Self) -> u32 {
        let of_shared = (self.shared / block.shared) as u32;
        (self.threads / block.threads).min(self.blocks).min(of_shared)
    }

    fn take(&mut self, block: Self) {
        self.threads -= block.threads;
        self.blocks -= block.blocks;
        self.shared -= block.shared;
    }

    fn give_back(&mut self, block: Self) {
        self.threads += block.threads;
        self.blocks += block.blocks;
        self.shared += block.shared;
    }
}

/// Resources and pending grids of a GPU.
pub(super) struct Gpu {
    /// The resources of a multiprocessor.
    whole: SmResources,
    /// Free resources of the multiprocessors used so far; the other multiprocessors are unused.
    free: Vec<SmResources>,
    /// The multiprocessor to try first.
    next: usize,
    /// Grids with blocks that have not started.
    pending: VecDeque<Rc<Grid>>,
}

impl Gpu {
    pub(super) fn new(settings: &Simulation) -> Self {
        let whole = SmResources::whole(settings);
        Self { whole, free: Vec::new(), next: 0, pending: VecDeque::new() }
    }

    /// Assigns a block to one of `all` multiprocessors, round robin like a GPU, and returns the
    /// multiprocessor's index.
    fn place(&mut self, all: u32, block: SmResources) -> Option<usize> {
        // An unused multiprocessor holds any block that `check` accepts: at most 1024 threads and,
        // with the memory that CUDA reserves, 228 KiB.
        if self.free.len() < all as usize {
            self.free.push(self.whole);
            self.next = self.free.len() - 1;
        }
        let n = self.free.len();
        let found = (0..n).map(|i| (self.next + i) % n).find(|i| self.free[*i].holds(block) > 0)?;
        self.free[found].take(block);
        self.next = (found + 1) % n;
        Some(found)
    }

    /// Assigns `n` blocks, if all fit.
    fn place_all(&mut self, all: u32, block: SmResources, n: u32) -> Option<Vec<usize>> {
        let fit = self.holds(all, block) >= n;
        // All of them are placed if they fit, since they have equal sizes.
        fit.then(|| (0..n).filter_map(|_| self.place(all, block)).collect())
    }

    /// Returns the number of blocks like `block` that fit in addition to the running blocks.
    fn holds(&self, all: u32, block: SmResources) -> u32 {
        let used: u32 = self.free.iter().map(|sm| sm.holds(block)).sum();
        let empty = all - self.free.len() as u32;
        used.saturating_add(empty.saturating_mul(self.whole.holds(block)))
    }
}

/// Converts a linear index, x first, to an index in each dimension.
fn to_dim3(index: u32, [x, y, _]: [u32; 3]) -> [u32; 3] {
    [index % x, index / x % y, index / x / y]
}

/// Returns the product of the dimensions.
fn volume(dimensions: [u32; 3]) -> u64 {
    dimensions.iter().fold(1_u64, |n, d| n.saturating_mul((*d).into()))
}

fn too_many(kernel: &'static str, threads: usize) -> Error {
    let reason = format!(
        "{threads} concurrent threads, but the simulator runs at most {MAX_THREADS}; launch fewer \
        blocks, or simulate fewer multiprocessors"
    );
    Error::Launch { kernel, reason }
}

impl Scheduler {
    /// Returns the maximum resident blocks of a GPU for `threads` threads and `dynamic_shared`
    /// bytes of dynamic shared memory per block.
    pub(crate) fn resident(&self, gpu: usize, threads: u32, dynamic_shared: usize) -> u32 {
        let block = SmResources::of_block(threads, dynamic_shared);
        let whole = SmResources::whole(&self.settings);
        self.settings.multiprocessors_of(gpu).saturating_mul(whole.holds(block))
    }

    /// Checks a launch against a GPU's limits; returns the number of blocks.
    pub(crate) fn check(&self, launch: &Launch) -> Result<u32> {
        let Launch { kernel, gpu, grid, block, cluster, dynamic_shared, .. } = *launch;
        let refuse = |reason: String| Err(Error::Launch { kernel, reason });
        if gpu >= self.gpus.len() {
            return refuse(format!("there is no GPU {gpu}, only {}", self.gpus.len()));
        }
        let (blocks, threads) = (volume(grid), volume(block));
        if blocks == 0 {
            return refuse("a grid without blocks".to_owned());
        }
        if (0..3).any(|i| grid[i] > MAX_GRID[i]) {
            return refuse(format!(
                "a grid of {grid:?} blocks, but at most {MAX_GRID:?} are possible"
            ));
        }
        if !grid[0].is_multiple_of(cluster) {
            return refuse(format!(
                "a grid of {} blocks in x, which is not a multiple of its clusters of {cluster}",
                grid[0]
            ));
        }
        let Ok(blocks) = u32::try_from(blocks) else {
            return refuse(format!("{blocks} blocks, but the simulator runs at most {}", u32::MAX));
        };
        if self.settings.races && blocks > MAX_BLOCKS {
            return refuse(format!(
                "{blocks} blocks, but the simulator finds races among at most {MAX_BLOCKS}: turn \
                 the detection off (`Simulation::races`)"
            ));
        }
        if !(1..=MAX_BLOCK_THREADS).contains(&threads) {
            return refuse(format!(
                "blocks of {threads} threads, but 1 to {MAX_BLOCK_THREADS} are possible"
            ));
        }
        if (0..3).any(|i| block[i] > MAX_BLOCK[i]) {
            return refuse(format!(
                "a block of {block:?} threads, but at most {MAX_BLOCK:?} are possible"
            ));
        }
        let threads = threads as u32;
        if dynamic_shared > MAX_SHARED {
            return refuse(format!(
                "{dynamic_shared} bytes of dynamic shared memory, but a block has at most \
                {MAX_SHARED}"
            ));
        }
        let resident = self.resident(gpu, threads, dynamic_shared);
        if launch.cooperative && blocks > resident {
            return refuse(format!(
                "a cooperative grid of {blocks} blocks, but at most {resident} of them are \
                resident on a GPU"
            ));
        }
        if cluster > resident {
            return refuse(format!(
                "clusters of {cluster} blocks, but at most {resident} of them are resident on a GPU"
            ));
        }
        let at_once = blocks.min(resident) as usize * threads as usize;
        if at_once > MAX_THREADS {
            return Err(too_many(kernel, at_once));
        }
        Ok(blocks)
    }

    /// Checks a grid and queues it.
    pub(crate) fn launch(&mut self, gpus: &Gpus, launch: Launch) -> Result<GridId> {
        let (blocks, gpu) = (self.check(&launch)?, launch.gpu);
        self.launched += 1;
        let id = GridId(self.launched);
        let previous = launch.previous.and_then(|id| self.grids.get(&id));
        let grid = Rc::new(Grid {
            id,
            previous: previous.map_or_else(Weak::new, Rc::downgrade),
            clock: gpus.memory.races.grid(launch.kernel, &launch.arguments)?,
            previous_clock: previous.map(|grid| grid.clock.clone()),
            launch,
            blocks,
            next: Cell::new(0),
            ended: Cell::new(0),
            triggered_blocks: Cell::new(0),
            communicator: OnceCell::new(),
            uses_peers: Cell::new(false),
        });
        self.grids.insert(id, Rc::clone(&grid));
        self.gpus[gpu].pending.push_back(grid);
        self.changed.push(gpu);
        Ok(id)
    }

    /// Returns whether no grid runs or is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.live == 0 && self.gpus.iter().all(|gpu| gpu.pending.is_empty())
    }

    pub(crate) fn clock_of(&self, id: GridId) -> Option<GridClock> {
        self.grids.get(&id).map(|grid| grid.clock.clone())
    }

    /// Returns whether a grid has ended.
    pub(crate) fn is_done(&mut self, id: GridId) -> bool {
        let runs = self.grids.get(&id).is_some_and(|grid| !grid.has_ended());
        if !runs {
            self.grids.remove(&id);
        }
        !runs
    }

    /// Returns whether every block of a running grid has ended or let the next grid begin.
    pub(crate) fn have_all_triggered(&self, id: GridId) -> bool {
        self.grids.get(&id).is_some_and(|grid| grid.triggered_blocks.get() == grid.blocks)
    }

    /// Starts the pending clusters that fit.
    pub(super) fn start_blocks(&mut self, gpus: &Gpus) -> Result<()> {
        for gpu in std::mem::take(&mut self.changed) {
            while let Some(grid) = self.gpus[gpu].pending.front().cloned() {
                let (all, next) = (self.settings.multiprocessors_of(gpu), grid.next.get());
                let n = grid.launch.cluster;
                let residency = SmResources::of_block(grid.threads(), grid.launch.dynamic_shared);
                let gpu = &mut self.gpus[gpu];
                // All blocks of a cooperative grid start in this loop, or none does.
                let must_fit = grid.launch.cooperative && next == 0;
                if must_fit && gpu.holds(all, residency) < grid.blocks {
                    break;
                }
                let Some(places) = gpu.place_all(all, residency, n) else { break };
                grid.next.set(next + n);
                if next + n == grid.blocks {
                    gpu.pending.pop_front();
                }
                let cluster = Rc::new(Cluster::new(n * grid.threads()));
                for (index, multiprocessor) in (next..).zip(places) {
                    self.start_block(gpus, &grid, &cluster, index, multiprocessor)?;
                }
            }
        }
        Ok(())
    }

    fn start_block(
        &mut self,
        gpus: &Gpus,
        grid: &Rc<Grid>,
        cluster: &Rc<Cluster>,
        index: u32,
        multiprocessor: usize,
    ) -> Result<()> {
        let size = grid.threads();
        self.live += size as usize;
        if self.live > MAX_THREADS {
            return Err(too_many(grid.launch.kernel, self.live));
        }
        let warps = (0..size.div_ceil(WARP)).map(|i| self.warp(size - i * WARP));
        let warps = warps.collect::<Result<Vec<_>>>()?;
        let shared = SharedMemory::new(grid.launch.dynamic_shared);
        let dynamic_shared = shared.dynamic();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(None);
            self.blocks.len() - 1
        });
        let block = Rc::new(Block {
            gpu: grid.launch.gpu,
            grid: Rc::clone(grid),
            index,
            slot: slot as u32,
            multiprocessor,
            size,
            live: Cell::new(size),
            next: RefCell::new(Vec::with_capacity(size as usize)),
            queued: Cell::new(false),
            has_triggered: Cell::new(false),
            barriers: std::array::from_fn(|_| BlockBarrier::default()),
            cluster: Rc::clone(cluster),
            warps,
            shared: RefCell::new(shared),
            unwritten: RefCell::default(),
            calls: RefCell::default(),
            began: gpus.timeline.now(),
            waits: RefCell::default(),
            mbarriers: Cell::new(0),
            spare_registers: Cell::new(0),
        });
        let Launch { grid: grid_dim, block: block_dim, .. } = block.grid.launch;
        for (tid, thread) in block.threads().enumerate() {
            let tid = tid as u32;
            thread.start(
                gpus,
                &block,
                tid,
                ThreadCtx {
                    thread_idx: to_dim3(tid, block_dim),
                    block_idx: to_dim3(index, grid_dim),
                    block_dim,
                    grid_dim,
                    dynamic_shared,
                    watch: self.settings.watch,
                    ops: &OPS,
                },
            );
            thread.enqueue();
        }
        cluster.add(&block);
        self.blocks[slot] = Some(block);
        Ok(())
    }

    /// Returns a warp for the first of `threads` threads of a block, that of an ended block if
    /// possible.
    fn warp(&mut self, threads: u32) -> Result<Box<Warp>> {
        let warp = match self.warps.pop() {
            Some(warp) => warp,
            None => Warp::new(self.settings.stack_size).map_err(|source| Error::Stacks {
                threads: self.live,
                bytes: self.settings.stack_size,
                source,
            })?,
        };
        warp.reset(threads);
        Ok(warp)
    }

    /// Frees the resources of a block whose last thread has ended.
    pub(super) fn end_block(&mut self, gpus: &Gpus, slot: usize) {
        // No other reference is left: a cluster has weak ones, and those made of them are dropped
        // before threads run.
        let Some(Ok(block)) = self.blocks[slot].take().map(Rc::try_unwrap) else { return };
        if gpus.timeline.is_on() {
            gpus.timeline.extend(block.spans(gpus.timeline.now()));
        }
        block.trigger_next();
        let Block { grid, gpu, index, size, multiprocessor, warps, cluster, shared, .. } = block;
        gpus.memory.races.end_block(grid.clock.op, index);
        self.free.push(slot);
        self.warps.extend(warps);
        let shared = shared.into_inner();
        shared.ranges().for_each(|(start, bytes)| {
            gpus.memory.races.forget(start, bytes);
            gpus.copies.forget(start, bytes);
        });
        cluster.block_ended(shared);
        let residency = SmResources::of_block(size, grid.launch.dynamic_shared);
        self.gpus[gpu].free[multiprocessor].give_back(residency);
        if !self.gpus[gpu].pending.is_empty() {
            self.changed.push(gpu);
        }
        grid.ended.set(grid.ended.get() + 1);
        if grid.has_ended() {
            gpus.grid_ended(&grid);
            let waits = |thread: &&Thread| matches!(thread.wait.get(), Wait::Previous { .. });
            let released = |thread: &&Thread| !thread.block().grid.follows_running();
            self.threads().filter(waits).filter(released).for_each(Thread::wake);
        }
    }
}

impl Grid {
    /// Returns the number of threads per block.
    fn threads(&self) -> u32 {
        self.launch.block.iter().product()
    }
}

impl Thread {
    /// Initialises the thread as thread `tid` of a block.
    fn start(&self, gpus: &Gpus, block: &Rc<Block>, tid: u32, ctx: ThreadCtx) {
        self.ctx.set(ctx);
        self.gpus.set(gpus);
        self.block.set(Rc::as_ptr(block));
        self.tid.set(tid);
        self.wait.set(Wait::Ready);
        self.updating.set(false);
        self.in_named_wait.set(false);
        self.unwinding.set(false);
        self.coop_call.set(None);
        self.returned.set(false);
        self.registers.set(0);
        self.read.set(Default::default());
        self.polled.set([0; 4]);
        self.repeated.set(RepeatedLoads::default());
        let (clock, mut race) = (&block.grid.clock, self.race.borrow_mut());
        gpus.memory.races.start_thread(&mut race, (clock.op, block.index, tid), &clock.start);
        self.state.timed_out.set(false);
        self.state.at.set(None);
        let fiber = Fiber::new(self);
        self.trap.set(Some(fiber.trap_handler()));
        self.fiber.replace(Some(fiber));
    }
}
