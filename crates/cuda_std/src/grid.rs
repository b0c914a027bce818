//! Dependent launches: a kernel that begins while the previous one of its stream still runs.
//!
//! The functions are for kernels launched with `Launch::dependent`, and for the kernels before
//! them. In any other launch they do nothing. They need sm_90.
//!
//! # Example
//!
//! ```
//! use cuda_std::{grid, prelude::*};
//! /// Computes `y[i] += table[i]`. The previous kernel wrote `y`; no kernel writes `table`.
//! #[kernel]
//! unsafe fn add_table(table: *const f32, y: *mut f32, count: usize) {
//!     grid::launch_next();
//!     let i = thread::index_1d() as usize;
//!     if i < count {
//!         // SAFETY: both have `count` elements, and only this thread accesses element i.
//!         unsafe {
//!             // Overlaps the end of the previous kernel.
//!             let a = mem::load(table.add(i));
//!             grid::wait_for_previous();
//!             mem::store(y.add(i), mem::load(y.add(i)) + a);
//!         }
//!     }
//! }
//! # fn main() {}
//! ```

use crate::arch;

/// Waits until the previous kernel of the stream has ended, and makes its writes visible to the
/// calling thread. PTX: `griddepcontrol.wait`.
///
/// Before this call a thread reads no memory that the previous kernel writes, and writes none that
/// it accesses. A kernel ends after the previous one only if one of its threads has waited: in a
/// dependent launch at least one calls this.
#[doc(alias = "cudaGridDependencySynchronize")]
#[track_caller]
pub fn wait_for_previous() {
    arch::wait_for_previous();
}

/// Lets the next kernel of the stream begin, if its launch is dependent: it begins as soon as every
/// block has called this or ended, and there is room for it. PTX:
/// `griddepcontrol.launch_dependents`.
///
/// It says nothing about memory: the next kernel sees what this kernel writes, before the call or
/// after it, only after [`wait_for_previous`].
#[doc(alias = "cudaTriggerProgrammaticLaunchCompletion")]
pub fn launch_next() {
    arch::launch_next();
}
