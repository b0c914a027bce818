//! The exchange of sums, common to both forms: partial sums to a strip's owner, results to all
//! ranks.
//!
//! Partial sums are exchanged in f32, in the layout of the tensor cores' results: in *fragments* of
//! 16 rows and 8 columns, of which each lane of a warp has four elements. So a warp stores 512
//! bytes at once, without a shuffle. A lane of the owner loads what four lanes stored: 8 columns of
//! two rows.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, Epoch, Flag, LsaPtr, MemoryOrder, Team, Window};

use super::tiles::{STRIP_ROWS, STRIPS, Strip, Tiles};

/// Words before the flags in their window: the number of blocks that have ended, the epoch of the
/// last launch, and padding to a cache line.
pub(super) const FIRST_FLAG: usize = 32;

/// Rows and columns of a fragment.
const ROWS: u32 = 16;
const WIDTH: u32 = 8;
/// Elements of a fragment that each lane has.
const PER_LANE: usize = 4;

/// Elements of a strip's slot in the workspace.
pub(super) const fn partial_elements(columns: usize) -> usize {
    STRIP_ROWS as usize * columns
}

/// Groups of 16 rows in a strip: a warp reduces one group at a time.
const GROUPS: u32 = STRIP_ROWS / ROWS;

/// In shared memory: the number of the next group of rows that a warp of the block takes.
#[inline(always)]
fn next_group() -> *mut u32 {
    shared_array![u32; 1]
}

/// In shared memory: how many of the block's warps have returned from [`Exchange::reduce`].
#[inline(always)]
fn warps_done() -> *mut u32 {
    shared_array![u32; 1]
}

/// The communicator, windows and epoch of a launch.
pub(super) struct Exchange<'a, const COLUMNS: u32> {
    comm: &'a DevComm,
    team: Team,
    tiles: Tiles<COLUMNS>,
    c: Window<bf16>,
    partials: Window<f32>,
    flags: Window<u32>,
    epoch: u32,
    local_only: bool,
}

impl<'a, const COLUMNS: u32> Exchange<'a, COLUMNS> {
    const FRAGMENTS: u32 = COLUMNS / WIDTH;

