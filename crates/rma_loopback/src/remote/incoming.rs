//! Executes requests of another process for this rank's memory.

use std::collections::VecDeque;

use super::segment::{ENTRIES, Entry, Ring};
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::transfer::{Buffer, Data, Source, Transfer};

/// The receiving end of a ring, at the rank that owns the target memory.
#[derive(Default)]
pub(crate) struct Incoming {
    /// The number of entries submitted to this rank's inbound queue (`LocalRank::inbound`).
    enqueued: u64,
    /// The number of entries executed: at most `enqueued`.
    acknowledged: u64,
    /// The sequence numbers in the inbound queue of the entries that are not acknowledged yet.
    sequences: VecDeque<u64>,
}

impl Incoming {
    /// Checks the number of published entries: at most [`ENTRIES`] are unacknowledged.
    fn checked(&self, published: u64) -> Result<u64> {
        if published < self.enqueued || published - self.acknowledged > ENTRIES {
            return Err(Error::Internal(format!(
                "another process wrote an invalid entry count to shared memory: {published} \
                 published, {} enqueued, {} acknowledged",
                self.enqueued, self.acknowledged
            )));
        }
        Ok(published)
    }

    pub(crate) fn progress(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let published = self.checked(ring.published())?;
        while self.enqueued < published {
            let transfer = transfer(ring, ring.read(self.enqueued)?, me)?;
            self.sequences.push_back(me.inbound.submit(transfer));
            self.enqueued += 1;
        }
        let before = self.acknowledged;
        while self.sequences.front().is_some_and(|sequence| me.inbound.done(*sequence)) {
            self.sequences.pop_front();
            self.acknowledged += 1;
        }
        if self.acknowledged > before {
            ring.acknowledge(self.acknowledged);
        }
        Ok(())
    }

    /// Returns whether all published entries are executed.
    pub(crate) fn is_settled(&self, ring: Ring<'_>) -> bool {
        self.acknowledged == ring.published()
    }
}

/// Returns the transfer that executes an entry.
fn transfer(ring: Ring<'_>, entry: Entry, me: &LocalRank) -> Result<Transfer> {
    let Entry { get, slot, bytes, region, offset, signal } = entry;
    let data = match bytes {
        0 => Data::None,
        bytes if get => {
            let own = me.device().number;
            let from = me.regions.source(region, offset, bytes, &me.staging, own)?;
            Data::Range { from, to: Buffer::Pinned(ring.slot(slot)), bytes, moved: 0 }
        }
        bytes => {
            let to = me.regions.range(region, offset, bytes)?;
            Data::Range { from: Source::Pinned(ring.slot(slot)), to, bytes, moved: 0 }
        }
    };
    Ok(Transfer { data, signal: me.regions.signal_of(signal)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_no_sender_writes_is_refused() {
        let incoming = Incoming { enqueued: 10, acknowledged: 4, ..Incoming::default() };
        for published in [10, 11, 4 + ENTRIES] {
            assert_eq!(incoming.checked(published), Ok(published));
        }
        for published in [9, 5 + ENTRIES, u64::MAX] {
            assert!(incoming.checked(published).is_err());
        }
    }
}
