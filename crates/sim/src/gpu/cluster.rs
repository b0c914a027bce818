//! Simulated thread block clusters: blocks that start together and access each other's shared
//! memory.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use crate::base::error::Site;
use crate::base::mutation::Change;
use crate::gpu::shared::SharedMemory;
use crate::gpu::thread::{Block, Thread, Wait};

/// The blocks of a cluster. In a launch without clusters each block is a cluster of one.
pub(crate) struct Cluster {
    /// The blocks by their rank in the cluster. The references are weak since a block owns its
    /// cluster.
    blocks: RefCell<Vec<Weak<Block>>>,
    /// The number of threads.
    threads: u32,
    /// The number of threads that have not ended.
    live: Cell<u32>,
    /// The number of threads that wait at the cluster's barrier.
    arrived: Cell<u32>,
    /// The shared memory of blocks that have ended. It is kept since another block's thread may
    /// have checked an access to it, and may make the access later.
    ended: RefCell<Vec<SharedMemory>>,
}

impl Cluster {
    /// Returns a cluster of `threads` threads, without blocks yet.
    pub(crate) fn new(threads: u32) -> Self {
        let (blocks, arrived, ended) = Default::default();
        Self { blocks, threads, live: Cell::new(threads), arrived, ended }
    }

    /// Adds the block of the next rank.
    pub(crate) fn add(&self, block: &Rc<Block>) {
        self.blocks.borrow_mut().push(Rc::downgrade(block));
    }

    /// Keeps the shared memory of a block that has ended.
    pub(crate) fn block_ended(&self, shared: SharedMemory) {
        self.ended.borrow_mut().push(shared);
    }

    /// Returns the block of this rank. The caller drops it before threads run again, since a block
    /// counts as running while a reference to it is held.
    fn block(&self, rank: usize) -> Result<Rc<Block>, String> {
        let blocks = self.blocks.borrow();
        let Some(block) = blocks.get(rank) else {
            return Err(format!("there is no block {rank} in a cluster of {}", blocks.len()));
        };
        block.upgrade().ok_or_else(|| format!("block {rank} of the cluster has ended"))
    }

    /// Returns the blocks that have not ended.
    fn running(&self) -> impl Iterator<Item = Rc<Block>> {
        let n = self.blocks.borrow().len();
        (0..n).filter_map(|rank| self.block(rank).ok())
    }

    /// Returns whether the bytes are in the shared memory of a running block.
    pub(crate) fn contains(&self, address: usize, bytes: usize) -> bool {
        self.running().any(|block| block.shared.borrow().contains(address, bytes))
    }

    /// Wakes the threads at the barrier, if all have arrived, and returns whether they have; `last`
    /// is the thread that arrives now, and whether its arrival is relaxed.
    fn release_if_complete(&self, last: Option<(&Thread, bool)>) -> bool {
        if self.arrived.get() < self.live.get() {
            return false;
        }
        self.arrived.set(0);
        let blocks: Vec<_> = self.running().collect();
        let threads = || blocks.iter().flat_map(|block| block.threads());
        let waiting = || {
            threads().filter_map(|thread| match thread.wait.get() {
                Wait::Cluster { relaxed, .. } => Some((thread, relaxed)),
                _ => None,
            })
        };
        let all = || last.into_iter().chain(waiting());
        if let Some((thread, _)) = all().next() {
            let races = &thread.gpus().memory.races;
            let of = |relaxed| all().filter(move |arrival| arrival.1 == relaxed).map(|a| &a.0.race);
            if of(true).next().is_some() {
                races.meet(|| all().map(|(thread, _)| &thread.race));
            }
            // A thread that has exited has not arrived, and is ordered before none.
            let whole = self.live.get() == self.threads && of(true).next().is_none();
            races.barrier(|| of(false), whole);
            // The wait after a relaxed arrival acquires what the others have released.
            if let Some(released) = of(false).next() {
                of(true).for_each(|thread| races.learn_from(thread, released));
            }
        }
        waiting().for_each(|(thread, _)| thread.wake());
        true
    }

    /// Wakes the threads that wait for a phase of the `mbarrier` at this address.
    pub(crate) fn phase_ended(&self, barrier: usize) {
        let waits = |thread: &&Thread| match thread.wait.get() {
            Wait::Phase { barrier: other, .. } => other == barrier,
            _ => false,
        };
        self.running().for_each(|block| block.threads().filter(waits).for_each(Thread::wake));
    }

    /// Counts a thread that has exited, and completes the barrier if the others wait for it alone.
    pub(crate) fn thread_ended(&self) {
        self.live.set(self.live.get() - 1);
        if self.arrived.get() > 0 {
            self.release_if_complete(None);
        }
    }
}

/// Arrives at the barrier of the thread's cluster, and waits for the other threads.
pub(crate) fn sync(thread: &Thread, relaxed: bool, at: Site) {
    let relaxed = match thread.gpus().change_at(at) {
        Some(Change::Remove) => return,
        Some(Change::Relax) => true,
        _ => relaxed,
    };
    let cluster = &thread.block().cluster;
    cluster.arrived.set(cluster.arrived.get() + 1);
    match cluster.release_if_complete(Some((thread, relaxed))) {
        true => thread.arrived_last(),
        false => thread.suspend(Wait::Cluster { relaxed, at }),
    }
}

/// Returns the address in the cluster's block `rank` that corresponds to `address` in the thread's
/// block.
pub(crate) fn map_shared(thread: &Thread, address: usize, rank: u32, at: Site) -> usize {
    thread.gpus().called();
    let block = thread.block();
    let map = || {
        let place = block.shared.borrow().place(address);
        let place = place.ok_or_else(|| {
            format!("address {address:#x} is not in the shared memory of the thread's block")
        })?;
        let peer = block.cluster.block(rank as usize)?;
        let mapped = peer.shared.borrow_mut().address_of(place);
        mapped.ok_or_else(|| {
            format!("block {rank} of the cluster has no room for its {} bytes", place.bytes)
        })
    };
    // The closure's borrows have ended when the thread fails.
    map().unwrap_or_else(|what| thread.misuse(at, what))
}
