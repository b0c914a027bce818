//! Constants of NCCL's layout of memory, and the content of memory that nothing has written.

/// The initial content of shared memory and of memory from NCCL, and the value that a shuffle reads
/// from missing lanes: a NaN in every floating-point type, and an unlikely integer.
pub(crate) const POISON: u32 = 0x7fff_7fff;

/// NCCL's unit of the distance between two ranks' parts of a window.
pub(crate) const STRIDE_UNIT: usize = 4 << 30;

/// Unit of offsets in a multicast group, in bytes.
pub(crate) const MULTICAST_UNIT: usize = 4096;

/// Unit of a resource handle, in bytes.
pub(crate) const RESOURCE_UNIT: usize = 128;
