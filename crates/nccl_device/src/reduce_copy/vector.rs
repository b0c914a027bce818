//! One vector of a window in every rank of the LSA team: for kernels that do more with a sum than
//! store it.

use cuda_std::vector::{Accumulate, Vec16};
use devcomm_types::Team;

use crate::Window;

impl<T: Accumulate> Window<T> {
    /// The sum of the vector of 16 bytes from element `at * Vec16::<T>::LANES` on, over an LSA team
    /// of `N` ranks. All loads are in flight at once.
    ///
    /// It begins with this rank's own part and goes round the team, so that ranks that sum
    /// different vectors at one time load from different peers; floats that two ranks sum may
    /// differ in the last bits.
    ///
    /// # Safety
    ///
    /// `team` is the LSA team, of `N` ranks. Each has the vector in its part, and
    /// nobody writes it at the same time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn sum_vec_of<const N: usize>(self, team: Team, at: usize) -> T::Wide {
        let mut parts = [Vec16::from_bits([0; 4]); N];
        let mut i = 0;
        while i < N {
            let peer = (team.rank as usize + i) % N;
            // SAFETY: the caller's.
            parts[i] = unsafe { self.lsa(peer as i32).load_vec(at) };
            i += 1;
        }
        let mut sum = T::widen(parts[0]);
        let mut i = 1;
        while i < N {
            T::add(&mut sum, parts[i]);
            i += 1;
        }
        sum
    }

    /// [`sum_vec_of`](Self::sum_vec_of) for any number of ranks, one load after the other, in the
    /// order of the ranks.
    ///
    /// # Safety
    ///
    /// The same.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn sum_vec(self, team: Team, at: usize) -> T::Wide {
        let mut sum = T::widen(Vec16::from_bits([0; 4]));
        for peer in 0..team.n_ranks {
            // SAFETY: the caller's.
            T::add(&mut sum, unsafe { self.lsa(peer).load_vec(at) });
        }
        sum
    }

    /// Stores a vector of 16 bytes to every rank of the LSA team, from element `at *
    /// Vec16::<T>::LANES` on, this rank first.
    ///
    /// # Safety
    ///
    /// `team` is the LSA team. Each rank has the vector in its part, and nobody else
    /// touches it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn store_vec_to_all(self, team: Team, at: usize, vector: Vec16<T>) {
        for peer in team.all_from_self() {
            // SAFETY: the caller's.
            unsafe { self.lsa(peer).store_vec(at, vector) };
        }
    }
}