    /// Every thread of the block calls it, then the block's barrier. A single rank exchanges
    /// nothing.
    ///
    /// # Safety
    ///
    /// The windows are as in the kernels' contract.
    #[inline(always)]
    pub(super) unsafe fn new(
        comm: &'a DevComm,
        tiles: Tiles<COLUMNS>,
        c: Window<bf16>,
        partials: Window<f32>,
        flags: Window<u32>,
    ) -> Self {
        // SAFETY: the caller's contract.
        let epoch = unsafe { Epoch::begin(flags.local().as_ptr()) }.get();
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                mem::store(next_group(), 0);
                mem::store(warps_done(), 0);
            }
        }
        let team = comm.lsa_team();
        let local_only = team.n_ranks == 1;
        Self { comm, team, tiles, c, partials, flags, epoch, local_only }
    }

    /// The rank that owns a strip.
    #[inline(always)]
    fn owner(&self, strip: Strip) -> i32 {
        (strip.number % self.team.n_ranks as u32) as i32
    }

    /// The slot of `source`'s sums of a strip, in the owner's workspace.
    #[inline(always)]
    fn slot(&self, strip: Strip, source: i32) -> usize {
        let n_ranks = self.team.n_ranks as usize;
        let of_source = ((self.tiles.count() * STRIPS) as usize).div_ceil(n_ranks);
        source as usize * of_source + strip.number as usize / n_ranks
    }

    /// The flag that `source` sets in the owner's workspace after its sums of a strip.
    #[inline(always)]
    fn flag(&self, strip: Strip, source: i32) -> Flag<'a> {
        // SAFETY: it is in the window, after the epoch's words, and is used only as a flag.
        unsafe { Flag::new(self.comm, self.flags, FIRST_FLAG + self.slot(strip, source)) }
    }

    /// The index in a slot of a lane's four elements of the fragment with first row `16 * i` and
    /// first column `8 * j`.
    #[inline(always)]
    fn fragment(i: u32, j: u32, lane: u32) -> usize {
        (((i * Self::FRAGMENTS + j) * warp::WARP_SIZE + lane) as usize) * PER_LANE
    }

    /// The destination of this rank's sums of a strip.
    #[inline(always)]
    pub(super) fn partial_tile(&self, strip: Strip) -> PartialTile<COLUMNS> {
        let slot = self.slot(strip, self.team.rank);
        // SAFETY: the slot is in the window.
        let partial = unsafe {
            let base = self.partials.lsa(self.owner(strip)).as_ptr();
            base.add(slot * partial_elements(COLUMNS as usize))
        };
        let Tiles { m, n } = self.tiles;
        PartialTile { c: self.c.local(), partial, strip, m, n, local_only: self.local_only }
    }

    /// Sets the flag of this rank's sums of a strip. The 128 threads that stored the sums call it
    /// together; `barrier` is a named barrier for them, and `rank` the thread's index among them.
    ///
    /// # Safety
    ///
    /// The sums are stored, and the flag is set once per launch.
    #[inline(always)]
    pub(super) unsafe fn announce(&self, strip: Strip, barrier: u32, rank: u32) {
        if self.local_only || strip.row >= self.tiles.m {
            return;
        }
        thread::named_barrier_sync(barrier, 128);
        if rank == 0 {
            let flag = self.flag(strip, self.team.rank);
            flag.post(Coop::thread(), self.owner(strip), self.epoch);
        }
    }

    /// Reduces this block's share of the strips that the rank owns, and stores the results to all
    /// ranks. Each warp repeatedly takes the next 16 rows that no warp has taken.
    ///
    /// # Safety
    ///
    /// Every warp of the block calls it, all lanes together, once per launch.
    #[inline(always)]
    pub(super) unsafe fn reduce(&self) {
        if self.local_only {
            return;
        }
        let (rank, n_ranks) = (self.team.rank as u32, self.team.n_ranks as u32);
        let strips = self.tiles.count() * STRIPS;
        loop {
            let mut item = 0;
            if warp::lane_id() == 0 {
                // SAFETY: a word in shared memory; after the block's barrier only this changes it.
                let next = unsafe { AtomicU32::from_ptr(next_group()) };
                item = next.fetch_add(1, Order::Relaxed, Scope::Cta);
            }
            // SAFETY: all lanes take part.
            let item = unsafe { warp::shuffle_idx(item, 0) };
            let owned = thread::block_idx_x() + item / GROUPS * thread::grid_dim_x();
            let number = owned * n_ranks + rank;
            if number >= strips {
                break;
            }
            let (strip, i) = (self.tiles.strip(number), item % GROUPS);
            if strip.row + ROWS * i < self.tiles.m {
                self.wait_for(strip);
                // SAFETY: all ranks' sums have arrived, and only this warp has taken the rows.
                unsafe { self.reduce_rows(strip, i) };
            }
        }
        if warp::lane_id() == 0 {
            // SAFETY: as above.
            let warps_done = unsafe { AtomicU32::from_ptr(warps_done()) };
            warps_done.fetch_add(1, Order::Relaxed, Scope::Cta);
        }
    }

    /// Waits until every rank has set its flag of the strip. All lanes call it together.
    #[inline(always)]
    fn wait_for(&self, strip: Strip) {
        let mut source = 0;
        self.comm.wait_until(Coop::warp(), || {
            while source < self.team.n_ranks {
                if self.flag(strip, source).get() != self.epoch {
                    return false;
                }
                source += 1;
            }
            true
        });
    }

    /// Reduces 16 rows of a strip, from row `16 * i` on.
    ///
    /// # Safety
    ///
    /// As for [`reduce`](Self::reduce); the sums of all ranks have arrived.
    #[inline(always)]
    unsafe fn reduce_rows(&self, strip: Strip, i: u32) {
        let each = partial_elements(COLUMNS as usize);
        let first = self.slot(strip, 0) * each;
        let stride = (self.slot(strip, 1) - self.slot(strip, 0)) * each;
        let partials = self.partials.local().as_ptr();
        // A lane takes 8 columns of two rows, and the next lane the next 8.
        let mut item = warp::lane_id();
        while item < ROWS / 2 * Self::FRAGMENTS {
            let (j, row) = (item % Self::FRAGMENTS, item / Self::FRAGMENTS);
            if strip.column + WIDTH * j < self.tiles.n {
                // SAFETY: the caller's contract; the fragment was stored, as some of its elements
                // are in C.
                unsafe {
                    let from = partials.add(first + Self::fragment(i, j, 4 * row));
                    let [top, bottom] = self.sums(from, stride);
                    let (row, column) = (strip.row + ROWS * i + row, strip.column + WIDTH * j);
                    self.store(row, column, top);
                    self.store(row + 8, column, bottom);
                }
            }
            item += warp::WARP_SIZE;
        }
    }

    /// The sums over the ranks, in a fixed order, of eight columns of two rows: 16 elements at
    /// `from`, and for each further rank at the next multiple of `stride`.
    ///
    /// # Safety
    ///
    /// The elements have arrived from every rank.
    #[inline(always)]
    unsafe fn sums(&self, from: *const f32, stride: usize) -> [[f32; 8]; 2] {
        let mut sums = [[0.0; 8]; 2];
        let mut source = 0;
        while source < self.team.n_ranks as usize {
            let mut lane = 0;
            while lane < 4 {
                // SAFETY: the caller's contract.
                let part = unsafe { mem::load_vec(from.add(source * stride + PER_LANE * lane)) };
                // Two columns of the upper row, and of the lower.
                let [a, b, c, d] = part.to_bits().map(f32::from_bits);
                sums[0][2 * lane] += a;
                sums[0][2 * lane + 1] += b;
                sums[1][2 * lane] += c;
                sums[1][2 * lane + 1] += d;
                lane += 1;
            }
            source += 1;
        }
        sums
    }

    /// Rounds eight elements of a row, and stores those that are in C to every rank.
    ///
    /// # Safety
    ///
    /// Only this thread stores these elements.
    #[inline(always)]
    unsafe fn store(&self, row: u32, column: u32, values: [f32; 8]) {
        let Tiles { m, n } = self.tiles;
        if row >= m {
            return;
        }
        let at = row as usize * n as usize + column as usize;
        let words = [
            f32_to_bf16x2([values[0], values[1]]),
            f32_to_bf16x2([values[2], values[3]]),
            f32_to_bf16x2([values[4], values[5]]),
            f32_to_bf16x2([values[6], values[7]]),
        ];
        for peer in self.team.all_from_self() {
            let c = self.c.lsa(peer);
            // SAFETY: the caller's contract. If `n` is a multiple of 8, rows are 16-byte aligned
            // whole vectors.
            unsafe {
                if n.is_multiple_of(WIDTH) {
                    c.store_vec(at / WIDTH as usize, Vec16::from_bits(words));
                } else {
                    store_elements(c, at, words, n - column);
                }
            }
        }
    }

    /// The end of a launch. On return, the strips that this block of each rank reduced are visible
    /// in every rank. The last block ends the epoch. Every thread of the block calls it.
    ///
    /// A block exits here if one of its warps exited because the host aborted its wait. It must not
    /// arrive at the peers' barrier: they would take its strips of C for complete.
    ///
    /// # Safety
    ///
    /// Called once per launch, after [`reduce`](Self::reduce).
    #[inline(always)]
    pub(super) unsafe fn finish(&self) {
        if self.local_only {
            return;
        }
        thread::sync_threads();
        // SAFETY: no thread changes the word any more.
        let warps_done = unsafe { mem::load(warps_done()) };
        if warps_done * warp::WARP_SIZE != thread::block_dim_x() {
            thread::exit();
        }
        self.comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
        // SAFETY: once per launch. (`begin` again, as keeping its result would take registers.)
        unsafe { Epoch::begin(self.flags.local().as_ptr()).end(Coop::cta()) };
    }
}

