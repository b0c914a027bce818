//! Buffers of equal length at a constant stride: the ranks' parts of a window, or local buffers.

use crate::prelude::*;

/// `n` buffers at a constant stride. Index 0 is buffer `first`; the indices wrap around at `n`.
#[derive(Clone, Copy)]
pub(super) struct Buffers<T> {
    zeroth: *mut T,
    /// Bytes from one buffer to the next.
    stride: isize,
    n: usize,
    first: usize,
}

impl<T: Element> Buffers<T> {
    /// Returns the ranks' parts of a window from element `index` on, in the rank order of `team`.
    ///
    /// NCCL maps the parts of consecutive LSA ranks at a constant stride; rank 1 need not exist.
    #[track_caller]
    pub(super) fn of_team(window: Window<T>, index: usize, team: Team) -> Self {
        let own = window.local().as_ptr().wrapping_add(index);
        let lsa = window.lsa(1).as_ptr().addr().wrapping_sub(window.lsa(0).as_ptr().addr());
        let stride = (lsa as isize).wrapping_mul(team.stride as isize);
        let zeroth = own.wrapping_byte_offset(stride.wrapping_mul(-(team.rank as isize)));
        Self { zeroth, stride, n: team.n_ranks as usize, first: 0 }
    }

    /// Does the same as [`Self::of_team`], with this rank's part first.
    #[track_caller]
    pub(super) fn of_team_starting_at_self(window: Window<T>, index: usize, team: Team) -> Self {
        Self { first: team.rank as usize, ..Self::of_team(window, index, team) }
    }

    /// Returns `n` buffers, `stride` elements apart.
    pub(super) fn strided(zeroth: *mut T, stride: usize, n: usize) -> Self {
        Self { zeroth, stride: stride.wrapping_mul(size_of::<T>()) as isize, n, first: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.n
    }

    /// Returns the address of buffer `i`, below [`Self::len`].
    pub(super) fn get(&self, i: usize) -> *mut T {
        let i = self.first + i;
        let i = if i < self.n { i } else { i - self.n };
        self.zeroth.wrapping_byte_offset(self.stride.wrapping_mul(i as isize))
    }

    /// Returns the addresses of all buffers. There must be `N`.
    pub(super) fn array<const N: usize>(&self) -> [*mut T; N] {
        let mut all = [self.zeroth; N];
        let mut i = 0;
        while i < N {
            all[i] = self.get(i);
            i += 1;
        }
        all
    }

    /// Returns the buffers' address modulo 16, or `None` if it differs between them.
    pub(super) fn misalignment(&self) -> Option<usize> {
        (self.stride % 16 == 0 || self.n == 1).then(|| misalignment(self.zeroth))
    }
}

/// Returns an address modulo 16.
pub(super) fn misalignment<T>(address: *const T) -> usize {
    address.addr() % 16
}
