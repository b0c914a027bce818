//! The limits of a simulated GPU, which are those of an H200.

/// The largest grid in blocks, by dimension.
pub(super) const GRID: [u32; 3] = [i32::MAX.cast_unsigned(), 65_535, 65_535];
/// The largest block in threads, by dimension.
pub(super) const BLOCK: [u32; 3] = [1024, 1024, 64];
/// The largest number of threads in a block.
pub(super) const BLOCK_THREADS: u32 = 1024;
/// The number of registers per block.
pub(super) const BLOCK_REGISTERS: u32 = 64 << 10;
/// The default limit on a block's shared memory in bytes.
pub(super) const STATIC_SHARED: u32 = 48 << 10;
/// The limit that a kernel can opt in to, on a block's shared memory in bytes.
pub(super) const BLOCK_SHARED: u32 = 227 << 10;
