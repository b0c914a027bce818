//! The CUDA driver functions that the plugin uses: a table, from `libcuda.so.1` or from a test.
//!
//! The driver is loaded at run time: without one, `init` fails and NCCL tries its next back end.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use libloading::Library;

use crate::error::{Error, Result};

/// Return code. CUDA: `CUresult`.
pub type Code = c_int;
/// A context. CUDA: `CUcontext`.
pub type RawContext = *mut c_void;
/// A stream. CUDA: `CUstream`.
pub type RawStream = *mut c_void;
/// An event. CUDA: `CUevent`.
pub type RawEvent = *mut c_void;
/// A device address. CUDA: `CUdeviceptr`.
pub type Address = u64;

/// CUDA: `CUDA_SUCCESS`.
pub const SUCCESS: Code = 0;
/// CUDA: `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: Code = 600;
/// CUDA: `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`.
pub const CAN_USE_64_BIT_STREAM_MEM_OPS: c_int = 122;
/// CUDA: `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`.
pub const ATOMIC_REDUCTION_SUPPORTED: c_int = 148;
/// The first driver version with atomic reductions on streams, as from `cuDriverGetVersion`.
const FIRST_WITH_REDUCTIONS: c_int = 13_010;
/// CUDA: `CU_STREAM_NON_BLOCKING`.
const STREAM_NON_BLOCKING: c_uint = 1;
/// CUDA: `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: c_uint = 2;
/// CUDA: `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`.
const HOST_PORTABLE_MAPPED: c_uint = 1 | 2;
/// CUDA: `CU_STREAM_CAPTURE_MODE_RELAXED`.
const CAPTURE_RELAXED: c_int = 2;

/// An operation of `cuStreamBatchMemOp`. CUDA: `CUstreamBatchMemOpParams`.
///
/// A write has the words kind, address, value, and flags, of which 0 stands for a memory barrier
/// before the write. A barrier has one word: its lower half is the kind, its upper half is 0, for
/// the whole system. A reduction has the words kind; operation (lower half, 0 is an addition) and
/// data type (upper half); address; value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOp(pub [u64; 6]);

impl MemOp {
    /// CUDA: `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
    pub const WRITE_32: u64 = 2;
    /// CUDA: `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
    pub const WRITE_64: u64 = 5;
    /// CUDA: `CU_STREAM_MEM_OP_BARRIER`.
    pub const BARRIER: u64 = 6;
    /// CUDA: `CU_STREAM_MEM_OP_ATOMIC_REDUCTION`.
    pub const REDUCTION: u64 = 8;
    /// Data type of a reduction: unsigned, 64 bits. CUDA's number.
    pub const REDUCTION_U64: u64 = 0x16;

    /// Writes `value` after all earlier work of the stream, visible to every device and the host.
    pub(crate) fn write_64(address: Address, value: u64) -> Self {
        Self([Self::WRITE_64, address, value, 0, 0, 0])
    }

    /// Does the same as [`MemOp::write_64`], with 4 bytes.
    pub(crate) fn write_32(address: Address, value: u32) -> Self {
        Self([Self::WRITE_32, address, u64::from(value), 0, 0, 0])
    }

    /// Orders later operations after all earlier work of the stream.
    pub(crate) fn barrier() -> Self {
        Self([Self::BARRIER, 0, 0, 0, 0, 0])
    }

    /// Adds `value` to the word atomically.
    pub(crate) fn add_64(address: Address, value: u64) -> Self {
        Self([Self::REDUCTION, Self::REDUCTION_U64 << 32, address, value, 0, 0])
    }
}

/// CUDA: `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const READ_WRITE: c_int = 3;

/// A memory location. CUDA: `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// 1: a device.
    pub kind: c_int,
    /// The device's number.
    pub id: c_int,
}

impl Location {
    pub(crate) fn device(number: c_int) -> Self {
        Self { kind: 1, id: number }
    }
}

/// Access to memory. CUDA: `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDescription {
    /// The device.
    pub location: Location,
    /// The access flags.
    pub flags: c_int,
}

