//! Where elements lie: strided parts of equal length, one per rank or one after the other.

use core::mem::size_of;

use devcomm_types::{Element, Team};

use crate::Window;

/// `n` strided places, counted round from the one at `first`.
#[derive(Clone, Copy)]
pub(super) struct Parts<T> {
    zeroth: *mut T,
    /// Bytes from one to the next.
    stride: isize,
    n: usize,
    first: usize,
}

impl<T: Element> Parts<T> {
    /// Element `index` of a window's part in every rank of `team`, in the order of the ranks.
    ///
    /// NCCL says where a rank's part lies; that the parts are as far apart as their LSA ranks is
    /// its layout of windows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) fn of_team(window: Window<T>, index: usize, team: Team) -> Self {
        let own = window.local().as_ptr().wrapping_add(index);
        let lsa = window.lsa(1).as_ptr().addr().wrapping_sub(window.lsa(0).as_ptr().addr());
        let stride = (lsa as isize).wrapping_mul(team.stride as isize);
        let zeroth = own.wrapping_byte_offset(stride.wrapping_mul(-(team.rank as isize)));
        Self { zeroth, stride, n: team.n_ranks as usize, first: 0 }
    }

    /// The same, this rank's own part first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) fn of_team_from_own(window: Window<T>, index: usize, team: Team) -> Self {
        Self { first: team.rank as usize, ..Self::of_team(window, index, team) }
    }

    /// `n` parts, `stride` elements apart.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn strided(zeroth: *mut T, stride: usize, n: usize) -> Self {
        Self { zeroth, stride: stride.wrapping_mul(size_of::<T>()) as isize, n, first: 0 }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn len(&self) -> usize {
        self.n
    }

    /// Place `i` of [`Self::len`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn get(&self, i: usize) -> *mut T {
        let i = self.first + i;
        let i = if i < self.n { i } else { i - self.n };
        self.zeroth.wrapping_byte_offset(self.stride.wrapping_mul(i as isize))
    }

    /// All of them, where they are `N`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn array<const N: usize>(&self) -> [*mut T; N] {
        let mut all = [self.zeroth; N];
        let mut i = 0;
        while i < N {
            all[i] = self.get(i);
            i += 1;
        }
        all
    }

    /// How all of them lie in their 16 bytes; `None` where they differ.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn phase(&self) -> Option<usize> {
        (self.stride % 16 == 0 || self.n == 1).then(|| phase(self.zeroth))
    }
}

/// Where an address lies in its 16 bytes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn phase<T>(address: *const T) -> usize {
    address.addr() % 16
}
