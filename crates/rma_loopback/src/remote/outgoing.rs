//! Requests of this rank to another process.

use std::collections::VecDeque;

use super::segment::{ENTRIES, Entry, RemoteSignal, Ring};
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::region::RegionId;
use crate::transfer::{Buffer, Data, Source, Transfer};

/// A put or a get.
pub(crate) enum RemoteKind {
    /// Source of the data on this rank; `None`: a signal alone.
    Put(Option<Buffer>),
    /// Target of the data on this rank.
    Get(Buffer),
}

/// An operation on another process's memory.
pub(crate) struct Job {
    pub(crate) kind: RemoteKind,
    pub(crate) bytes: usize,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) signal: Option<RemoteSignal>,
}

// SAFETY: the pointers are in registered regions, which NCCL keeps until the operation is complete.
unsafe impl Send for Job {}

#[derive(Clone, Copy)]
enum Stage {
    /// The slot is filled once the outbound stream has passed the mark.
    Filling(u64),
    Ready,
    /// Published to the owner.
    Published,
    /// The data of a get is on this rank's lane.
    Landing(u64),
}

struct InFlight {
    stage: Stage,
    entry: Entry,
    /// Target of a get's data.
    landing: Option<Buffer>,
    has_slot: bool,
    /// Whether it is the job's last entry.
    last: bool,
}

/// The sender's end of a ring: jobs are split into entries, which are published and completed in
/// order.
pub(crate) struct Outgoing {
    jobs: VecDeque<Job>,
    /// Bytes of the first job that have entries.
    cut: usize,
    in_flight: VecDeque<InFlight>,
    /// Number of the first entry in flight.
    first: u64,
    published: u64,
    slots_taken: usize,
    next_slot: usize,
    accepted: u64,
    completed: u64,
    /// The connection has failed: nothing more is started.
    cancelled: bool,
}

// SAFETY: as for `Job`.
unsafe impl Send for Outgoing {}

impl Outgoing {
    pub(crate) fn new() -> Self {
        Self {
            jobs: VecDeque::with_capacity(ENTRIES as usize),
            cut: 0,
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

    /// Accepts a job; returns its ticket.
    pub(crate) fn submit(&mut self, job: Job) -> u64 {
        self.jobs.push_back(job);
        self.accepted += 1;
        self.accepted
    }

    /// Drops pending jobs: from now on the host accesses no memory of a job.
    pub(crate) fn cancel(&mut self) {
        self.cancelled = true;
        self.jobs.clear();
        self.in_flight.clear();
    }

    /// The ticket of the last job.
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    pub(crate) fn done(&self, ticket: u64) -> bool {
        self.completed >= ticket
    }

    /// Whether the owner has entries left to carry out.
    pub(crate) fn waits_for_owner(&self, ring: Ring<'_>) -> bool {
        let all_cut = self.first + self.in_flight.len() as u64;
        !self.jobs.is_empty() || ring.acknowledged() < all_cut
    }

    pub(crate) fn progress(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        if self.cancelled || self.accepted == self.completed {
            return Ok(());
        }
        self.end(ring, me)?;
        self.begin(ring, me)?;
        self.publish(ring, me);
        Ok(())
    }

    /// Splits jobs into entries while there are free entries and slots.
    fn begin(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let shape = ring.shape();
        while let Some(job) = self.jobs.front() {
            let has_slot = job.bytes > 0;
            if self.in_flight.len() as u64 == ENTRIES
                || (has_slot && self.slots_taken == shape.slots)
            {
                break;
            }
            let bytes = (job.bytes - self.cut).min(shape.slot_bytes);
            let last = self.cut + bytes == job.bytes;
            let slot = self.next_slot;
            let (get, landing, stage) = match job.kind {
                RemoteKind::Get(buffer) => (true, Some(buffer.at(self.cut)), Stage::Ready),
                RemoteKind::Put(None) => (false, None, Stage::Ready),
                RemoteKind::Put(Some(from)) => {
                    (false, None, fill(me, from.at(self.cut), ring.slot(slot), bytes)?)
                }
            };
            let entry = Entry {
                get,
                slot,
                bytes,
                region: job.region,
                offset: job.offset + self.cut as u64,
                signal: job.signal.filter(|_| last),
            };
            self.in_flight.push_back(InFlight { stage, entry, landing, has_slot, last });
            if has_slot {
                self.next_slot = (slot + 1) % shape.slots;
                self.slots_taken += 1;
            }
            if last {
                self.jobs.pop_front();
                self.cut = 0;
            } else {
                self.cut += bytes;
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
                Stage::Filling(mark) => me.staging.channel.passed(mark),
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

    /// Lands the data of gets and completes entries, in order.
    fn end(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let acknowledged = ring.acknowledged();
        if acknowledged > self.published {
            return Err(Error::Internal(format!(
                "the ring of another process is broken: {acknowledged} entries carried out of {}",
                self.published
            )));
        }
        let carried_out = acknowledged.saturating_sub(self.first) as usize;
        for in_flight in self.in_flight.iter_mut().take(carried_out) {
            if let (Stage::Published, Some(to)) = (in_flight.stage, in_flight.landing)
                && in_flight.entry.bytes > 0
            {
                let from = Source::Pinned(ring.slot(in_flight.entry.slot));
                let data = Data::Range { from, to, bytes: in_flight.entry.bytes, moved: 0 };
                let sequence = me.lane.submit(Transfer { data, signal: None })?;
                in_flight.stage = Stage::Landing(sequence);
            }
        }
        for _ in 0..carried_out {
            let Some(in_flight) = self.in_flight.pop_front_if(|in_flight| match in_flight.stage {
                Stage::Landing(sequence) => me.lane.done(sequence),
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
            let channel = &me.staging.channel;
            let _entered = channel.device.enter()?;
            channel.copy_out(slot, address, bytes)?;
            Ok(Stage::Filling(channel.mark()?))
        }
        Buffer::Host(address) | Buffer::Pinned(address) => {
            // SAFETY: the range is in a registered region, checked when the job was made; the slot
            // is this side's.
            unsafe { std::ptr::copy_nonoverlapping(address, slot, bytes) };
            Ok(Stage::Ready)
        }
    }
}
