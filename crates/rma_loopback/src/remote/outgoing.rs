//! Sends requests of this rank to another process.

use std::collections::VecDeque;

use super::segment::{ENTRIES, Entry, RemoteSignal, Ring};
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::region::RegionId;
use crate::transfer::{Buffer, Data, Source, Transfer};

/// A put or a get.
pub(crate) enum RemoteKind {
    /// Source of the data on this rank; `None` for a signal alone.
    Put(Option<Buffer>),
    /// Target of the data on this rank.
    Get(Buffer),
}

/// An operation on another process's memory.
pub(crate) struct RemoteOp {
    pub(crate) kind: RemoteKind,
    pub(crate) bytes: usize,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) signal: Option<RemoteSignal>,
}

// SAFETY: the pointers are in registered regions, which NCCL keeps until the operation is complete.
unsafe impl Send for RemoteOp {}

#[derive(Clone, Copy)]
enum Stage {
    /// The slot is filled once the outbound stream has passed the mark.
    Filling(u64),
    /// The slot is filled, or there is nothing to fill.
    Ready,
    /// Published to the owner.
    Published,
    /// This rank's inbound stream copies the data of a get out of the slot.
    CopyingOut(u64),
}

struct InFlight {
    stage: Stage,
    entry: Entry,
    /// Target of a get's data.
    get_target: Option<Buffer>,
    has_slot: bool,
    /// Whether this is the operation's last entry.
    last: bool,
}

/// The sender's end of a ring: operations are split into entries, which are published and completed
/// in order.
pub(crate) struct Outgoing {
    operations: VecDeque<RemoteOp>,
    /// Bytes of the first operation that are already split into entries.
    split_bytes: usize,
    in_flight: VecDeque<InFlight>,
    /// Number of the first entry in flight.
    first: u64,
    /// The number of entries published: at least `first`, as only published ones are completed.
    published: u64,
    /// The number of slots in use. Slots are freed in the order in which they are taken, so the
    /// number and the next slot say which ones are free.
    slots_taken: usize,
    next_slot: usize,
    /// The numbers of operations accepted and completed.
    accepted: u64,
    completed: u64,
    /// The connection has failed: nothing more is started.
    cancelled: bool,
}

// SAFETY: any thread may access the memory at its addresses, and pass these to the driver.
unsafe impl Send for Outgoing {}

impl Outgoing {
    pub(crate) fn new() -> Self {
        Self {
            operations: VecDeque::with_capacity(ENTRIES as usize),
            split_bytes: 0,
            in_flight: VecDeque::with_capacity(ENTRIES as usize),
            first: 0,
            published: 0,
            slots_taken: 0,
            next_slot: 0,
            accepted: 0,
            completed: 0,
            cancelled: false,
        }
    }

    /// Accepts an operation; returns its sequence number.
    pub(crate) fn submit(&mut self, op: RemoteOp) -> u64 {
        self.operations.push_back(op);
        self.accepted += 1;
        self.accepted
    }

    /// Drops pending operations: from now on the host accesses no memory of an operation.
    pub(crate) fn cancel(&mut self) {
        self.cancelled = true;
        self.operations.clear();
        self.in_flight.clear();
    }

