//! What this rank asks of another process.

use std::collections::VecDeque;

use super::segment::{ENTRIES, Entry, RemoteSignal, Ring};
use crate::error::{Error, Result};
use crate::group::Member;
use crate::region::RegionId;
use crate::transfer::{Data, Place, Source, Transfer};

/// A put or a get.
pub(crate) enum Asked {
    /// The data is here, of this rank; `None`: a signal alone.
    Put(Option<Place>),
    /// The data is to come here.
    Get(Place),
}

/// An operation on another process's memory.
pub(crate) struct Job {
    pub(crate) asked: Asked,
    pub(crate) bytes: usize,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) signal: Option<RemoteSignal>,
}

// SAFETY: places are in registered regions, which stay until the operation is complete: NCCL
// promises it.
unsafe impl Send for Job {}

#[derive(Clone, Copy)]
enum Stage {
    /// The slot is filled when the outbound stream has passed the mark.
    Filling(u64),
    Ready,
    /// The owner has it.
    Published,
    /// What was got is on this rank's lane.
    Landing(u64),
}

struct Flight {
    stage: Stage,
    entry: Entry,
    /// Where what is got goes.
    landing: Option<Place>,
    has_slot: bool,
    /// The job ends with it.
    last: bool,
}

/// The sender's end of a ring: jobs are cut into entries, which are published and end in order.
pub(crate) struct Outgoing {
    jobs: VecDeque<Job>,
    /// Bytes of the first job that are cut off.
    cut: usize,
    flights: VecDeque<Flight>,
    /// The number of the first flight.
    first: u64,
    published: u64,
    slots_taken: usize,
    next_slot: usize,
    accepted: u64,
    completed: u64,
    /// The connection has failed: nothing more begins.
    cancelled: bool,
}

// SAFETY: as for `Job`.
unsafe impl Send for Outgoing {}

impl Outgoing {
    pub(crate) fn new() -> Self {
        Self {
            jobs: VecDeque::with_capacity(ENTRIES as usize),
            cut: 0,
            flights: VecDeque::with_capacity(ENTRIES as usize),
            first: 0,
            published: 0,
            slots_taken: 0,
            next_slot: 0,
            accepted: 0,
            completed: 0,
            cancelled: false,
        }
    }

    /// Takes a job, and returns its ticket.
    pub(crate) fn submit(&mut self, job: Job) -> u64 {
        self.jobs.push_back(job);
        self.accepted += 1;
        self.accepted
    }

    /// Drops what waits: from now on the host looks at no memory of a job.
    pub(crate) fn cancel(&mut self) {
        self.cancelled = true;
        self.jobs.clear();
        self.flights.clear();
    }

    /// The ticket of the last job.
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    pub(crate) fn done(&self, ticket: u64) -> bool {
        self.completed >= ticket
    }

    /// Whether the owner has something left to carry out.
    pub(crate) fn waits_for_owner(&self, ring: Ring<'_>) -> bool {
        let all_cut = self.first + self.flights.len() as u64;
        !self.jobs.is_empty() || ring.acknowledged() < all_cut
    }

    pub(crate) fn progress(&mut self, ring: Ring<'_>, me: &Member) -> Result<()> {
        if self.cancelled || self.accepted == self.completed {
            return Ok(());
        }
        self.end(ring, me)?;
        self.begin(ring, me)?;
        self.publish(ring, me);
        Ok(())
    }

    /// Cuts jobs into entries while there are free entries and slots.
    fn begin(&mut self, ring: Ring<'_>, me: &Member) -> Result<()> {
        let shape = ring.shape();
        while let Some(job) = self.jobs.front() {
            let has_slot = job.bytes > 0;
            if self.flights.len() as u64 == ENTRIES || (has_slot && self.slots_taken == shape.slots)
            {
                break;
            }
            let bytes = (job.bytes - self.cut).min(shape.slot_bytes);
            let last = self.cut + bytes == job.bytes;
            let slot = self.next_slot;
            let (get, landing, stage) = match job.asked {
                Asked::Get(place) => (true, Some(place.at(self.cut)), Stage::Ready),
                Asked::Put(None) => (false, None, Stage::Ready),
                Asked::Put(Some(from)) => {
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
            self.flights.push_back(Flight { stage, entry, landing, has_slot, last });
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

    /// Shows the owner what is ready, in order.
    fn publish(&mut self, ring: Ring<'_>, me: &Member) {
        let before = self.published;
        let skip = (self.published - self.first) as usize;
        for flight in self.flights.iter_mut().skip(skip) {
            let ready = match flight.stage {
                Stage::Filling(mark) => me.staging.channel.passed(mark),
                _ => true,
            };
            if !ready {
                break;
            }
            ring.write(self.published, flight.entry);
            flight.stage = Stage::Published;
            self.published += 1;
        }
        if self.published > before {
            ring.publish(self.published);
        }
    }

    /// Lands what was got, and ends what is complete, in order.
    fn end(&mut self, ring: Ring<'_>, me: &Member) -> Result<()> {
        let acknowledged = ring.acknowledged();
        if acknowledged > self.published {
            return Err(Error::Internal(format!(
                "the ring of another process is broken: {acknowledged} entries carried out of {}",
                self.published
            )));
        }
        let carried_out = acknowledged.saturating_sub(self.first) as usize;
        for flight in self.flights.iter_mut().take(carried_out) {
            if let (Stage::Published, Some(to)) = (flight.stage, flight.landing)
                && flight.entry.bytes > 0
            {
                let from = Source::Pinned(ring.slot(flight.entry.slot));
                let data = Data::Range { from, to, bytes: flight.entry.bytes, moved: 0 };
                let sequence = me.lane.submit(Transfer { data, signal: None })?;
                flight.stage = Stage::Landing(sequence);
            }
        }
        for _ in 0..carried_out {
            let Some(flight) = self.flights.pop_front_if(|flight| match flight.stage {
                Stage::Landing(sequence) => me.lane.done(sequence),
                _ => true,
            }) else {
                break;
            };
            self.first += 1;
            self.slots_taken -= usize::from(flight.has_slot);
            self.completed += u64::from(flight.last);
        }
        Ok(())
    }
}

/// Starts to fill a slot with what is put.
fn fill(me: &Member, from: Place, slot: *mut u8, bytes: usize) -> Result<Stage> {
    match from {
        Place::Device(address) => {
            let channel = &me.staging.channel;
            let _entered = channel.device.enter()?;
            channel.copy_out(slot, address, bytes)?;
            Ok(Stage::Filling(channel.mark()?))
        }
        Place::Host(address) | Place::Pinned(address) => {
            // SAFETY: the range is in a registered region, checked when the job was made; the slot
            // is this side's.
            unsafe { std::ptr::copy_nonoverlapping(address, slot, bytes) };
            Ok(Stage::Ready)
        }
    }
}
