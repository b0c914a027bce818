//! Clocks of the GPU.
//!
//! # Safety model
//!
//! Safe. The compiler does not move a read across the memory accesses around it.
//!
//! # Example
//!
//! ```
//! /// Returns the number of cycles that `work` took on this multiprocessor.
//! fn cycles(work: impl FnOnce()) -> u64 {
//!     let start = cuda_std::clock::clock64();
//!     work();
//!     cuda_std::clock::clock64().wrapping_sub(start)
//! }
//! ```

use crate::arch;

/// Returns the cycle counter of this multiprocessor; not comparable with those of others. PTX:
/// `%clock64`.
pub fn clock64() -> u64 {
    arch::clock64()
}

/// Returns the nanosecond clock that all multiprocessors of the GPU share, with steps of up to a
/// microsecond. PTX: `%globaltimer`.
pub fn globaltimer() -> u64 {
    arch::globaltimer()
}
