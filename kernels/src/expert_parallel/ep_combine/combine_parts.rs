//! Sends the sum of this rank's experts for a part of a row, and adds up the sums of all ranks.

use super::*;

impl<const N: usize, const V: usize, const TOGETHER: usize> Combine<'_, N, V, TOGETHER> {
    /// Sends a part of a row back to the rank at a distance, if the token has an expert here.
    pub(super) unsafe fn send(&self, distance: usize, part: Part<V>, entries: Entries) {
        let Self { launch, session, .. } = self;
        // SAFETY: the row is below the most tokens, and only this whole warp sends the part.
        unsafe {
            let Some(row) = sum::<V, TOGETHER>(launch.results.rows, entries, part) else {
                return;
            };
            let send = |distance| {
                for i in 0..V {
                    if let Some(slot) = part.slot(i) {
                        session.rows.send(distance, slot, row[i]);
                    }
                }
            };
            // An index that is not a constant would move the peers' addresses to memory.
            if N == ANY_RANKS {
                send(distance);
            }
            for peer in 1..N {
                if peer == distance {
                    send(peer);
                }
            }
        }
    }

    /// Receives a part of a row of this rank from all ranks that have an expert of the token.
    pub(super) unsafe fn receive(&self, part: Part<V>, (entries, targets): (Entries, Ranks)) {
        let (mut sums, results) = ([[0.0; 8]; V], &self.launch.results);
        // SAFETY: each rank of `targets` sends the part, and only this warp receives it.
        unsafe {
            // This rank's rows are loaded while those of the others are in transit.
            let mine = sum::<V, TOGETHER>(results.rows, entries, part);
            let residual = results.residual(part);
            match N {
                4 => self.add_rows::<4>(&mut sums, part, mine, targets),
                8 => self.add_rows::<2>(&mut sums, part, mine, targets),
                _ => self.add_rows::<1>(&mut sums, part, mine, targets),
            }
            results.store(part, sums, &residual);
        }
    }

    /// Adds the row of this rank, if there is one, and those that it receives, in the order of the
    /// ranks. It waits for the rows of `K` ranks together, of several with a vector in each lane:
    /// more would take registers.
    unsafe fn add_rows<const K: usize>(
        &self,
        sums: &mut Sums<V>,
        part: Part<V>,
        mine: Option<Row<V>>,
        targets: Ranks,
    ) {
        let Self { launch: Launch { comm, .. }, session, .. } = self;
        let (me, nothing) = (comm.lsa_team().rank as usize, Vec16::from_bits([0; 4]));
        let sends = |rank| rank != me && targets.contains(rank);
        for first in Strided::new(0, rolled::<N>(comm), K) {
            let mut rows = [[nothing; V]; K];
            if K == 1 {
                if sends(first) {
                    // SAFETY: the rank is one of `targets`, and so sends the part.
                    rows[0] = unsafe { session.rows.receive_several(first, |i| part.slot(i), 0) };
                }
            } else if let Some(slot) = part.slot(0) {
                comm.wait_until(Coop::thread(), || {
                    let mut all = true;
                    for i in 0..K {
                        // SAFETY: the kernel's caller guarantees the memory. (No branch is around
                        // the loads, so that all are in flight together, also of unused slots.)
                        let row = unsafe { session.rows.peek(first + i, slot) };
                        let sends = sends(first + i);
                        all &= row.is_some() || !sends;
                        rows[i][0] = row.filter(|_| sends).unwrap_or(nothing);
                    }
                    all
                });
                for i in 0..K {
                    if sends(first + i) {
                        // SAFETY: the kernel's caller guarantees the memory; the row has arrived.
                        unsafe { session.rows.empty(first + i, slot) };
                    }
                }
            }
            for i in 0..K {
                match mine {
                    Some(mine) if first + i == me => add(sums, &mine, 1.0),
                    _ if K > 1 || sends(first) => add(sums, &rows[i], 1.0),
                    _ => {}
                }
            }
        }
    }
}
