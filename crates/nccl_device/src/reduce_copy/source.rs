//! Sources of a reduction or copy.

use super::buffers::{Buffers, misalignment};
use super::pack::Pack;
use crate::prelude::*;

/// The memory from which values are loaded, and reduced to one value per element index.
pub(super) trait Source<T: Accumulate>: Copy {
    /// Returns the address modulo 16, or `None` if it differs between the buffers.
    fn misalignment(&self) -> Option<usize>;

    /// The loaded values, before `finish` reduces them.
    type Loaded<P: Pack<T>>: Copy;

    /// Loads up to `U` packs (16 bytes or one element each): from element `at + u * row` on, for
    /// every `u` for which `live(u)` is true. All loads are issued before a result is used.
    ///
    /// # Safety
    ///
    /// The addresses of these packs are valid for loads and aligned for the pack.
    #[track_caller]
    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [Self::Loaded<P>; U];

    /// Returns the reduced value of what was loaded.
    fn finish<P: Pack<T>>(&self, loaded: Self::Loaded<P>) -> P::Value;
}

/// One buffer, without a reduction.
#[derive(Clone, Copy)]
pub(super) struct Copied<T>(pub(super) *const T);

impl<T: Accumulate> Source<T> for Copied<T> {
    type Loaded<P: Pack<T>> = P::Value;

    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.0))
    }

    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [P::Value; U] {
        let mut values = [P::zero(); U];
        for (u, value) in values.iter_mut().enumerate() {
            if live(u) {
                // SAFETY: the caller passes rows that the buffers have, aligned for the pack.
                *value = unsafe { P::load(self.0.add(at + u * row)) };
            }
        }
        values
    }

    fn finish<P: Pack<T>>(&self, loaded: P::Value) -> P::Value {
        loaded
    }
}

/// `N` buffers, reduced. All loads of one call of `rows` are in flight at once.
#[derive(Clone, Copy)]
pub(super) struct Reduced<T, Op, const N: usize> {
    op: Op,
    from: [*mut T; N],
    misalignment: Option<usize>,
}

impl<T: Accumulate, Op, const N: usize> Reduced<T, Op, N> {
    /// Returns the source of `buffers`, which are `N`.
    pub(super) fn of(op: Op, buffers: Buffers<T>) -> Self {
        Self { op, from: buffers.array(), misalignment: buffers.misalignment() }
    }
}

impl<T: Accumulate, Op: ReduceOp<T>, const N: usize> Source<T> for Reduced<T, Op, N> {
    type Loaded<P: Pack<T>> = [P::Value; N];

    fn misalignment(&self) -> Option<usize> {
        self.misalignment
    }

    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [[P::Value; N]; U] {
        let mut loaded = [[P::zero(); N]; U];
        for (u, loaded) in loaded.iter_mut().enumerate() {
            if live(u) {
                for (loaded, from) in loaded.iter_mut().zip(&self.from) {
                    // SAFETY: the caller passes rows that the buffers have, aligned for the pack.
                    *loaded = unsafe { P::load(from.add(at + u * row)) };
                }
            }
        }
        loaded
    }

    fn finish<P: Pack<T>>(&self, loaded: [P::Value; N]) -> P::Value {
        let op = self.op;
        let mut acc = P::widen(loaded[0]);
        P::map(&mut acc, |x| op.input(x));
        for value in &loaded[1..] {
            P::zip(&mut acc, P::widen(*value), |a, b| op.combine(a, op.input(b)));
        }
        P::map(&mut acc, |x| op.result(x));
        P::narrow(acc)
    }
}

/// Any number of buffers, at least one, reduced.
#[derive(Clone, Copy)]
pub(super) struct ReducedMany<T, Op> {
    pub(super) op: Op,
    pub(super) from: Buffers<T>,
}

/// The number of buffers from which [`ReducedMany`] has loads in flight at once.
const BUFFERS_AT_ONCE: usize = 4;

impl<T: Accumulate, Op: ReduceOp<T>> Source<T> for ReducedMany<T, Op> {
    type Loaded<P: Pack<T>> = P::Wide;

    fn misalignment(&self) -> Option<usize> {
        self.from.misalignment()
    }

    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [P::Wide; U] {
        let op = self.op;
        let n = self.from.len();
        let mut acc = [P::widen(P::zero()); U];
        let mut i = 0;
        while i < n {
            let mut loaded = [[P::zero(); U]; BUFFERS_AT_ONCE];
            for (k, loaded) in loaded.iter_mut().enumerate() {
                if i + k < n {
                    let from = self.from.get(i + k);
                    for (u, loaded) in loaded.iter_mut().enumerate() {
                        if live(u) {
                            // SAFETY: the buffers have the caller's rows, aligned for the pack.
                            *loaded = unsafe { P::load(from.add(at + u * row)) };
                        }
                    }
                }
            }
            for (k, loaded) in loaded.iter().enumerate() {
                if i + k < n {
                    for u in 0..U {
                        let mut input = P::widen(loaded[u]);
                        P::map(&mut input, |x| op.input(x));
                        if i + k == 0 {
                            acc[u] = input;
                        } else {
                            P::zip(&mut acc[u], input, |a, b| op.combine(a, b));
                        }
                    }
                }
            }
            i += BUFFERS_AT_ONCE;
        }
        acc
    }

    fn finish<P: Pack<T>>(&self, mut loaded: P::Wide) -> P::Value {
        P::map(&mut loaded, |x| self.op.result(x));
        P::narrow(loaded)
    }
}
