//! Kernel functions and launches. A simulated GPU runs a kernel's Rust code compiled for the host,
//! not PTX or SASS, so that a module has no content.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{
    CUfunction, CUfunction_attribute, CUjit_option, CUlaunchAttributeID, CUlaunchConfig, CUmodule,
    CUresult,
};
use devcomm_types::kernel::MemoryRef;
use devcomm_types::{HostBody, TensorMap, TensorMapDesc};

use super::stream::StreamOp;
use super::{CallContext, CudaError, CudaResult, call, limits};
use crate::base::arguments::Arguments;
use crate::base::error::Error;
use crate::base::ids::GridId;
use crate::base::owner::Registry;
use crate::gpu::gpus::Launch;
use crate::machine::core::Core;

/// The number of registers per thread that is returned for every kernel.
const REGISTERS: u32 = 32;

/// A kernel function on one GPU.
pub(crate) struct Function {
    gpu: usize,
    module: u64,
    body: HostBody,
    is_unloaded: Cell<bool>,
    /// The limit on dynamic shared memory per launch, in bytes.
    max_dynamic_shared: Cell<u32>,
}

impl Function {
    pub(crate) fn new(gpu: usize, module: u64, body: HostBody) -> Self {
        let max_dynamic_shared = Cell::new(limits::STATIC_SHARED);
        Self { gpu, module, body, is_unloaded: Cell::default(), max_dynamic_shared }
    }

    /// Returns whether this is the function of kernel `body` of a module on `gpu`.
    pub(crate) fn is(&self, gpu: usize, module: u64, body: &HostBody) -> bool {
        self.gpu == gpu && self.module == module && self.body == *body
    }
}

impl CallContext<'_> {
    fn function(&self, function: CUfunction) -> CudaResult<Rc<Function>> {
        self.gpu()?;
        let functions = self.core.functions.borrow();
        let found = functions.get(&(function as u64)).cloned();
        found.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

/// Fails: there is no device code to load.
fn no_modules(name: &'static str) -> CUresult {
    call(name, |_| {
        let text = "a simulated GPU runs a kernel's Rust code, compiled for the host: it cannot \
                    load device code";
        Err(CudaError::new(CUresult::CUDA_ERROR_NOT_SUPPORTED, text))
    })
}

pub(super) unsafe fn load_file(_: *mut CUmodule, _: *const c_char) -> CUresult {
    no_modules("cuModuleLoad")
}

pub(super) unsafe fn load_data(
    _: *mut CUmodule,
    _: *const c_void,
    _: c_uint,
    _: *mut CUjit_option,
    _: *mut *mut c_void,
) -> CUresult {
    no_modules("cuModuleLoadDataEx")
}

pub(super) unsafe fn unload(module: CUmodule) -> CUresult {
    call("cuModuleUnload", |cx| {
        cx.core.functions.borrow_mut().retain(|_, function| {
            let is_unloaded = function.module == module as u64;
            // Launches that have not ended, and graphs, still have the function: they fail.
            function.is_unloaded.set(is_unloaded);
            !is_unloaded
        });
        Ok(())
    })
}

pub(super) unsafe fn from_module(_: *mut CUfunction, _: CUmodule, _: *const c_char) -> CUresult {
    call("cuModuleGetFunction", |_| Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()))
}

pub(super) unsafe fn load(function: CUfunction) -> CUresult {
    call("cuFuncLoad", |cx| cx.function(function).map(drop))
}

pub(super) unsafe fn attribute(
    value: *mut c_int,
    attribute: CUfunction_attribute,
    function: CUfunction,
) -> CUresult {
    use CUfunction_attribute as A;
    call("cuFuncGetAttribute", |cx| {
        let function = cx.function(function)?;
        let number = match attribute {
            A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => function.body.max_threads(),
            A::CU_FUNC_ATTRIBUTE_NUM_REGS => REGISTERS,
            A::CU_FUNC_ATTRIBUTE_PTX_VERSION | A::CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
            A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => function.max_dynamic_shared.get(),
            A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH if function.body.cluster() > 1 => {
                function.body.cluster()
            }
            _ => 0,
        };
        // SAFETY: the program passes valid pointers, as CUDA requires.
        unsafe { value.write(number.cast_signed()) };
        Ok(())
    })
}

