//! Sinks: the destinations of a reduction or copy.

use super::buffers::{Buffers, misalignment};
use super::pack::Pack;
use crate::prelude::*;

/// A destination: one buffer, several, or a multicast address.
pub(super) trait Sink<T: Accumulate>: Copy {
    /// Returns the address modulo 16, or `None` if it differs between the buffers.
    fn misalignment(&self) -> Option<usize>;

    /// Stores `value`, one pack (16 bytes or one element), from element `at` on.
    ///
    /// # Safety
    ///
    /// The address is valid for stores and aligned for the pack.
    #[track_caller]
    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value);
}

/// One buffer.
#[derive(Clone, Copy)]
pub(super) struct One<T>(pub(super) *mut T);

impl<T: Accumulate> Sink<T> for One<T> {
    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.0))
    }

    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        // SAFETY: the caller passes an index of a pack that the buffer has, aligned for it.
        unsafe { P::store(self.0.add(at), value) }
    }
}

/// `N` buffers.
#[derive(Clone, Copy)]
pub(super) struct Each<T, const N: usize> {
    to: [*mut T; N],
    misalignment: Option<usize>,
}

impl<T: Accumulate, const N: usize> Each<T, N> {
    /// Returns the sink of `buffers`, which are `N`.
    pub(super) fn of(buffers: Buffers<T>) -> Self {
        Self { to: buffers.array(), misalignment: buffers.misalignment() }
    }
}

impl<T: Accumulate, const N: usize> Sink<T> for Each<T, N> {
    fn misalignment(&self) -> Option<usize> {
        self.misalignment
    }

    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        for to in &self.to {
            // SAFETY: the caller passes an index of a pack that the buffer has, aligned for it.
            unsafe { P::store(to.add(at), value) };
        }
    }
}

/// Any number of buffers.
#[derive(Clone, Copy)]
pub(super) struct Many<T>(pub(super) Buffers<T>);

impl<T: Accumulate> Sink<T> for Many<T> {
    fn misalignment(&self) -> Option<usize> {
        self.0.misalignment()
    }

    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        let mut i = 0;
        while i < self.0.len() {
            // SAFETY: the caller passes an index of a pack that the buffer has, aligned for it.
            unsafe { P::store(self.0.get(i).add(at), value) };
            i += 1;
        }
    }
}
