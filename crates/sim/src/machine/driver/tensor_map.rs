//! Encodes tensor maps, the descriptors of TMA copies.

use std::ffi::c_void;

use devcomm_sys::driver::{
    CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use devcomm_types::{DataType, TensorMapDesc};

use super::{CudaError, call};

/// Encodes the only layout that cuda_std's TMA copies use: two dimensions, in tiles with rows of
/// 128 bytes.
#[expect(clippy::too_many_arguments, reason = "the driver's signature")]
pub(super) unsafe fn encode_tiled(
    map: *mut CUtensorMap,
    data_type: CUtensorMapDataType,
    rank: u32,
    address: *mut c_void,
    extents: *const u64,
    strides: *const u64,
    tile: *const u32,
    element_strides: *const u32,
    _interleave: CUtensorMapInterleave,
    swizzle: CUtensorMapSwizzle,
    _promotion: CUtensorMapL2promotion,
    _fill: CUtensorMapFloatOOBfill,
) -> CUresult {
    call("cuTensorMapEncodeTiled", |cx| {
        cx.gpu()?;
        let refuse = |what: &str| {
            let text = format!("the simulator supports only tensor maps {what}");
            Err(CudaError::new(CUresult::CUDA_ERROR_NOT_SUPPORTED, text))
        };
        if rank != 2 {
            return refuse("of two dimensions");
        }
        // SAFETY: the program passes arrays with an element per dimension, and one less in
        // `strides`, as CUDA requires.
        let (columns, rows, stride, tile, element_strides) = unsafe {
            let tile = [*tile, *tile.add(1)];
            let element_strides = [*element_strides, *element_strides.add(1)];
            (*extents, *extents.add(1), *strides, tile, element_strides)
        };
        let data_type = match data_type {
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8 => DataType::Uint8,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT32 => DataType::Int32,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32 => DataType::Uint32,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT64 => DataType::Int64,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64 => DataType::Uint64,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 => DataType::Float16,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32 => DataType::Float32,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT64 => DataType::Float64,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 => DataType::Bfloat16,
            _ => return refuse("of whole numbers and of floats as they are"),
        };
        let element_bytes = data_type.size() as u32;
        if swizzle != CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
            || tile[0].checked_mul(element_bytes) != Some(TensorMapDesc::ROW_BYTES)
            || element_strides != [1, 1]
            || Some(stride) != u64::from(element_bytes).checked_mul(columns)
        {
            return refuse("of dense rows, with 128-byte swizzled tiles of 128 bytes a row");
        }
        let (Ok(rows), Ok(columns)) = (u32::try_from(rows), u32::try_from(columns)) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        };
        let address = address as u64;
        let desc = TensorMapDesc { address, rows, columns, tile_rows: tile[1], data_type };
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { (*map).opaque = desc.for_simulator().words };
        Ok(())
    })
}
