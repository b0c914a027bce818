//! Returns the experts' results to the ranks of the tokens, within the LSA team, where each rank
//! knows how many return.

use super::prelude::*;

/// Does what [`ep_combine`](fn@super::ep_combine::ep_combine) does, with the same bits, after an
/// [`ep_dispatch_counted`](fn@super::ep_dispatch_counted::ep_dispatch_counted).
///
/// `arrivals` has room for [`Counted::results`] rows of each token in each rank, for the rows that
/// return to it: those of a token in the order of the ranks, with this rank's own.
/// A launch that only sends waits until the peers have begun theirs.
///
/// Grid and block: as those of [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch).
///
/// # Safety
///
/// The same as for [`ep_combine`](fn@super::ep_combine::ep_combine). `memory` is as the last
/// dispatch has left it, and `shape.top_k` is that dispatch's.
#[kernel(
    max_threads = 512,
    requires(
        results.tokens <= shape.tokens,
        8 * (shape.tokens as usize * Counted::results(shape, comm.n_ranks() as usize))
            * shape.vectors as usize
            <= arrivals.len()
    )
)]
pub unsafe fn ep_combine_counted(
    comm: DevComm,
    memory: Counted,
    arrivals: Window<bf16>,
    shape: Shape,
    results: Results,
    steps: u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    // SAFETY: the kernel's caller guarantees the rows and the memory of the last dispatch.
    unsafe {
        let progress = &Progress::new(&comm, &memory, 1); // The combine.
        let parts = Parts::new(shape.vectors);
        let of_token = Counted::results(shape, progress.team.n_ranks as usize) as u32;
        let combine = Combine { progress, memory, arrivals, of_token, parts, results };
        if steps & Steps::SEND != 0 {
            if thread::block_idx_x() == 0 {
                progress.tell(Step::Ready);
            }
            progress.wait(Step::Ready);
            combine.send();
            progress.tell_by_last_block(Step::Returned);
        }
        if steps & Steps::RECEIVE != 0 {
            progress.wait(Step::Returned);
            for part in parts.of_grid(results.tokens) {
                combine.receive(part);
            }
            progress.epoch.end(Coop::cta());
        }
    }
}

struct Combine<'a> {
    progress: &'a Progress<'a>,
    memory: Counted,
    arrivals: Window<bf16>,
    /// The most results of a token.
    of_token: u32,
    parts: Parts<SUMMED>,
    results: Results,
}

impl Combine<'_> {
    /// Stores the sums of this rank's experts in the ranks of the tokens. The whole grid calls
    /// this, once.
    unsafe fn send(&self) {
        let ranks = self.progress.team.n_ranks as u32;
        let firsts = Words(shared_array![u32; RANKS + 1]);
        // SAFETY: the kernel's caller guarantees the memory; a warp's lanes take the same turns.
        unsafe {
            assert_unchecked(ranks > 0); // Otherwise divisions would be checked.
            for rank in Coop::cta().strided(ranks + 1) {
                firsts.store(rank, Words(self.memory.firsts).load(rank));
            }
            thread::sync_threads();
            let mut most = 0;
            for rank in 0..ranks {
                most = most.max(firsts.load(rank + 1) - firsts.load(rank));
            }
            // The ranks take turns, so that results go to all ranks at the same time.
            for part in self.parts.of_grid(ranks * most) {
                let rank = self.progress.team.rotated((part.row % ranks) as i32) as u32;
                let token = firsts.load(rank) + part.row / ranks;
                let is_absent = self.progress.absent.contains(rank as usize);
                if token < firsts.load(rank + 1) && !is_absent {
                    let (tokens, token) = (self.memory.tokens.local().as_ptr(), token as usize);
                    let entries = self.memory.returns(tokens, token).load(warp::lane_id());
                    let at = self.memory.origin(tokens, token).load(1) as usize;
                    if let Some(row) = sum::<SUMMED, TOGETHER>(self.results.rows, entries, part) {
                        part.store(self.arrivals.lsa(rank as i32).as_ptr(), at, &row);
                    }
                }
            }
        }
    }

    /// Adds up the results of a part of a token, which have arrived. A whole warp calls this.
    unsafe fn receive(&self, part: Part<SUMMED>) {
        let lane = warp::lane_id();
        // SAFETY: the kernel's caller guarantees the memory, and the results have arrived.
        unsafe {
            let targets = mem::load(self.memory.targets.wrapping_add(part.row as usize));
            let (count, mut absent) = (targets.count_ones(), targets & self.progress.absent.0);
            // Results are added as if they were rows of experts with weights of 1.
            let mut entries = match lane {
                _ if lane >= 2 * count => NONE,
                _ if lane.is_multiple_of(2) => part.row * self.of_token + lane / 2,
                _ => f32::to_bits(1.0),
            };
            while absent != 0 {
                let before = targets & ((1 << absent.trailing_zeros()) - 1);
                entries = if lane == 2 * before.count_ones() { DROPPED } else { entries };
                absent &= absent - 1;
            }
            let (from, mut sums) = (self.arrivals.local().as_ptr(), [[0.0; 8]; SUMMED]);
            add_rows::<SUMMED, TOGETHER>(&mut sums, from, (entries, count), part);
            self.results.store(part, sums, &self.results.residual(part));
        }
    }
}
