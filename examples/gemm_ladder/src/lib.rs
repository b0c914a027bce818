//! Launches the matrix products that `docs/gemm.md` explains: from a loop to the shipped kernel.
//!
//! The kernels are in `kernels/src`, one file for each step. `cargo xtask run gemm_ladder` runs and
//! checks them, `devcomm-bench gemm-ladder` measures them.

use devcomm::{
    DeviceSlice, Element, Error, Gemm, GemmPlan, KernelSet, Kernels, LaunchConfig, Result, Stream,
    TensorMap, TensorMapDesc,
};
use devcomm_gemm_ladder_kernels::{self as kernels, MULTIPLE_K, MULTIPLE_MN, sizes};
use half::bf16;

#[cfg(feature = "ptx")]
static KERNELS: KernelSet = devcomm::include_kernels!();
#[cfg(not(feature = "ptx"))]
static KERNELS: KernelSet = devcomm::WITHOUT_PTX;

/// A step of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "`what` describes them")]
pub enum Step {
    Loop,
    Shared,
    Registers,
    Mma,
    Wgmma,
    Pipeline,
    Cluster,
    Persistent,
    Shipped,
}

impl Step {
    /// All steps, the slowest first.
    pub const ALL: [Self; 9] = [
        Self::Loop,
        Self::Shared,
        Self::Registers,
        Self::Mma,
        Self::Wgmma,
        Self::Pipeline,
        Self::Cluster,
        Self::Persistent,
        Self::Shipped,
    ];

    /// Returns what is new in this step.
    #[must_use]
    pub const fn what(self) -> &'static str {
        match self {
            Self::Loop => "one thread per element, a loop over the terms",
            Self::Shared => "tiles of A and B in shared memory",
            Self::Registers => "8 x 8 sums per thread in registers, loads of 16 bytes",
            Self::Mma => "tensor cores by mma.sync, copies by cp.async",
            Self::Wgmma => "wgmma, tiles loaded by TMA",
            Self::Pipeline => "a warp that loads, four stages, tiles of 128 x 256",
            Self::Cluster => "clusters of two blocks, multicast of B",
            Self::Persistent => "persistent blocks, an order for the L2 cache, stores by TMA",
            Self::Shipped => "the shipped gemm_wgmma: stores during the next tile's products",
        }
    }
}

/// The compiled kernels, for products on a stream of a Hopper GPU.
pub struct Ladder {
    compiled: Kernels,
    /// The number of clusters of `step8_persistent` that are resident at the same time.
    clusters: u32,
    shipped: Gemm,
    stream: Stream,
}

impl Ladder {
    /// Prepares products launched on `stream`.
    ///
    /// # Errors
    ///
    /// The errors are those of loading kernels. A GPU that is not of the Hopper family is an error.
    pub fn new(stream: &Stream) -> Result<Self> {
        let compiled = Kernels::load(stream.context(), &KERNELS)?;
        let clusters = {
            use sizes::step8_persistent::{CLUSTER, Memory, THREADS};
            compiled.resident_clusters::<kernels::step8_persistent>(
                CLUSTER,
                THREADS,
                Memory::BYTES,
            )?
        };
        Ok(Self { compiled, clusters, shipped: Gemm::new(stream)?, stream: stream.clone() })
    }

    /// Enqueues one product `C = A x B^T` of `[m, n, k]`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape that does not consist of whole tiles, and for matrices
    /// that are too short; errors of the launch.
    ///
    /// # Safety
    ///
    /// Until the product has ended, nothing else writes A or B or accesses C. In a capture: the
    /// matrices and this object are not dropped while the graph can be launched.
    pub unsafe fn launch(
        &self,
        step: Step,
        [a, b, c]: [&DeviceSlice<bf16>; 3],
        shape @ [rows, columns, terms]: [usize; 3],
    ) -> Result<()> {
        let extents @ [m, n, k] = check_shape(shape)?;
        check_len("A", a, rows, terms)?;
        check_len("B", b, columns, terms)?;
        check_len("C", c, rows, columns)?;
        let stream = self.compiled.on(&self.stream);
        // SAFETY: the matrices have the elements of the shape, which consists of whole tiles; the
        // caller guarantees that nothing else uses them.
        unsafe {
            match step {
                Step::Loop => {
                    use sizes::step1_loop::TILE;
                    let product = kernels::step1_loop::args(a, b, c, n, k);
                    product.grid((n / TILE, m / TILE)).block((TILE, TILE)).launch(&stream)
                }
                Step::Shared => {
                    use sizes::step2_shared::TILE;
                    let product = kernels::step2_shared::args(a, b, c, n, k);
                    product.grid((n / TILE, m / TILE)).block((TILE, TILE)).launch(&stream)
                }
                Step::Registers => {
                    use sizes::step3_registers::{THREADS, TILE};
                    let product = kernels::step3_registers::args(a, b, c, n, k);
                    product.grid((n / TILE, m / TILE)).block(THREADS).launch(&stream)
                }
                Step::Mma => {
                    use sizes::step4_mma::{SHARED, THREADS, TILE};
                    let config = LaunchConfig::new((n / TILE, m / TILE), THREADS);
                    let product = kernels::step4_mma::args(a, b, c, m, n, k);
                    product.config(config.with_dynamic_shared(SHARED)).launch(&stream)
                }
                Step::Wgmma | Step::Pipeline | Step::Cluster | Step::Persistent => {
                    self.launch_with_maps(step, [a, b, c], extents)
                }
                Step::Shipped => {
                    // `Gemm` would take another kernel for some shapes.
                    if self.shipped.plan(shape)? != GemmPlan::Wide {
                        self.shipped.set_plan(shape, GemmPlan::Wide)?;
                    }
                    self.shipped.launch(a, b, c, shape)
                }
            }
        }
    }

