//! Tensor maps for TMA.

use devcomm_sys::driver::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use devcomm_types::{TensorMap, TensorMapDesc};

use super::{PrimaryContext, check};
use crate::error::Result;

impl PrimaryContext {
    /// The tensor map of a tiling. Fails if the driver does not accept the address or a size.
    pub(crate) fn tensor_map(&self, tiling: &TensorMapDesc) -> Result<TensorMap> {
        self.bind()?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        let extents = [u64::from(tiling.columns), u64::from(tiling.rows)];
        let pitch = [u64::from(tiling.element_bytes) * u64::from(tiling.columns)];
        let tile = [TensorMapDesc::ROW_BYTES / tiling.element_bytes, tiling.tile_rows];
        // Copies depend on the size only.
        let data_type = match tiling.element_bytes {
            1 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        // SAFETY: the driver is initialised. The map is live, the arrays have one element per
        // dimension (the pitches one fewer). The matrix is not accessed.
        let made = unsafe {
            self.driver.cuTensorMapEncodeTiled(
                &raw mut map,
                data_type,
                2,
                tiling.address as *mut std::ffi::c_void,
                extents.as_ptr(),
                pitch.as_ptr(),
                tile.as_ptr(),
                [1, 1].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(self.driver, "cuTensorMapEncodeTiled", made)?;
        Ok(TensorMap { words: map.opaque })
    }
}
