//! Tensor maps: descriptions of matrices for TMA.

use core::fmt;

use crate::element::DataType;
use crate::kernel::KernelParam;

/// Describes a matrix in global memory for TMA: address, extents, the tile that one copy
/// transfers, and the tile's layout in shared memory. It is opaque: the driver creates it (the host
/// crate's `Context::tensor_map`), or [`TensorMapDesc::for_simulator`] does.
///
/// A kernel takes it as a [`GridConstant`](crate::GridConstant). CUDA: `CUtensorMap` (128 bytes).
#[doc(alias = "CUtensorMap")]
#[repr(C, align(128))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// The words that the driver encodes.
    pub words: [u64; 16],
}

// SAFETY: `Abi` is the type itself.
unsafe impl KernelParam for TensorMap {
    type Abi = Self;
}

impl fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TensorMap")
    }
}

/// A row-major matrix, and the tiles that are copied from it. Elements outside of the matrix are
/// copied as zeros.
///
/// In shared memory a row of the tile has 128 bytes, rows are contiguous, and the 16-byte chunks of
/// row `r` are swizzled: chunk `c` is at `c ^ (r % 8)`, the 128-byte swizzle with which tensor
/// cores read without bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapDesc {
    /// Device address of the first element, a multiple of 16.
    pub address: u64,
    /// Rows of the matrix, at least 1.
    pub rows: u32,
    /// Elements per row. A row has a multiple of 16 bytes, and rows are contiguous.
    pub columns: u32,
    /// Rows per tile, 1 to 256, of [`TensorMapDesc::ROW_BYTES`].
    pub tile_rows: u32,
    /// The type of the elements. Copies depend on its size only, additions on the type.
    pub data_type: DataType,
}

impl TensorMapDesc {
    /// Bytes of a tile's row.
    pub const ROW_BYTES: u32 = 128;

    /// Returns the number of elements in 16 bytes.
    #[must_use]
    pub const fn chunk(&self) -> u32 {
        16 / self.data_type.size() as u32
    }

    /// Returns the map in the simulator's encoding, which is not valid on a GPU.
    #[must_use]
    pub const fn for_simulator(&self) -> TensorMap {
        let mut words = [0; 16];
        words[0] = SIMULATED;
        words[1] = self.address;
        words[2] = self.rows as u64;
        words[3] = self.columns as u64;
        words[4] = self.tile_rows as u64;
        words[5] = self.data_type as u64;
        TensorMap { words }
    }

    /// Returns the description that [`for_simulator`](Self::for_simulator) encoded; `None` for
    /// other maps.
    #[must_use]
    pub const fn of_simulated(map: &TensorMap) -> Option<Self> {
        let words = &map.words;
        if words[0] != SIMULATED {
            return None;
        }
        Some(Self {
            address: words[1],
            rows: words[2] as u32,
            columns: words[3] as u32,
            tile_rows: words[4] as u32,
            data_type: DataType::ALL[words[5] as usize],
        })
    }
}

/// First word of a map in the simulator's encoding.
const SIMULATED: u64 = u64::from_le_bytes(*b"tiling\0\0");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulators_map_is_read_back_and_no_other() {
        let desc = TensorMapDesc {
            address: 0x7f00,
            rows: 3,
            columns: 16,
            tile_rows: 128,
            data_type: DataType::Float16,
        };
        assert_eq!(TensorMapDesc::of_simulated(&desc.for_simulator()), Some(desc));
        assert_eq!(TensorMapDesc::of_simulated(&TensorMap { words: [1; 16] }), None);
    }

    #[test]
    fn the_layout_is_the_drivers() {
        assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 128));
    }
}
