//! Uses that fail to compile because of types; `tests/ui` has the macro's own errors.
//!
//! An instance that the kernel's bounds exclude:
//!
//! ```compile_fail,E0277
//! # use cuda_std::prelude::*;
//! #[kernel(T = [f32, bool])]
//! fn k<T: Accumulate>(_x: *mut T) {}
//! # fn main() {}
//! ```
//!
//! A parameter type that is not a [`KernelParam`]:
//!
//! ```compile_fail,E0277
//! # use cuda_std::prelude::*;
//! #[kernel]
//! fn k(_x: std::time::Duration) {}
//! # fn main() {}
//! ```
//!
//! A parameter of size zero, which PTX would drop:
//!
//! ```compile_fail,E0080
//! # use cuda_std::prelude::*;
//! #[derive(Clone, Copy)]
//! struct Nothing;
//! unsafe impl cuda_std::__private::KernelParam for Nothing {
//!     type Abi = ();
//! }
//! #[kernel]
//! fn k(_x: Nothing) {}
//! # fn main() {}
//! ```
//!
//! A store of a register tile to a shared tile of 8-bit elements: a word of four of them has two
//! elements of each of two rows, so it fits in no row of the tile:
//!
//! ```compile_fail,E0080
//! use cuda_std::tile::{RegTile, SharedTile};
//! use devcomm_types::F8E4M3;
//! let store: unsafe fn(&RegTile<f32, 16>, SharedTile<F8E4M3, 16>, u32) = RegTile::store;
//! ```
