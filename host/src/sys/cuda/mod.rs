//! Calls of the CUDA driver, through the function table of the [`Machine`].
//!
//! With real GPUs, a call panics if the driver's library or the function is missing. [`init`]
//! checks for both, and everything else needs a [`PrimaryContext`], whose constructor calls it.

pub(crate) mod abort_block;
pub(crate) mod graph;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod stream;
mod tensor_map;

use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::OnceLock;

use devcomm_locate::GinGpus;
use devcomm_sys::driver::{CUcontext, CUdevice, CUresult, Driver};
use libloading::Library;

use super::fork::Process;
use crate::error::{DriverError, Error, Result};
use crate::machine::Machine;

pub(crate) use devcomm_sys::driver::{
    CUdevice_attribute as DeviceAttribute, CUfunction_attribute as FunctionAttribute,
    CUstream as RawStream,
};

/// The CUDA version of the oldest driver that has every function called here: 12.8 added
/// `cuEventElapsedTime_v2`. The kernels' PTX 8.6 needs 12.7. For NCCL see [`super::nccl_build`].
const OLDEST_CUDA: c_int = 12_080;

/// Turns a driver result into an error that names the operation.
fn check(driver: &Driver, operation: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(driver, operation, result)) }
}

fn error(driver: &Driver, operation: &'static str, result: CUresult) -> Error {
    let text = |lookup: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver is loaded, since it returned `result`; `text` is a live pointer, and
        // the driver sets it to a constant string.
        let found = unsafe { lookup(result, &raw mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return format!("error {}", result as u32);
        }
        // SAFETY: a NUL-terminated constant of the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Error::Driver(DriverError::Failed {
        operation,
        code: result as u32,
        name: text(driver.cuGetErrorName),
        text: text(driver.cuGetErrorString),
    })
}

/// Initialises the machine's driver, and returns its functions for this thread.
pub(crate) fn init(machine: &Machine) -> Result<&'static Driver> {
    static INITIALISED: OnceLock<()> = OnceLock::new();
    let driver = machine.driver();
    if !machine.is_simulated() && INITIALISED.get().is_none() {
        init_gpus(driver)?;
        let _ = INITIALISED.set(());
    }
    Ok(driver)
}

/// Loads and initialises NVIDIA's driver.
fn init_gpus(driver: &Driver) -> Result<()> {
    // SAFETY: loading the library runs its initialisers, which NVIDIA's driver supports.
    let open = |name| unsafe { Library::new(name) }.ok();
    let Some(library) = cudarc::get_lib_name_candidates("cuda").into_iter().find_map(open) else {
        let reason = "libcuda.so.1 cannot be loaded".to_owned();
        return Err(DriverError::NoDriver { reason }.into());
    };
    // For as long as the process runs: cuda-gdb loses a driver that is unloaded and loaded again.
    std::mem::forget(library);
    let has = version_code(driver)?;
    if has < OLDEST_CUDA {
        return Err(DriverError::TooOld { needs: dotted(OLDEST_CUDA), has: dotted(has) }.into());
    }
    // SAFETY: the library is loaded, as checked above; the flags must be 0.
    match unsafe { driver.cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(DriverError::NoGpu.into()),
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            let reason = "the libcuda found is the toolkit's stub, not a driver".to_owned();
            Err(DriverError::NoDriver { reason }.into())
        }
        failed => Err(error(driver, "cuInit", failed)),
    }
}

fn version_code(driver: &Driver) -> Result<c_int> {
    let mut version = 0;
    // SAFETY: the library is loaded, as all callers have checked; `version` is a live int.
    let got = unsafe { driver.cuDriverGetVersion(&raw mut version) };
    check(driver, "cuDriverGetVersion", got)?;
    Ok(version)
}

/// Returns the CUDA version that the driver supports, as `13.0`.
pub(crate) fn driver_version(machine: &Machine) -> Result<String> {
    version_code(init(machine)?).map(dotted)
}

fn dotted(code: c_int) -> String {
    format!("{}.{}", code / 1000, code % 1000 / 10)
}

/// Returns the properties of driver and GPUs on which GIN's back ends depend.
pub(crate) fn gin_gpus(machine: &Machine) -> Result<GinGpus> {
    const ATTRIBUTE: DeviceAttribute =
        DeviceAttribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    let (driver, mut rdma_with_vmm) = (init(machine)?, true);
    for device in (0..).take(device_count(machine)?) {
        let mut value = 0;
        // SAFETY: a `CUdevice` is an ordinal below the count; `value` is live.
        let result = unsafe { driver.cuDeviceGetAttribute(&raw mut value, ATTRIBUTE, device) };
        check(driver, "cuDeviceGetAttribute", result)?;
        rdma_with_vmm &= value != 0;
    }
    Ok(GinGpus { driver: version_code(driver)?, rdma_with_vmm })
}

