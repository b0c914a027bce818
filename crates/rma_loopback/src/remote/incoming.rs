//! Requests of another process for this rank's memory.

use std::collections::VecDeque;

use super::segment::{ENTRIES, Entry, Ring};
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::transfer::{Buffer, Data, Source, Transfer};

/// The owner's end of a ring.
#[derive(Default)]
pub(crate) struct Incoming {
    /// Number of entries enqueued on the lane.
    taken: u64,
    acknowledged: u64,
    /// Lane sequence numbers of entries not acknowledged yet.
    sequences: VecDeque<u64>,
}

impl Incoming {
    /// The number of published entries, checked: at most a ring's worth is outstanding.
    fn checked(&self, published: u64) -> Result<u64> {
        if published < self.taken || published - self.acknowledged > ENTRIES {
            return Err(Error::Internal(format!(
                "the ring of another process is broken: {published} entries written, {} taken, {} \
                 carried out",
                self.taken, self.acknowledged
            )));
        }
        Ok(published)
    }

    pub(crate) fn progress(&mut self, ring: Ring<'_>, me: &LocalRank) -> Result<()> {
        let published = self.checked(ring.published())?;
        while self.taken < published {
            let transfer = transfer(ring, ring.read(self.taken)?, me)?;
            self.sequences.push_back(me.lane.submit(transfer)?);
            self.taken += 1;
        }
        let before = self.acknowledged;
        while self.sequences.front().is_some_and(|sequence| me.lane.done(*sequence)) {
            self.sequences.pop_front();
            self.acknowledged += 1;
        }
        if self.acknowledged > before {
            ring.acknowledge(self.acknowledged);
        }
        Ok(())
    }

    /// Whether all published entries were carried out.
    pub(crate) fn is_settled(&self, ring: Ring<'_>) -> bool {
        self.acknowledged == ring.published()
    }
}

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
        let incoming = Incoming { taken: 10, acknowledged: 4, ..Incoming::default() };
        for published in [10, 11, 4 + ENTRIES] {
            assert_eq!(incoming.checked(published), Ok(published));
        }
        for published in [9, 5 + ENTRIES, u64::MAX] {
            assert!(incoming.checked(published).is_err());
        }
    }
}
