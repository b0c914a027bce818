//! Where a pass stores to.

use cuda_std::vector::Accumulate;

use super::pack::Pack;
use super::parts::{Parts, phase};

/// Where a pass stores to.
pub(super) trait Sink<T: Accumulate>: Copy {
    /// Where it lies in its 16 bytes; `None` where its parts differ.
    fn phase(&self) -> Option<usize>;

    /// Stores `value` at element `at`.
    ///
    /// # Safety
    ///
    /// The place is valid for stores and aligned for the pack.
    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value);
}

/// One place.
#[derive(Clone, Copy)]
pub(super) struct One<T>(pub(super) *mut T);

impl<T: Accumulate> Sink<T> for One<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        Some(phase(self.0))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        // SAFETY: the caller's.
        unsafe { P::store(self.0.add(at), value) }
    }
}

/// `N` places.
#[derive(Clone, Copy)]
pub(super) struct Each<T, const N: usize> {
    to: [*mut T; N],
    phase: Option<usize>,
}

impl<T: Accumulate, const N: usize> Each<T, N> {
    /// The parts, which are `N`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of(parts: Parts<T>) -> Self {
        Self { to: parts.array(), phase: parts.phase() }
    }
}

impl<T: Accumulate, const N: usize> Sink<T> for Each<T, N> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        self.phase
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        for to in &self.to {
            // SAFETY: the caller's.
            unsafe { P::store(to.add(at), value) };
        }
    }
}

/// Any number of places.
#[derive(Clone, Copy)]
pub(super) struct Many<T>(pub(super) Parts<T>);

impl<T: Accumulate> Sink<T> for Many<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        self.0.phase()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        let mut i = 0;
        while i < self.0.len() {
            // SAFETY: the caller's.
            unsafe { P::store(self.0.get(i).add(at), value) };
            i += 1;
        }
    }
}
