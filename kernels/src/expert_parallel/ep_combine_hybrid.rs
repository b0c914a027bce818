//! Returns the experts' results to the ranks of the tokens, over several LSA teams.

use super::ep_combine::Launch;
use super::prelude::*;

/// Returns the number of vectors of a message with a whole batch.
#[must_use]
pub const fn message_vectors(shape: Shape, batch: u32) -> usize {
    (batch * shape.vectors) as usize
}

/// Returns the number of elements of a rank's `partials_of_team`, for `ranks` ranks in all teams.
#[must_use]
pub const fn partials(shape: Shape, ranks: usize) -> usize {
    8 * ranks * (shape.tokens * shape.vectors) as usize // A vector has 8 elements.
}

/// Does what [`ep_combine`](fn@super::ep_combine::ep_combine) does, among the ranks of all LSA
/// teams, after an [`ep_dispatch_hybrid`](fn@super::ep_dispatch_hybrid::ep_dispatch_hybrid).
///
/// Each rank sums the rows of its experts in the same way, and stores the rounded sum to the rank
/// of its team that has relayed the token. The relaying rank adds the sums of its team in the order
/// of the ranks, in f32, and rounds; this returns to the token's rank, which adds the teams' sums
/// in their order and then the residual, in f32, and rounds once. So a token's result does not
/// depend on its rank. If each team has at most one rank with the token's experts, the result is
/// that of `ep_combine`.
///
/// `partials_of_team` has [`partials`] elements for all ranks, and `mail` room for messages of
/// [`message_vectors`]. Both are other memory than that of the dispatch. All other arguments are
/// those of `ep_combine`, but of `received` only the counts are read: no rank is absent.
///
/// Grid, block and connections: as those of `ep_dispatch_hybrid`.
///
/// # Safety
///
/// The same as for [`ep_combine`](fn@super::ep_combine::ep_combine). `relayed` is as the last
/// dispatch has left it. All ranks launch this with the same sizes, and `mail` is as [`Mail`] says,
/// its epoch 0 before the first launch.
#[kernel(
    B = gin,
    max_threads = 512,
    min_blocks = 1,
    requires(
        results.tokens <= shape.tokens,
        mail.batch > 0,
        mail.batch <= super::rail::BATCH,
        grid.x <= shape.tokens.div_ceil(mail.batch),
        partials(shape, comm.n_ranks() as usize) <= partials_of_team.len(),
        Mail::words(
            shape,
            comm.rail_team().n_ranks as usize,
            mail.batch,
            message_vectors(shape, mail.batch)
        ) <= mail.window.len()
    )
)]
pub unsafe fn ep_combine_hybrid<B: GinBackend>(
    comm: DevComm,
    mail: Mail,
    partials_of_team: Window<bf16>,
    shape: Shape,
    results: Results,
    returns: *const u32,
    received: Received,
    relayed: Relayed,
    steps: u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    let local = Launch { comm: &comm, shape, results, returns, received, steps };
    // SAFETY: the kernel's caller guarantees the rows, the words and the memory of the messages.
    unsafe {
        let rail = &Rail::<B>::new(&comm, mail, shape, message_vectors(shape, mail.batch));
        let (team, partials) = (comm.lsa_team(), partials_of_team);
        let hybrid = Hybrid { local, rail, team, partials, relayed };
        if steps & Steps::SEND != 0 {
            let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
            // After this, no rank of the team reads the last launch's sums. The barrier also
            // releases, as the last launch has not told the team that it has read them.
            barrier.sync(MemoryOrder::AcqRel);
            for source in comm.world_team().all_from_self() {
                hybrid.sum_experts(source);
            }
            barrier.sync(MemoryOrder::AcqRel);
            for team in rail.teams.others() {
                hybrid.send(team);
            }
        }
        if steps & Steps::RECEIVE != 0 {
            hybrid.receive();
            rail.end();
        }
    }
}

struct Hybrid<'a, B> {
    local: Launch<'a>,
    rail: &'a Rail<'a, B>,
    team: Team,
    partials: Window<bf16>,
    relayed: Relayed,
}

