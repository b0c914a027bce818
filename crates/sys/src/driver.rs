//! The CUDA driver's functions that devcomm calls.
//!
//! Names, prototypes and raw types are the driver's (the types as cudarc declares them).

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

pub use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUcontext, CUdevice, CUdevice_attribute,
    CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphEdgeData, CUgraphExec, CUgraphNode, CUhostFn, CUjit_option, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchAttributeValue_union__bindgen_ty_1,
    CUlaunchConfig, CUmodule, CUresult, CUstream, CUstream_flags, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuserObject, cuuint64_t,
};

/// Declares the function table, and the static table with cudarc's functions.
macro_rules! functions {
    ($( $name:ident($($arg:ident: $type:ty),* $(,)?); )*) => {
        /// The function table. Each function has the contract of the driver function with its name.
        #[derive(Clone, Copy, Debug)]
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            $(
                #[doc = concat!("CUDA: `", stringify!($name), "`.")]
                pub $name: unsafe fn($($type),*) -> CUresult,
            )*
        }

        /// The system's driver, loaded by cudarc: a call panics if the library or the function is
        /// missing.
        pub static CUDA: Driver = Driver { $( $name: cudarc::driver::sys::$name, )* };

        #[allow(non_snake_case, reason = "the names are the driver's")]
        impl Driver {
            $(
                #[doc = concat!("CUDA: `", stringify!($name), "`.")]
                ///
                /// # Safety
                ///
                /// The contract is that of the C function.
                #[allow(clippy::too_many_arguments, reason = "they are the C function's")]
                pub unsafe fn $name(&self, $($arg: $type),*) -> CUresult {
                    // SAFETY: the caller passes arguments that are valid for CUDA's function.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

functions! {
    // Errors and the driver.
    cuGetErrorName(error: CUresult, text: *mut *const c_char);
    cuGetErrorString(error: CUresult, text: *mut *const c_char);
    cuInit(flags: c_uint);
    cuDriverGetVersion(driver_version: *mut c_int);
    // Devices and contexts.
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxSetCurrent(context: CUcontext);
    cuCtxSynchronize();
    // Memory.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(memory: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(memory: CUdeviceptr);
    cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(memory: *mut c_void);
    cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, memory: *mut c_void, flags: c_uint);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
    cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
    cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
    cuMemsetD2D32Async(
        to: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize,
        stream: CUstream,
    );
    cuTensorMapEncodeTiled(
        tensor_map: *mut CUtensorMap, tensor_data_type: CUtensorMapDataType, tensor_rank: u32,
        global_address: *mut c_void, global_dim: *const u64, global_strides: *const u64,
        box_dim: *const u32, element_strides: *const u32, interleave: CUtensorMapInterleave,
        swizzle: CUtensorMapSwizzle, l2_promotion: CUtensorMapL2promotion,
        oob_fill: CUtensorMapFloatOOBfill
    );
    // Streams and events.
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent);
    // Graphs.
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuStreamGetCaptureInfo_v3(
        stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t,
        graph: *mut CUgraph, dependencies: *mut *const CUgraphNode,
        edge_data: *mut *const CUgraphEdgeData, num_dependencies: *mut usize
    );
    cuUserObjectCreate(
        object: *mut CUuserObject, ptr: *mut c_void, destroy: CUhostFn, refcount: c_uint,
        flags: c_uint
    );
    cuUserObjectRelease(object: CUuserObject, count: c_uint);
    cuGraphRetainUserObject(
        graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint
    );
    cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, num_nodes: *mut usize);
    cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(exec: CUgraphExec);
    // Modules and launches.
    cuModuleLoad(module: *mut CUmodule, path: *const c_char);
    cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, num_options: c_uint,
        options: *mut CUjit_option, option_values: *mut *mut c_void
    );
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuFuncLoad(function: CUfunction);
    cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        num_blocks: *mut c_int, function: CUfunction, block_size: c_int, dynamic_smem_size: usize
    );
    cuOccupancyMaxActiveClusters(
        num_clusters: *mut c_int, function: CUfunction, config: *const CUlaunchConfig
    );
    cuLaunchKernelEx(
        config: *const CUlaunchConfig, function: CUfunction, kernel_params: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}
