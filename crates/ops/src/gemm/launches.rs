//! The launches of the kernels of products.

use devcomm_host::{DataType, TensorMap, TensorMapDesc};
use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Cluster, Division, Shape};
use devcomm_kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide, slices};
use half::f16;

use super::element::{GemmElement, GemmOutput, ScaledElement, no_kernel};
use super::model::ResidentClusters;
use super::plan::{GemmPlan, Tiling};
use super::product::{Added, EpilogueArgs};
use super::{Gemm, SliceMemory};
use crate::prelude::*;

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
    /// Checks that A, B and C with these rows, and what is added to the product, have the elements
    /// and are of the context.
    pub(crate) fn checked<T, O>(
        context: &Context,
        extents: Extents,
        (a, b, c): (&DeviceSlice<T>, &DeviceSlice<T>, &DeviceSlice<O>),
        [rows_of_a, rows_of_b, rows_of_c]: [usize; 3],
        added: &Added<O>,
    ) -> Result<Self> {
        let [_, n, k] = extents.lengths();
        Ok(Self {
            a: address(context, "A", a, rows_of_a, k)?,
            b: address(context, "B", b, rows_of_b, k)?,
            c: address(context, "C", c, rows_of_c, n)?,
            shape: extents.array(),
            transposed: [false; 2],
            epilogue: added.args(context, [rows_of_c, n])?,
        })
    }

    /// Returns whether TMA can load and store them.
    pub(crate) fn are_aligned(&self) -> bool {
        (self.a | self.b | self.c).is_multiple_of(16)
    }
}

pub(crate) fn map<T: Element>(
    stream: &Stream,
    address: u64,
    [rows, columns, tile_rows]: [u32; 3],
) -> Result<TensorMap> {
    let data_type = T::DATA_TYPE;
    let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
    stream.context().tensor_map(&desc)
}

#[derive(Clone, Copy)]
pub(super) enum Prepared {
    Wide(LaunchConfig),
    Tiled(Tiled),
}

/// The number of slices, and the addresses of their memory.
type SlicesArgs = slices::SlicesArgs<u32, u64, u64>;

pub(crate) type DivisionArgs = swapped::DivisionArgs<u32, u32, u32, u32, u32, bool, bool>;

/// A launch of `gemm_swapped` or `gemm_unswapped`.
#[derive(Clone, Copy)]
pub(super) struct Tiled {
    config: LaunchConfig,
    /// Whether it is by `gemm_swapped`.
    is_swapped: bool,
    division: Division,
    slices: u32,
    launch: LaunchTiled,
}

type LaunchTiled = unsafe fn(&Gemm, Matrices, &Tiled) -> Result<()>;

impl Gemm {
    /// Prepares a plan. Returns `None` for the portable one, if the GPU has no room for the plan,
    /// or if the type has no such kernel.
    pub(super) fn prepare_plan<T: GemmElement, O: GemmOutput<T>>(
        &self,
        plan: GemmPlan,
        extents: Extents,
    ) -> Result<Option<Prepared>> {
        let (compiled, context, shape) = (&self.compiled, self.stream.context(), extents.array());
        if plan == GemmPlan::Wide {
            return Ok(wide_config(compiled, shape)?.map(Prepared::Wide));
        }
        let swapped = plan.swapped(shape).filter(|_| T::DATA_TYPE == O::DATA_TYPE);
        let Some((Tiling { rows, columns, cluster, slices }, shape)) = swapped else {
            return Ok(None);
        };
        let Some(tile_kernels) = kernels_of(plan, (rows, columns)) else { return Ok(None) };
        let kernel = tile_kernels.kernels.iter().find(|kernel| kernel.key == T::DATA_TYPE);
        let Some(kernel) = kernel else { return Ok(None) };
        let resident = (kernel.resident)(compiled, context, cluster.blocks())?;
        Ok(tile_kernels.divide(shape, cluster, slices, resident).map(|(division, config)| {
            let is_swapped = matches!(plan, GemmPlan::Swapped(_));
            Prepared::Tiled(Tiled { config, is_swapped, division, slices, launch: kernel.launch })
        }))
    }