/// Stores the first `len` of eight elements, or all eight.
///
/// # Safety
///
/// They are in the window, and only this thread stores them.
#[inline(always)]
unsafe fn store_elements(c: LsaPtr<bf16>, at: usize, words: [u32; 4], len: u32) {
    let mut i = 0;
    while i < 8 {
        if (i as u32) < len {
            let bits = (words[i / 2] >> (16 * (i % 2))) as u16;
            // SAFETY: the caller's contract.
            unsafe { c.store(at + i, bf16::from_bits(bits)) };
        }
        i += 1;
    }
}

/// The destination of a strip's sums: the owner's workspace, or this rank's C with `local_only`.
#[derive(Clone, Copy)]
pub(super) struct PartialTile<const COLUMNS: u32> {
    c: LsaPtr<bf16>,
    partial: *mut f32,
    strip: Strip,
    m: u32,
    n: u32,
    local_only: bool,
}

impl<const COLUMNS: u32> PartialTile<COLUMNS> {
    /// Stores the lane's elements of `J` fragments: rows from `16 * i` on, columns from `8 * j` on.
    /// A lane has four elements of each: columns `2 * (lane % 4)` and the next, in rows `lane / 4`
    /// and `lane / 4 + 8`.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call it together; no other warp stores these fragments.
    #[inline(always)]
    pub(super) unsafe fn store<const J: usize>(
        &self,
        i: u32,
        j: u32,
        fragments: impl Fn(usize) -> [f32; PER_LANE],
    ) {
        let (row, column) = (self.strip.row + ROWS * i, self.strip.column + WIDTH * j);
        if row >= self.m || column >= self.n {
            return;
        }
        let columns = (self.n - column) as usize;
        let lane = warp::lane_id();
        if self.local_only {
            let (row, first) = (row + lane / 4, lane % 4 * 2);
            // SAFETY: the caller's contract.
            unsafe {
                self.store_local::<J>(
                    row,
                    column + first,
                    columns.saturating_sub(first as usize),
                    fragments,
                )
            };
            return;
        }
        // SAFETY: the fragments are in the strip's slot.
        unsafe {
            let to = self.partial.add(Exchange::<COLUMNS>::fragment(i, j, lane));
            let mut x = 0;
            while x < J {
                if x * (WIDTH as usize) < columns {
                    let to = to.add(Exchange::<COLUMNS>::fragment(0, x as u32, 0));
                    mem::store_vec(to, Vec16::from_bits(fragments(x).map(f32::to_bits)));
                }
                x += 1;
            }
        }
    }

