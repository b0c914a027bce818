//! Strided views: elements of a pointer or window by two or three indices.
//!
//! A [`View`] is a pointer with a size and a stride in each dimension. In simulated runs, and in
//! kernels that are compiled with checks (`cuda_builder`'s `debug`), an index outside the size
//! traps, also one that is within the memory but in another row. Otherwise the sizes take no
//! registers.
//!
//! # Safety model
//!
//! [`View::new`] is `unsafe`: its caller guarantees that the elements are there. Accesses are
//! `unsafe` as those of [`mem`] are: the indices are within the size, parts are within their views,
//! and other threads' accesses are ordered.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use cuda_std::view::View;
//!
//! /// Stores the sum of each row, which a warp adds up.
//! ///
//! /// # Safety
//! ///
//! /// `x` has `rows * columns` elements, and `sums` `rows`. Blocks have whole warps.
//! #[kernel]
//! pub unsafe fn sum_rows(x: *mut f32, sums: *mut f32, rows: usize, columns: usize) {
//!     // SAFETY: the kernel's contract; all lanes of a warp have the same row.
//!     unsafe {
//!         let x = View::new(x, [rows, columns]);
//!         for row in thread::warps_strided(rows) {
//!             let mut mine = 0.0;
//!             let mut column = warp::lane_id() as usize;
//!             while column < columns {
//!                 mine += x.load([row, column]);
//!                 column += 32;
//!             }
//!             let sum = warp_sum(mine);
//!             if warp::lane_id() == 0 {
//!                 mem::store(sums.add(row), sum);
//!             }
//!         }
//!     }
//! }
//! # fn main() {}
//! ```

use crate::track_callers;
use devcomm_types::Element;

use crate::mem;
use crate::vector::Vec16;

/// Whether indices are checked.
const CHECKED: bool = cfg!(any(debug_assertions, not(target_arch = "nvptx64")));

/// Elements in `D` dimensions, of which the last one varies fastest. Sizes, strides and indices are
/// in elements.
#[derive(Clone, Copy, Debug)]
pub struct View<T, const D: usize> {
    pointer: *mut T,
    size: [usize; D],
    strides: [usize; D],
}

#[track_callers]
impl<T: Element, const D: usize> View<T, D> {
    /// Returns a view of elements that follow each other.
    ///
    /// # Safety
    ///
    /// `pointer` points to the product of the sizes of elements, for as long as the view is used.
    pub unsafe fn new(pointer: *mut T, size: [usize; D]) -> Self {
        let mut strides = [1; D];
        let mut d = D;
        while d > 1 {
            d -= 1;
            strides[d - 1] = strides[d] * size[d];
        }
        Self { pointer, size, strides }
    }

    /// Returns a view with a stride in each dimension.
    ///
    /// # Safety
    ///
    /// The elements `sum(index * stride)` from `pointer` on exist for all indices below the sizes,
    /// for as long as the view is used.
    pub unsafe fn with_strides(pointer: *mut T, size: [usize; D], strides: [usize; D]) -> Self {
        Self { pointer, size, strides }
    }

    /// Returns the number of elements in each dimension.
    pub fn size(self) -> [usize; D] {
        self.size
    }

    /// Returns the part of `size` elements from `first` on. Traps, where checked, if it is not
    /// within the view.
    pub fn part(self, first: [usize; D], size: [usize; D]) -> Self {
        let mut d = 0;
        while CHECKED && d < D {
            let is_within = first[d] <= self.size[d] && size[d] <= self.size[d] - first[d];
            assert!(is_within, "{size:?} from {first:?} in a view of {:?}", self.size);
            d += 1;
        }
        Self { pointer: self.pointer.wrapping_add(self.offset(first)), size, ..self }
    }

    /// Returns the elements with the indices `[i, j]` as `[j, i]`, or those with `[i, j, k]` as
    /// `[k, j, i]`.
    pub fn transposed(mut self) -> Self {
        self.size.reverse();
        self.strides.reverse();
        self
    }

    /// Returns the address of an element. Traps, where checked, if there is no such element, or
    /// fewer than `count` from there on in the last dimension.
    fn address(self, at: [usize; D], count: usize) -> *mut T {
        let mut d = 0;
        while CHECKED && d < D {
            let count = if d + 1 < D { 1 } else { count };
            let is_within = at[d] < self.size[d] && count <= self.size[d] - at[d];
            assert!(is_within, "{count} elements at {at:?} of a view of {:?}", self.size);
            d += 1;
        }
        self.pointer.wrapping_add(self.offset(at))
    }

    /// Returns the number of elements from the first one to that at `at`.
    fn offset(self, at: [usize; D]) -> usize {
        let (mut offset, mut d) = (0, 0);
        while d < D {
            offset += at[d] * self.strides[d];
            d += 1;
        }
        offset
    }

    /// Returns the address of the element at `at`. Traps, where checked, if there is none.
    pub fn as_ptr(self, at: [usize; D]) -> *mut T {
        self.address(at, 1)
    }

    /// Loads an element.
    ///
    /// # Safety
    ///
    /// `at` is within the size, this view is within those of which it is a [`part`](Self::part),
    /// and nothing writes the element at the same time.
    pub unsafe fn load(self, at: [usize; D]) -> T {
        // SAFETY: the element exists, as the constructor's and this function's callers guarantee.
        unsafe { mem::load(self.address(at, 1)) }
    }

    /// Stores an element.
    ///
    /// # Safety
    ///
    /// `at` is within the size, this view is within those of which it is a [`part`](Self::part),
    /// and nothing else accesses the element at the same time.
    pub unsafe fn store(self, at: [usize; D], value: T) {
        // SAFETY: the element exists, as the constructor's and this function's callers guarantee.
        unsafe { mem::store(self.address(at, 1), value) }
    }

    /// Loads 16 bytes of the last dimension from an element on, by one instruction.
    ///
    /// # Safety
    ///
    /// The contract is that of [`load`](Self::load), for each of the elements; they begin at a
    /// multiple of 16 bytes, and the last dimension's stride is 1.
    pub unsafe fn load_vec(self, at: [usize; D]) -> Vec16<T> {
        // SAFETY: the elements exist and are aligned, as the callers guarantee.
        unsafe { mem::load_vec(self.address(at, Vec16::<T>::LANES)) }
    }

    /// Stores 16 bytes of the last dimension from an element on, by one instruction.
    ///
    /// # Safety
    ///
    /// The contract is that of [`store`](Self::store), for each of the elements; they begin at a
    /// multiple of 16 bytes, and the last dimension's stride is 1.
    pub unsafe fn store_vec(self, at: [usize; D], value: Vec16<T>) {
        // SAFETY: the elements exist and are aligned, as the callers guarantee.
        unsafe { mem::store_vec(self.address(at, Vec16::<T>::LANES), value) }
    }
}
