//! The steps that the collectives by Lamport messages share.
//!
//! A thread sends what it has to send before it receives: it loads its first vectors while the
//! number of the launch is on its way, and sends all of its slots. While the messages are on their
//! way, the block ends its session, so that the next launch may begin. Then it receives its slots.

use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use nccl_device::{Coop, DevComm, Element, Lamport, LamportMemory, LamportSlots};

/// What a collective sends and receives. All lanes of a warp call a method together, with
/// neighbouring slots; each slot is used by one thread.
pub(super) trait OneStep {
    /// The type of the elements that travel.
    type Element: Element;

    /// Returns how many slots a launch uses for each rank.
    fn used(&self) -> u32;

    /// Returns whether this rank sends.
    fn sends(&self) -> bool {
        true
    }

    /// Prefetches what [`load`](Self::load) loads. It is called before the wait for the previous
    /// launch, so that the addresses are computed there, too.
    unsafe fn prefetch<const N: usize>(&self, _slot: u32) {}

    /// Loads what this rank sends in a slot, in the order of the distances to the ranks that get
    /// it; nothing is loaded for a slot that is not used.
    unsafe fn load<const N: usize>(&self, slot: u32) -> [Vec16<Self::Element>; N];

    /// Sends what [`load`](Self::load) has loaded.
    unsafe fn send<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        slot: u32,
        mine: &[Vec16<Self::Element>; N],
    );

    /// Sends what the session requires of a rank that sends nothing, as one thread.
    unsafe fn send_nothing<const N: usize>(&self, _session: &Lamport<'_, N>) {}

    /// Receives a slot from the ranks that send, and stores the result.
    unsafe fn receive<const N: usize>(&self, session: &Lamport<'_, N>, slot: u32);

    /// Receives from the ranks that send [nothing](Self::send_nothing), as one thread.
    unsafe fn receive_nothing<const N: usize>(&self, _session: &Lamport<'_, N>) {}
}

/// Runs a collective among the 2, 4 or 8 ranks of the LSA team. All threads of the grid call this.
/// The memory is as [`LamportSlots`] needs it.
pub(super) unsafe fn exchange(comm: &DevComm, memory: &LamportMemory, collective: &impl OneStep) {
    // SAFETY: the caller guarantees the memory, and the team has the ranks that the slots are for.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => exchange_of(LamportSlots::<2>::new(comm, memory), collective),
            4 => exchange_of(LamportSlots::<4>::new(comm, memory), collective),
            8 => exchange_of(LamportSlots::<8>::new(comm, memory), collective),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// Runs a collective among the `N` ranks of the LSA team.
///
/// # Safety
///
/// The memory is as [`LamportSlots`] needs it. All threads of the grid call this.
unsafe fn exchange_of<C: OneStep, const N: usize>(slots: LamportSlots<'_, N>, collective: &C) {
    let (used, sends) = (collective.used(), collective.sends());
    let threads = thread::grid_dim_x() * thread::block_dim_x();
    let first = thread::index_1d();
    // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread, and all
    // lanes of a warp use those of a row together.
    unsafe {
        if sends {
            collective.prefetch::<N>(first);
        }
        grid::wait_for_previous();
        // These loads precede the first send, which waits for the number of the launch.
        let mut mine = [Vec16::from_bits([0; 4]); N];
        if sends {
            mine = collective.load(first);
        }
        let session = slots.begin(used);
        if sends {
            let mut slot = first;
            while slot < used {
                collective.send(&session, slot, &mine);
                slot += threads;
                mine = collective.load(slot);
            }
        } else if first == 0 {
            collective.send_nothing(&session);
        }
        grid::launch_next();
        if sends {
            // The session ends while the messages are on their way.
            thread::sync_threads();
            session.end(Coop::cta());
        }
        let mut slot = first;
        while slot < used {
            collective.receive(&session, slot);
            slot += threads;
        }
        if first == 0 {
            collective.receive_nothing(&session);
        }
        if !sends {
            thread::sync_threads();
            session.end(Coop::cta());
        }
    }
}
