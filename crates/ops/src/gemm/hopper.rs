//! The launches of Hopper's kernels.

use devcomm_host::{
    Context, Element, Kernels, LaunchConfig, Result, Stream, TensorMap, TensorMapDesc,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::epilogue::FusedArgs;
use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Cluster, Shape};
use devcomm_kernels::gemm::gemm_wgmma as wide;
use devcomm_types::Kernel;
use half::bf16;

use super::added::EpilogueArgs;
use super::element::{GemmElement, GemmOutput};
use super::plan::{GemmPlan, Room};

/// A launch's matrices, as their addresses, and its epilogue. A and B may be stored transposed.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) shape: [u32; 3],
    pub(crate) transposed: [bool; 2],
    pub(crate) epilogue: EpilogueArgs,
}

impl Matrices {
    /// Matrices at these addresses, without an epilogue.
    pub(crate) fn plain([a, b, c]: [u64; 3], shape: [u32; 3]) -> Self {
        let epilogue =
            FusedArgs { scale_a: 0, scale_b: 0, bias: 0, residual: 0, linear: 0.0, cubic: 0.0 };
        Self { a, b, c, shape, transposed: [false; 2], epilogue }
    }
}

/// The map of a matrix of `T`.
pub(crate) fn map<T: Element>(
    stream: &Stream,
    address: u64,
    [rows, columns, tile_rows]: [u32; 3],
) -> Result<TensorMap> {
    let data_type = T::DATA_TYPE;
    let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
    stream.context().tensor_map(&desc)
}

/// What a plan needs for a shape.
#[derive(Clone, Copy)]
pub(super) enum Prepared {
    Wide(LaunchConfig),
    Swapped { config: LaunchConfig, division: swapped::Division, launch: LaunchSwapped },
}

type LaunchSwapped =
    unsafe fn(&Kernels, &Stream, Matrices, LaunchConfig, swapped::Division) -> Result<()>;

/// Prepares a plan, which leaves so many multiprocessors to other kernels if it can; `None` if the
/// GPU has no room for it, or the type no such kernel.
pub(super) fn prepare<T: GemmElement, O: GemmOutput<T>>(
    compiled: &Kernels,
    context: &Context,
    plan: GemmPlan,
    shape: [u32; 3],
    left: u32,
) -> Result<Option<Prepared>> {
    match plan {
        GemmPlan::Wide => Ok(wide_config(compiled, shape, left)?.map(Prepared::Wide)),
        GemmPlan::Swapped { rows, columns, cluster }
            if [T::DATA_TYPE, O::DATA_TYPE] == [bf16::DATA_TYPE; 2] =>
        {
            SWAPPED
                .iter()
                .find(|(tile, _)| *tile == (rows, columns))
                .map_or(Ok(None), |(_, prepare)| prepare(compiled, context, shape, cluster))
        }
        GemmPlan::Swapped { .. } | GemmPlan::Portable => Ok(None),
    }
}

/// How `gemm_wgmma` and `gemm_blocks` are launched, with as many blocks as are resident but those
/// `left`; `None` if the GPU has no room.
pub(super) fn wide_config(
    compiled: &Kernels,
    [m, n, _]: [u32; 3],
    left: u32,
) -> Result<Option<LaunchConfig>> {
    let resident =
        compiled.resident_blocks::<kernels::gemm_wgmma<bf16>>(wide::THREADS, wide::SHARED)?;
    let resident = resident.saturating_sub(left);
    let pairs =
        u64::from(m.div_ceil(wide::CLUSTER * wide::TILE_M)) * u64::from(n.div_ceil(wide::TILE_N));
    let blocks = u64::from(resident / wide::CLUSTER).min(pairs) as u32 * wide::CLUSTER;
    // The kernel counts tiles in 32 bits.
    let possible = blocks > 0 && pairs <= u64::from(u32::MAX - resident);
    let config = LaunchConfig::new(blocks, wide::THREADS).with_dynamic_shared(wide::SHARED);
    Ok(possible.then(|| config.with_dependent()))
}

/// The clusters of `gemm_swapped` that are resident: those of each tile are as many.
pub(super) fn room(compiled: &Kernels, context: &Context) -> Result<Room> {
    type Tile = swapped::M128N128;
    let clusters = |blocks| {
        let resident = resident::<Tile, <Tile as Swapped>::Kernel>(compiled, context, blocks);
        resident.map(|[clusters, _]| clusters)
    };
    Ok(Room([clusters(1)?, clusters(2)?, clusters(4)?, clusters(8)?]))
}

/// The clusters of so many blocks that are resident if a block has all the dynamic shared memory
/// that it may have, and that memory in bytes.
pub(crate) fn resident<S: Shape, K: Kernel>(
    compiled: &Kernels,
    context: &Context,
    blocks: u32,
) -> Result<[u32; 2]> {
    let most = context.limits().shared_per_block_optin;
    let shared = most.saturating_sub(compiled.info::<K>()?.static_shared);
    Ok([compiled.resident_clusters::<K>(blocks, S::THREADS, shared)?, shared])
}