    /// Returns the sequence number of the last operation.
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.completed >= sequence
    }

    /// Returns whether the owner has entries left to execute.
    pub(crate) fn waits_for_owner(&self, ring: Ring<'_>) -> bool {
        let all_entries = self.first + self.in_flight.len() as u64;
        !self.operations.is_empty() || ring.acknowledged() < all_entries
    }

    pub(crate) fn progress(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        if self.cancelled || self.accepted == self.completed {
            return Ok(());
        }
        self.complete(ring, me)?;
        self.split(ring, me)?;
        self.publish(ring, me);
        Ok(())
    }

    /// Splits operations into entries while there are free entries and slots.
    fn split(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let sizes = ring.sizes();
        while let Some(op) = self.operations.front() {
            let has_slot = op.bytes > 0;
            if self.in_flight.len() as u64 == ENTRIES
                || (has_slot && self.slots_taken == sizes.slots)
            {
                break;
            }
            let bytes = (op.bytes - self.split_bytes).min(sizes.slot_bytes);
            let last = self.split_bytes + bytes == op.bytes;
            let slot = self.next_slot;
            let (get, get_target, stage) = match op.kind {
                RemoteKind::Get(buffer) => (true, Some(buffer.at(self.split_bytes)), Stage::Ready),
                RemoteKind::Put(None) => (false, None, Stage::Ready),
                RemoteKind::Put(Some(from)) => {
                    (false, None, fill(me, from.at(self.split_bytes), ring.slot(slot), bytes)?)
                }
            };
            let entry = Entry {
                get,
                slot,
                bytes,
                region: op.region,
                offset: op.offset + self.split_bytes as u64,
                signal: op.signal.filter(|_| last),
            };
            self.in_flight.push_back(InFlight { stage, entry, get_target, has_slot, last });
            if has_slot {
                self.next_slot = (slot + 1) % sizes.slots;
                self.slots_taken += 1;
            }
            if last {
                self.operations.pop_front();
                self.split_bytes = 0;
            } else {
                self.split_bytes += bytes;
            }
        }
        Ok(())
    }

    /// Publishes ready entries, in order.
    fn publish(&mut self, ring: Ring<'_>, me: &LocalRank) {
        let before = self.published;
        let skip = (self.published - self.first) as usize;
        for in_flight in self.in_flight.iter_mut().skip(skip) {
            let ready = match in_flight.stage {
                Stage::Filling(mark) => me.staging.stream.passed(mark),
                _ => true,
            };
            if !ready {
                break;
            }
            ring.write(self.published, in_flight.entry);
            in_flight.stage = Stage::Published;
            self.published += 1;
        }
        if self.published > before {
            ring.publish(self.published);
        }
    }

    /// Copies the data of gets out of the slots, and completes entries, in order.
    fn complete(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let acknowledged = ring.acknowledged();
        if acknowledged > self.published {
            return Err(Error::Internal(format!(
                "another process wrote an invalid entry count to shared memory: {acknowledged} \
                 acknowledged of {} published",
                self.published
            )));
        }
        // This is 0 if the other process has lowered the count.
        let executed = acknowledged.saturating_sub(self.first) as usize;
        for in_flight in self.in_flight.iter_mut().take(executed) {
            if let (Stage::Published, Some(to)) = (in_flight.stage, in_flight.get_target)
                && in_flight.entry.bytes > 0
            {
                let from = Source::Pinned(ring.slot(in_flight.entry.slot));
                let data = Data::Range { from, to, bytes: in_flight.entry.bytes, moved: 0 };
                let sequence = me.inbound.submit(Transfer { data, signal: None });
                in_flight.stage = Stage::CopyingOut(sequence);
            }
        }
        for _ in 0..executed {
            let Some(in_flight) = self.in_flight.pop_front_if(|in_flight| match in_flight.stage {
                Stage::CopyingOut(sequence) => me.inbound.done(sequence),
                _ => true,
            }) else {
                break;
            };
            self.first += 1;
            self.slots_taken -= usize::from(in_flight.has_slot);
            self.completed += u64::from(in_flight.last);
        }
        Ok(())
    }
}

/// Starts to fill a slot with a put's data.
fn fill(me: &LocalRank, from: Buffer, slot: *mut u8, bytes: usize) -> Result<Stage> {
    match from {
        Buffer::Device(address) => {
            let stream = &me.staging.stream;
            let _entered = stream.device.enter()?;
            stream.copy_d2h(slot, address, bytes)?;
            Ok(Stage::Filling(stream.mark()?))
        }
        Buffer::Host(address) | Buffer::Pinned(address) => {
            // SAFETY: the range is in a registered region, checked when `put` was called; this side
            // owns the slot.
            unsafe { std::ptr::copy_nonoverlapping(address, slot, bytes) };
            Ok(Stage::Ready)
        }
    }
}
