//! What a GPU takes: the numbers of an H200.

/// Blocks of a grid, by dimension.
pub(super) const GRID: [u32; 3] = [i32::MAX.cast_unsigned(), 65_535, 65_535];
/// Threads of a block, by dimension.
pub(super) const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Threads of a block.
pub(super) const BLOCK_THREADS: u32 = 1024;
/// Registers of a block.
pub(super) const BLOCK_REGISTERS: u32 = 64 << 10;
/// Bytes of shared memory of a block, unless a kernel asks for more.
pub(super) const STATIC_SHARED: u32 = 48 << 10;
/// Bytes of shared memory of a block at most.
pub(super) const BLOCK_SHARED: u32 = 227 << 10;
