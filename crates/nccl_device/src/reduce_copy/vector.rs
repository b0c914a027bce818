//! Sums and stores of one 16-byte vector over the LSA team.

use crate::prelude::*;

#[track_callers]
impl<T: Accumulate> Window<T> {
    /// Returns the sum over an LSA team of `N` ranks of the 16-byte vector from element `at` on.
    /// All loads are in flight at once.
    ///
    /// The sum begins with this rank and goes through the ranks cyclically, so that ranks that sum
    /// different vectors at the same time load from different peers. Two ranks' float sums of the
    /// same vector may differ in the last bits.
    ///
    /// # Safety
    ///
    /// `team` is the LSA team, of `N` ranks. Each rank's part has the vector, at a multiple of 16
    /// bytes, and nothing writes it at the same time.
    pub unsafe fn sum_vec_of<const N: usize>(self, team: Team, at: usize) -> T::Wide {
        let mut vectors = [Vec16::from_bits([0; 4]); N];
        let mut i = 0;
        while i < N {
            let peer = (team.rank as usize + i) % N;
            // SAFETY: each rank's window has the caller's vector, which no thread writes.
            vectors[i] = unsafe { self.lsa(peer as i32).load_vec(at) };
            i += 1;
        }
        let mut sum = T::widen(vectors[0]);
        let mut i = 1;
        while i < N {
            T::add(&mut sum, vectors[i]);
            i += 1;
        }
        sum
    }

    /// Does the same as [`sum_vec_of`](Self::sum_vec_of), for any number of ranks, with one load
    /// after the other, in rank order.
    ///
    /// # Safety
    ///
    /// The contract is that of [`sum_vec_of`](Self::sum_vec_of), for any number of ranks.
    pub unsafe fn sum_vec(self, team: Team, at: usize) -> T::Wide {
        let mut sum = T::widen(Vec16::from_bits([0; 4]));
        for peer in 0..team.n_ranks {
            // SAFETY: each rank's window has the caller's vector, which no thread writes.
            T::add(&mut sum, unsafe { self.lsa(peer).load_vec(at) });
        }
        sum
    }

    /// Stores a 16-byte vector to every rank of the LSA team, this rank first, from element `at`
    /// on.
    ///
    /// # Safety
    ///
    /// `team` is the LSA team. Each rank's part has the vector, at a multiple of 16 bytes, and
    /// other threads do not access it.
    pub unsafe fn store_vec_to_all(self, team: Team, at: usize, vector: Vec16<T>) {
        for peer in team.all_from_self() {
            // SAFETY: each rank's window has the caller's vector, which only this thread accesses.
            unsafe { self.lsa(peer).store_vec(at, vector) };
        }
    }
}