pub(super) unsafe fn set_attribute(
    function: CUfunction,
    attribute: CUfunction_attribute,
    value: c_int,
) -> CUresult {
    call("cuFuncSetAttribute", |cx| {
        let function = cx.function(function)?;
        cx.note(|| format!("{} {value}", attribute as u32));
        let bytes = u32::try_from(value).ok().filter(|bytes| *bytes <= limits::BLOCK_SHARED);
        match (attribute, bytes) {
            (
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                Some(bytes),
            ) => function.max_dynamic_shared.set(bytes),
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into()),
        }
        Ok(())
    })
}

pub(super) unsafe fn occupancy(
    blocks: *mut c_int,
    function: CUfunction,
    block_size: c_int,
    dynamic_shared: usize,
) -> CUresult {
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", |cx| {
        let gpu = cx.function(function)?.gpu;
        let threads = u32::try_from(block_size).ok().filter(|threads| *threads > 0);
        let threads = threads.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let resident = cx.core.gpus.resident(gpu, threads, dynamic_shared);
        let multiprocessors = cx.core.simulation().multiprocessors_of(gpu);
        // SAFETY: the program passes valid pointers, as CUDA requires.
        unsafe { blocks.write((resident / multiprocessors) as c_int) };
        Ok(())
    })
}

pub(super) unsafe fn cluster_occupancy(
    clusters: *mut c_int,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    call("cuOccupancyMaxActiveClusters", |cx| {
        // SAFETY: the program passes valid pointers, as CUDA requires.
        let config = unsafe { &*config };
        let function = cx.function(function)?;
        let (body, gpu) = (function.body, function.gpu);
        // SAFETY: the program passes valid pointers, as CUDA requires.
        let cluster = unsafe { Attributes::of(config) }.cluster_for(&body)?;
        let threads = [config.blockDimY, config.blockDimZ]
            .into_iter()
            .fold(config.blockDimX, u32::saturating_mul);
        let resident = cx.core.gpus.resident(gpu, threads, config.sharedMemBytes as usize);
        // SAFETY: the program passes valid pointers, as CUDA requires.
        unsafe { clusters.write((resident / cluster) as c_int) };
        Ok(())
    })
}

/// The attributes of a launch.
#[derive(Default)]
struct Attributes {
    cooperative: bool,
    cluster: Option<[u32; 3]>,
    dependent: bool,
}

impl Attributes {
    /// Returns the attributes of a launch's configuration.
    ///
    /// # Safety
    ///
    /// The configuration points to `numAttrs` attributes.
    unsafe fn of(config: &CUlaunchConfig) -> Self {
        use CUlaunchAttributeID as Id;
        let mut all = Self::default();
        for index in 0..config.numAttrs as usize {
            // SAFETY: the caller's contract; the id says which value the attribute has.
            unsafe {
                let attribute = &*config.attrs.add(index);
                let value = attribute.value;
                match attribute.id {
                    Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE => all.cooperative = value.cooperative != 0,
                    Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                        let dim = value.clusterDim;
                        all.cluster = Some([dim.x, dim.y, dim.z]);
                    }
                    Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION => {
                        all.dependent = value.programmaticStreamSerializationAllowed != 0;
                    }
                    _ => {}
                }
            }
        }
        all
    }

    /// Returns the blocks per cluster in a launch of `body`: at most 8, CUDA's portable limit.
    /// Clusters extend in x only.
    fn cluster_for(&self, body: &HostBody) -> CudaResult<u32> {
        match (self.cluster, body.cluster()) {
            (None, fixed) => Ok(fixed),
            (Some([size @ 1..=8, 1, 1]), fixed) if fixed == 1 || fixed == size => Ok(size),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE.into()),
        }
    }
}

