//! The memory that a thread polls: it is recognised by the thread's loads, and named in reports.
//!
//! # Safety
//!
//! A report reads a word that the thread has read before, if its memory is still live.

use cuda_std::arch::{Access, pending_of_mbarrier};

use crate::base::error::{Site, Waiting};
use crate::base::owner::{Owner, Registry};
use crate::gpu::thread::{Thread, Wait};

/// The number of plain loads of the same few addresses in a row after which a thread counts as
/// polling. Each of these loads ends a slice.
const POLLS: u32 = 64;

/// Plain loads in a row that may be a poll.
#[derive(Clone, Copy, Default)]
pub(crate) struct RepeatedLoads {
    /// The addresses of the loads; 0 stands for none.
    addresses: [usize; 4],
    loads: u32,
    /// The number of [changes](crate::gpu::gpus::Gpus::changes) at the last of them.
    changes: u64,
}

impl RepeatedLoads {
    /// Adds a load; returns `None` if it shows that the thread does not poll.
    fn with_load(mut self, address: usize, changes: u64) -> Option<Self> {
        let known = |other: &usize| *other == address || *other == 0;
        let at = self.addresses.iter().position(known)?;
        self.addresses[at] = address;
        let loads = if self.changes == changes { self.loads + 1 } else { 1 };
        Some(Self { loads, changes, ..self })
    }
}

impl Thread {
    /// May yield before an access, and records whether it is progress.
    #[inline(always)]
    pub(crate) fn begin_access(&self, (address, bytes): (usize, usize), access: Access, at: Site) {
        let gpus = self.gpus();
        // The thread has not called `spin` since its last read-modify-write: that one has changed
        // memory.
        if self.updating.replace(false) {
            gpus.progress();
        }
        // A thread that polls yields in `spin`.
        let may_yield = !matches!(access, Access::AtomicRead(..) | Access::BarrierTest);
        let is_last = gpus.accesses.get() >= gpus.slice_end.get();
        if may_yield && (gpus.settings.preempts(access) || is_last) {
            self.end_slice((address, bytes), access, at);
        }
        match access {
            Access::Read | Access::ReadByOther => {}
            Access::Write | Access::AtomicWrite(..) => gpus.progress(),
            Access::AtomicRmw(..) | Access::BarrierChange => self.updating.set(true),
            Access::AtomicRead(..) | Access::BarrierTest => {
                self.read.set([(address, bytes), self.read.get()[0]]);
                // A thread that accesses new addresses is not polling, unless it is in a named wait
                // (`crate::gpu::waits`).
                let [a, b, c, d] = self.polled.get();
                if ![a, b, c, d].contains(&address) && !self.in_named_wait.get() {
                    self.polled.set([address, a, b, c]);
                    gpus.reset_idle();
                }
            }
        }
    }

    /// Yields before an access. A thread that has used up its slice may poll by plain loads: then
    /// its next accesses end slices too. After [`POLLS`] loads of the same few addresses, during
    /// which nothing has changed, it counts as polling.
    #[cold]
    pub(crate) fn end_slice(&self, (address, bytes): (usize, usize), access: Access, at: Site) {
        let gpus = self.gpus();
        let repeated = (access == Access::Read).then(|| self.repeated.get());
        let repeated = repeated.and_then(|loads| loads.with_load(address, gpus.changes.get()));
        let repeated = repeated.unwrap_or_default();
        self.repeated.set(repeated);
        let plain = repeated.loads > POLLS;
        if plain {
            self.read.set([(address, bytes); 2]);
        }
        self.suspend(if plain { Wait::Spin { at, plain } } else { Wait::Ready });
        if repeated.loads > 0 {
            gpus.slice_end.set(gpus.accesses.get() + 1);
        }
    }

    /// Returns the memory that the thread has read last in a poll, and its value, except the host's
    /// abort flag, which a wait of `nccl_device` reads after the memory that it waits for.
    pub(crate) fn polled_memory(&self) -> Option<String> {
        let [last, before] = self.read.get();
        let memory = &self.gpus().memory;
        let is_pinned = memory.owner_at(last.0).is_some_and(|(owner, _)| owner == Owner::Pinned);
        let place = if is_pinned { self.value_at(before) } else { None };
        place.or_else(|| self.value_at(last))
    }

    /// Returns the name and value of memory that the thread has read.
    fn value_at(&self, (address, bytes): (usize, usize)) -> Option<String> {
        let memory = &self.gpus().memory;
        let place = if bytes == 0 {
            return None;
        } else if self.block().shared.borrow().contains(address, bytes) {
            self.shared_place(address)
        } else if memory.is_live(address, bytes) {
            let (owner, offset) = memory.owner_at(address)?;
            self.arguments().locate(owner, offset)
        } else {
            return None;
        };
        let mut value = [0; 16];
        // SAFETY: the memory is live, and `value` has as many bytes.
        unsafe {
            std::ptr::with_exposed_provenance::<u8>(address)
                .copy_to_nonoverlapping(value.as_mut_ptr(), bytes.min(value.len()));
        }
        let value = u128::from_le_bytes(value);
        Some(match bytes {
            0..=8 => format!("{place} is {value}"),
            9..=16 => format!("{place} is {value:#x}"),
            _ => format!("{place} begins with {value:#x}"),
        })
    }

    /// Returns what ends the phase of an `mbarrier` for which the thread waits.
    pub(crate) fn waits_for_phase(&self, barrier: usize, parity: u32) -> Waiting {
        let is_here = self.block().shared.borrow().contains(barrier, 8);
        // SAFETY: the word is in the block's shared memory.
        let word = is_here.then(|| unsafe { *std::ptr::with_exposed_provenance::<u64>(barrier) });
        let (arrivals, bytes) = word.map_or((0, 0), pending_of_mbarrier);
        Waiting::Phase { memory: self.shared_place(barrier), parity, arrivals, bytes }
    }
}
