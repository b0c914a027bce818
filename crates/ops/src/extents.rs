//! The shape of a product.

use crate::prelude::*;

/// The shape `[m, n, k]` of a product, validated: each extent is at least 1 and a 32-bit number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extents([u32; 3]);

impl Extents {
    /// The largest extent. TMA's coordinates are signed 32-bit numbers; a last tile ends up to 255
    /// past the matrix.
    pub(crate) const MOST: usize = i32::MAX as usize - 512;

    /// Validates a shape, which has elements and is not too large.
    pub(crate) fn new([m, n, k]: [usize; 3]) -> Result<Self> {
        refuse_if!(
            m == 0 || n == 0 || k == 0,
            "a product of {m} x {n} elements with {k} terms has nothing to do"
        );
        let most = Self::MOST;
        refuse_if!(
            m > most || n > most || k > most,
            "m, n and k are {m}, {n} and {k}, but {most} is the maximum of each"
        );
        Ok(Self([m as u32, n as u32, k as u32]))
    }

    /// Validates a shape as [`new`](Self::new) does, for kernels whose rows of A and B are aligned.
    pub(crate) fn with_aligned_rows(shape @ [.., k]: [usize; 3]) -> Result<Self> {
        let extents = Self::new(shape)?;
        refuse_if!(
            !k.is_multiple_of(8),
            "k is {k}, but rows of A and B begin at multiples of 16 bytes: pad k with zeros to \
             a multiple of 8"
        );
        Ok(extents)
    }

    /// Returns these extents with one column, for choices that do not depend on the columns.
    pub(crate) fn without_columns(self) -> Self {
        let [m, _, k] = self.0;
        Self([m, 1, k])
    }

    /// Returns `m`, `n` and `k`, for kernels.
    pub(crate) fn array(self) -> [u32; 3] {
        self.0
    }

    /// Returns `m`, `n` and `k`, for lengths of buffers.
    pub(crate) fn lengths(self) -> [usize; 3] {
        self.0.map(|extent| extent as usize)
    }
}

#[cfg(test)]
mod tests;
