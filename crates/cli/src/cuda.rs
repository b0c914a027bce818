//! Queries the CUDA driver, if its library is present.

use std::ffi::{CStr, c_char, c_int};

use devcomm_locate::GinGpus;
use libloading::{Library, Symbol};

/// The driver's view of the system.
pub struct DriverInfo {
    /// The CUDA version that the driver supports, e.g. `13.0`.
    pub driver: String,
    /// The GPU properties that GIN depends on; `None` without GPUs.
    pub gin: Option<GinGpus>,
    /// The name of each GPU.
    pub gpus: Vec<String>,
    /// Number of ordered pairs of GPUs with peer access.
    pub peer_pairs: usize,
    /// Number of ordered pairs with native atomics, as over NVLink.
    pub atomic_pairs: usize,
}

/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED` and
/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
const P2P_ACCESS: c_int = 2;
const P2P_ATOMICS: c_int = 3;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const RDMA_WITH_VMM: c_int = 110;

/// Queries the driver.
///
/// # Errors
///
/// If the driver's library is missing, or a call fails.
pub fn driver_info() -> Result<DriverInfo, String> {
    let driver = Driver::open()?;
    let count = driver.number("cuDeviceGetCount")?;
    let version = driver.number("cuDriverGetVersion")?;
    let rdma_with_vmm = (0..count).all(|gpu| driver.attribute(RDMA_WITH_VMM, gpu));
    let mut info = DriverInfo {
        driver: version_text(version),
        gin: (count > 0).then_some(GinGpus { driver: version, rdma_with_vmm }),
        gpus: (0..count).map(|gpu| driver.name(gpu)).collect::<Result<_, _>>()?,
        peer_pairs: 0,
        atomic_pairs: 0,
    };
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            info.peer_pairs += usize::from(driver.p2p(P2P_ACCESS, from, to));
            info.atomic_pairs += usize::from(driver.p2p(P2P_ATOMICS, from, to));
        }
    }
    Ok(info)
}

/// Returns whether the driver is present and has GPUs.
pub fn has_gpus() -> bool {
    driver_info().is_ok_and(|info| !info.gpus.is_empty())
}

/// Returns the version for a code such as 13000, which is CUDA 13.0.
fn version_text(code: c_int) -> String {
    format!("{}.{}", code / 1000, code % 1000 / 10)
}

/// The opened and initialised driver library.
struct Driver(Library);

impl Driver {
    fn open() -> Result<Self, String> {
        // SAFETY: opening NVIDIA's driver library runs its initialisers, which any process may do.
        let library = unsafe { Library::new("libcuda.so.1") }
            .map_err(|error| format!("libcuda.so.1 does not open: {error}"))?;
        let driver = Self(library);
        // SAFETY: `CUresult cuInit(unsigned int)` of the driver API; flags must be 0, and are.
        let code = unsafe { driver.symbol::<unsafe extern "C" fn(u32) -> c_int>("cuInit")?(0) };
        if code == 0 { Ok(driver) } else { Err(format!("cuInit failed: {}", explain(code))) }
    }

    /// # Safety
    ///
    /// `F` must be the type of the driver's function `name`.
    unsafe fn symbol<F>(&self, name: &str) -> Result<Symbol<'_, F>, String> {
        // SAFETY: the caller guarantees the type.
        unsafe { self.0.get(name) }.map_err(|error| format!("the driver has no {name}: {error}"))
    }

    /// Calls a function that returns one number.
    fn number(&self, name: &'static str) -> Result<c_int, String> {
        let mut value = 0;
        // SAFETY: this is called for `cuDeviceGetCount` and `cuDriverGetVersion`, both `CUresult
        // (int *)`; the pointer is to a live int.
        let code = unsafe {
            self.symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(name)?(&raw mut value)
        };
        if code == 0 { Ok(value) } else { Err(format!("{name} failed: {}", explain(code))) }
    }

    fn name(&self, gpu: c_int) -> Result<String, String> {
        type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
        let mut text = [0 as c_char; 128];
        // SAFETY: `CUresult cuDeviceGetName(char *, int length, CUdevice)` writes at most `length`
        // characters, including the terminating NUL, into the array of that length. Device handles
        // are the ordinals.
        let code =
            unsafe { self.symbol::<GetName>("cuDeviceGetName")?(text.as_mut_ptr(), 128, gpu) };
        if code != 0 {
            return Err(format!("cuDeviceGetName failed: {}", explain(code)));
        }
        // SAFETY: the call wrote a NUL-terminated string.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Returns whether a GPU has an attribute; a failed query counts as no.
    fn attribute(&self, attribute: c_int, gpu: c_int) -> bool {
        type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
        let mut value = 0;
        // SAFETY: `CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice)`; the pointer
        // is to a live int, and the device is an ordinal below the count.
        let code = unsafe {
            match self.symbol::<GetAttribute>("cuDeviceGetAttribute") {
                Ok(get) => get(&raw mut value, attribute, gpu),
                Err(_) => return false,
            }
        };
        code == 0 && value != 0
    }

    /// Returns whether a pair of GPUs has a P2P attribute; a failed query counts as no.
    fn p2p(&self, attribute: c_int, from: c_int, to: c_int) -> bool {
        type GetP2p = unsafe extern "C" fn(*mut c_int, c_int, c_int, c_int) -> c_int;
        let mut value = 0;
        // SAFETY: `CUresult cuDeviceGetP2PAttribute(int *, CUdevice_P2PAttribute, CUdevice,
        // CUdevice)`; the pointer is to a live int, and the devices are ordinals below the count.
        let code = unsafe {
            match self.symbol::<GetP2p>("cuDeviceGetP2PAttribute") {
                Ok(get) => get(&raw mut value, attribute, from, to),
                Err(_) => return false,
            }
        };
        code == 0 && value != 0
    }
}

/// Explains the error codes of systems without working GPUs.
fn explain(code: c_int) -> String {
    match code {
        34 => "code 34, the driver library is a stub".to_owned(),
        100 => "code 100, there is no GPU".to_owned(),
        803 => "code 803, the driver library is older or newer than the driver".to_owned(),
        _ => format!("code {code}"),
    }
}