pub(super) unsafe fn launch(
    config: *const CUlaunchConfig,
    function: CUfunction,
    params: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    call("cuLaunchKernelEx", |cx| {
        // SAFETY: the program passes valid pointers, as CUDA requires.
        let config = unsafe { &*config };
        let function = cx.function(function)?;
        let stream = cx.stream(config.hStream)?;
        if stream.gpu() != function.gpu {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into());
        }
        if config.sharedMemBytes > function.max_dynamic_shared.get() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE.into());
        }
        // SAFETY: the program passes valid pointers, as CUDA requires.
        let attributes = unsafe { Attributes::of(config) };
        // SAFETY: the program passes the address of each parameter in `params`, as CUDA requires.
        let params = unsafe { Params::copy(&function.body, params) };
        let kernel = Kernel {
            body: function.body,
            arguments: Rc::new(params.memory(&function.body, cx.core)),
            params: Rc::new(params),
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            dynamic_shared: config.sharedMemBytes as usize,
            cooperative: attributes.cooperative,
            cluster: attributes.cluster_for(&function.body)?,
            dependent: attributes.dependent,
            started: None,
            function,
        };
        cx.note(|| kernel.describe_arguments());
        let checked = cx.core.gpus.check(&kernel.launch(None));
        checked.map_err(|error| {
            CudaError::new(CUresult::CUDA_ERROR_INVALID_VALUE, error.to_string())
        })?;
        cx.core.enqueue(&stream, Box::new(kernel))
    })
}

/// A copy of a launch's parameters, which the kernel's threads read.
struct Params {
    /// The parameters, each of which starts at an element.
    bytes: Box<[Aligned]>,
    /// The index of the element at which each parameter starts.
    starts: Vec<usize>,
}

/// Bytes with the alignment of a tensor map, the parameter type with the strictest alignment.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Aligned([u8; 128]);

impl Params {
    /// Copies a launch's parameters.
    ///
    /// # Safety
    ///
    /// `from` points to an array of the addresses of the body's parameters.
    unsafe fn copy(body: &HostBody, from: *mut *mut c_void) -> Self {
        let mut starts = Vec::new();
        let mut len = 0;
        for size in body.sizes() {
            starts.push(len);
            len += size.div_ceil(size_of::<Aligned>());
        }
        let mut bytes = vec![Aligned([0; 128]); len].into_boxed_slice();
        let base = bytes.as_mut_ptr();
        for (index, (size, start)) in body.sizes().iter().zip(&starts).enumerate() {
            // SAFETY: the caller's contract; `bytes` has at least `size` bytes from `start` on.
            unsafe {
                let source = (*from.add(index)).cast::<u8>();
                base.add(*start).cast::<u8>().copy_from_nonoverlapping(source, *size);
            }
        }
        Self { bytes, starts }
    }

    /// Returns the 64-bit words of the parameters.
    fn words(&self) -> impl Iterator<Item = usize> + '_ {
        let words = self.bytes.iter().flat_map(|Aligned(bytes)| bytes.as_chunks().0);
        words.map(|&word| u64::from_ne_bytes(word) as usize)
    }

    /// Returns the word at byte `offset` of parameter `index`; 0 after the last parameter.
    fn word(&self, index: usize, offset: usize) -> usize {
        let bytes = self.bytes[self.starts[index]..].iter();
        let mut words = bytes.flat_map(|Aligned(bytes)| bytes.as_chunks().0);
        words.nth(offset / 8).map_or(0, |&word| u64::from_ne_bytes(word)) as usize
    }

    /// Returns the memory that the parameters refer to.
    fn memory(&self, body: &HostBody, core: &Core) -> Arguments {
        let mut arguments = Arguments::default();
        for (index, (name, references)) in body.memory().enumerate() {
            for MemoryRef { field, offset, element } in references {
                let name = if field.is_empty() { name.into() } else { format!("{name}.{field}") };
                let word = self.word(index, *offset);
                let window = core.nccl.owner(word).map(|owner| (owner, 0));
                if let Some((owner, offset)) = window.or_else(|| core.memory.owner_at(word)) {
                    arguments.add(name, *element, owner, offset);
                }
            }
            let words = std::array::from_fn(|i| self.word(index, 8 * i) as u64);
            if let Some(map) = TensorMapDesc::of_simulated(&TensorMap { words })
                && let Some((owner, offset)) = core.memory.owner_at(map.address as usize)
            {
                arguments.add(name.into(), map.data_type.size(), owner, offset);
            }
        }
        arguments
    }

    fn addresses(&self) -> Vec<*const c_void> {
        let base = self.bytes.as_ptr();
        self.starts.iter().map(|start| base.wrapping_add(*start).cast()).collect()
    }
}