    /// Enqueues a product by what was prepared, or by the portable kernel.
    ///
    /// # Safety
    ///
    /// The matrices have the elements of the shape that was prepared, and stay allocated until the
    /// product has ended. No other product uses the memory of the slices at the same time.
    pub(super) unsafe fn launch_prepared<T: GemmElement, O: GemmOutput<T>>(
        &self,
        prepared: Option<Prepared>,
        matrices: Matrices,
    ) -> Result<()> {
        // SAFETY: the caller passes matrices of the prepared shape that outlive the product, and
        // lets no other product use the memory of the slices.
        unsafe {
            match prepared {
                None => self.launch_portable::<T, O>(matrices),
                Some(Prepared::Wide(config)) => {
                    let ([a, b, c], unaligned) = wide_maps::<T, O>(&self.stream, matrices)?;
                    let Matrices { shape: [m, n, k], transposed: [ta, tb], epilogue, .. } =
                        matrices;
                    let args = (a, b, c, unaligned, m, n, k, ta, tb, epilogue);
                    O::Wide::launch(args, config, &self.compiled.on(&self.stream))
                }
                Some(Prepared::Tiled(mut tiled)) => {
                    // The A of `gemm_unswapped`'s tiles is B.
                    match tiled.is_swapped {
                        true => tiled.division.constant_b = self.constant_b,
                        false => tiled.division.constant_a = self.constant_b,
                    }
                    (tiled.launch)(self, matrices, &tiled)
                }
            }
        }
    }

    /// Enqueues a product by the portable kernel: a block computes a tile of C.
    ///
    /// # Safety
    ///
    /// The matrices have the elements of the shape, and stay allocated until the product has ended.
    unsafe fn launch_portable<T: GemmElement, O: GemmOutput<T>>(
        &self,
        matrices: Matrices,
    ) -> Result<()> {
        let Matrices { a, b, c, shape: [m, n, k], transposed: [ta, tb], epilogue } = matrices;
        if !O::HAS_PORTABLE {
            return no_kernel::<T>(matrices);
        }
        let tiles = u64::from(m.div_ceil(portable::TILE)) * u64::from(n.div_ceil(portable::TILE));
        // CUDA's limit for a grid.
        let Some(tiles) = u32::try_from(tiles).ok().filter(|tiles| *tiles <= i32::MAX as u32)
        else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        let config =
            LaunchConfig::new(tiles, portable::THREADS).with_dynamic_shared(portable::SHARED);
        let args = (a, b, c, m, n, k, ta, tb, epilogue);
        // SAFETY: the caller passes matrices of the shape that outlive the product.
        unsafe { O::Portable::launch(args, config, &self.compiled.on(&self.stream)) }
    }

    /// Returns the argument of a product of this number of slices. On Hopper, where products have
    /// slices, there is memory.
    fn slices_args(&self, count: u32) -> SlicesArgs {
        let addresses =
            |SliceMemory { sums, arrived }: &_| [sums.device_address(), arrived.device_address()];
        let [sums, arrived] = self.slices.as_ref().map_or([0; 2], addresses);
        SlicesArgs { count, sums, arrived }
    }
}

/// Returns the shape of launches of `gemm_wgmma` and `gemm_blocks`, with at most the blocks that
/// are resident; `None` if the GPU has no room.
pub(super) fn wide_config(compiled: &Kernels, [m, n, _]: [u32; 3]) -> Result<Option<LaunchConfig>> {
    let resident =
        compiled.resident_blocks::<kernels::gemm_wgmma<bf16>>(wide::THREADS, wide::SHARED)?;
    let (clusters, pairs) = (resident / wide::CLUSTER, wide_pairs(m, n));
    // The kernel counts tiles in 32 bits, beyond the last one by up to the size of the grid.
    let possible = clusters > 0 && pairs <= u64::from(u32::MAX - resident);
    Ok(possible.then(|| wide_grid(clusters, pairs)))
}