    /// Rounds the elements and stores them to C: `J` pairs of columns, eight columns apart, in
    /// `row` and `row + 8`.
    ///
    /// # Safety
    ///
    /// Only this thread stores these elements.
    #[inline(always)]
    unsafe fn store_local<const J: usize>(
        &self,
        row: u32,
        column: u32,
        columns: usize,
        fragments: impl Fn(usize) -> [f32; PER_LANE],
    ) {
        let mut half = 0;
        while half < 2 {
            let row = row + 8 * half as u32;
            if row < self.m {
                // SAFETY: the row is in C.
                let to = unsafe {
                    self.c.as_ptr().add(row as usize * self.n as usize + column as usize)
                };
                let pair = |x: usize| {
                    let sums = fragments(x);
                    f32_to_bf16x2([sums[2 * half], sums[2 * half + 1]])
                };
                // SAFETY: the caller's contract; if `n` is even, every pair is whole and 4-byte
                // aligned.
                unsafe {
                    if self.n.is_multiple_of(2) {
                        let mut x = 0;
                        while x < J {
                            if 8 * x < columns {
                                mem::store(to.add(8 * x).cast::<u32>(), pair(x));
                            }
                            x += 1;
                        }
                    } else {
                        let mut x = 0;
                        while x < J {
                            let word = pair(x);
                            if 8 * x < columns {
                                mem::store(to.add(8 * x), bf16::from_bits(word as u16));
                            }
                            if 8 * x + 1 < columns {
                                let high = (word >> 16) as u16;
                                mem::store(to.add(8 * x + 1), bf16::from_bits(high));
                            }
                            x += 1;
                        }
                    }
                }
            }
            half += 1;
        }
    }
}
