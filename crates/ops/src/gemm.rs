//! The matrix product on one GPU, with the checks of its launches.

use std::sync::LazyLock;

use devcomm_host::{
    Buffer, KernelSet, Kernels, LaunchConfig, ModuleSource, Result, Stream, TensorMapDesc,
};
use devcomm_kernels::{self as kernels, gemm::gemm_wgmma as sizes};
use devcomm_types::Kernel;
use half::bf16;

use crate::check::{check_buffer, check_shape, refuse, require_context};
use crate::{KERNELS, modules};

/// `C = A x B^T` on one GPU and one stream: owns the loaded kernel, and launches it.
///
/// A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its weights) and C `m x n`, all
/// row-major bf16. Sums are in f32 and rounded once. Needs a Hopper GPU.
///
/// ```no_run
/// use devcomm::{Gemm, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = comm.mem_alloc::<bf16>(m * n)?;
///     Gemm::new(&stream)?.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct Gemm {
    compiled: Kernels,
    stream: Stream,
    blocks: u32,
}

static MODULES: LazyLock<Vec<ModuleSource>> =
    LazyLock::new(|| modules(&[kernels::gemm_wgmma::FILE]));

impl Gemm {
    /// For products launched on `stream`.
    ///
    /// # Errors
    ///
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) on a GPU other than Hopper;
    /// those of loading kernels.
    pub fn new(stream: &Stream) -> Result<Self> {
        let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
        let compiled = Kernels::load(stream.context(), &set)?;
        let resident =
            compiled.resident_blocks::<kernels::gemm_wgmma>(sizes::THREADS, sizes::SHARED)?;
        let blocks = resident / sizes::CLUSTER * sizes::CLUSTER;
        Ok(Self { compiled, stream: stream.clone(), blocks })
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// writes the first `m * n` elements of `c`, which overlaps neither. Only work on this stream
    /// may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, `n`
    /// or `k` that is not a multiple of 8, and buffers that are too short, not aligned to 16 bytes
    /// or of another context; [`StateError::Capturing`](devcomm_host::StateError::Capturing) during
    /// a stream capture (use [`launch_capturable`](Self::launch_capturable)); errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        self.stream.context().refuse_capturing("Gemm::launch is called")?;
        // SAFETY: no capture is active.
        unsafe { self.launch_capturable(a, b, c, shape) }
    }

    /// As [`launch`](Self::launch), but also allowed during a stream capture.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), except
    /// [`StateError::Capturing`](devcomm_host::StateError::Capturing).
    ///
    /// # Safety
    ///
    /// In a capture: the buffers and this object are not dropped while the graph can be launched.
    pub unsafe fn launch_capturable<A, B, C>(
        &self,
        a: &A,
        b: &B,
        c: &C,
        shape: [usize; 3],
    ) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let [m, n, k] = check_shape(shape)?;
        let [rows, columns, terms] = shape;
        if n % 8 != 0 {
            return refuse(format!("n is {n}, but rows of C begin at multiples of 16 bytes"));
        }
        let context = self.stream.context();
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        let map =
            |name, buffer: &devcomm_host::DeviceSlice<bf16>, rows: usize, columns, tile_rows| {
                require_context(name, buffer.context(), context)?;
                check_buffer(name, buffer.device_address(), buffer.len(), rows, columns)?;
                context.tensor_map(&TensorMapDesc {
                    address: buffer.device_address(),
                    rows: rows as u32,
                    columns: columns as u32,
                    tile_rows,
                })
            };
        let a = map("A", &a, rows, terms, sizes::TILE_M)?;
        let b = map("B", &b, columns, terms, sizes::TILE_N / sizes::CLUSTER)?;
        let c = map("C", &c, rows, columns, sizes::STORE_M)?;
        let pairs = u64::from(m.div_ceil(sizes::CLUSTER * sizes::TILE_M))
            * u64::from(n.div_ceil(sizes::TILE_N));
        let Ok(tiles) = u32::try_from(pairs * u64::from(sizes::CLUSTER)) else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        let config = LaunchConfig::new(self.blocks.min(tiles), sizes::THREADS)
            .with_dynamic_shared(sizes::SHARED);
        let product = kernels::gemm_wgmma::args(a, b, c, m, n, k);
        // SAFETY: the matrices have the elements that the maps describe; dropping a buffer waits
        // for the stream, and the caller ensures what a graph needs.
        unsafe { product.config(config).launch(&self.compiled.on(&self.stream)) }
    }
}

impl std::fmt::Debug for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gemm({} blocks)", self.blocks)
    }
}
