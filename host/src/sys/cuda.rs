//! The part of the CUDA driver that the host uses, over cudarc's bindings.
//!
//! cudarc panics when the driver's library or one of its functions is missing. [`init`] checks for
//! both first, and everything here needs a [`PrimaryContext`], which needs [`init`].

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use crate::{Error, Result};

pub(crate) use cudarc::driver::sys::{
    CUdevice_attribute as DeviceAttribute, CUfunction_attribute as FunctionAttribute,
};
/// A stream as the driver and NCCL take it.
pub(crate) type RawStream = sys::CUstream;

/// The oldest driver that has every function called here (`cuEventElapsedTime_v2`); PTX 8.6, which
/// kernels are built for, needs 12.7.
const OLDEST_CUDA: c_int = 12_080;

/// Turns a driver result into an error that names the operation.
fn check(operation: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(operation, result)) }
}

fn error(operation: &'static str, result: CUresult) -> Error {
    let text = |lookup: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver is loaded, for it returned `result`; `text` is a live pointer, and what
        // it is set to is a constant of the driver.
        let found = unsafe { lookup(result, &raw mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return format!("error {}", result as u32);
        }
        // SAFETY: a NUL-terminated constant, as said above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Error::Cuda {
        operation,
        code: result as u32,
        name: text(sys::cuGetErrorName),
        text: text(sys::cuGetErrorString),
    }
}

/// Loads and initialises the driver, once a process.
pub(crate) fn init() -> Result<()> {
    static READY: OnceLock<()> = OnceLock::new();
    if READY.get().is_some() {
        return Ok(());
    }
    // SAFETY: loading the driver's library runs its initialisers, which is what using it means.
    if !unsafe { sys::is_culib_present() } {
        let reason = "libcuda.so.1 cannot be loaded".to_owned();
        return Err(Error::NoDriver { reason });
    }
    let has = driver_version_code()?;
    if has < OLDEST_CUDA {
        return Err(Error::DriverTooOld { needs: dotted(OLDEST_CUDA), has: dotted(has) });
    }
    // SAFETY: the library is there, checked above; the flags are 0, as they must be.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(Error::NoGpu),
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            let reason = "the libcuda found is the toolkit's stub, not a driver".to_owned();
            return Err(Error::NoDriver { reason });
        }
        failed => return Err(error("cuInit", failed)),
    }
    let _ = READY.set(());
    Ok(())
}

