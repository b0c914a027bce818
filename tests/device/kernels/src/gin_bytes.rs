//! A kernel that tests GIN puts and gets of any length and alignment, on several contexts.

use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, LsaPtr, MemoryOrder};

use crate::extra::{Extra, Words, share};
use crate::files::gin::{cast, connected};

/// Messages from one rank to another per launch.
pub const MESSAGES: usize = 12;
/// Bytes of a slot, which has room for one message at some offset.
pub const SLOT: usize = 80;

/// A message's length, and its offsets in its three slots: the source, the put's target, and the
/// get's target.
struct Message {
    len: usize,
    starts: [usize; 3],
}

impl Message {
    /// Returns the message `k` from rank `from` to rank `to`: its length is 1 to 70 bytes, its
    /// offsets have every alignment.
    fn of(from: i32, to: i32, k: usize) -> Self {
        let seed = 7 * from as usize + 3 * to as usize + 13 * k;
        let len = 1 + seed % 70;
        let room = SLOT - len + 1;
        Self { len, starts: [seed * 5 % room, seed * 11 % room, seed * 3 % room] }
    }

    /// Returns the byte `i` of message `k`; never 0. Launches differ in `salt`.
    fn byte(from: i32, to: i32, k: usize, salt: u32, i: usize) -> u8 {
        1 + ((from as usize * 31 + to as usize * 17 + k * 7 + i + salt as usize) % 255) as u8
    }
}

/// Returns how many bytes of a slot (index `which` of [`Message::starts`]) differ from the expected
/// ones: message `k`, and zeros around it.
unsafe fn wrong_in(
    slot: LsaPtr<u8>,
    first: usize,
    which: usize,
    from: i32,
    to: i32,
    k: usize,
    salt: u32,
) -> u64 {
    let message = Message::of(from, to, k);
    let begin = message.starts[which];
    let mut wrong = 0;
    for i in 0..SLOT {
        let inside = i >= begin && i < begin + message.len;
        let expected = if inside { Message::byte(from, to, k, salt, i - begin) } else { 0 };
        // SAFETY: the caller passes a slot in the window, which nothing writes.
        wrong += u64::from(unsafe { slot.load(first + i) } != expected);
    }
    wrong
}

/// Sends [`MESSAGES`] messages from every rank of a team to every rank: the sender puts them, and
/// the receiver gets them as well. Each block uses a context. Bit 0 of `n` selects the team (0 the
/// world, 1 the rail), the others vary the bytes. For each block `mail` has three areas, with one
/// slot per message: sources, targets of puts, targets of gets.
#[kernel(B = gin)]
pub unsafe fn gin_bytes<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, block, salt) = (Coop::cta(), thread::block_idx_x(), n >> 1);
    let team = connected(&comm, n & 1);
    // SAFETY: a word consists of bytes, and any byte is valid.
    let mail = unsafe { cast::<u8>(mail) };
    let slots = team.n_ranks as usize * MESSAGES;
    let area = slots * SLOT;
    let [sources, puts, gets] = [0, 1, 2].map(|i| (3 * block as usize + i) * area);
    let slot = |area: usize, rank: i32, k: usize| area + (rank as usize * MESSAGES + k) * SLOT;
    let gin = comm.gin::<B>(block);
    let arrived = extra.signal(&comm, 0);
    let world = |rank: i32| team.to_world(comm.rank(), rank);
    let me = comm.rank();

    // SAFETY: each block has its own areas. Targets of puts are read after the signals, targets of
    // gets after the flush; both are cleared before the barrier.
    unsafe {
        for i in share(coop, slots) {
            let (rank, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let message = Message::of(me, world(rank), k);
            for b in 0..SLOT {
                mail.local().store(slot(puts, rank, k) + b, 0);
                mail.local().store(slot(gets, rank, k) + b, 0);
            }
            for b in 0..message.len {
                let byte = Message::byte(me, world(rank), k, salt, b);
                mail.local().store(slot(sources, rank, k) + message.starts[0] + b, byte);
            }
        }
        let set = if n & 1 == 0 { gin.world_barriers() } else { gin.rail_barriers() };
        let mut barrier = set.barrier(coop, BarrierIndex::this_block());
        barrier.sync(MemoryOrder::AcqRel, FenceLevel::None);

        // One thread puts each message.
        for i in share(coop, slots) {
            let (rank, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let message = Message::of(me, world(rank), k);
            let from = mail.at(slot(sources, rank, k) + message.starts[0]);
            let to = mail.at(slot(puts, team.rank, k) + message.starts[1]);
            let put = gin.put(team, rank, to, from, message.len);
            put.signal(arrived.inc().weak()).post(Coop::thread());

            let message = Message::of(world(rank), me, k);
            let from = mail.at(slot(sources, team.rank, k) + message.starts[0]);
            let to = mail.at(slot(gets, rank, k) + message.starts[2]);
            gin.get(team, rank, from, to, message.len).post(Coop::thread());
        }
        gin.wait_signal_follow_shadow(coop, arrived, slots as u64, MemoryOrder::Acquire);
        gin.flush(coop, MemoryOrder::Acquire);

        let mut wrong = 0;
        for i in share(coop, slots) {
            let (rank, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let (from, local) = (world(rank), mail.local());
            wrong += wrong_in(local, slot(puts, rank, k), 1, from, me, k, salt);
            wrong += wrong_in(local, slot(gets, rank, k), 2, from, me, k, salt);
        }
        out.local().store(thread::index_1d() as usize, wrong);
    }
}
