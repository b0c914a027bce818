//! Counts of the data that kernels send to other ranks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use cuda_std::arch::Access;

use crate::base::owner::{Owner, Registry};
use crate::memory::Memory;

/// The data that the kernels of a rank have sent to another rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// The number of stores and atomic updates to its memory. A bulk copy is stores of 16 bytes.
    pub stores: u64,
    /// The number of bytes of the stores.
    pub stored_bytes: u64,
    /// The number of operations of the network with data or a signal for that rank.
    pub puts: u64,
    /// The number of bytes of their data.
    pub put_bytes: u64,
}

/// Counts what kernels send, while it is on.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    is_on: Cell<bool>,
    pairs: RefCell<BTreeMap<(usize, usize), Traffic>>,
}

impl Counters {
    /// Counts from 0 from now on.
    pub(crate) fn begin(&self) {
        self.is_on.set(true);
        self.pairs.borrow_mut().clear();
    }

    /// Returns the traffic of each pair of ranks that has any, by sender and receiver.
    pub(crate) fn all(&self) -> BTreeMap<(usize, usize), Traffic> {
        self.pairs.borrow().clone()
    }

    /// Counts an access of a kernel of `gpu` to global memory, if it sends anything.
    #[inline(always)]
    pub(crate) fn access(
        &self,
        memory: &Memory,
        gpu: usize,
        (address, bytes): (usize, usize),
        access: Access,
    ) {
        if self.is_on.get() {
            self.count(memory, gpu, (address, bytes), access);
        }
    }

    #[cold]
    fn count(&self, memory: &Memory, gpu: usize, (address, bytes): (usize, usize), access: Access) {
        let (Access::Write | Access::AtomicWrite(..) | Access::AtomicRmw(..)) = access else {
            return;
        };
        let rank = match memory.owner_at(address) {
            Some((
                Owner::Window { rank, .. }
                | Owner::Resources { rank, .. }
                | Owner::Buffer { rank, .. },
                _,
            )) => rank,
            Some((Owner::Pinned, _)) | None => return,
        };
        self.add((gpu, rank), |traffic| {
            traffic.stores += 1;
            traffic.stored_bytes += bytes as u64;
        });
    }

    /// Counts an operation of the network that moves `bytes` bytes.
    pub(crate) fn put(&self, gpu: usize, rank: usize, bytes: usize) {
        if self.is_on.get() {
            self.add((gpu, rank), |traffic| {
                traffic.puts += 1;
                traffic.put_bytes += bytes as u64;
            });
        }
    }

    fn add(&self, pair: (usize, usize), to: impl FnOnce(&mut Traffic)) {
        if pair.0 != pair.1 {
            to(self.pairs.borrow_mut().entry(pair).or_default());
        }
    }
}