/// Returns the number of pairs of `gemm_wgmma`'s tiles. A cluster computes a pair at a time.
pub(crate) fn wide_pairs(m: u32, n: u32) -> u64 {
    u64::from(m.div_ceil(wide::CLUSTER * wide::TILE_M)) * u64::from(n.div_ceil(wide::TILE_N))
}

/// Returns the shape of a launch with a cluster for each pair of tiles, and at most `clusters`.
pub(crate) fn wide_grid(clusters: u32, pairs: u64) -> LaunchConfig {
    let blocks = u64::from(clusters).min(pairs) as u32 * wide::CLUSTER;
    LaunchConfig::new(blocks, wide::THREADS).with_dynamic_shared(wide::SHARED).with_dependent()
}

/// Returns how many clusters of `gemm_swapped` are resident, which is the same for all tiles.
pub(super) fn room(compiled: &Kernels, context: &Context) -> Result<ResidentClusters> {
    type Tile = swapped::M128N128;
    let clusters = |blocks| {
        let resident =
            resident::<Tile, kernels::gemm_swapped<bf16, Tile>>(compiled, context, blocks);
        resident.map(|[clusters, _]| clusters)
    };
    Ok(ResidentClusters([clusters(1)?, clusters(2)?, clusters(4)?, clusters(8)?]))
}

/// Allocates memory for the slices of all blocks that are resident, zeroed, as `arrived` must be.
pub(super) fn slice_memory(compiled: &Kernels, context: &Context) -> Result<SliceMemory> {
    let tiles = SWAPPED_SLICED.iter().chain(&UNSWAPPED_SLICED).map(|kernels| kernels.tile);
    let largest = tiles.map(|(rows, columns)| (rows * columns) as usize).max().unwrap_or(1);
    // An allocation is not empty, also on a GPU without room, which has no plan with slices.
    let blocks = room(compiled, context)?.0[0].max(1) as usize;
    Ok(SliceMemory { sums: context.alloc(blocks * largest)?, arrived: context.alloc(blocks)? })
}

/// Returns how many clusters of `blocks` blocks are resident if a block has all the dynamic shared
/// memory that it may have, and that memory in bytes.
pub(crate) fn resident<S: Shape, K: Kernel>(
    compiled: &Kernels,
    context: &Context,
    blocks: u32,
) -> Result<[u32; 2]> {
    let most = context.limits().shared_per_block_optin;
    let shared = most.saturating_sub(compiled.info::<K>()?.static_shared);
    Ok([compiled.resident_clusters::<K>(blocks, S::THREADS, shared)?, shared])
}

/// Returns the maps of A, B and C for tiles of `gemm_wgmma`, and C's address if its rows are not
/// aligned: then A's map is in place of C's, which is not used.
pub(crate) fn wide_maps<T: GemmElement, O: GemmOutput<T>>(
    stream: &Stream,
    matrices: Matrices,
) -> Result<([TensorMap; 3], u64)> {
    wide_maps_of_groups::<T, O>(stream, matrices, 1)
}

/// Returns what [`wide_maps`] does, with a B for each group.
pub(super) fn wide_maps_of_groups<T: GemmElement, O: GemmOutput<T>>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], transposed, .. }: Matrices,
    groups: u32,
) -> Result<([TensorMap; 3], u64)> {
    let factor = |address, rows, tile_rows, transposed| match transposed {
        false => map::<T>(stream, address, [rows, k, tile_rows]),
        true => map::<T>(stream, address, [k, rows, wide::TRANSPOSED]),
    };
    let a = factor(a, m, wide::TILE_M, transposed[0])?;
    let b = factor(b, groups * n, wide::TILE_N / wide::CLUSTER, transposed[1])?;
    let (map_of_c, unaligned) = match n.is_multiple_of(16 / size_of::<O>() as u32) {
        true => (map::<O>(stream, c, [m, n, wide::STORE_M])?, 0),
        false => (a, c),
    };
    Ok(([a, b, map_of_c], unaligned))
}

