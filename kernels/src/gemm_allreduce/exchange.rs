//! What both forms do with the sums of a tile: to the owner, and back to all.
//!
//! Sums travel in f32, as tensor cores leave them: in *fragments* of 16 rows and 8 columns, of
//! which each lane of a warp has four elements. So a warp stores 512 bytes at once, and nothing is
//! swizzled on the way. A lane of the owner picks up what four lanes stored, which is 8 columns of
//! two rows.

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::convert::f32_to_bf16x2;
use cuda_std::prelude::*;
use nccl_device::{BarrierIndex, Coop, DevComm, Epoch, Flag, LsaPtr, MemoryOrder, Team, Window};

use super::tiles::{STRIP_ROWS, STRIPS, Strip, Tiles};

/// Words of the flags' window before the flags: the blocks that have ended, the epoch of the last
/// launch, room to the next line.
pub(super) const FIRST_FLAG: usize = 32;

/// Rows and columns of a fragment.
const ROWS: u32 = 16;
const WIDTH: u32 = 8;
/// Elements of a fragment that one lane has.
const EACH: usize = 4;

/// Elements of a strip in the workspace.
pub(super) const fn partial_elements(columns: usize) -> usize {
    STRIP_ROWS as usize * columns
}

/// Groups of 16 rows in a strip: what a warp reduces at a time.
const GROUPS: u32 = STRIP_ROWS / ROWS;

/// The number of the next group of rows that a warp of the block takes.
#[inline(always)]
fn next_item() -> *mut u32 {
    shared_array![u32; 1]
}

/// How many of the block's warps have come through [`Exchange::reduce`].
#[inline(always)]
fn through() -> *mut u32 {
    shared_array![u32; 1]
}

