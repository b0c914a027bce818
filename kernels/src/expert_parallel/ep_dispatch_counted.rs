//! Sends the rows of tokens to their places in the order of the experts, within the LSA team, after
//! all ranks have told each other how many rows there are.

use super::places::{BATCH, Dispatch, Shared};
use super::prelude::*;

/// Stores the rows of this rank's `tokens` in `rows` of the ranks of the LSA team that have one of
/// their experts, in the order of the experts, and receives those of all ranks. The team has up to
/// [`RANKS`], with up to [`Shape::EXPERTS`] experts together.
///
/// A row goes once to each rank, to the first of its places there; `ep_expand` copies it to the
/// others. The sender knows a rank's place for a row, since all ranks first tell each other how
/// many rows they have for each expert: `rows` has no more than `memory.capacity`, from all ranks
/// together. `scales` has the scales of 8-bit floats: [`Shape::scale_vectors`] vectors of each row.
/// If a rank needs more rows, the rows after these are left out, and all ranks record it in
/// `faults`.
///
/// `grouped.offsets` and `grouped.sizes` become those of this rank's experts, which begin at
/// multiples of `grouped.alignment`, the same in every rank. Nothing else in `grouped` is used.
///
/// `tokens` and `steps` are those of [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch), except
/// that a launch that only sends waits for the peers' counts.
///
/// Grid and block: as those of `ep_dispatch`.
///
/// # Safety
///
/// `tokens` and `faults` are as `ep_dispatch` needs them, `memory` is as [`Counted`] says, `rows`
/// and `scales` have room for `memory.capacity` rows, and `grouped.offsets` and `grouped.sizes`
/// have a word for each expert of a rank, the former one more. Nothing else accesses these until
/// the kernel has ended. All ranks launch this with the same sizes.
#[kernel(
    T = [bf16, F8E4M3],
    max_threads = 512,
    requires(
        tokens.count <= shape.tokens,
        shape.top_k <= 16,
        shape.experts > 0,
        grouped.alignment > 0,
        shape.experts * comm.n_ranks() as u32 <= Shape::EXPERTS as u32,
        Counted::count_words(shape, comm.n_ranks() as usize) <= memory.counts.len(),
        Counted::token_words(memory.capacity as usize) <= memory.tokens.len()
    )
)]
pub unsafe fn ep_dispatch_counted<T: Rows>(
    comm: DevComm,
    memory: Counted,
    rows: Window<T>,
    scales: Window<f32>,
    shape: Shape,
    tokens: Tokens,
    grouped: Grouped,
    faults: *mut u32,
    steps: u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    // SAFETY: the kernel's caller guarantees the elements, the rows and the memory.
    unsafe {
        let progress = &Progress::new(&comm, &memory, 0); // The dispatch.
        let shared = Shared::new();
        let dispatch =
            Dispatch { progress, memory, rows, scales, shape, tokens, grouped, faults, shared };
        if steps & Steps::SEND != 0 {
            match T::HAS_SCALES {
                true => dispatch.send::<F8_VECTORS>(),
                false => dispatch.send::<VECTORS>(),
            }
            progress.tell_by_last_block(Step::Sent);
        }
        if steps & Steps::RECEIVE != 0 {
            // The kernel ends only after all rows have arrived.
            if thread::block_idx_x() == 0 {
                progress.wait(Step::Sent);
            }
            progress.epoch.end(Coop::cta());
        }
    }
}

impl<T: Rows> Dispatch<'_, T> {
    /// Sends this block's tokens. The whole block calls this.
    unsafe fn send<const V: usize>(&self) {
        let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
        let (first, count) = share(self.tokens.count as usize, block, blocks);
        let end = (first + count) as u32;
        // SAFETY: the whole block is here, and barriers separate the places of two batches.
        unsafe {
            self.count(first as u32);
            self.exchange_counts();
            self.add_others();
            self.find_starts();
            for first in Strided::new(first as u32, end, BATCH) {
                let batch = BATCH.min(end - first);
                if thread::thread_idx_x() < warp::WARP_SIZE {
                    self.stage(first, batch);
                    for token in 0..batch {
                        self.place(token);
                    }
                }
                thread::sync_threads();
                for part in Parts::new(self.shape.vectors).of_block(0, batch) {
                    self.store::<V>(first, part);
                }
                // After this, all threads have read the places.
                thread::sync_threads();
            }
        }
    }

    /// Stores a part of a row of a batch, which begins with token `first`, in the ranks that get
    /// it, and tells them which rows are those of the token. A whole warp calls this.
    unsafe fn store<const V: usize>(&self, first: u32, part: Part<V>) {
        let Self { progress: Progress { team, .. }, memory, tokens, shared, .. } = self;
        let (token, me) = (first + part.row, team.rank as u32);
        // SAFETY: lane `k` has the `k`-th place, where only this warp stores the part.
        unsafe {
            let row = part.load_input::<T>(tokens.input, token);
            let (rank_of_lane, place) = self.placed(part.row);
            let targets = mem::load(shared.targets.wrapping_add(part.row as usize));
            let payload = Payload::of::<T>(&row);
            // Each rank begins with itself, so that the ranks store to different ones.
            let mut rest = targets.rotate_right(me);
            while rest != 0 {
                let rank = (me + rest.trailing_zeros()) % u64::BITS;
                rest &= rest - 1;
                let place = (rank_of_lane == Some(rank)).then_some(place);
                let to = warp_min(place.unwrap_or(NONE));
                if to < memory.capacity {
                    let rows = self.rows.lsa(rank as i32).as_ptr().cast();
                    let scales = self.scales.lsa(rank as i32).as_ptr().cast();
                    part.store_payload::<T>([rows, scales], to as usize, &payload);
                }
                if part.is_first {
                    let index = shared.received.load(part.row * RANKS as u32 + rank);
                    let before = (targets & ((1 << rank) - 1)).count_ones();
                    self.tell(rank, index as usize, token, place, before);
                }
            }
            if part.is_first && warp::lane_id() == 0 {
                mem::store(memory.targets.wrapping_add(token as usize), targets);
            }
        }
    }

    /// Tells a rank, whose received token `index` is this rank's `token`, the places of this lane's
    /// row, and where its result returns: after those of `before` ranks. A whole warp calls this.
    unsafe fn tell(&self, rank: u32, index: usize, token: u32, place: Option<u32>, before: u32) {
        let Self { progress: Progress { team, .. }, memory, shape, .. } = self;
        let to = memory.tokens.lsa(rank as i32).as_ptr();
        // SAFETY: `memory` of each rank has the words of the token, and only this warp tells it.
        unsafe {
            let (mut weight, at) = (0.0, token * shape.top_k + warp::lane_id());
            if place.is_some() {
                weight = mem::load(self.tokens.weights.wrapping_add(at as usize));
            }
            let (is_there, place) = (place.is_some(), place.unwrap_or(0));
            store_returns(memory.returns(to, index), is_there, place, weight.to_bits());
            if warp::lane_id() == 0 {
                let results = Counted::results(*shape, team.n_ranks as usize) as u32;
                let origin = memory.origin(to, index);
                origin.store(0, team.rank as u32 * shape.tokens + token);
                origin.store(1, token * results + before);
            }
        }
    }
}
