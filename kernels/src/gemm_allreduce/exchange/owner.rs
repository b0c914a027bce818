//! The owner of a strip: it waits for the sums of all ranks, adds them, and stores the results to
//! all ranks.

use cuda_std::atomic::Order;

use super::super::partial::{MOST_FRAGMENTS, add_scaled};
use super::*;
use crate::files::collectives::elements::Elements;

/// A row of the fragments of a vector; fragments that it does not have are 0.
type Sums = [[f32; WIDTH as usize]; MOST_FRAGMENTS];

impl<W: Partial> Exchange<'_, W> {
    /// Reduces this block's share of the strips that the rank owns, and stores the results to all
    /// ranks. Each warp repeatedly takes the next 16 rows that no warp has taken. Every warp of the
    /// block calls it, all lanes together, once per launch.
    pub(in super::super) unsafe fn reduce(&self) {
        if self.local_only {
            return;
        }
        let (rank, n_ranks) = (self.team.rank as u32, self.team.n_ranks as u32);
        let strips = self.tiles.count() * STRIPS;
        // SAFETY: the whole warp is here, and after a barrier the shared words change only here.
        unsafe {
            let next = AtomicU32::from_ptr(words());
            loop {
                let is_first = warp::lane_id() == 0;
                let item = if is_first { next.fetch_add(1, Order::Relaxed, Scope::Cta) } else { 0 };
                let item = warp::shuffle_idx(item, 0);
                let owned = thread::block_idx_x() + item / GROUPS * thread::grid_dim_x();
                let number = owned * n_ranks + rank;
                if number >= strips {
                    break;
                }
                let (strip, i) = (self.tiles.strip(number), item % GROUPS);
                if strip.row + ROWS * i < self.tiles.m {
                    self.wait_for(strip);
                    self.reduce_rows(strip, i); // Only this warp has taken the rows.
                }
            }
            if warp::lane_id() == 0 {
                let warps_done = AtomicU32::from_ptr(words().add(1));
                warps_done.fetch_add(1, Order::Relaxed, Scope::Cta); // Read after a barrier.
            }
        }
    }

    /// Waits until every rank has set its flag of the strip, which no rank sets again before this
    /// block has passed its last barrier. All lanes call it together.
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

    /// Reduces 16 rows of a strip, from row `16 * i` on. The conditions are those of
    /// [`reduce`](Self::reduce); the sums of all ranks have arrived.
    unsafe fn reduce_rows(&self, strip: Strip, i: u32) {
        let slots = [0, 1].map(|source| self.slot(strip, source) * Self::SLOT);
        let stride = slots[1] - slots[0];
        let columns = WIDTH * W::FRAGMENTS as u32;
        // A lane takes the columns of one vector's fragments in two rows.
        for item in Strided::new(warp::lane_id(), ROWS / 2 * Self::VECTORS, warp::WARP_SIZE) {
            let (vector, row) = (item % Self::VECTORS, item / Self::VECTORS);
            let (j, column) = (vector * W::FRAGMENTS as u32, strip.column + vector * columns);
            if column < self.tiles.n {
                // SAFETY: the sums of all ranks have arrived: vectors in C were stored.
                unsafe {
                    let slot = self.partials.local().as_ptr().add(slots[0]);
                    let from = slot.add(Self::vector(i, j, 4 * row));
                    let scales = slot.add(Self::scales(i, j, row));
                    let [top, bottom] = self.sums(from, scales, stride);
                    let row = strip.row + ROWS * i + row;
                    self.store(row, column, top);
                    self.store(row + 8, column, bottom);
                }
            }
        }
    }

    /// Returns the sums over the ranks, in their order, of two rows of a vector's fragments. The
    /// first rank's four vectors are at `from`, and those of each next rank are `stride` words
    /// after them, as are its `scales`. The elements have arrived from every rank.
    unsafe fn sums(&self, from: *const u32, scales: *const u32, stride: usize) -> [Sums; 2] {
        let mut sums = [[[0.0; WIDTH as usize]; MOST_FRAGMENTS]; 2];
        for source in 0..self.team.n_ranks as usize {
            let scales = match W::HAS_SCALES {
                // SAFETY: the caller has waited for every rank's elements and their scales.
                true => Scale::unpack(unsafe { mem::load(scales.add(source * stride)) }),
                false => [1.0; 2],
            };
            for lane in 0..4 {
                // SAFETY: the caller has waited for every rank's elements.
                let part = unsafe { mem::load_vec(from.add(source * stride + 4 * lane).cast()) };
                let part = W::unpack(part);
                for i in 0..W::FRAGMENTS {
                    let rows = sums.each_mut().map(|row| &mut row[i]);
                    add_scaled(rows, lane, part[i], scales);
                }
            }
        }
        sums
    }

    /// Rounds a row of a vector's fragments, and stores the elements that are in C to every rank.
    /// Only this thread stores these elements.
    unsafe fn store(&self, row: u32, column: u32, sums: Sums) {
        let Tiles { m, n } = self.tiles;
        if row >= m {
            return;
        }
        let vectors = sums.map(bf16::narrow);
        for peer in self.team.all_from_self() {
            let row = self.c.lsa(peer).as_ptr().wrapping_add(row as usize * n as usize);
            for i in 0..W::FRAGMENTS {
                let at = (column / WIDTH) as usize + i;
                // SAFETY: only this thread stores the elements, as the caller guarantees.
                unsafe { Elements::<_>::new(row, n as usize).store(at, vectors[i]) };
            }
        }
    }
}