/// The stream operation that is a kernel launch.
struct Kernel {
    function: Rc<Function>,
    body: HostBody,
    params: Rc<Params>,
    arguments: Rc<Arguments>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: usize,
    cooperative: bool,
    /// The number of blocks per cluster.
    cluster: u32,
    /// Whether the launch may begin while the previous kernel runs.
    dependent: bool,
    started: Option<GridId>,
}

impl Kernel {
    /// Returns the launch's arguments as text, for the record of calls.
    fn describe_arguments(&self) -> String {
        let Self { grid, block, dynamic_shared, cooperative, .. } = self;
        let name = self.body.name();
        format!(
            "{name} grid {grid:?} block {block:?} shared {dynamic_shared} cooperative {cooperative}"
        )
    }

    fn launch(&self, previous: Option<GridId>) -> Launch {
        let (body, params) = (self.body, Rc::clone(&self.params));
        let addresses = params.addresses();
        let run = move || {
            // The addresses point into `params`.
            let _params = &params;
            // SAFETY: `addresses` points to a copy of each parameter; the launch's caller keeps the
            // kernel's contract, and the GPU's scheduler has made a thread current.
            unsafe { body.call(&addresses) }
        };
        Launch {
            kernel: self.body.name(),
            package: self.body.package(),
            max_threads: self.body.max_threads(),
            gpu: self.function.gpu,
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            dynamic_shared: self.dynamic_shared,
            cooperative: self.cooperative,
            previous,
            arguments: Rc::clone(&self.arguments),
            body: Rc::new(run),
        }
    }

    /// Starts the grid, unless it has started.
    fn start(&mut self, core: &Core, previous: Option<GridId>) {
        if self.started.is_none() {
            match core.gpus.launch(self.launch(previous)) {
                Ok(grid) => self.started = Some(grid),
                Err(error) => core.fail(error),
            }
        }
    }
}

impl StreamOp for Kernel {
    fn poll(&mut self, core: &Core) -> Poll<()> {
        if self.function.is_unloaded.get() {
            let reason =
                "its module was unloaded before it ended, or before its graph was launched";
            core.fail(Error::Launch { kernel: self.body.name(), reason: reason.to_owned() });
            return Poll::Pending;
        }
        self.start(core, None);
        let Some(grid) = self.started else { return Poll::Pending };
        // `is_done` forgets a grid that has ended.
        let clock = core.gpus.clock_of(grid);
        if !core.gpus.is_done(grid) {
            return Poll::Pending;
        }
        if let Some(clock) = clock {
            core.memory.races.learn_here(&core.memory.races.end_of(&clock));
        }
        Poll::Ready(())
    }

    fn triggering_grid(&self, core: &Core) -> Option<GridId> {
        self.started.filter(|grid| core.gpus.have_all_triggered(*grid))
    }

    fn begin_early(&mut self, core: &Core, previous: GridId) {
        if self.dependent {
            self.start(core, Some(previous));
        }
    }

    fn runs_kernel(&self) -> bool {
        self.started.is_some()
    }

    fn kernel_given(&self, is_given: &dyn Fn(usize) -> bool) -> Option<&'static str> {
        self.params.words().any(is_given).then(|| self.body.name())
    }

    fn name(&self) -> String {
        format!("kernel `{}`", self.body.name())
    }

    fn describe(&self, _core: &Core) -> String {
        let state = if self.started.is_some() { "runs" } else { "is next" };
        format!("{} {state}", self.name())
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        let (params, arguments) = (Rc::clone(&self.params), Rc::clone(&self.arguments));
        let function = Rc::clone(&self.function);
        Box::new(Self { function, params, arguments, started: None, ..*self })
    }
}
