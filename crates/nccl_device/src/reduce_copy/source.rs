//! Where a pass loads from.

use cuda_std::reduce::ReduceOp;
use cuda_std::vector::Accumulate;

use super::pack::Pack;
use super::parts::{Parts, phase};

/// What a pass loads, reduced to one value a place.
pub(super) trait Source<T: Accumulate>: Copy {
    /// Where it lies in its 16 bytes; `None` where its parts differ.
    fn phase(&self) -> Option<usize>;

    /// What is loaded of a place before it is one value.
    type Loaded<P: Pack<T>>: Copy;

    /// Loads at elements `at`, `at + row`, .., those that are `live`. All loads come before the
    /// first use of one.
    ///
    /// # Safety
    ///
    /// The live places are valid for loads and aligned for the pack.
    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [Self::Loaded<P>; U];

    /// The value of what was loaded.
    fn finish<P: Pack<T>>(&self, loaded: Self::Loaded<P>) -> P::Value;
}

/// One place, as it is.
#[derive(Clone, Copy)]
pub(super) struct Copied<T>(pub(super) *const T);

impl<T: Accumulate> Source<T> for Copied<T> {
    type Loaded<P: Pack<T>> = P::Value;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        Some(phase(self.0))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [P::Value; U] {
        let mut values = [P::zero(); U];
        for (u, value) in values.iter_mut().enumerate() {
            if live(u) {
                // SAFETY: the caller's.
                *value = unsafe { P::load(self.0.add(at + u * row)) };
            }
        }
        values
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish<P: Pack<T>>(&self, loaded: P::Value) -> P::Value {
        loaded
    }
}

/// `N` places, reduced. All that a thread loads in a step is in flight at once.
#[derive(Clone, Copy)]
pub(super) struct Reduced<T, Op, const N: usize> {
    op: Op,
    from: [*mut T; N],
    phase: Option<usize>,
}

impl<T: Accumulate, Op, const N: usize> Reduced<T, Op, N> {
    /// The parts, which are `N`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of(op: Op, parts: Parts<T>) -> Self {
        Self { op, from: parts.array(), phase: parts.phase() }
    }
}

impl<T: Accumulate, Op: ReduceOp<T>, const N: usize> Source<T> for Reduced<T, Op, N> {
    type Loaded<P: Pack<T>> = [P::Value; N];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        self.phase
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
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
                    // SAFETY: the caller's.
                    *loaded = unsafe { P::load(from.add(at + u * row)) };
                }
            }
        }
        loaded
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish<P: Pack<T>>(&self, loaded: [P::Value; N]) -> P::Value {
        let op = self.op;
        let mut acc = P::widen(loaded[0]);
        P::map(&mut acc, |x| op.input(x));
        for part in &loaded[1..] {
            P::zip(&mut acc, P::widen(*part), |a, b| op.combine(a, op.input(b)));
        }
        P::map(&mut acc, |x| op.result(x));
        P::narrow(acc)
    }
}

/// Any number of places, at least one, reduced.
#[derive(Clone, Copy)]
pub(super) struct ReducedMany<T, Op> {
    pub(super) op: Op,
    pub(super) from: Parts<T>,
}

/// Places whose loads [`ReducedMany`] has in flight together.
const TOGETHER: usize = 4;

impl<T: Accumulate, Op: ReduceOp<T>> Source<T> for ReducedMany<T, Op> {
    type Loaded<P: Pack<T>> = P::Wide;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> Option<usize> {
        self.from.phase()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
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
            let mut loaded = [[P::zero(); U]; TOGETHER];
            for (k, loaded) in loaded.iter_mut().enumerate() {
                if i + k < n {
                    let from = self.from.get(i + k);
                    for (u, loaded) in loaded.iter_mut().enumerate() {
                        if live(u) {
                            // SAFETY: the caller's.
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
            i += TOGETHER;
        }
        acc
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish<P: Pack<T>>(&self, mut loaded: P::Wide) -> P::Value {
        P::map(&mut loaded, |x| self.op.result(x));
        P::narrow(loaded)
    }
}
