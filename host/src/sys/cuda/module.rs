//! CUDA modules: loading them, their functions, and launches.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use devcomm_sys::driver::{
    CUfunction, CUjit_option, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1, CUlaunchConfig, CUmodule, CUresult, CUstream,
    Driver,
};
use devcomm_types::HostBody;

use super::stream::StreamHandle;
use super::{FunctionAttribute, PrimaryContext, check, error, text_of, unsigned};
use crate::error::{Error, Result};
use crate::machine::Machine;

/// Why a module was not loaded.
pub(crate) enum LoadFailure {
    /// The driver's compiler does not know the PTX ISA.
    PtxTooNew,
    /// `log` is that of the driver's compiler, or the path of a file, for which there is no log.
    Refused {
        error: String,
        log: String,
    },
    Other(Error),
}

/// The source of a module.
#[derive(Clone, Copy)]
pub(crate) enum Image<'a> {
    /// The text of the PTX.
    Ptx(&'a CStr),
    /// A whole cubin, checked by its hash.
    Cubin(&'a [u8]),
    /// The path of a cubin or of a PTX file, which the driver reads.
    File(&'a CStr),
}

impl PrimaryContext {
    /// Loads a module. If the driver refuses PTX, the error contains its compiler's log.
    pub(crate) fn load_module(&self, image: Image<'_>) -> Result<ModuleHandle, LoadFailure> {
        self.bind().map_err(LoadFailure::Other)?;
        match image {
            // SAFETY: PTX ends with its NUL.
            Image::Ptx(ptx) => unsafe { load_data(self.driver, ptx.as_ptr().cast()) },
            // SAFETY: the cubin is whole, as `Image` says, and its header has its length.
            Image::Cubin(cubin) => unsafe { load_data(self.driver, cubin.as_ptr().cast()) },
            Image::File(path) => load_file(self.driver, path),
        }
    }

    /// Returns a new module of the simulated `machine`, for kernels' bodies in Rust.
    pub(crate) fn simulated_module(&self, machine: &Machine) -> Result<ModuleHandle> {
        self.bind()?;
        Ok(ModuleHandle { driver: self.driver, raw: machine.load_module() })
    }

    /// Returns the function of a [simulated](Self::simulated_module) module that runs a kernel's
    /// body in Rust on this GPU.
    pub(crate) fn bind_body(
        &self,
        machine: &Machine,
        module: CUmodule,
        body: &HostBody,
    ) -> Result<FunctionHandle> {
        self.bind()?;
        let (driver, raw) = (self.driver, machine.bind(module, body));
        if raw.is_null() {
            return Err(Error::invalid(format!("no Rust body of `{}` can be run", body.name())));
        }
        Ok(FunctionHandle { driver, raw })
    }
}

fn load_file(driver: &'static Driver, path: &CStr) -> Result<ModuleHandle, LoadFailure> {
    let mut raw = null_mut();
    // SAFETY: the caller made the context current; the path is NUL-terminated.
    match unsafe { driver.cuModuleLoad(&raw mut raw, path.as_ptr()) } {
        CUresult::CUDA_SUCCESS => Ok(ModuleHandle { driver, raw }),
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => Err(LoadFailure::PtxTooNew),
        refused => {
            let error = error(driver, "cuModuleLoad", refused).to_string();
            Err(LoadFailure::Refused { error, log: path.to_string_lossy().into_owned() })
        }
    }
}

/// Loads an image from memory.
///
/// # Safety
///
/// The image is whole: the driver finds its end by what is in it.
unsafe fn load_data(
    driver: &'static Driver,
    image: *const c_void,
) -> Result<ModuleHandle, LoadFailure> {
    const LOG_BYTES: usize = 16 << 10;
    let (mut errors, mut infos) = (vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]);
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        CUjit_option::CU_JIT_INFO_LOG_BUFFER,
        CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        // The module gets line information for debuggers and profilers; its code is the same.
        CUjit_option::CU_JIT_GENERATE_LINE_INFO,
    ];
    // Options that are numbers are cast to pointers; the driver writes the used sizes back.
    let (size, on) = (without_provenance_mut(LOG_BYTES), without_provenance_mut(1));
    let mut values = [errors.as_mut_ptr().cast(), size, infos.as_mut_ptr().cast(), size, on];
    let mut raw = null_mut();
    // SAFETY: the caller made the context current, and the image is the caller's contract; each
    // option has a value, and the log buffers outlive the call and have the given size.
    let result = unsafe {
        driver.cuModuleLoadDataEx(
            &raw mut raw,
            image,
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    match result {
        CUresult::CUDA_SUCCESS => Ok(ModuleHandle { driver, raw }),
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => Err(LoadFailure::PtxTooNew),
        refused => {
            let error = error(driver, "cuModuleLoadDataEx", refused).to_string();
            let log = [errors, infos].map(|log| text_of(&log)).join("\n");
            Err(LoadFailure::Refused { error, log })
        }
    }
}

/// A loaded module.
pub(crate) struct ModuleHandle {
    driver: &'static Driver,
    raw: CUmodule,
}

// SAFETY: an opaque handle, which any thread may use.
unsafe impl Send for ModuleHandle {}

impl ModuleHandle {
    /// Returns the entry point `name`, loaded now: a lazy load while a kernel runs could wait for
    /// that kernel.
    pub(crate) fn function(&self, name: &str) -> Result<FunctionHandle> {
        let name = CString::new(name)
            .map_err(|_| Error::invalid(format!("the kernel name {name:?} holds a NUL")))?;
        let (driver, mut raw) = (self.driver, null_mut());
        // SAFETY: the module is live, the name NUL-terminated, `raw` writable.
        let got = unsafe { driver.cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) };
        check(driver, "cuModuleGetFunction", got)?;
        // SAFETY: the function belongs to the live module.
        check(driver, "cuFuncLoad", unsafe { driver.cuFuncLoad(raw) })?;
        Ok(FunctionHandle { driver, raw })
    }

    pub(crate) fn raw(&self) -> CUmodule {
        self.raw
    }

    /// Unloads the module.
    ///
    /// # Safety
    ///
    /// None of its kernels runs, and none of its [`FunctionHandle`]s is used again.
    pub(crate) unsafe fn unload(self) -> Result<()> {
        // SAFETY: the module is live and taken by value; its functions are the caller's contract.
        check(self.driver, "cuModuleUnload", unsafe { self.driver.cuModuleUnload(self.raw) })
    }
}

/// A kernel entry point. Its owner keeps the module loaded.
pub(crate) struct FunctionHandle {
    driver: &'static Driver,
    raw: CUfunction,
}

// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Send for FunctionHandle {}
// SAFETY: an opaque handle, which any thread may use, several at a time.
unsafe impl Sync for FunctionHandle {}

/// Grid, block and attributes of one launch.
pub(crate) struct LaunchShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// Blocks per cluster; by default what the kernel fixes, or 1.
    pub cluster: Option<u32>,
    /// A cooperative launch: all blocks are resident, or the launch fails.
    pub cooperative: bool,
    /// The kernel may begin before the previous one of the stream has ended.
    pub dependent: bool,
}