impl<B: GinBackend> Hybrid<'_, B> {
    /// Returns the index of the partial sum that `rank` of this team has for a token from `team`.
    fn partial(&self, rank: i32, team: i32, token: u32) -> usize {
        let of_rank = rank as usize * self.rail.teams.n_ranks as usize + team as usize;
        of_rank * self.local.shape.tokens as usize + token as usize
    }

    /// Loads the bits that a dispatch has left in `words` for this lane's token of a batch.
    unsafe fn bits_of_lane(words: *const u32, batch: Batch, tokens: u32) -> u32 {
        let lane = warp::lane_id();
        if lane >= batch.len(tokens) {
            return 0;
        }
        // SAFETY: the batch has a token of this lane's number, and `words` its word.
        unsafe { mem::load(words.wrapping_add((batch.first() + lane) as usize)) }
    }

    /// Stores the sums of this rank's experts for the tokens of the rank `source` to the rank of
    /// this team on its rail. The whole block calls this.
    unsafe fn sum_experts(&self, source: i32) {
        // SAFETY: a team has at least one rank. (Otherwise divisions would be checked.)
        unsafe { assert_unchecked(self.team.n_ranks > 0) };
        let (team, rank) = (source / self.team.n_ranks, source % self.team.n_ranks);
        // SAFETY: the kernel's caller guarantees the memory; a warp's lanes take the same turns.
        unsafe {
            let (tokens, to) =
                (self.local.received.tokens_of(source as usize), self.partials.lsa(rank).as_ptr());
            self.rail.each_batch(|batch| {
                let parts = Parts::<SUMMED>::new(self.local.shape.vectors);
                for part in parts.of_block(batch.first(), batch.len(tokens)) {
                    let entries = self.local.entries(source as usize, part.row, tokens);
                    let row = sum::<SUMMED, TOGETHER>(self.local.results.rows, entries, part);
                    if let Some(row) = row {
                        part.store(to, self.partial(self.team.rank, team, part.row), &row);
                    }
                }
                tokens
            });
        }
    }

    /// Returns the sum over the ranks of this team for a token from `team`. `bits` has a bit for
    /// each rank that has experts of it. The ranks have stored their sums.
    unsafe fn sum_team(&self, team: i32, bits: u32, part: Part<SUMMED>) -> Row<SUMMED> {
        let (from, mut sums) = (self.partials.local().as_ptr(), [[0.0; 8]; SUMMED]);
        for rank in 0..self.team.n_ranks {
            if bits >> rank & 1 == 1 {
                // SAFETY: the rank has stored its sum, which nothing writes before the next launch.
                let row = unsafe { part.load(from, self.partial(rank, team, part.row)) };
                add(&mut sums, &row, 1.0);
            }
        }
        sums.map(bf16::narrow)
    }

    /// Sends this team's sums to the rank of `team` on this rail. The whole block calls this.
    unsafe fn send(&self, team: i32) {
        let source = team * self.team.n_ranks + self.team.rank;
        // SAFETY: the kernel's caller guarantees the memory; a warp's lanes take the same turns.
        unsafe {
            let tokens = self.local.received.tokens_of(source as usize);
            self.rail.each_batch(|batch| {
                let words = self.relayed.ranks_of(team, self.local.shape.tokens);
                let bits = Self::bits_of_lane(words, batch, tokens);
                let summed = warp::ballot(bits != 0);
                batch.each_part(self.local.shape, tokens, bits, |part, token, bits| {
                    if bits != 0 {
                        let row = self.sum_team(team, bits, part);
                        let to = self.rail.outgoing(team, batch).cast();
                        part.store(to, position(summed, token), &row);
                    }
                });
                thread::sync_threads();
                if thread::thread_idx_x() == 0 {
                    let vectors = summed.count_ones() * self.local.shape.vectors;
                    self.rail.post(team, batch, vectors);
                }
                tokens
            });
        }
    }

    /// Adds the sums of all teams for this rank's tokens. The whole block calls this.
    unsafe fn receive(&self) {
        let (results, teams) = (&self.local.results, self.rail.teams);
        self.rail.each_batch(|batch| {
            for team in teams.others() {
                self.rail.wait(team, batch);
            }
            // SAFETY: the kernel's caller guarantees the memory; a warp's lanes stay together.
            unsafe {
                let of_lane = Self::bits_of_lane(self.relayed.teams, batch, results.tokens);
                batch.each_part(self.local.shape, results.tokens, of_lane, |part, token, bits| {
                    let mut sums = [[0.0; 8]; SUMMED];
                    for team in 0..teams.n_ranks {
                        let from_team = warp::ballot(of_lane >> team & 1 == 1);
                        if bits >> team & 1 == 0 {
                            continue;
                        }
                        let row = if team == teams.rank {
                            let ranks = self.relayed.ranks_of(team, self.local.shape.tokens);
                            self.sum_team(team, Words(ranks).load(part.row), part)
                        } else {
                            let from = self.rail.incoming(team, batch).cast();
                            part.load(from, position(from_team, token))
                        };
                        add(&mut sums, &row, 1.0);
                    }
                    results.store(part, sums, &results.residual(part));
                });
            }
            results.tokens
        });
    }
}
