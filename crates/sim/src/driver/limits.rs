//! Limits of a simulated GPU: those of an H200.

/// Largest grid in blocks, by dimension.
pub(super) const GRID: [u32; 3] = [i32::MAX.cast_unsigned(), 65_535, 65_535];
/// Largest block in threads, by dimension.
pub(super) const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Largest block in threads.
pub(super) const BLOCK_THREADS: u32 = 1024;
/// Registers per block.
pub(super) const BLOCK_REGISTERS: u32 = 64 << 10;
/// Default limit on a block's shared memory in bytes.
pub(super) const STATIC_SHARED: u32 = 48 << 10;
/// Opt-in limit on a block's shared memory in bytes.
pub(super) const BLOCK_SHARED: u32 = 227 << 10;