/// The kernels with tiles of one size: one for each value of `K`, with a launch `L`.
pub(crate) struct TileKernels<K: 'static, L: 'static> {
    /// [`Shape::M`] and [`Shape::N`].
    pub(crate) tile: (u32, u32),
    /// [`Shape::DEPTH`].
    pub(super) depth: u32,
    threads: u32,
    divide: Divide,
    pub(crate) kernels: &'static [TileKernel<K, L>],
}

/// One of the [`TileKernels`].
pub(crate) struct TileKernel<K, L> {
    /// The element type, or the number of ranks, for which the kernel is.
    pub(crate) key: K,
    /// [`resident`] for clusters of this number of blocks.
    pub(crate) resident: fn(&Kernels, &Context, u32) -> Result<[u32; 2]>,
    pub(crate) launch: L,
}

/// The type of [`Division::of`].
type Divide = fn([u32; 3], Cluster, u32, u32, u32) -> Option<(Division, u32, u32)>;

impl<K, L> TileKernels<K, L> {
    pub(crate) const fn new<S: Shape>(kernels: &'static [TileKernel<K, L>]) -> Self {
        let (tile, divide) = ((S::M, S::N), Division::of::<S>);
        Self { tile, depth: S::DEPTH, threads: S::THREADS, divide, kernels }
    }

    /// Returns how a product is divided among the clusters that are resident with this shared
    /// memory, and the shape of its launch; `None` if they cannot do it.
    pub(crate) fn divide(
        &self,
        shape: [u32; 3],
        cluster: Cluster,
        slices: u32,
        [clusters, shared]: [u32; 2],
    ) -> Option<(Division, LaunchConfig)> {
        let blocks = cluster.blocks();
        let (division, clusters, shared) = (self.divide)(shape, cluster, slices, clusters, shared)?;
        let config = LaunchConfig::new(clusters * blocks, self.threads)
            .with_dynamic_shared(shared)
            .with_cluster(blocks)
            .with_dependent();
        Some((division, config))
    }
}

/// The kernels of a `Gemm` for a size of tiles, one for each type of A, B and C.
type GemmKernels = TileKernels<DataType, LaunchTiled>;

/// Returns the kernels for plans like this one with a size of `gemm_swapped`'s tiles.
pub(super) fn kernels_of(plan: GemmPlan, tile: (u32, u32)) -> Option<&'static GemmKernels> {
    let by_tile: &[GemmKernels] = match plan {
        GemmPlan::Portable | GemmPlan::Wide => &[],
        GemmPlan::Swapped(Tiling { slices: 1, .. }) => &SWAPPED,
        GemmPlan::Swapped(_) => &SWAPPED_SLICED,
        GemmPlan::Unswapped(Tiling { slices: 1, .. }) => &UNSWAPPED,
        GemmPlan::Unswapped(_) => &UNSWAPPED_SLICED,
    };
    by_tile.iter().find(|kernels| kernels.tile == tile)
}

