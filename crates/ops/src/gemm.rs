//! The matrix product on one GPU, with the checks of its launches.

mod portable;

use std::sync::LazyLock;

use devcomm_host::{
    Buffer, DeviceSlice, KernelSet, Kernels, LaunchConfig, ModuleSource, Result, Stream,
    TensorMapDesc,
};
use devcomm_kernels::{self as kernels, gemm::gemm_wgmma as sizes};
use devcomm_types::Kernel;
use half::bf16;

use crate::check::{check_extents, check_len, refuse, require_context};
use crate::{KERNELS, modules};

/// `C = A x B^T` on one GPU and one stream: owns the loaded kernel, and launches it.
///
/// A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its weights) and C `m x n`, all
/// row-major bf16. Sums are in f32 and rounded once.
///
/// On Hopper, products whose rows begin at multiples of 16 bytes (`n` and `k` are multiples of 8)
/// are by `wgmma` and TMA. All others, and those on any other GPU since Ampere, are by `mma.sync`:
/// fastest if `k` is a multiple of 8, slowest if it is odd.
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
    /// Resident blocks of Hopper's kernel; `None` on another GPU.
    blocks: Option<u32>,
}

static MODULES: LazyLock<Vec<ModuleSource>> =
    LazyLock::new(|| modules(&[kernels::gemm_wgmma::FILE, kernels::gemm_mma::<bf16>::FILE]));

impl Gemm {
    /// For products launched on `stream`.
    ///
    /// # Errors
    ///
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) on a GPU before Ampere;
    /// those of loading kernels.
    pub fn new(stream: &Stream) -> Result<Self> {
        let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
        let compiled = Kernels::load(stream.context(), &set)?;
        let blocks = match compiled.info::<kernels::gemm_wgmma>() {
            Ok(_) => {
                let resident = compiled
                    .resident_blocks::<kernels::gemm_wgmma>(sizes::THREADS, sizes::SHARED)?;
                Some(resident / sizes::CLUSTER * sizes::CLUSTER)
            }
            Err(_) => {
                compiled.info::<kernels::gemm_mma<bf16>>()?;
                None
            }
        };
        Ok(Self { compiled, stream: stream.clone(), blocks })
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// writes the first `m * n` elements of `c`, which overlaps neither. Only work on this stream
    /// may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements,
    /// and for buffers that are too short or of another context;
    /// [`StateError::Capturing`](devcomm_host::StateError::Capturing) during a stream capture (use
    /// [`launch_capturable`](Self::launch_capturable)); errors of the launch.
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
        let extents @ [m, n, k] = check_extents(shape)?;
        let [rows, columns, terms] = shape;
        let context = self.stream.context();
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        let mut aligned = n % 8 == 0 && k % 8 == 0;
        let matrices =
            [("A", &a, rows, terms), ("B", &b, columns, terms), ("C", &c, rows, columns)];
        for (name, buffer, rows, columns) in matrices {
            require_context(name, buffer.context(), context)?;
            check_len(name, buffer.len(), rows, columns)?;
            aligned &= buffer.device_address().is_multiple_of(16);
        }
        let Some(blocks) = self.blocks.filter(|_| aligned) else {
            // SAFETY: the buffers have the elements; dropping one waits for the stream, and the
            // caller ensures what a graph needs.
            return unsafe {
                portable::launch(&self.compiled, &self.stream, [&a, &b, &c], extents)
            };
        };
        let map = |buffer: &DeviceSlice<bf16>, rows, columns, tile_rows| {
            let address = buffer.device_address();
            context.tensor_map(&TensorMapDesc { address, rows, columns, tile_rows })
        };
        let a = map(&a, m, k, sizes::TILE_M)?;
        let b = map(&b, n, k, sizes::TILE_N / sizes::CLUSTER)?;
        let c = map(&c, m, n, sizes::STORE_M)?;
        let pairs = u64::from(m.div_ceil(sizes::CLUSTER * sizes::TILE_M))
            * u64::from(n.div_ceil(sizes::TILE_N));
        let Ok(tiles) = u32::try_from(pairs * u64::from(sizes::CLUSTER)) else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        let config =
            LaunchConfig::new(blocks.min(tiles), sizes::THREADS).with_dynamic_shared(sizes::SHARED);
        let product = kernels::gemm_wgmma::args(a, b, c, m, n, k);
        // SAFETY: the matrices have the elements that the maps describe; dropping a buffer waits
        // for the stream, and the caller ensures what a graph needs.
        unsafe { product.config(config).launch(&self.compiled.on(&self.stream)) }
    }
}

impl std::fmt::Debug for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.blocks {
            Some(blocks) => write!(f, "Gemm({blocks} blocks)"),
            None => write!(f, "Gemm(portable)"),
        }
    }
}