/// The windows of a launch, and its epoch.
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

    /// Every thread of the block calls it, and the block's barrier follows. A single rank has
    /// nobody to exchange with.
    ///
    /// # Safety
    ///
    /// The windows have what the kernels' contract says.
    #[inline(always)]
    pub(super) unsafe fn new(
        comm: &'a DevComm,
        tiles: Tiles<COLUMNS>,
        c: Window<bf16>,
        partials: Window<f32>,
        flags: Window<u32>,
        local_only: bool,
    ) -> Self {
        // SAFETY: the caller's.
        let epoch = unsafe { Epoch::begin(flags.local().as_ptr()) }.get();
        if thread::thread_idx_x() == 0 {
            // SAFETY: nobody uses the words before the barrier.
            unsafe {
                mem::store(next_item(), 0);
                mem::store(through(), 0);
            }
        }
        let team = comm.lsa_team();
        let local_only = local_only || team.n_ranks == 1;
        Self { comm, team, tiles, c, partials, flags, epoch, local_only }
    }

    /// The rank that owns a strip.
    #[inline(always)]
    fn owner(&self, strip: Strip) -> i32 {
        (strip.number % self.team.n_ranks as u32) as i32
    }

    /// The place of `source`'s sums of a strip, in the owner's workspace.
    #[inline(always)]
    fn place(&self, strip: Strip, source: i32) -> usize {
        let n_ranks = self.team.n_ranks as usize;
        let of_source = ((self.tiles.count() * STRIPS) as usize).div_ceil(n_ranks);
        source as usize * of_source + strip.number as usize / n_ranks
    }

    /// The flag by which `source` tells the owner that its sums of a strip are there.
    #[inline(always)]
    fn flag(&self, strip: Strip, source: i32) -> Flag<'a> {
        // SAFETY: it lies in the window, behind the epoch's words, and is used as a flag alone.
        unsafe { Flag::new(self.comm, self.flags, FIRST_FLAG + self.place(strip, source)) }
    }

    /// Where in a strip a lane's four elements of the fragment of rows `16 * i` and columns `8 * j`
    /// lie.
    #[inline(always)]
    fn fragment(i: u32, j: u32, lane: u32) -> usize {
        (((i * Self::FRAGMENTS + j) * warp::WARP_SIZE + lane) as usize) * EACH
    }

    /// Where this rank's sums of a strip go.
    #[inline(always)]
    pub(super) fn partial_tile(&self, strip: Strip) -> PartialTile<COLUMNS> {
        let place = self.place(strip, self.team.rank);
        // SAFETY: the place lies in the window.
        let partial = unsafe {
            let base = self.partials.lsa(self.owner(strip)).as_ptr();
            base.add(place * partial_elements(COLUMNS as usize))
        };
        let Tiles { m, n } = self.tiles;
        PartialTile { c: self.c.local(), partial, strip, m, n, local_only: self.local_only }
    }

    /// Says that this rank's sums of a strip are there. `barrier` is a number for the 128 threads
    /// that stored them, which call it together; `rank` is the thread's place among them.
    ///
    /// # Safety
    ///
    /// The sums are stored, and nobody else says so in this launch.
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

    /// Reduces this block's part of the strips that the rank owns, and stores them to all ranks.
    /// Each warp takes the next 16 rows that no warp has taken, until there are none: those that do
    /// nothing else from the beginning, the others when they are done.
    ///
    /// # Safety
    ///
    /// Every warp of the block calls it, all lanes together, once a launch.
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
                // SAFETY: the word is shared memory, and from the block's barrier on changed here
                // only.
                let next = unsafe { AtomicU32::from_ptr(next_item()) };
                item = next.fetch_add(1, Order::Relaxed, Scope::Cta);
            }
            // SAFETY: all lanes are here.
            let item = unsafe { warp::shuffle_idx(item, 0) };
            let slot = thread::block_idx_x() + item / GROUPS * thread::grid_dim_x();
            let number = slot * n_ranks + rank;
            if number >= strips {
                break;
            }
            let (strip, i) = (self.tiles.strip(number), item % GROUPS);
            if strip.row + ROWS * i < self.tiles.m {
                self.wait_for(strip);
                // SAFETY: all ranks' sums are there, and the rows are this warp's.
                unsafe { self.reduce_rows(strip, i) };
            }
        }
        if warp::lane_id() == 0 {
            // SAFETY: as above.
            let through = unsafe { AtomicU32::from_ptr(through()) };
            through.fetch_add(1, Order::Relaxed, Scope::Cta);
        }
    }

    /// Waits until every rank has announced the strip. The warp calls it together.
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

    /// Reduces the rows of a strip from `16 * i` on.
    ///
    /// # Safety
    ///
    /// As [`reduce`](Self::reduce); the sums of all ranks are there.
    #[inline(always)]
    unsafe fn reduce_rows(&self, strip: Strip, i: u32) {
        let each = partial_elements(COLUMNS as usize);
        let first = self.place(strip, 0) * each;
        let stride = (self.place(strip, 1) - self.place(strip, 0)) * each;
        let partials = self.partials.local().as_ptr();
        // A lane has 8 columns of two rows, and the next lane the next 8.
        let mut item = warp::lane_id();
        while item < ROWS / 2 * Self::FRAGMENTS {
            let (j, row) = (item % Self::FRAGMENTS, item / Self::FRAGMENTS);
            if strip.column + WIDTH * j < self.tiles.n {
                // SAFETY: the caller's; the fragment was stored, as it has a row and a column in C.
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

    /// The sums over the ranks, always in the same order, of eight columns of two rows: the 16
    /// elements at `from`, and `stride` further for each next rank.
    ///
    /// # Safety
    ///
    /// They are there for every rank.
    #[inline(always)]
    unsafe fn sums(&self, from: *const f32, stride: usize) -> [[f32; 8]; 2] {
        let mut sums = [[0.0; 8]; 2];
        let mut source = 0;
        while source < self.team.n_ranks as usize {
            let mut lane = 0;
            while lane < 4 {
                // SAFETY: the caller's.
                let part = unsafe { mem::load_vec(from.add(source * stride + EACH * lane)) };
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

    /// Rounds eight elements of a row and stores those that exist in every rank.
    ///
    /// # Safety
    ///
    /// The elements are this thread's.
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
            // SAFETY: the caller's. Rows of whole vectors begin on 16 bytes, and have no part of
            // one.
            unsafe {
                if n.is_multiple_of(WIDTH) {
                    c.store_vec(at / WIDTH as usize, Vec16::from_bits(words));
                } else {
                    store_elements(c, at, words, n - column);
                }
            }
        }
    }

    /// The end of a launch: when it returns, what the same block of each rank has reduced is there
    /// in every rank, and the epoch is over when all blocks were here. Every thread of the block
    /// calls it.
    ///
    /// A block of which a warp has left, because the host ended its wait, leaves here. It must not
    /// arrive at the others' barrier: they would take its part of C for complete.
    ///
    /// # Safety
    ///
    /// Once a launch, as the last.
    #[inline(always)]
    pub(super) unsafe fn finish(&self) {
        if self.local_only {
            return;
        }
        thread::sync_threads();
        // SAFETY: nobody changes the word any more.
        let through = unsafe { mem::load(through()) };
        if through * warp::WARP_SIZE != thread::block_dim_x() {
            thread::exit();
        }
        self.comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
        // SAFETY: once a launch. The epoch is read again: kept, its address would take registers.
        unsafe { Epoch::begin(self.flags.local().as_ptr()).end(Coop::cta()) };
    }
}

/// Stores the first `len` of eight elements, or all.
///
/// # Safety
///
/// They lie in the window, and are this thread's.
#[inline(always)]
unsafe fn store_elements(c: LsaPtr<bf16>, at: usize, words: [u32; 4], len: u32) {
    let mut i = 0;
    while i < 8 {
        if (i as u32) < len {
            let bits = (words[i / 2] >> (16 * (i % 2))) as u16;
            // SAFETY: the caller's.
            unsafe { c.store(at + i, bf16::from_bits(bits)) };
        }
        i += 1;
    }
}

/// Where a strip's sums go: to the owner's workspace, or to C where nothing is exchanged.
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
    /// A lane has four elements of each: columns `2 * (lane % 4)` and the next of row `lane / 4`,
    /// and of the row eight further.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call it together; nobody else stores these fragments.
    #[inline(always)]
    pub(super) unsafe fn store<const J: usize>(
        &self,
        i: u32,
        j: u32,
        fragments: impl Fn(usize) -> [f32; EACH],
    ) {
        let (row, column) = (self.strip.row + ROWS * i, self.strip.column + WIDTH * j);
        if row >= self.m || column >= self.n {
            return;
        }
        let columns = (self.n - column) as usize;
        let lane = warp::lane_id();
        if self.local_only {
            let (row, first) = (row + lane / 4, lane % 4 * 2);
            // SAFETY: the caller's.
            unsafe {
                self.store_own::<J>(
                    row,
                    column + first,
                    columns.saturating_sub(first as usize),
                    fragments,
                )
            };
            return;
        }
        // SAFETY: the fragments' places lie in the strip's.
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

    /// Rounds the elements and stores them to C: pairs of columns, each eight further, of `row` and
    /// of the row eight further.
    ///
    /// # Safety
    ///
    /// They are this thread's.
    #[inline(always)]
    unsafe fn store_own<const J: usize>(
        &self,
        row: u32,
        column: u32,
        columns: usize,
        fragments: impl Fn(usize) -> [f32; EACH],
    ) {
        let mut half = 0;
        while half < 2 {
            let row = row + 8 * half as u32;
            if row < self.m {
                // SAFETY: the row lies in C.
                let to = unsafe {
                    self.c.as_ptr().add(row as usize * self.n as usize + column as usize)
                };
                let pair = |x: usize| {
                    let sums = fragments(x);
                    f32_to_bf16x2([sums[2 * half], sums[2 * half + 1]])
                };
                // SAFETY: the caller's; with even rows every pair begins on four bytes, and is
                // whole.
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
