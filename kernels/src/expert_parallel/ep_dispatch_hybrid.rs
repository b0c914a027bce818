//! Sends the rows of tokens to the ranks of their experts, over several LSA teams.

use super::prelude::*;

/// Vectors of a message's header: a word with the number of the rank's tokens, and padding.
const HEADER: usize = 1;

/// Returns the number of vectors of a message with a whole batch.
#[must_use]
pub const fn message_vectors(shape: Shape, batch: u32, has_scales: bool) -> usize {
    let row = shape.vectors + shape.scale_vectors_if(has_scales);
    rows_at(shape, batch) + (batch * row) as usize
}

/// Returns where the rows begin in a message, in vectors: after two words for each token and
/// expert. The first word is 1 plus the expert's index in the team, or 0 if it is elsewhere; the
/// second is its weight. Scales of 8-bit floats follow the rows.
const fn rows_at(shape: Shape, tokens: u32) -> usize {
    HEADER + (tokens * shape.top_k).div_ceil(2) as usize
}

/// Does what [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch) does, among the ranks of all LSA
/// teams: up to [`GROUP`](super::rail::GROUP) teams of the same size. A token's row goes once to
/// each team with one of its experts, to the rank there on this rank's rail, which stores it to the
/// ranks of its team. Rows of [`F8E4M3`] are converted in the same way, with scales. No rank is
/// absent.
///
/// `received` has in each rank the memory of [`Received`], at [`Received::offsets`] for all ranks,
/// in the order of the world. `mail` has room for messages of [`message_vectors`].
///
/// A launch that only sends also stores this rank's rows to its own team.
///
/// Grid: any, up to the LSA barriers and the batches of `shape.tokens`, the same in every rank.
/// Block: a multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed.
/// Connections: RAIL or FULL.
///
/// # Safety
///
/// The same as for [`ep_dispatch`](fn@super::ep_dispatch::ep_dispatch), with `received` in place of
/// the pointers; `relayed` has words for `shape.tokens` tokens of each rank of the rail, and of
/// this rank. All ranks launch this with the same sizes, and `mail` is as [`Mail`] says, its epoch
/// 0 before the first launch.
#[kernel(
    B = gin,
    T = [bf16, F8E4M3],
    max_threads = 512,
    min_blocks = 1,
    requires(
        tokens.count <= shape.tokens,
        shape.top_k <= 16,
        shape.experts > 0,
        mail.batch > 0,
        mail.batch <= BATCH,
        grid.x <= shape.tokens.div_ceil(mail.batch),
        Received::offsets(shape, comm.n_ranks() as usize, T::HAS_SCALES)[5] <= received.len(),
        Mail::words(
            shape,
            comm.rail_team().n_ranks as usize,
            mail.batch,
            message_vectors(shape, mail.batch, T::HAS_SCALES)
        ) <= mail.window.len()
    )
)]
pub unsafe fn ep_dispatch_hybrid<T: Rows, B: GinBackend>(
    comm: DevComm,
    mail: Mail,
    received: Window<u32>,
    shape: Shape,
    tokens: Tokens,
    relayed: Relayed,
    faults: *mut u32,
    steps: u32,
) {
    grid::launch_next();
    grid::wait_for_previous();
    let vectors = message_vectors(shape, mail.batch, T::HAS_SCALES);
    // SAFETY: the kernel's caller guarantees the elements and the memory.
    unsafe {
        let rail = &Rail::<B>::new(&comm, mail, shape, vectors);
        let (team, row) = (comm.lsa_team(), PhantomData::<T>);
        let routes = Words(shared_array![u32; BATCH as usize]);
        let dispatch =
            Dispatch { rail, team, shape, received, tokens, relayed, faults, routes, row };
        match T::HAS_SCALES {
            true => dispatch.run::<F8_VECTORS>(&comm, steps),
            false => dispatch.run::<VECTORS>(&comm, steps),
        }
    }
}

/// A launch's arguments. All threads of the block, or all lanes of the warp for a token or a part,
/// call the unsafe methods together; the kernel's caller guarantees the memory.
struct Dispatch<'a, T, B> {
    rail: &'a Rail<'a, B>,
    team: Team,
    shape: Shape,
    received: Window<u32>,
    tokens: Tokens,
    relayed: Relayed,
    faults: *mut u32,
    /// Words in shared memory: a bit for each target, team or rank, of each token of a batch.
    routes: Words,
    row: PhantomData<T>,
}

