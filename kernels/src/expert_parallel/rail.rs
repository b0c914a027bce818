//! Messages between the LSA teams: over the network, between the ranks of a *rail*, which have the
//! same number in each team. Tokens go in *batches*: a message is one put with a batch's rows,
//! packed, to the rank of the other team, which passes it on by load and store.
//!
//! Block `b` of `n` blocks has the batches `b`, `b + n`, `b + 2 * n` and so on, the same in every
//! rank. It sends its first batch in every launch, also without a token: that one says how many
//! tokens the rank has, and so which others follow. Each batch of each team has a signal of its
//! own, which counts its messages; nothing is reset. (A signal for several messages would not say
//! which of them have arrived.)
//!
//! Messages are packed in one place, which is free again after the launch's flush, and arrive in
//! two banks, which take turns: a rank that has a message of a launch knows that the launch before
//! it has ended in the sender, and so the rank's next message overwrites only what has been read.

use nccl_device::SignalRange;
use nccl_device::gin::{Gin, GinBackend, SignalId};

use super::prelude::*;

/// The most tokens of a batch: each lane of a warp has one.
pub const BATCH: u32 = warp::WARP_SIZE;

/// The most ranks of an LSA team, and the most teams: a word has a bit for each.
pub const GROUP: usize = 32;

/// Words of a vector.
const VECTOR: usize = 4;

/// Areas of the window: one where messages are packed, and two banks where they arrive.
const AREAS: usize = 3;

/// The memory of messages between teams, of one kernel.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Mail {
    /// [`Mail::words`] words in each rank.
    pub window: Window<u32>,
    /// [`Mail::signals`] signals.
    pub signals: SignalRange,
    /// [`Epoch::WORDS`] words of this GPU.
    pub epoch: *mut u32,
    /// Tokens of a batch, from 1 to [`BATCH`].
    pub batch: u32,
}

impl Mail {
    /// Returns the number of words of the window for messages of `vectors` vectors.
    #[must_use]
    pub const fn words(shape: Shape, teams: usize, batch: u32, vectors: usize) -> usize {
        AREAS * Self::signals(shape, teams, batch) * vectors * VECTOR
    }

    /// Returns the number of signals: one for each batch of each team.
    #[must_use]
    pub const fn signals(shape: Shape, teams: usize, batch: u32) -> usize {
        teams * shape.tokens.div_ceil(batch) as usize
    }
}

/// The routes that a rank has relayed in a dispatch, which say from where results return.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Relayed {
    /// A bit for each rank of this team that gets a token's row, for each token of each rank of
    /// this rank's rail. The words of team `t` begin at index `t * Shape::tokens`.
    pub ranks: *mut u32,
    /// A bit for each team that gets a token's row, for each token of this rank.
    pub teams: *mut u32,
}

impl Relayed {
    /// Returns the words of the tokens from the rank of `team` on this rail, `most` for each rank.
    pub(super) fn ranks_of(self, team: i32, most: u32) -> *mut u32 {
        self.ranks.wrapping_add((team as u32 * most) as usize)
    }
}

/// The messages of a launch.
pub(super) struct Rail<'a, B> {
    /// The ranks of the rail, whose numbers are those of the teams.
    pub(super) teams: Team,
    gin: Gin<'a, B>,
    comm: &'a DevComm,
    mail: Mail,
    /// The most batches of a rank.
    batches: usize,
    /// Vectors of a message.
    vectors: usize,
    epoch: Epoch,
}

impl<'a, B: GinBackend> Rail<'a, B> {
    /// Begins a launch with messages of at most `vectors` vectors. The memory is as [`Mail`] says,
    /// and one launch at a time uses it, in every rank with the same arguments and the same grid.
    #[track_caller]
    pub(super) unsafe fn new(comm: &'a DevComm, mail: Mail, shape: Shape, vectors: usize) -> Self {
        Self {
            teams: comm.rail_team(),
            // `gin` traps without contexts.
            gin: comm.gin::<B>(thread::block_idx_x() % comm.n_gin_contexts().max(1)),
            comm,
            mail,
            batches: shape.tokens.div_ceil(mail.batch) as usize,
            vectors,
            // SAFETY: the caller guarantees `Mail`'s memory, which no other launch uses.
            epoch: unsafe { Epoch::begin(mail.epoch) },
        }
    }

    /// Calls `work` with this block's batches of a rank, always with the first one. `work` returns
    /// how many tokens the rank has; batches after them are left out.
    pub(super) fn each_batch(&self, work: impl Fn(Batch) -> u32) {
        let mut batch = Batch { index: thread::block_idx_x(), tokens: self.mail.batch };
        loop {
            let tokens = work(batch);
            batch.index += thread::grid_dim_x();
            if batch.first() >= tokens {
                break;
            }
        }
    }

    /// Returns where this rank packs a message for a team.
    pub(super) fn outgoing(&self, team: i32, batch: Batch) -> *mut u32 {
        self.mail.window.local().as_ptr().wrapping_add(self.place(0, team, batch))
    }