fn prepare_swapped<S: Swapped>(
    compiled: &Kernels,
    context: &Context,
    shape: [u32; 3],
    cluster: Cluster,
) -> Result<Option<Prepared>> {
    let blocks = cluster.blocks();
    let [clusters, shared] = resident::<S, S::Kernel>(compiled, context, blocks)?;
    let division = swapped::Division::of::<S>(shape, cluster, clusters, shared);
    Ok(division.map(|(division, clusters, shared)| {
        let config = LaunchConfig::new(clusters * blocks, S::THREADS)
            .with_dynamic_shared(shared)
            .with_cluster(blocks)
            .with_dependent();
        Prepared::Swapped { config, division, launch: S::launch }
    }))
}

impl Prepared {
    /// Enqueues the product. `constant_b`: see [`swapped::Division::constant_b`].
    ///
    /// # Safety
    ///
    /// The matrices have the elements of the shape that was prepared, and stay allocated until the
    /// product has ended.
    pub(super) unsafe fn launch<T: GemmElement, O: GemmOutput<T>>(
        &self,
        compiled: &Kernels,
        stream: &Stream,
        matrices: Matrices,
        constant_b: bool,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            match *self {
                Self::Wide(config) => {
                    let (maps, unaligned) = wide_maps::<T, O>(stream, matrices)?;
                    O::wide(compiled, stream, maps, unaligned, matrices, config)
                }
                Self::Swapped { config, division, launch } => {
                    let division = swapped::Division { constant_b, ..division };
                    launch(compiled, stream, matrices, config, division)
                }
            }
        }
    }
}

/// The maps of A, B and C for these kernels, and C's address if its map is not used.
pub(crate) fn wide_maps<T: GemmElement, O: GemmOutput<T>>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], transposed, .. }: Matrices,
) -> Result<([TensorMap; 3], u64)> {
    let factor = |address, rows, tile_rows, transposed| match transposed {
        false => map::<T>(stream, address, [rows, k, tile_rows]),
        true => map::<T>(stream, address, [k, rows, wide::TRANSPOSED]),
    };
    let a = factor(a, m, wide::TILE_M, transposed[0])?;
    let b = factor(b, n, wide::TILE_N / wide::CLUSTER, transposed[1])?;
    let (map_of_c, unaligned) = match n.is_multiple_of(16 / size_of::<O>() as u32) {
        true => (map::<O>(stream, c, [m, n, wide::STORE_M])?, 0),
        false => (a, c),
    };
    Ok(([a, b, map_of_c], unaligned))
}

/// The kernel for a shape of tiles.
trait Swapped: swapped::Shape {
    type Kernel: Kernel;

    /// # Safety
    ///
    /// As [`Prepared::launch`].
    unsafe fn launch(
        compiled: &Kernels,
        stream: &Stream,
        matrices: Matrices,
        config: LaunchConfig,
        division: swapped::Division,
    ) -> Result<()>;
}

type Prepare = fn(&Kernels, &Context, [u32; 3], Cluster) -> Result<Option<Prepared>>;

macro_rules! swapped {
    ($($shape:ident)*) => {
        /// How a launch is prepared, for each shape of tiles.
        const SWAPPED: [((u32, u32), Prepare); swapped::SHAPES.len()] = [$((
            (<swapped::$shape as Shape>::M, <swapped::$shape as Shape>::N),
            prepare_swapped::<swapped::$shape>,
        )),*];

        $(
            impl Swapped for swapped::$shape {
                type Kernel = kernels::gemm_swapped<Self>;

                unsafe fn launch(
                    compiled: &Kernels,
                    stream: &Stream,
                    Matrices { a, b, c, shape: [m, n, k], epilogue, .. }: Matrices,
                    config: LaunchConfig,
                    division: swapped::Division,
                ) -> Result<()> {
                    let map = |address, tiles| map::<bf16>(stream, address, tiles);
                    let swapped::Division { across, down, stages, whole, sums, constant_b } =
                        division;
                    let a = map(a, [m, k, Self::M / across])?;
                    let b = map(b, [n, k, Self::N / down])?;
                    let c = map(c, [m, n, swapped::STORE_M])?;
                    let division = swapped::DivisionArgs {
                        across,
                        down,
                        stages,
                        whole,
                        sums,
                        constant_b,
                    };
                    let product = Self::Kernel::args(a, b, c, m, n, k, division, epilogue);
                    // SAFETY: the caller's contract.
                    unsafe { product.config(config).launch(&compiled.on(stream)) }
                }
            }
        )*
    };
}

swapped! {
    M8N64 M16N64 M32N64 M64N64 M96N64 M112N64 M128N64 M256N64 M8N128 M16N128 M32N128 M48N128
    M64N128 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128 M256N128
}
