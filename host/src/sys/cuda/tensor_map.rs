//! Tensor maps for TMA.

use devcomm_sys::driver::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use devcomm_types::{DataType, TensorMap, TensorMapDesc};

use super::{PrimaryContext, check};
use crate::error::Result;

impl PrimaryContext {
    /// Returns the tensor map of a tiling. Fails if the driver does not accept the address or a
    /// size.
    pub(crate) fn tensor_map(&self, tiling: &TensorMapDesc) -> Result<TensorMap> {
        self.bind()?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        let extents = [u64::from(tiling.columns), u64::from(tiling.rows)];
        let element_bytes = tiling.data_type.size() as u32;
        let pitch = [u64::from(element_bytes) * u64::from(tiling.columns)];
        let tile = [TensorMapDesc::ROW_BYTES / element_bytes, tiling.tile_rows];
        // A tile has adjacent elements: none are left out.
        let element_strides = [1, 1];
        // SAFETY: the driver is initialised. The map is live, the arrays have one element per
        // dimension (the pitches one fewer). The matrix is not accessed.
        let made = unsafe {
            self.driver.cuTensorMapEncodeTiled(
                &raw mut map,
                encoded(tiling.data_type),
                extents.len() as u32,
                tiling.address as *mut std::ffi::c_void,
                extents.as_ptr(),
                pitch.as_ptr(),
                tile.as_ptr(),
                element_strides.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(self.driver, "cuTensorMapEncodeTiled", made)?;
        Ok(TensorMap { words: map.opaque })
    }
}

/// Returns the driver's type: bytes for 8-bit floats, since it has no type for them.
const fn encoded(data_type: DataType) -> CUtensorMapDataType {
    use CUtensorMapDataType as Encoded;
    match data_type {
        DataType::Int8 | DataType::Uint8 | DataType::Float8e4m3 | DataType::Float8e5m2 => {
            Encoded::CU_TENSOR_MAP_DATA_TYPE_UINT8
        }
        DataType::Int32 => Encoded::CU_TENSOR_MAP_DATA_TYPE_INT32,
        DataType::Uint32 => Encoded::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        DataType::Int64 => Encoded::CU_TENSOR_MAP_DATA_TYPE_INT64,
        DataType::Uint64 => Encoded::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        DataType::Float16 => Encoded::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DataType::Float32 => Encoded::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DataType::Float64 => Encoded::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        DataType::Bfloat16 => Encoded::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }
}