fn driver_version_code() -> Result<c_int> {
    let mut version = 0;
    // SAFETY: the library is there, as both callers have checked; `version` is a live int.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// The CUDA version that the driver supports, as `13.0`.
pub(crate) fn driver_version() -> Result<String> {
    init()?;
    driver_version_code().map(dotted)
}

fn dotted(code: c_int) -> String {
    format!("{}.{}", code / 1000, code % 1000 / 10)
}

/// How many GPUs the driver shows to this process.
pub(crate) fn device_count() -> Result<usize> {
    init()?;
    let mut count = 0;
    // SAFETY: the driver is initialised; `count` is a live int.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A device's primary context, which NCCL uses too. Every operation below takes one and makes it
/// current on the calling thread first.
pub(crate) struct PrimaryContext {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

impl PrimaryContext {
    pub(crate) fn retain(ordinal: usize) -> Result<Self> {
        let visible = device_count()?;
        if visible == 0 {
            return Err(Error::NoGpu);
        }
        let asked = ordinal.saturating_add(1);
        let ordinal = c_int::try_from(ordinal).ok().filter(|_| ordinal < visible);
        let ordinal = ordinal.ok_or(Error::TooFewGpus { asked, visible })?;
        let mut device = 0;
        // SAFETY: the driver is initialised; `device` is live.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut raw = null_mut();
        // SAFETY: the device came from the driver; `raw` is live.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        let context = Self { device, raw };
        context.bind()?;
        Ok(context)
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    pub(crate) fn attribute(&self, attribute: DeviceAttribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the device came from the driver; `value` is live.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    pub(crate) fn device_name(&self) -> Result<String> {
        let mut name = [0u8; 256];
        let length = name.len() as c_int;
        // SAFETY: the buffer is live and of the length given; the driver ends the name with a NUL.
        let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), length, self.device) };
        check("cuDeviceGetName", result)?;
        Ok(text_of(&name))
    }

    /// Free and total memory of the device in bytes.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both are live.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// Copies to the device and waits.
    ///
    /// # Safety
    ///
    /// `to` is device memory of at least `from.len()` bytes that nothing uses meanwhile.
    pub(crate) unsafe fn copy_in(&self, to: u64, from: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the source is live for its length, the caller vouches for the target. From
        // pageable memory this returns once the bytes are staged; the wait below is for the rest.
        let result = unsafe { sys::cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len()) };
        check("cuMemcpyHtoD", result)?;
        self.wait_for_default_stream()
    }

    /// Copies to the host and waits.
    ///
    /// # Safety
    ///
    /// `from` is device memory of at least `to.len()` bytes that nothing writes meanwhile.
    pub(crate) unsafe fn copy_out(&self, to: &mut [u8], from: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the target is live for its length, the caller vouches for the source.
        let result = unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len()) };
        check("cuMemcpyDtoH", result)?;
        self.wait_for_default_stream()
    }

    /// Fills bytes and waits.
    ///
    /// # Safety
    ///
    /// `to` is device memory of at least `bytes` bytes that nothing uses meanwhile.
    pub(crate) unsafe fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller vouches for the target.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(to, byte, bytes) })?;
        self.wait_for_default_stream()
    }

    /// Copies and fills run in the default stream, which the streams of this crate do not wait for.
    fn wait_for_default_stream(&self) -> Result<()> {
        // SAFETY: the context is current and NULL is its default stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(null_mut()) })
    }

    /// Makes a stream that does not wait for the default stream.
    pub(crate) fn create_stream(&self) -> Result<StreamHandle> {
        self.bind()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the context is current; `raw` is live.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(StreamHandle(raw))
    }

    /// Makes an event that can be timed.
    pub(crate) fn create_event(&self) -> Result<EventHandle> {
        self.bind()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint;
        // SAFETY: the context is current; `raw` is live.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(EventHandle(raw))
    }

    /// Loads a module from PTX; the driver's compiler log comes with a refusal.
    pub(crate) fn load_module(&self, ptx: &CStr) -> Result<ModuleHandle, LoadFailure> {
        const LOG_BYTES: usize = 16 << 10;
        self.bind().map_err(LoadFailure::Other)?;
        let (mut errors, mut notes) = (vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]);
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            sys::CUjit_option::CU_JIT_INFO_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver takes a number in the place of the pointer, and writes the used size back.
        let size = LOG_BYTES as *mut c_void;
        let mut values = [errors.as_mut_ptr().cast(), size, notes.as_mut_ptr().cast(), size];
        let mut raw = null_mut();
        // SAFETY: the context is current; the image is NUL-terminated PTX; there are as many options as
        // values, and the log buffers outlive the call and are of the size given.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                ptx.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match result {
            CUresult::CUDA_SUCCESS => Ok(ModuleHandle(raw)),
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => Err(LoadFailure::PtxTooNew),
            refused => {
                let error = error("cuModuleLoadDataEx", refused).to_string();
                let log = [errors, notes].map(|log| text_of(&log)).join("\n");
                Err(LoadFailure::Refused { error, log })
            }
        }
    }
}