impl AccessDescription {
    pub(crate) fn of(number: c_int) -> Self {
        Self { location: Location::device(number), flags: READ_WRITE }
    }
}

/// Declares the table and its loader.
macro_rules! functions {
    ($($symbol:ident: fn($($argument:ty),*);)*) => {
        /// The driver's functions, by their symbols.
        #[allow(non_snake_case, missing_docs, reason = "the driver's names")]
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(pub $symbol: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Functions {
            /// Loads the symbols.
            ///
            /// # Safety
            ///
            /// `library` is the CUDA driver and stays loaded.
            unsafe fn of(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($symbol: {
                        let name = concat!(stringify!($symbol), "\0").as_bytes();
                        // SAFETY: the driver's function of this name has this signature: the name
                        // carries the version.
                        let found = unsafe { library.get(name) };
                        *found.map_err(|_| Error::NoDriver(format!(
                            "libcuda.so.1 has no {}: it is too old", stringify!($symbol),
                        )))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit: fn(c_uint);
    cuGetErrorName: fn(Code, *mut *const c_char);
    cuDriverGetVersion: fn(*mut c_int);
    cuDeviceGetAttribute: fn(*mut c_int, c_int, c_int);
    cuDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int);
    cuCtxGetCurrent: fn(*mut RawContext);
    cuCtxPushCurrent_v2: fn(RawContext);
    cuCtxPopCurrent_v2: fn(*mut RawContext);
    cuCtxGetDevice: fn(*mut c_int);
    cuCtxGetStreamPriorityRange: fn(*mut c_int, *mut c_int);
    cuStreamCreateWithPriority: fn(*mut RawStream, c_uint, c_int);
    cuStreamDestroy_v2: fn(RawStream);
    cuStreamQuery: fn(RawStream);
    cuStreamWaitEvent: fn(RawStream, RawEvent, c_uint);
    cuStreamBatchMemOp_v2: fn(RawStream, c_uint, *mut MemOp, c_uint);
    cuEventCreate: fn(*mut RawEvent, c_uint);
    cuEventDestroy_v2: fn(RawEvent);
    cuEventRecord: fn(RawEvent, RawStream);
    cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint);
    cuMemHostRegister_v2: fn(*mut c_void, usize, c_uint);
    cuMemHostUnregister: fn(*mut c_void);
    cuMemHostGetDevicePointer_v2: fn(*mut Address, *mut c_void, c_uint);
    cuMemFreeHost: fn(*mut c_void);
    cuMemGetAccess: fn(*mut u64, *const Location, Address);
    cuMemGetAddressRange_v2: fn(*mut Address, *mut usize, Address);
    cuMemRetainAllocationHandle: fn(*mut u64, *mut c_void);
    cuMemAddressReserve: fn(*mut Address, usize, usize, Address, u64);
    cuMemAddressFree: fn(Address, usize);
    cuMemMap: fn(Address, usize, usize, u64, u64);
    cuMemSetAccess: fn(Address, usize, *const AccessDescription, usize);
    cuMemUnmap: fn(Address, usize);
    cuMemRelease: fn(u64);
    cuMemcpyHtoDAsync_v2: fn(Address, *const c_void, usize, RawStream);
    cuMemcpyDtoHAsync_v2: fn(*mut c_void, Address, usize, RawStream);
    cuMemcpyDtoDAsync_v2: fn(Address, Address, usize, RawStream);
    cuMemcpyPeerAsync: fn(Address, RawContext, Address, RawContext, usize, RawStream);
    cuThreadExchangeStreamCaptureMode: fn(*mut c_int);
}

/// An initialised driver.
pub struct Driver {
    functions: Functions,
    version: c_int,
}

/// Calls a function of the table; an error names the function and the purpose of the call.
macro_rules! call {
    ($driver:expr, $purpose:expr, $symbol:ident($($argument:expr),* $(,)?)) => {{
        let driver: &$crate::driver::Driver = &$driver;
        // SAFETY: the user of the macro passes arguments that are valid for the driver's function.
        let code = unsafe { (driver.functions().$symbol)($($argument),*) };
        driver.check(code, stringify!($symbol), || $purpose.to_string())
    }};
}
pub(crate) use call;

impl Driver {
    /// Returns the system's driver, loaded and initialised once per process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDriver`].
    pub fn system() -> Result<Arc<Self>> {
        static DRIVER: OnceLock<Result<Arc<Driver>>> = OnceLock::new();
        DRIVER
            .get_or_init(|| {
                // SAFETY: loading the driver runs its initialisers, as intended.
                let library = unsafe { Library::new("libcuda.so.1") };
                let library = library.map_err(|error| {
                    Error::NoDriver(format!("libcuda.so.1 cannot be loaded ({error})"))
                })?;
                // SAFETY: the library is the CUDA driver, and is leaked below.
                let functions = unsafe { Functions::of(&library) }?;
                std::mem::forget(library);
                Self::new(functions).map(Arc::new)
            })
            .clone()
    }

    /// Initialises a driver with these functions.
    ///
    /// # Errors
    ///
    /// [`Error::NoDriver`].
    pub fn new(functions: Functions) -> Result<Self> {
        let mut driver = Self { functions, version: 0 };
        let mut version = 0;
        // SAFETY: the only pointer among the arguments is an out pointer to a live variable.
        let code = unsafe {
            match (functions.cuInit)(0) {
                SUCCESS => (functions.cuDriverGetVersion)(&raw mut version),
                code => code,
            }
        };
        driver
            .check(code, "cuInit", || "at start".to_owned())
            .map_err(|error| Error::NoDriver(error.to_string()))?;
        driver.version = version;
        Ok(driver)
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns [`Error::Driver`] unless `code` is success.
    pub(crate) fn check(
        &self,
        code: Code,
        call: &'static str,
        purpose: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = null();
        // SAFETY: the out pointer is to a live variable.
        let named = unsafe { (self.functions.cuGetErrorName)(code, &raw mut name) };
        let name = if named == SUCCESS && !name.is_null() {
            // SAFETY: the driver returns a NUL-terminated constant.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an unknown error".to_owned()
        };
        Err(Error::Driver { call, code, name, purpose: purpose() })
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> Result<bool> {
        let mut value = 0;
        call!(*self, "at connect", cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(value != 0)
    }
}

/// A rank's device: the context that was current when the rank connected.
#[derive(Clone)]
pub(crate) struct Device {
    pub(crate) driver: Arc<Driver>,
    pub(crate) context: RawContext,
    pub(crate) number: c_int,
    /// Whether its streams can add to a word in memory atomically.
    pub(crate) reductions: bool,
}

// SAFETY: contexts may be used by every thread; the driver locks.
unsafe impl Send for Device {}
// SAFETY: contexts may be used by several threads at a time; the driver locks.
unsafe impl Sync for Device {}

impl Device {
    /// Returns the device whose context is current on this thread.
    pub(crate) fn current(driver: &Arc<Driver>) -> Result<Self> {
        let mut context = null_mut();
        call!(**driver, "at connect", cuCtxGetCurrent(&raw mut context))?;
        if context.is_null() {
            return Err(Error::Unsupported(
                "no CUDA context is current in connect: call cudaSetDevice or make the device's \
                 primary context current before the communicator is used"
                    .to_owned(),
            ));
        }
        let mut device = 0;
        call!(**driver, "at connect", cuCtxGetDevice(&raw mut device))?;
        if !driver.attribute(CAN_USE_64_BIT_STREAM_MEM_OPS, device)? {
            return Err(Error::Unsupported(format!(
                "device {device} cannot write 64-bit words in the order of a stream (attribute \
                 {CAN_USE_64_BIT_STREAM_MEM_OPS})"
            )));
        }
        let reductions = driver.version >= FIRST_WITH_REDUCTIONS
            && driver.attribute(ATOMIC_REDUCTION_SUPPORTED, device).unwrap_or(false);
        Ok(Self { driver: Arc::clone(driver), context, number: device, reductions })
    }

    /// Returns whether device `other` can access this one's memory.
    pub(crate) fn is_accessible_from(&self, other: c_int) -> bool {
        let mut can = 0;
        let purpose = "for peer access";
        call!(*self.driver, purpose, cuDeviceCanAccessPeer(&raw mut can, other, self.number))
            .is_ok_and(|()| can != 0)
    }

    /// Makes the context current until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<CurrentContext<'_>> {
        call!(*self.driver, "to make a context current", cuCtxPushCurrent_v2(self.context))?;
        Ok(CurrentContext { device: self })
    }

    /// Returns a non-blocking stream of the highest priority.
    pub(crate) fn create_stream(&self) -> Result<RawStream> {
        let _entered = self.enter()?;
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        let driver = &*self.driver;
        call!(
            *driver,
            "at connect",
            cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        )?;
        call!(
            *driver,
            "at connect",
            cuStreamCreateWithPriority(&raw mut stream, STREAM_NON_BLOCKING, greatest)
        )?;
        Ok(stream)
    }

    /// Returns an event without timing.
    pub(crate) fn create_event(&self) -> Result<RawEvent> {
        let _entered = self.enter()?;
        let mut event = null_mut();
        call!(*self.driver, "at connect", cuEventCreate(&raw mut event, EVENT_DISABLE_TIMING))?;
        Ok(event)
    }

    /// Returns pinned host memory that every device can access.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let _entered = self.enter()?;
        let mut host = null_mut();
        call!(
            *self.driver,
            format_args!("for {bytes} bytes at connect"),
            cuMemHostAlloc(&raw mut host, bytes, HOST_PORTABLE_MAPPED)
        )?;
        let mut pinned = Pinned { device: self.clone(), host: host.cast(), address: 0, bytes };
        call!(
            *self.driver,
            "at connect",
            cuMemHostGetDevicePointer_v2(&raw mut pinned.address, host, 0)
        )?;
        // SAFETY: the allocation has this many bytes and no other reference.
        unsafe { pinned.host.write_bytes(0, bytes) };
        Ok(pinned)
    }
}

/// A context that is current on this thread until dropped.
pub(crate) struct CurrentContext<'a> {
    device: &'a Device,
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        let mut popped = null_mut();
        let _ =
            call!(*self.device.driver, "to leave a context", cuCtxPopCurrent_v2(&raw mut popped));
    }
}

/// Pinned host memory, initially zero.
pub(crate) struct Pinned {
    device: Device,
    pub(crate) host: *mut u8,
    /// The address by which devices access it.
    pub(crate) address: Address,
    pub(crate) bytes: usize,
}

// SAFETY: the memory belongs to no thread; the owner coordinates its use.
unsafe impl Send for Pinned {}
// SAFETY: a shared value gives addresses only; the owner coordinates accesses.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        let _ = call!(*self.device.driver, "at close", cuMemFreeHost(self.host.cast()));
    }
}

/// Sets the capture mode of this thread, one of NCCL's, to relaxed, permanently: its copies would
/// otherwise invalidate another thread's capture in `cudaStreamCaptureModeGlobal`.
pub(crate) fn relax_captures(driver: &Driver) {
    thread_local! {
        static DONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    if !DONE.replace(true) {
        exchange_capture_mode(driver, CAPTURE_RELAXED);
    }
}

/// Sets the thread's capture mode to relaxed until dropped. The program's threads use this.
pub(crate) struct RelaxedCaptures {
    driver: Arc<Driver>,
    before: Option<c_int>,
}

impl RelaxedCaptures {
    pub(crate) fn new(driver: &Arc<Driver>) -> Self {
        let before = exchange_capture_mode(driver, CAPTURE_RELAXED);
        Self { driver: Arc::clone(driver), before }
    }
}

impl Drop for RelaxedCaptures {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange_capture_mode(&self.driver, before);
        }
    }
}

/// Exchanges this thread's capture mode; returns the previous one.
fn exchange_capture_mode(driver: &Driver, mut mode: c_int) -> Option<c_int> {
    let purpose = "for a thread's captures";
    call!(*driver, purpose, cuThreadExchangeStreamCaptureMode(&raw mut mode)).ok().map(|()| mode)
}
