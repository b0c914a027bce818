//! The operators and factors of the collectives that reduce.

use cuda_std::reduce::Number;

use crate::prelude::*;

/// The operator that reduces the elements of the ranks in `f32`, and factors before and after it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, KernelParam)]
pub struct Reduction {
    /// [`SUM`](Self::SUM), [`MAX`](Self::MAX) or [`MIN`](Self::MIN).
    pub operator: u32,
    /// A factor of this rank's elements, which are then rounded.
    pub input: f32,
    /// A factor of each result.
    pub output: f32,
}

impl Reduction {
    /// The operator of sums.
    pub const SUM: u32 = 0;
    /// The operator of largest elements.
    pub const MAX: u32 = 1;
    /// The operator of smallest elements.
    pub const MIN: u32 = 2;
    /// The operator of products, which only
    /// [`lamport_allreduce_any`](super::lamport_allreduce_any::lamport_allreduce_any()) has.
    pub const PROD: u32 = 3;

    /// Returns this rank's contribution: the vector times the factor of the input.
    pub(super) fn scale<T: Accumulate<Acc = f32>>(self, vector: Vec16<T>) -> Vec16<T> {
        if self.input == 1.0 {
            return vector;
        }
        let mut wide = T::widen(vector);
        T::map(&mut wide, |x| x * self.input);
        T::narrow(wide)
    }

    /// Reduces the vectors of all ranks, in their order.
    pub(super) fn reduce<T: Accumulate<Acc = f32>, const N: usize>(
        self,
        vectors: [Vec16<T>; N],
    ) -> Vec16<T> {
        let mut result = T::widen(vectors[0]);
        for i in 1..N {
            self.combine(&mut result, vectors[i]);
        }
        self.finish(result)
    }

    /// Reduces one more vector.
    pub(super) fn combine<T: Accumulate<Acc = f32>>(self, result: &mut T::Wide, next: Vec16<T>) {
        let next = T::widen(next);
        match self.operator {
            Self::SUM => T::zip(result, next, |a, b| a + b),
            Self::MAX => T::zip(result, next, Number::max),
            _ => T::zip(result, next, Number::min),
        }
    }

    /// Returns the result, times the factor of the output.
    pub(super) fn finish<T: Accumulate<Acc = f32>>(self, mut result: T::Wide) -> Vec16<T> {
        T::map(&mut result, |x| x * self.output);
        T::narrow(result)
    }
}
