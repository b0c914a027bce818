//! Staging slots: pinned memory for copies that cannot be direct.
//!
//! A slot is taken, filled by the rank's outbound stream or by the host, read by the target's
//! stream, and free again when that stream has written a *mark*, a count in pinned memory, after
//! the copy. The number of slots is fixed: while none is free, the copy waits.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Address, Device, Pinned, RawEvent, call};
use crate::error::Result;
use crate::stream::TrackedStream;

enum Slot {
    Free,
    Taken,
    /// Free once the stream has passed the mark.
    Until(Arc<TrackedStream>, u64),
}

/// A rank's slots, and its outbound stream, which fills them.
pub(crate) struct Staging {
    pub(crate) stream: TrackedStream,
    memory: ManuallyDrop<Pinned>,
    /// One event per slot, recorded after the copy that fills it.
    events: Vec<RawEvent>,
    slots: Mutex<Vec<Slot>>,
    pub(crate) slot_bytes: usize,
}

// SAFETY: events may be used by every thread; the slots are locked.
unsafe impl Send for Staging {}
// SAFETY: events may be used by several threads at a time; the slots are locked.
unsafe impl Sync for Staging {}

impl Staging {
    pub(crate) fn new(device: &Device, slots: usize, slot_bytes: usize) -> Result<Self> {
        let mut staging = Self {
            stream: TrackedStream::new(device)?,
            memory: ManuallyDrop::new(device.pinned(slots * slot_bytes)?),
            events: Vec::with_capacity(slots),
            slots: Mutex::new((0..slots).map(|_| Slot::Free).collect()),
            slot_bytes,
        };
        for _ in 0..slots {
            staging.events.push(device.create_event()?);
        }
        Ok(staging)
    }

    /// Takes a free slot, if there is one.
    pub(crate) fn take(&self) -> Option<usize> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let free = slots.iter().position(|slot| match slot {
            Slot::Free => true,
            Slot::Taken => false,
            Slot::Until(stream, mark) => stream.passed(*mark),
        })?;
        slots[free] = Slot::Taken;
        Some(free)
    }

    /// Frees a slot.
    pub(crate) fn free(&self, slot: usize) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)[slot] = Slot::Free;
    }

    /// Frees a slot when `stream` has passed `mark`.
    pub(crate) fn free_when(&self, slot: usize, stream: &Arc<TrackedStream>, mark: u64) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)[slot] =
            Slot::Until(Arc::clone(stream), mark);
    }

    /// Returns the memory of a slot.
    pub(crate) fn slot_memory(&self, slot: usize) -> *mut u8 {
        debug_assert!((slot + 1) * self.slot_bytes <= self.memory.bytes);
        // SAFETY: the slot is inside the allocation.
        unsafe { self.memory.host.add(slot * self.slot_bytes) }
    }

    /// Starts to fill a slot from this rank's device; `target` waits until it is filled.
    pub(crate) fn fill(
        &self,
        slot: usize,
        from: Address,
        bytes: usize,
        target: &TrackedStream,
    ) -> Result<()> {
        let event = self.events[slot];
        {
            let _entered = self.stream.device.enter()?;
            self.stream.copy_d2h(self.slot_memory(slot), from, bytes)?;
            self.stream.record(event)?;
        }
        target.wait(event)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The streams of all local ranks, which read the slots, are idle or stuck together.
        if self.stream.ends() {
            // SAFETY: the memory is dropped here only, and not used again: no copy is in flight.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
        let device = &self.stream.device;
        let Ok(_entered) = device.enter() else { return };
        for event in &self.events {
            let _ = call!(*device.driver, "at close", cuEventDestroy_v2(*event));
        }
    }
}