/// The text before the first NUL.
fn text_of(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. The result does not matter: the process is done with it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Why a module was not loaded.
pub(crate) enum LoadFailure {
    PtxTooNew,
    Refused { error: String, log: String },
    Other(Error),
}

/// A live stream of the context it is used with.
pub(crate) struct StreamHandle(RawStream);

impl StreamHandle {
    pub(crate) fn raw(&self) -> RawStream {
        self.0
    }

    /// Whether all work is done.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream is live.
        match unsafe { sys::cuStreamQuery(self.0) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            failed => Err(error("cuStreamQuery", failed)),
        }
    }

    pub(crate) fn record(&self, event: &EventHandle) -> Result<()> {
        // SAFETY: both are live and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, self.0) })
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        // SAFETY: the stream is live and not used again. The driver lets pending work finish.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// A live event.
pub(crate) struct EventHandle(sys::CUevent);

impl EventHandle {
    /// Milliseconds from `start` to `self`. Both must have been recorded and reached.
    pub(crate) fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are live; `milliseconds` is a live float.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.0, self.0) };
        check("cuEventElapsedTime", result)?;
        Ok(milliseconds)
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        // SAFETY: the event is live and not used again. The driver waits for no work here.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A loaded module.
pub(crate) struct ModuleHandle(sys::CUmodule);

impl ModuleHandle {
    /// The entry `name`, loaded completely: a lazy load while a kernel spins would wait for that kernel.
    pub(crate) fn function(&self, name: &str) -> Result<FunctionHandle> {
        let name = CString::new(name)
            .map_err(|_| Error::invalid(format!("the kernel name {name:?} holds a NUL")))?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the module is live, the name NUL-terminated, `raw` writable.
        let result = unsafe { sys::cuModuleGetFunction(raw.as_mut_ptr(), self.0, name.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        // SAFETY: the call succeeded, so it wrote the handle.
        let raw = unsafe { raw.assume_init() };
        // SAFETY: the function belongs to the live module.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(raw) })?;
        Ok(FunctionHandle(raw))
    }

    /// Unloads the module.
    ///
    /// # Safety
    ///
    /// No kernel of it runs and no [`FunctionHandle`] of it is used again.
    pub(crate) unsafe fn unload(self) -> Result<()> {
        // SAFETY: the module is live and taken by value; the caller vouches for its functions.
        check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.0) })
    }
}

/// A kernel entry; the owner keeps the module it belongs to.
pub(crate) struct FunctionHandle(sys::CUfunction);

/// Grid and block of one launch.
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    /// Launch all blocks at once or fail.
    pub cooperative: bool,
}

impl FunctionHandle {
    pub(crate) fn attribute(&self, attribute: FunctionAttribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the function's module is live; `value` is a live int.
        let result = unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, self.0) };
        check("cuFuncGetAttribute", result)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Allows launches with up to `bytes` of dynamic shared memory.
    pub(crate) fn allow_dynamic_shared(&self, bytes: u32) -> Result<()> {
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is live; the driver checks the value.
        let result = unsafe { sys::cuFuncSetAttribute(self.0, attribute, bytes) };
        check("cuFuncSetAttribute", result)
    }

    /// Blocks of this shape that fit on one multiprocessor at once.
    pub(crate) fn blocks_per_sm(&self, threads: u32, dynamic_shared: u32) -> Result<u32> {
        let mut blocks = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is live; `blocks` is a live int.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.0,
                threads,
                dynamic_shared as usize,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Launches the kernel.
    ///
    /// # Safety
    ///
    /// `params` holds the address of every parameter, in order, each of the parameter's size; the
    /// context of `stream` is current and the function's own; the kernel's contract holds.
    pub(crate) unsafe fn launch(
        &self,
        stream: &StreamHandle,
        shape: &Shape,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        attribute.value.cooperative = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.block[0],
            blockDimY: shape.block[1],
            blockDimZ: shape.block[2],
            sharedMemBytes: shape.dynamic_shared,
            hStream: stream.0,
            attrs: if shape.cooperative { &raw mut attribute } else { null_mut() },
            numAttrs: c_uint::from(shape.cooperative),
        };
        // SAFETY: the configuration and its one attribute live through the call, which copies the
        // parameters; the caller vouches for the rest.
        let result = unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.0, params.as_mut_ptr(), null_mut())
        };
        check("cuLaunchKernelEx", result)
    }
}