    /// Returns where a message of a team arrives.
    pub(super) fn incoming(&self, team: i32, batch: Batch) -> *mut u32 {
        let bank = 1 + self.epoch.get() as usize % 2;
        self.mail.window.local().as_ptr().wrapping_add(self.place(bank, team, batch))
    }

    /// Returns the word in the window at which the message of a team's batch begins, in an area.
    fn place(&self, area: usize, team: i32, batch: Batch) -> usize {
        let all = self.teams.n_ranks as usize * self.batches;
        (area * all + self.index(team, batch)) * self.vectors * VECTOR
    }

    /// Returns the number of a team's batch among those of all teams.
    fn index(&self, team: i32, batch: Batch) -> usize {
        team as usize * self.batches + batch.index as usize
    }

    #[track_caller]
    fn signal(&self, team: i32, batch: Batch) -> SignalId {
        // SAFETY: `mail` has a signal for each batch of each team.
        unsafe { SignalId::of(self.comm, self.mail.signals, self.index(team, batch) as u32) }
    }

    /// Sends `vectors` vectors of a packed message to a team; at least one, so that there is a
    /// message. One thread calls this after a barrier of the block, once for each batch and launch.
    pub(super) unsafe fn post(&self, team: i32, batch: Batch, vectors: u32) {
        let (bank, me) = (1 + self.epoch.get() as usize % 2, self.teams.rank);
        let to = self.mail.window.at(self.place(bank, me, batch));
        let from = self.mail.window.at(self.place(0, team, batch));
        let words = vectors.max(1) as usize * VECTOR;
        // SAFETY: the caller has packed the message. The peer has read what was in this bank.
        let put = unsafe { self.gin.put(self.teams, team, to, from, words) };
        let arrived = self.signal(me, batch);
        put.signal(arrived.inc().weak()).post(Coop::thread());
    }

    /// Waits for a team's message. The whole block calls this.
    pub(super) fn wait(&self, team: i32, batch: Batch) {
        let arrived = self.signal(team, batch);
        if thread::thread_idx_x() == 0 {
            self.gin.expect(arrived, 1);
        }
        // It begins with a barrier, after which all threads see the new shadow.
        self.gin.wait_signal_meets_shadow(Coop::cta(), arrived, MemoryOrder::Acquire);
    }

    /// Waits until the messages that this block has sent may be overwritten, and ends the launch's
    /// epoch. The whole block calls this, once, in a launch that receives, after all other methods.
    pub(super) unsafe fn end(&self) {
        self.gin.flush(Coop::cta(), MemoryOrder::Relaxed);
        // SAFETY: the launch receives, and does not use the messages any more.
        unsafe { self.epoch.end(Coop::cta()) };
    }
}

/// A batch of tokens of a rank.
#[derive(Clone, Copy)]
pub(super) struct Batch {
    index: u32,
    /// The tokens of a whole batch.
    tokens: u32,
}

impl Batch {
    /// Returns the number of the batch's first token.
    pub(super) fn first(self) -> u32 {
        self.index * self.tokens
    }

    /// Returns how many tokens the batch has, of a rank with `all` tokens.
    pub(super) fn len(self, all: u32) -> u32 {
        all.saturating_sub(self.first()).min(self.tokens)
    }

    /// Calls `work` with this warp's parts of the batch's rows, of a rank with `all` tokens: with
    /// each part, its token's number in the batch, and the bits that the lane with that number has.
    /// A whole warp calls this.
    pub(super) unsafe fn each_part<const V: usize>(
        self,
        shape: Shape,
        all: u32,
        bits_of_lane: u32,
        work: impl Fn(Part<V>, u32, u32),
    ) {
        for part in Parts::new(shape.vectors).of_block(self.first(), self.len(all)) {
            let token = part.row - self.first();
            // SAFETY: all lanes are here; a warp's lanes have the same parts.
            work(part, token, unsafe { warp::shuffle_idx(bits_of_lane, token) });
        }
    }
}

/// Tells each of the groups of `size` experts, not 0, which of its experts each lane has for a
/// token with `top_k`, and the bits of its weight, where `to` has the words. Returns a bit for each
/// group that has such an expert. A whole warp calls this.
pub(super) unsafe fn tell(
    top_k: u32,
    groups: impl Iterator<Item = i32>,
    size: u32,
    (expert, weight): (Option<u32>, u32),
    to: impl Fn(i32) -> [*mut u32; 2],
) -> u32 {
    let mut bits = 0;
    // SAFETY: the caller's contract. (Otherwise divisions would be checked.)
    unsafe {
        assert_unchecked(size > 0);
        for group in groups {
            let here = expert.filter(|expert| expert / size == group as u32);
            bits |= u32::from(warp::any(here.is_some())) << group;
            if warp::lane_id() < top_k {
                let [words, weights] = to(group);
                mem::store(words, here.map_or(0, |expert| expert % size + 1));
                mem::store(weights, weight);
            }
        }
    }
    bits
}

/// Returns the index of a token's row among the packed rows; `packed` has a bit for each of them.
pub(super) fn position(packed: u32, token: u32) -> usize {
    (packed & ((1 << token) - 1)).count_ones() as usize
}