    /// Enqueues a product whose kernel loads A and B by TMA, with tensor maps.
    ///
    /// # Safety
    ///
    /// The contract is that of [`launch`](Self::launch); the matrices have the shape's elements.
    unsafe fn launch_with_maps(
        &self,
        step: Step,
        [a, b, c]: [&DeviceSlice<bf16>; 3],
        [m, n, k]: [u32; 3],
    ) -> Result<()> {
        let stream = self.compiled.on(&self.stream);
        let map = |matrix: &DeviceSlice<bf16>, rows, columns, tile_rows| {
            let address = matrix.device_address();
            let desc =
                TensorMapDesc { address, rows, columns, tile_rows, data_type: bf16::DATA_TYPE };
            self.stream.context().tensor_map(&desc)
        };
        let maps = |a_rows, b_rows| -> Result<[TensorMap; 2]> {
            Ok([map(a, m, k, a_rows)?, map(b, n, k, b_rows)?])
        };
        // SAFETY: the matrices have the elements of the shape, and the caller guarantees that
        // nothing else uses them.
        unsafe {
            match step {
                Step::Wgmma => {
                    use sizes::step5_wgmma::{SHARED, THREADS, TILE};
                    let config = LaunchConfig::new((m / TILE, n / TILE), THREADS);
                    let [a, b] = maps(TILE, TILE)?;
                    let product = kernels::step5_wgmma::args(a, b, c, n, k);
                    product.config(config.with_dynamic_shared(SHARED)).launch(&stream)
                }
                Step::Pipeline => {
                    use sizes::step6_pipeline::{SHARED, THREADS, TILE_M, TILE_N};
                    let config = LaunchConfig::new((m / TILE_M, n / TILE_N), THREADS);
                    let [a, b] = maps(TILE_M, TILE_N)?;
                    let product = kernels::step6_pipeline::args(a, b, c, n, k);
                    product.config(config.with_dynamic_shared(SHARED)).launch(&stream)
                }
                Step::Cluster => {
                    use sizes::step7_cluster::{HALF, SHARED, THREADS, TILE_M, TILE_N};
                    let config = LaunchConfig::new((m / TILE_M, n / TILE_N), THREADS);
                    let [a, b] = maps(TILE_M, HALF)?;
                    let product = kernels::step7_cluster::args(a, b, c, n, k);
                    product.config(config.with_dynamic_shared(SHARED)).launch(&stream)
                }
                Step::Persistent => {
                    use sizes::step8_persistent::{
                        CLUSTER, HALF, Memory, STORE_M, THREADS, TILE_M, TILE_N,
                    };
                    let tiles = m / (CLUSTER * TILE_M) * (n / TILE_N);
                    let clusters = self.clusters.min(tiles);
                    let config = LaunchConfig::new(clusters * CLUSTER, THREADS);
                    let ([a, b], c) = (maps(TILE_M, HALF)?, map(c, m, n, STORE_M)?);
                    let product = kernels::step8_persistent::args(a, b, c, m, n, k);
                    product.config(config.with_dynamic_shared(Memory::BYTES)).launch(&stream)
                }
                Step::Loop | Step::Shared | Step::Registers | Step::Mma | Step::Shipped => {
                    let what = "a step of the ladder that loads without tensor maps".to_owned();
                    Err(Error::InvalidInput { what })
                }
            }
        }
    }
}

/// Returns the shape as kernel arguments, if it consists of whole tiles.
///
/// # Errors
///
/// [`Error::InvalidInput`] for a shape with a partial tile, and for an empty or too large one.
pub fn check_shape([m, n, k]: [usize; 3]) -> Result<[u32; 3]> {
    // A grid has fewer than 2^16 rows of blocks, and blocks of step 1 have 16 rows of C.
    const MAX: u32 = 1 << 19; // Below 2^16 x 16.
    let extent = |name, extent: usize, multiple: u32| match u32::try_from(extent) {
        Ok(extent) if extent > 0 && extent <= MAX && extent.is_multiple_of(multiple) => Ok(extent),
        _ => invalid(format!(
            "{name} is {extent}: the ladder's products have multiples of {multiple} up to {MAX}"
        )),
    };
    Ok([extent("m", m, MULTIPLE_MN)?, extent("n", n, MULTIPLE_MN)?, extent("k", k, MULTIPLE_K)?])
}

fn check_len(name: &str, matrix: &DeviceSlice<bf16>, rows: usize, columns: usize) -> Result<()> {
    let len = matrix.len();
    if len < rows * columns {
        return invalid(format!("{name} has {len} elements, but needs {rows} x {columns}"));
    }
    Ok(())
}

fn invalid<T>(what: String) -> Result<T> {
    Err(Error::InvalidInput { what })
}
