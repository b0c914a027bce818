//! Receives the experts' results that [`ep_combine`](super::ep_combine) returns, and adds them up.

use super::ep_combine::Combine;
use super::prelude::*;

/// The words that a warp loads ahead for a part that it receives: entries, and the ranks that send.
pub(super) type Incoming = (Entries, Ranks);

impl Combine<'_> {
    /// Loads the entries of a token of this rank, and the ranks that have experts of it.
    pub(super) unsafe fn incoming(&self, row: u32, absent: Ranks) -> Incoming {
        let (me, tokens) = (self.comm.lsa_team().rank as usize, self.results.tokens);
        let mut targets = Ranks(0);
        // SAFETY: `received` and `returns` have words for the most tokens of this rank.
        unsafe {
            if row < tokens {
                let of_row = self.received.targets.wrapping_add(row as usize);
                targets = Ranks(mem::load(of_row) & !absent.0);
            }
            (self.entries(me, row, tokens), targets)
        }
    }

    /// Receives a part of a row of this rank from all ranks that have an expert of the token. A
    /// whole warp calls this.
    pub(super) unsafe fn receive<const N: usize, const V: usize, const TOGETHER: usize>(
        &self,
        session: &Session<'_, N>,
        part: Part<V>,
        (entries, targets): Incoming,
    ) {
        let mut sums = [[0.0; 8]; V];
        // SAFETY: each rank of `targets` sends the part, and only this warp receives it.
        unsafe {
            // This rank's rows are loaded while those of the others are in transit.
            let mine = sum::<V, TOGETHER>(self.results.rows, entries, part);
            let residual = self.results.residual(part);
            match N {
                4 => self.add_rows::<N, V, 4>(&mut sums, session, part, mine, targets),
                8 => self.add_rows::<N, V, 2>(&mut sums, session, part, mine, targets),
                _ => self.add_rows::<N, V, 1>(&mut sums, session, part, mine, targets),
            }
            self.results.store(part, sums, &residual);
        }
    }

    /// Adds the row of this rank, if there is one, and those that it receives, in the order of the
    /// ranks. It waits for the rows of `K` ranks together, of several with a vector in each lane:
    /// more would take registers. A whole warp calls this.
    unsafe fn add_rows<const N: usize, const V: usize, const K: usize>(
        &self,
        sums: &mut Sums<V>,
        session: &Session<'_, N>,
        part: Part<V>,
        mine: Option<Row<V>>,
        targets: Ranks,
    ) {
        let (me, nothing) = (self.comm.lsa_team().rank as usize, Vec16::from_bits([0; 4]));
        let sends = |rank| rank != me && targets.contains(rank);
        let slot = |i| part.vector_of(part.row as usize, i).map(|vector| vector as u32);
        for first in Strided::new(0, rolled::<N>(self.comm), K) {
            let mut rows = [[nothing; V]; K];
            if K == 1 {
                if sends(first) {
                    // SAFETY: the rank is one of `targets`, and so sends the part.
                    rows[0] = unsafe { session.rows.receive_several(first, slot, 0) }; // No pause.
                }
            } else if let Some(slot) = slot(0) {
                self.comm.wait_until(Coop::thread(), || {
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

    /// Ends the session while rows are in transit, and waits until all ranks have begun this
    /// launch, also those that return no rows. The whole block, which has the number of the launch,
    /// calls this once.
    pub(super) unsafe fn end<const N: usize>(&self, session: &Session<'_, N>) {
        thread::sync_threads();
        if is_in_last_warp() {
            // SAFETY: all threads of the block have the number of the launch.
            unsafe { session.rows.end(Coop::warp()) };
        }
        if is_leader() {
            self.comm.wait_until(Coop::thread(), || {
                let mut all = true;
                for distance in 1..ranks::<N>(self.comm) {
                    let source = self.rank(distance);
                    // SAFETY: the kernel's caller guarantees the memory. (No branch is around the
                    // loads, so that all are in flight together.)
                    let begun = unsafe { session.numbered.peek(source, 0) }.is_some();
                    all &= begun || session.absent.contains(source);
                }
                all
            });
        }
    }

    /// Loads the entries of a token of a rank that has `tokens` tokens.
    pub(super) unsafe fn entries(&self, rank: usize, row: u32, tokens: u32) -> Entries {
        let mut entries = NONE;
        if row < self.shape.tokens {
            let token = rank * self.shape.tokens as usize + row as usize;
            let from = token * RETURN_WORDS + warp::lane_id() as usize;
            // SAFETY: the kernel's caller guarantees words for the most tokens.
            entries = unsafe { mem::load(self.returns.wrapping_add(from)) };
        }
        // This is not a condition of the load, which would then wait for `tokens`.
        if row < tokens { entries } else { NONE }
    }
}

/// Returns whether this thread is in the last warp of its block, which has the least to send.
fn is_in_last_warp() -> bool {
    thread::thread_idx_x() + warp::WARP_SIZE >= thread::block_dim_x()
}

/// Returns whether this thread sends and receives the numbers of the launch.
pub(super) fn is_leader() -> bool {
    is_in_last_warp() && thread::block_idx_x() == 0 && warp::lane_id() == 0
}