impl LaunchShape {
    /// Returns the driver's form of the attributes, and how many there are: no allocation per
    /// launch.
    fn attributes(&self) -> ([CUlaunchAttribute; 3], usize) {
        use CUlaunchAttributeID as Id;
        let none = CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: CUlaunchAttributeValue { pad: [0; 64] },
        };
        let (mut all, mut count) = ([none; 3], 0);
        let mut add = |id, set: &dyn Fn(&mut CUlaunchAttributeValue)| {
            all[count].id = id;
            set(&mut all[count].value);
            count += 1;
        };
        if let Some(x) = self.cluster {
            let dim = CUlaunchAttributeValue_union__bindgen_ty_1 { x, y: 1, z: 1 };
            add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &|value| value.clusterDim = dim);
        }
        if self.cooperative {
            add(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &|value| value.cooperative = 1);
        }
        if self.dependent {
            add(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, &|value| {
                value.programmaticStreamSerializationAllowed = 1;
            });
        }
        (all, count)
    }

    /// Returns the driver's form. It points to the attributes.
    fn config(&self, stream: CUstream, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
        CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.dynamic_shared,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as c_uint,
        }
    }
}

impl FunctionHandle {
    pub(crate) fn attribute(&self, attribute: FunctionAttribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the function's module is live; `value` is a live int.
        let result = unsafe { self.driver.cuFuncGetAttribute(&raw mut value, attribute, self.raw) };
        check(self.driver, "cuFuncGetAttribute", result)?;
        Ok(unsigned(value))
    }

    /// Allows launches with up to `bytes` of dynamic shared memory.
    pub(crate) fn allow_dynamic_shared(&self, bytes: u32) -> Result<()> {
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // The driver refuses `c_int::MAX` too.
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is live; the driver checks the value.
        let result = unsafe { self.driver.cuFuncSetAttribute(self.raw, attribute, bytes) };
        check(self.driver, "cuFuncSetAttribute", result)
    }

    /// Returns the occupancy: the number of blocks of this size that fit on one multiprocessor.
    pub(crate) fn blocks_per_sm(&self, threads: u32, dynamic_shared: u32) -> Result<u32> {
        let mut blocks = 0;
        // The driver refuses `c_int::MAX` too.
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is live; `blocks` is a live int.
        let result = unsafe {
            self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.raw,
                threads,
                dynamic_shared as usize,
            )
        };
        check(self.driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(unsigned(blocks))
    }

    /// Returns the occupancy: the number of clusters of this shape's blocks that fit on the GPU.
    pub(crate) fn resident_clusters(&self, shape: &LaunchShape) -> Result<u32> {
        let mut clusters = 0;
        let (mut attributes, count) = shape.attributes();
        let config = shape.config(null_mut(), &mut attributes[..count]);
        // SAFETY: the function's module is live; `clusters` is a live int; the configuration and
        // its attributes outlive the call.
        let result = unsafe {
            self.driver.cuOccupancyMaxActiveClusters(&raw mut clusters, self.raw, &raw const config)
        };
        check(self.driver, "cuOccupancyMaxActiveClusters", result)?;
        Ok(unsigned(clusters))
    }

    /// Launches the kernel.
    ///
    /// # Safety
    ///
    /// `params` has the address of each parameter, in order, with a value of the compiled size; the
    /// context of `stream` is current and is the function's; the kernel's contract holds.
    pub(crate) unsafe fn launch(
        &self,
        stream: &StreamHandle,
        shape: &LaunchShape,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        let (mut attributes, count) = shape.attributes();
        let config = shape.config(stream.raw(), &mut attributes[..count]);
        // SAFETY: the configuration and its attributes outlive the call, which copies the
        // parameters; the rest is the caller's contract.
        let result = unsafe {
            self.driver.cuLaunchKernelEx(
                &raw const config,
                self.raw,
                params.as_mut_ptr(),
                null_mut(),
            )
        };
        check(self.driver, "cuLaunchKernelEx", result)
    }
}
