//! The steps that the collectives by Lamport messages share.
//!
//! A thread sends what it has to send before it receives: it loads its first vectors while the
//! number of the launch is on its way, and sends all of its slots. While the messages are on their
//! way, the block ends its session, so that the next launch may begin. Then it receives its slots.

use super::prelude::*;

/// What a collective sends and receives among `N` ranks. The lanes of a warp call a method for
/// neighbouring slots, together if their number is a multiple of 32; each slot is used by one
/// thread.
pub(super) trait OneStep<const N: usize> {
    /// The type of the elements that travel.
    type Element: Element;

    /// Returns how many slots a launch uses for each rank.
    fn used(&self) -> u32;

    /// Returns whether the message is [long](is_long).
    fn is_long(&self) -> bool {
        is_long(self.used(), threads())
    }

    /// Returns the only rank that sends, or [`Messages::ALL`].
    fn sender(&self) -> u32 {
        Messages::ALL
    }

    /// Prefetches what [`load`](Self::load) loads. It is called before the wait for the previous
    /// launch, so that the addresses are computed there, too.
    unsafe fn prefetch(&self, _slot: u32) {}

    /// Loads what this rank sends in a slot, in the order of the distances to the ranks that get
    /// it; nothing is loaded for a slot that is not used.
    unsafe fn load(&self, slot: u32) -> [Vec16<Self::Element>; N];

    /// Sends what [`load`](Self::load) has loaded.
    unsafe fn send(&self, session: &Lamport<'_, N>, slot: u32, mine: &[Vec16<Self::Element>; N]);

    /// Receives a slot from the ranks that send, and stores the result.
    unsafe fn receive(&self, session: &Lamport<'_, N>, slot: u32);

    /// Receives two slots, from two ranks.
    unsafe fn receive_two(&self, session: &Lamport<'_, N>, slots: [u32; 2]) {
        // SAFETY: the contract of this function is that of `receive`, for both slots.
        unsafe {
            self.receive(session, slots[0]);
            self.receive(session, slots[1]);
        }
    }
}

/// Runs a collective among the 2, 4 or 8 ranks of the LSA team. The whole grid calls this. The
/// memory is as [`LamportSlots`] needs it.
pub(super) unsafe fn exchange(
    comm: &DevComm,
    memory: &LamportMemory,
    collective: &(impl OneStep<2> + OneStep<4> + OneStep<8>),
) {
    // SAFETY: the caller guarantees the memory, and the team has the ranks that the slots are for.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => exchange_of::<2>(comm, memory, collective),
            4 => exchange_of::<4>(comm, memory, collective),
            8 => exchange_of::<8>(comm, memory, collective),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// Does the same as [`exchange`], for `N` ranks.
unsafe fn exchange_of<const N: usize>(
    comm: &DevComm,
    memory: &LamportMemory,
    collective: &impl OneStep<N>,
) {
    let (used, sender, is_long) = (collective.used(), collective.sender(), collective.is_long());
    let me = comm.lsa_team().rank as u32;
    let sends = sender == Messages::ALL || sender == me;
    let (first, threads) = (thread::index_1d(), threads());
    // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread.
    unsafe {
        let slots = LamportSlots::<N>::new(comm, memory);
        if sends {
            collective.prefetch(first);
        }
        wait_for_previous(memory, is_long);
        // These loads precede the first send, which waits for the number of the launch.
        let mut mine = [Vec16::from_bits([0; 4]); N];
        if sends {
            mine = collective.load(first);
        }
        let session = slots.begin(used);
        if sends {
            let mut slot = first;
            // Two ranks have the registers for two slots in flight.
            while N == 2 && is_long && slot < used {
                let next = collective.load(slot + threads);
                collective.send(&session, slot, &mine);
                slot += threads;
                mine = next;
            }
            while slot < used {
                collective.send(&session, slot, &mine);
                slot += threads;
                mine = collective.load(slot);
            }
        } else if first == 0 {
            // Each rank sends to each peer: something that counts as a message.
            for distance in 1..N {
                session.send(distance, 0, Vec16::<u8>::from_bits([0; 4]));
            }
        }
        grid::launch_next();
        if sends {
            // The session ends while the messages are on their way.
            thread::sync_threads();
            session.end(Coop::cta());
        }
        let mut slot = first;
        while N == 2 && is_long && slot + threads < used {
            collective.receive_two(&session, [slot, slot + threads]);
            slot += 2 * threads;
        }
        while slot < used {
            collective.receive(&session, slot);
            slot += threads;
        }
        if first == 0 && sender != Messages::ALL {
            for source in (0..N as u32).filter(|&source| source != me && source != sender) {
                session.receive::<u8>(source as usize, 0);
            }
        }
        if !sends {
            // This rank has waited at once: it had no time in which to end the session before.
            thread::sync_threads();
            session.end(Coop::cta());
        }
    }
}

/// Waits for the previous launch. If the message is [long](is_long), and the launches are alone on
/// the GPU, the next one may begin before the wait: its blocks take the room that blocks of this
/// one leave. For a short message it would only delay the first loads.
#[track_caller]
pub(super) fn wait_for_previous(memory: &LamportMemory, is_long: bool) {
    if memory.alone && is_long {
        grid::launch_next();
    }
    grid::wait_for_previous();
}

/// Returns whether at least half of the `threads` threads of a grid have several of the `used`
/// slots of a message, which is then long.
#[must_use]
pub fn is_long(used: u32, threads: u32) -> bool {
    2 * used >= 3 * threads
}

/// Returns the number of threads of the grid.
pub(super) fn threads() -> u32 {
    thread::grid_dim_x() * thread::block_dim_x()
}