impl<T: Rows, B: GinBackend> Dispatch<'_, T, B> {
    /// Sends, and then receives.
    unsafe fn run<const V: usize>(&self, comm: &DevComm, steps: u32) {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        // SAFETY: the contract of the struct; barriers separate the steps.
        unsafe {
            if steps & Steps::SEND != 0 {
                self.rail.each_batch(|batch| self.pack::<V>(batch));
                // After this, no rank of the team uses what it received before. The barrier also
                // releases, as the last launch has not told the team that it has read this.
                barrier.sync(MemoryOrder::AcqRel);
                let me = self.rail.teams.rank; // Its message stays where it is packed.
                self.rail.each_batch(|batch| {
                    self.pass_on::<V>(me, batch, self.rail.outgoing(me, batch))
                });
            }
            if steps & Steps::RECEIVE != 0 {
                for team in self.rail.teams.others() {
                    self.rail.each_batch(|batch| {
                        self.rail.wait(team, batch);
                        self.pass_on::<V>(team, batch, self.rail.incoming(team, batch))
                    });
                }
                self.rail.end();
                // After this the rows of all teams are in this rank.
                barrier.sync(MemoryOrder::Release);
            }
        }
    }

    /// Calls `route` for each token of a batch, of a rank with `all`, which returns a bit for each
    /// target of the token's row, and stores these bits in the rank's `words`. Returns the bits of
    /// the token with this lane's number.
    unsafe fn routes(
        &self,
        batch: Batch,
        all: u32,
        words: *mut u32,
        route: impl Fn(u32) -> u32,
    ) -> u32 {
        let (lane, len) = (warp::lane_id(), batch.len(all));
        // SAFETY: a batch has up to `BATCH` tokens, and the barrier separates stores from loads.
        unsafe {
            for token in Strided::new(warp::warp_id(), len, block_warps()) {
                let bits = route(token);
                if lane == 0 {
                    self.routes.store(token, bits);
                    Words(words).store(batch.first() + token, bits);
                }
            }
            thread::sync_threads();
            if lane < len { self.routes.load(lane) } else { 0 }
        }
    }

    /// Packs and sends a batch to all teams. Returns how many tokens this rank has.
    unsafe fn pack<const V: usize>(&self, batch: Batch) -> u32 {
        let (rail, count, words) = (self.rail, self.tokens.count, self.relayed.teams);
        let (teams, len) = (rail.teams.n_ranks, batch.len(count));
        // SAFETY: the whole block is here, and the kernel's caller guarantees the memory.
        unsafe {
            let routes = self.routes(batch, count, words, |token| self.route(batch, token));
            batch.each_part::<V>(self.shape, count, routes, |part, token, bits| {
                let row = part.load_input::<T>(self.tokens.input, part.row);
                let row = Payload::of::<T>(&row);
                for team in 0..teams {
                    let routed = warp::ballot(routes >> team & 1 == 1);
                    if bits >> team & 1 == 1 {
                        let to = self.rows(rail.outgoing(team, batch), len, routed);
                        part.store_payload::<T>(to, position(routed, token), &row);
                    }
                }
            });
            for team in Coop::cta().strided(teams as u32) {
                let header = Vec16::from_bits([count, 0, 0, 0]);
                mem::store_vec(rail.outgoing(team as i32, batch), header);
            }
            thread::sync_threads();
            let sends = warp::warp_id() == 0;
            for team in (0..teams).take_while(|_| sends) {
                let rows = warp::ballot(routes >> team & 1 == 1).count_ones();
                if team != rail.teams.rank && warp::lane_id() == 0 {
                    let row = self.shape.vectors + self.shape.scale_vectors_if(T::HAS_SCALES);
                    rail.post(team, batch, rows_at(self.shape, len) as u32 + rows * row);
                }
            }
        }
        count
    }

    /// Packs the experts of a token for all teams. Returns a bit for each team that gets its row.
    unsafe fn route(&self, batch: Batch, token: u32) -> u32 {
        let (row, of_team) = (batch.first() + token, self.shape.experts * self.team.n_ranks as u32);
        // SAFETY: the contract of the struct; the input has the token.
        unsafe {
            let (id, weight) = self.tokens.expert(self.shape, row);
            let exists = (id as u32) < of_team * self.rail.teams.n_ranks as u32;
            if !exists && id != -1 {
                Faults::record_id(self.faults, row * self.shape.top_k + warp::lane_id(), id);
            }
            let expert = exists.then_some(id as u32);
            let to = |team| {
                let entry = self.entry(self.rail.outgoing(team, batch), token);
                [entry, entry.wrapping_add(1)]
            };
            let teams = 0..self.rail.teams.n_ranks;
            tell(self.shape.top_k, teams, of_team, (expert, weight.to_bits()), to)
        }
    }

    /// Stores to this team a batch from the rank of `team` on this rail, whose `message` has
    /// arrived. Returns how many tokens that rank has.
    unsafe fn pass_on<const V: usize>(&self, team: i32, batch: Batch, message: *mut u32) -> u32 {
        let Shape { tokens: most, top_k, experts, .. } = self.shape;
        let source = (team * self.team.n_ranks + self.team.rank) as usize;
        let of_source = source * most as usize;
        let ranks = (self.team.n_ranks * self.rail.teams.n_ranks) as usize;
        let [_, scales_at, experts_at, weights_at, counts_at, _] =
            Received::offsets(self.shape, ranks, T::HAS_SCALES);
        let received = |peer, at: usize| self.received.lsa(peer).as_ptr().wrapping_add(at);
        let (first, relayed) = (batch.first(), self.relayed.ranks_of(team, most));
        // SAFETY: the contract of the struct; the message's first word is the number of tokens.
        unsafe {
            let tokens = mem::load(message);
            let len = batch.len(tokens);
            if first == 0 {
                for peer in Coop::cta().strided(self.team.n_ranks as u32) {
                    mem::store(received(peer as i32, counts_at + source), tokens);
                }
            }
            let routes = self.routes(batch, tokens, relayed, |token| {
                let (mut word, mut weight) = (0, 0);
                if warp::lane_id() < top_k {
                    let entry = Words(self.entry(message, token));
                    (word, weight) = (entry.load(0), entry.load(1));
                }
                let at = (of_source + (first + token) as usize) * top_k as usize;
                let at = at + warp::lane_id() as usize;
                let to = |peer| [received(peer, experts_at + at), received(peer, weights_at + at)];
                let (peers, expert) = (self.team.all_from_self(), word.checked_sub(1));
                tell(top_k, peers, experts, (expert, weight), to)
            });
            let routed = warp::ballot(routes != 0);
            batch.each_part::<V>(self.shape, tokens, routes, |part, token, bits| {
                if bits == 0 {
                    return;
                }
                let [rows, scales] = self.rows(message, len, routed);
                let (from, to) = (position(routed, token), of_source + part.row as usize);
                let mut payload = Payload { row: part.load(rows, from), ..Payload::ZERO };
                if let (true, Some(at)) = (T::HAS_SCALES, part.scales_of(from)) {
                    payload.scales = mem::load_vec(scales.wrapping_add(4 * at).cast_const());
                }
                for peer in self.team.all_from_self() {
                    if bits >> peer & 1 == 1 {
                        let memory = [0, scales_at].map(|at| received(peer, at));
                        part.store_payload::<T>(memory, to, &payload);
                    }
                }
            });
            // After this, all threads have read the routes.
            thread::sync_threads();
            tokens
        }
    }

    /// Returns the address of the words of this lane's expert of a token in a message.
    fn entry(&self, message: *mut u32, token: u32) -> *mut u32 {
        let entry = token * self.shape.top_k + warp::lane_id();
        message.wrapping_add(4 * HEADER + 2 * entry as usize)
    }

    /// Returns the rows of a message with `len` tokens, and their scales; `routed` has a bit for
    /// each token that has a row.
    fn rows(&self, message: *mut u32, len: u32, routed: u32) -> [*mut u32; 2] {
        let rows = message.wrapping_add(4 * rows_at(self.shape, len));
        [rows, rows.wrapping_add((4 * routed.count_ones() * self.shape.vectors) as usize)]
    }
}