/// Returns how many GPUs the driver shows to this process.
pub(crate) fn device_count(machine: &Machine) -> Result<usize> {
    let (driver, mut count) = (init(machine)?, 0);
    // SAFETY: the driver is initialised; `count` is a live int.
    check(driver, "cuDeviceGetCount", unsafe { driver.cuDeviceGetCount(&raw mut count) })?;
    Ok(unsigned(count) as usize)
}

/// A device's primary context, which NCCL uses too. The operations on it make it current on the
/// calling thread first.
pub(crate) struct PrimaryContext {
    driver: &'static Driver,
    device: CUdevice,
    raw: CUcontext,
    process: Process,
}

// SAFETY: an opaque handle, which any thread may use; a context can be current on any number of
// threads.
unsafe impl Send for PrimaryContext {}
// SAFETY: CUDA's contexts may be used by any thread, several at a time.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains the context of a visible GPU, and makes it current on this thread.
    pub(crate) fn retain(machine: &Machine, ordinal: usize) -> Result<Self> {
        let visible = device_count(machine)?;
        if visible == 0 {
            return Err(DriverError::NoGpu.into());
        }
        let asked = ordinal.saturating_add(1);
        let ordinal = c_int::try_from(ordinal).ok().filter(|_| ordinal < visible);
        let ordinal = ordinal.ok_or(DriverError::TooFewGpus { asked, visible })?;
        let (driver, mut device, mut raw) = (machine.driver(), 0, null_mut());
        // SAFETY: the driver is initialised; `device` is live.
        let got = unsafe { driver.cuDeviceGet(&raw mut device, ordinal) };
        check(driver, "cuDeviceGet", got)?;
        // SAFETY: the driver returned the device; `raw` is live.
        let retained = unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut raw, device) };
        check(driver, "cuDevicePrimaryCtxRetain", retained)?;
        let context = Self { driver, device, raw, process: Process::current() };
        context.bind()?;
        Ok(context)
    }

    /// Makes the context current on this thread. Fails in a forked child.
    pub(crate) fn bind(&self) -> Result<()> {
        self.process.require()?;
        self.binder().bind()
    }

    /// Returns whether this process is a forked child, which cannot use the context.
    pub(crate) fn is_forked(&self) -> bool {
        !self.process.is_current()
    }

    /// Returns whether `other` is this context.
    pub(crate) fn is(&self, other: CUcontext) -> bool {
        self.raw == other
    }

    /// Returns a handle that makes the context current on other threads. The context must outlive
    /// it.
    pub(crate) fn binder(&self) -> Binder {
        Binder { driver: self.driver, raw: self.raw }
    }

    pub(crate) fn attribute(&self, attribute: DeviceAttribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver returned the device; `value` is live.
        let result =
            unsafe { self.driver.cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check(self.driver, "cuDeviceGetAttribute", result)?;
        Ok(unsigned(value))
    }

    pub(crate) fn device_name(&self) -> Result<String> {
        let mut name = [0u8; 256];
        let length = name.len() as c_int;
        // SAFETY: the buffer is live and of the length given; the driver ends the name with a NUL.
        let result =
            unsafe { self.driver.cuDeviceGetName(name.as_mut_ptr().cast(), length, self.device) };
        check(self.driver, "cuDeviceGetName", result)?;
        Ok(text_of(&name))
    }

    /// Returns free and total memory of the device in bytes.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both are live.
        check(self.driver, "cuMemGetInfo", unsafe {
            self.driver.cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }
}

/// A `Send` handle that makes a context current on the calling thread.
#[derive(Clone, Copy)]
pub(crate) struct Binder {
    driver: &'static Driver,
    raw: CUcontext,
}

// SAFETY: a context can be current on any number of threads.
unsafe impl Send for Binder {}

impl Binder {
    pub(crate) fn bind(self) -> Result<()> {
        // SAFETY: the holder of the handle keeps the context retained.
        check(self.driver, "cuCtxSetCurrent", unsafe { self.driver.cuCtxSetCurrent(self.raw) })
    }

    /// Waits until all work of the context is done, in streams of any library.
    pub(crate) fn synchronize(self) -> Result<()> {
        self.bind()?;
        // SAFETY: the context is current.
        check(self.driver, "cuCtxSynchronize", unsafe { self.driver.cuCtxSynchronize() })
    }
}

/// Returns a count or an attribute, of which the driver returns none that is negative.
fn unsigned(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// Returns the text before the first NUL.
fn text_of(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        // The last user may be on a thread that has not used it yet.
        let _ = self.bind();
        // SAFETY: retained once by `retain`. An error cannot be handled here.
        let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