macro_rules! tile_kernels {
    ($by_tile:ident, $kernel:ident $types:tt, $maps:ident, $is_sliced:tt: $($shape:ident)*) => {
        static $by_tile: [GemmKernels; [$(stringify!($shape)),*].len()] = [$({
            type Tile = swapped::$shape;
            TileKernels::new::<Tile>(tile_kernels!(@of_types $kernel $types, $maps, $is_sliced))
        }),*];
    };
    (@of_types $kernel:ident [$($type:ident),*], $maps:ident, $is_sliced:tt) => {
        &[$({
            type Kernel = kernels::$kernel<$type, Tile>;

            unsafe fn launch(gemm: &Gemm, matrices: Matrices, tiled: &Tiled) -> Result<()> {
                let Matrices { shape: [m, n, k], epilogue, .. } = matrices;
                let (a, b, c) = $maps::<$type, Tile>(&gemm.stream, matrices, tiled.division)?;
                let division = division_args(tiled.division);
                let slices = gemm.slices_args(tiled.slices);
                let product = tile_kernels!(
                    @args $is_sliced, Kernel, [a, b, c, m, n, k, division], slices, epilogue
                );
                // SAFETY: the caller passes matrices of the prepared shape that outlive the
                // product.
                unsafe { product.config(tiled.config).launch(&gemm.compiled.on(&gemm.stream)) }
            }

            TileKernel { key: $type::DATA_TYPE, resident: resident::<Tile, Kernel>, launch }
        }),*]
    };
    (@args true, $kernel:ty, [$($arg:expr),*], $slices:ident, $epilogue:ident) => {
        <$kernel>::args($($arg,)* $slices, $epilogue)
    };
    (@args false, $kernel:ty, [$($arg:expr),*], $slices:ident, $epilogue:ident) => {{
        let _ = $slices;
        <$kernel>::args($($arg,)* $epilogue)
    }};
}

tile_kernels! {
    SWAPPED, gemm_swapped [bf16, f16], swapped_maps, false:
    M8N64 M16N64 M32N64 M64N64 M96N64 M112N64 M128N64 M256N64 M8N128 M16N128 M32N128 M48N128
    M64N128 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128 M256N128
}

tile_kernels! {
    SWAPPED_SLICED, gemm_swapped_sliced [bf16, f16], swapped_maps, true:
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128
}

tile_kernels! {
    UNSWAPPED, gemm_unswapped [bf16, f16], unswapped_maps, false:
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128 M256N128
}

tile_kernels! {
    UNSWAPPED_SLICED, gemm_unswapped_sliced [bf16, f16], unswapped_maps, true:
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128
}

pub(crate) fn division_args(division: Division) -> DivisionArgs {
    let Division { across, down, stages, whole, sums, constant_a, constant_b } = division;
    swapped::DivisionArgs { across, down, stages, whole, sums, constant_a, constant_b }
}

/// Returns the maps of A, B and C.
pub(crate) fn swapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, TensorMap)> {
    let map = |address, tiles| map::<T>(stream, address, tiles);
    Ok((
        map(a, [m, k, S::M / across])?,
        map(b, [n, k, S::N / down])?,
        map(c, [m, n, swapped::STORE_M])?,
    ))
}

/// Returns the maps of A and B, and C's address.
fn unswapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, u64)> {
    let map = |address, tiles| map::<T>(stream, address, tiles);
    Ok((map(a, [m, k, S::N / down])?, map(b, [n, k, S::M / across])?, c))
}

/// Enqueues a product whose A and B have matrices of scales at these addresses.
///
/// # Safety
///
/// All matrices have the elements of the shape, and stay allocated until the product has ended.
pub(super) unsafe fn launch_blocks<T: ScaledElement>(
    Gemm { compiled, stream, hopper, .. }: &Gemm,
    matrices: Matrices,
    [scales_a, scales_b]: [u64; 2],
) -> Result<()> {
    let Matrices { a, b, c, shape: shape @ [m, n, k], epilogue, .. } = matrices;
    let possible = hopper.is_some() && (a | b | c | u64::from(k)).is_multiple_of(16);
    let config = if possible { wide_config(compiled, shape)? } else { None };
    let Some(config) = config else { return no_kernel::<T>(matrices) };
    let ([a, b, c], unaligned) = wide_maps::<T, T::Output>(stream, matrices)?;
    let args = (a, b, c, unaligned, m, n, k, scales_a, scales_b, epilogue);
    // SAFETY: the caller passes matrices and scales of the shape that outlive the product.
    unsafe { T::Blocks::launch(args, config, &compiled.on(stream)) }
}
