//! Strided loops: their iterations are divided among the threads of a block or grid. [`share`]
//! divides elements into parts, such as those of blocks.
//!
//! [`thread::grid_strided`](crate::thread::grid_strided) and the `strided` of `nccl_device`'s
//! `Coop` return a [`Strided`]: an iterator that compiles to the loop `while i < n { ..; i += step
//! }`, which [`Iterator::step_by`] does not.
//!
//! # Safety model
//!
//! Arithmetic only; safe.
//!
//! # Example
//!
//! ```
//! use cuda_std::strided::Strided;
//! assert_eq!(Strided::new(1_u32, 8, 3).collect::<Vec<_>>(), [1, 4, 7]);
//! ```

/// The type of an index: `u32` or `usize`.
pub trait Index: Copy {
    /// Converts a number.
    fn from_u32(n: u32) -> Self;
    /// Returns whether this is below `end`.
    fn is_below(self, end: Self) -> bool;
    /// Returns the sum, wrapping around.
    fn wrapping_add(self, other: Self) -> Self;
    /// Returns the difference, wrapping around.
    fn wrapping_sub(self, other: Self) -> Self;
}

macro_rules! indices {
    ($($type:ident)*) => { $(
        impl Index for $type {
            fn from_u32(n: u32) -> Self {
                n as $type
            }

            fn is_below(self, end: Self) -> bool {
                self < end
            }

            fn wrapping_add(self, other: Self) -> Self {
                $type::wrapping_add(self, other)
            }

            fn wrapping_sub(self, other: Self) -> Self {
                $type::wrapping_sub(self, other)
            }
        }
    )* };
}

indices!(u32 usize);

/// The numbers `first`, `first + step`, .. below `end`.
///
/// `end + step` must fit the type, so that the last step does not wrap around.
#[derive(Clone, Copy, Debug)]
#[must_use = "an iterator does nothing until it is iterated"]
pub struct Strided<N> {
    /// The last number returned. Storing the next one would occupy registers in the loop's body.
    last: N,
    end: N,
    step: N,
}

impl<N: Index> Strided<N> {
    /// Returns every `step`-th number from `first` on below `end`.
    pub fn new(first: N, end: N, step: N) -> Self {
        Self { last: first.wrapping_sub(step), end, step }
    }
}

impl<N: Index> Iterator for Strided<N> {
    type Item = N;

    fn next(&mut self) -> Option<N> {
        self.last = self.last.wrapping_add(self.step);
        if self.last.is_below(self.end) { Some(self.last) } else { None }
    }
}

/// Divides `count` elements into `parts` parts that follow each other, and whose lengths differ by
/// at most one. Returns the first element and the length of part `index`. No parts count as one.
///
/// ```
/// use cuda_std::strided::share;
/// assert_eq!([0, 1, 2].map(|index| share(8, index, 3)), [(0, 3), (3, 3), (6, 2)]);
/// ```
#[must_use]
pub const fn share(count: usize, index: usize, parts: usize) -> (usize, usize) {
    let parts = if parts == 0 { 1 } else { parts };
    let (each, more) = (count / parts, count % parts);
    if index < more { (index * (each + 1), each + 1) } else { (index * each + more, each) }
}
