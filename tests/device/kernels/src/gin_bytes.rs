//! GIN: puts and gets of any number of bytes, from and to any byte, on many contexts.

use cuda_std::prelude::*;
use nccl_device::gin::{GinBackend, SignalId};
use nccl_device::{BarrierIndex, Coop, DevComm, FenceLevel, LsaPtr, MemoryOrder};

use crate::extra::{Extra, Words, share};
use crate::files::gin::{cast, connected};

/// Messages from one rank to another in a launch, and the bytes of the slot in which each lies
/// somewhere.
pub const MESSAGES: usize = 12;
/// See [`MESSAGES`].
pub const SLOT: usize = 80;

/// A message: its bytes, and where it begins in its slots at the source, at the target of a put,
/// and at the target of a get.
struct Message {
    len: usize,
    starts: [usize; 3],
}

impl Message {
    /// Message `k` from rank `from` to rank `to`: lengths from 1 to 70, with a begin of every
    /// remainder.
    #[inline(always)]
    fn of(from: i32, to: i32, k: usize) -> Self {
        let mix = 7 * from as usize + 3 * to as usize + 13 * k;
        let len = 1 + mix % 70;
        let room = SLOT - len + 1;
        Self { len, starts: [mix * 5 % room, mix * 11 % room, mix * 3 % room] }
    }

    /// Its byte `i`; never 0.
    #[inline(always)]
    fn byte(from: i32, to: i32, k: usize, salt: u32, i: usize) -> u8 {
        1 + ((from as usize * 31 + to as usize * 17 + k * 7 + i + salt as usize) % 255) as u8
    }
}

/// How many bytes of a slot are not message `k`, and nothing around it.
#[inline(always)]
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
        let wanted = if inside { Message::byte(from, to, k, salt, i - begin) } else { 0 };
        // SAFETY: the caller's: the slot's bytes, at rest.
        wrong += u64::from(unsafe { slot.load(first + i) } != wanted);
    }
    wrong
}

/// Every rank of a team has [`MESSAGES`] for every other, which it puts, and which the other then
/// gets as well. A block a context; the team by `n & 1`: 0 the world, 1 the rail; `n >> 1` makes
/// other bytes. `mail` has three areas of a slot per message for each block: sources, targets of
/// puts, targets of gets.
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
    // SAFETY: bytes are what words are made of.
    let mail = unsafe { cast::<u8>(mail) };
    let slots = team.n_ranks as usize * MESSAGES;
    let area = slots * SLOT;
    let [sources, puts, gets] = [0, 1, 2].map(|i| (3 * block as usize + i) * area);
    let slot = |area: usize, member: i32, k: usize| area + (member as usize * MESSAGES + k) * SLOT;
    let gin = comm.gin::<B>(block);
    let arrived = SignalId::of(&comm, extra.signals(), 0);
    let world = |member: i32| team.to_world(comm.rank(), member);
    let me = comm.rank();

    // SAFETY: areas of the block's own. What is put is looked at after its signals, what is got
    // after a flush; a rank's own slots are cleared before it says that it is there.
    unsafe {
        for i in share(coop, slots) {
            let (member, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let message = Message::of(me, world(member), k);
            for b in 0..SLOT {
                mail.local().store(slot(puts, member, k) + b, 0);
                mail.local().store(slot(gets, member, k) + b, 0);
            }
            for b in 0..message.len {
                let byte = Message::byte(me, world(member), k, salt, b);
                mail.local().store(slot(sources, member, k) + message.starts[0] + b, byte);
            }
        }
        let set = if n & 1 == 0 { gin.world_barriers() } else { gin.rail_barriers() };
        let mut barrier = set.barrier(coop, BarrierIndex::this_block());
        barrier.sync(MemoryOrder::AcqRel, FenceLevel::None);

        // A thread per message.
        for i in share(coop, slots) {
            let (member, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let message = Message::of(me, world(member), k);
            let from = mail.at(slot(sources, member, k) + message.starts[0]);
            let to = mail.at(slot(puts, team.rank, k) + message.starts[1]);
            let put = gin.put(team, member, to, from, message.len);
            put.signal(arrived.inc().weak()).post(Coop::thread());

            let message = Message::of(world(member), me, k);
            let from = mail.at(slot(sources, team.rank, k) + message.starts[0]);
            let to = mail.at(slot(gets, member, k) + message.starts[2]);
            gin.get(team, member, from, to, message.len).post(Coop::thread());
        }
        gin.wait_signal_follow_shadow(coop, arrived, slots as u64, MemoryOrder::Acquire);
        gin.flush(coop, MemoryOrder::Acquire);

        let mut wrong = 0;
        for i in share(coop, slots) {
            let (member, k) = ((i / MESSAGES) as i32, i % MESSAGES);
            let (from, local) = (world(member), mail.local());
            wrong += wrong_in(local, slot(puts, member, k), 1, from, me, k, salt);
            wrong += wrong_in(local, slot(gets, member, k), 2, from, me, k, salt);
        }
        out.local().store(thread::index_1d() as usize, wrong);
    }
}
