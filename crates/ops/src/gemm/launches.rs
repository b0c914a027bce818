//! The launches of the kernels of products.

use devcomm_host::TensorMapDesc;
use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Cluster, Division, Shape};
use devcomm_kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide, slices};

use super::element::{GemmElement, GemmOutput, no_kernel};
use super::model::ResidentClusters;
use super::plan::{GemmPlan, Tiling};
use super::product::{Added, EpilogueArgs};
use super::{Gemm, SliceMemory};
use crate::prelude::*;

/// A launch's matrices, as their addresses, and its epilogue. `groups` of rows have a B each.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) shape: [u32; 3],
    pub(crate) groups: u32,
    pub(crate) transposed: [bool; 2],
    /// The addresses of matrices of scales for A and B, or 0 without them.
    pub(crate) block_scales: [u64; 2],
    pub(crate) epilogue: EpilogueArgs,
}

impl Matrices {
    /// Checks that A, B and C with these rows, and what is added to the product, have the elements
    /// and are of the context, and that C overlaps none of the others.
    pub(crate) fn checked<T, O>(
        context: &Context,
        extents: Extents,
        (a, b, c): (&DeviceSlice<T>, &DeviceSlice<T>, &DeviceSlice<O>),
        [rows_of_a, rows_of_b, rows_of_c]: [usize; 3],
        added: &Added<O>,
    ) -> Result<Self> {
        let [_, n, k] = extents.lengths();
        let matrices = Self {
            a: address(context, "A", a, rows_of_a, k)?,
            b: address(context, "B", b, rows_of_b, k)?,
            c: address(context, "C", c, rows_of_c, n)?,
            shape: extents.array(),
            groups: 1,
            transposed: [false; 2],
            block_scales: [0; 2],
            epilogue: added.args(context, [rows_of_c, n])?,
        };
        let len_of_c = rows_of_c * n;
        let to = ("C", c, len_of_c);
        require_apart(("A", a, rows_of_a * k), to, None)?;
        require_apart(("B", b, rows_of_b * k), to, None)?;
        let Added { bias, residual, .. } = added;
        bias.iter().try_for_each(|bias| require_apart(("the bias", bias, n), to, None))?;
        residual.iter().try_for_each(|residual| {
            require_apart(("the residual", residual, len_of_c), to, Some(0))
        })?;
        Ok(matrices)
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
    /// `gemm_blocks`, with a scale for each block of A and B.
    Blocks(LaunchConfig),
    Tiled(Tiled),
}

/// The number of slices, and the addresses of their memory.
type SlicesArgs = slices::SlicesArgs<u32, u64, u64>;

/// A launch of `gemm_swapped` or `gemm_unswapped`.
#[derive(Clone, Copy)]
pub(super) struct Tiled {
    config: LaunchConfig,
    division: Division,
    slices: u32,
    launch: LaunchTiled,
}

type LaunchTiled = unsafe fn(&Gemm, Matrices, &Tiled) -> Result<()>;

impl Gemm {
    /// Prepares a plan, unless it is the portable one, or the GPU has no room or the type no
    /// kernel.
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
        let Some(kernel) = kernel_of(plan, (rows, columns), T::DATA_TYPE) else { return Ok(None) };
        let resident = (kernel.resident)(compiled, context, cluster.blocks())?;
        let divided = (kernel.divide)(shape, cluster, slices, resident);
        let launch = kernel.launch;
        Ok(divided
            .map(|(division, config)| Prepared::Tiled(Tiled { config, division, slices, launch })))
    }

    /// Enqueues a product, after the previous one of this object.
    ///
    /// # Safety
    ///
    /// The matrices have the elements of the shape; all memory stays allocated until the product
    /// has ended.
    pub(crate) unsafe fn enqueue<T: GemmElement, O: GemmOutput<T>>(
        &self,
        extents: Extents,
        matrices: Matrices,
    ) -> Result<()> {
        let Matrices { a, b, c, shape: [m, n, k], transposed, epilogue, .. } = matrices;
        let prepared = match matrices.block_scales {
            [0, 0] if !matrices.are_aligned() => None,
            [0, 0] => self.prepare::<T, O>(extents, transposed)?.1,
            _ if self.hopper.is_some() && (a | b | c | u64::from(k)).is_multiple_of(16) => {
                wide_config(&self.compiled, matrices.shape)?.map(Prepared::Blocks)
            }
            _ => None,
        };
        let _turn = self.order.begin(&self.stream)?;
        let ([ta, tb], target) = (transposed, self.compiled.on(&self.stream));
        let in_f32 = O::DATA_TYPE == DataType::Float32;
        // SAFETY: the caller passes matrices of the prepared shape that outlive the product.
        // `_turn` orders the products, which use the memory of the slices.
        unsafe {
            match prepared {
                Some(Prepared::Tiled(tiled)) => (tiled.launch)(self, matrices, &tiled),
                Some(Prepared::Wide(config)) => {
                    let ([a, b, c], unaligned) = wide_maps::<T, O>(&self.stream, matrices)?;
                    let args = (a, b, c, unaligned, m, n, k, ta, tb, epilogue);
                    with_element!(T::DATA_TYPE, E in bf16, f16, F8E4M3, F8E5M2 => if in_f32 {
                        kernels::gemm_wgmma_f32::<E>::launch(args, config, &target)
                    } else {
                        kernels::gemm_wgmma::<E>::launch(args, config, &target)
                    })
                }
                Some(Prepared::Blocks(config)) => {
                    let ([a, b, c], unaligned) = wide_maps::<T, O>(&self.stream, matrices)?;
                    let [scales_a, scales_b] = matrices.block_scales;
                    let args = (a, b, c, unaligned, m, n, k, scales_a, scales_b, epilogue);
                    with_element!(T::DATA_TYPE, Scaled in F8E4M3, F8E5M2 => {
                        kernels::gemm_blocks::<Scaled>::launch(args, config, &target)
                    })
                }
                None if size_of::<T>() == 1 => no_kernel::<T>(matrices),
                None => {
                    let (args, config) =
                        ((a, b, c, m, n, k, ta, tb, epilogue), portable_config(m, n)?);
                    with_element!(T::DATA_TYPE, Half in f16, bf16 => if in_f32 {
                        kernels::gemm_mma_f32::<Half>::launch(args, config, &target)
                    } else {
                        kernels::gemm_mma::<Half>::launch(args, config, &target)
                    })
                }
            }
        }
    }

    /// Returns the argument of a product of this number of slices, on Hopper, where there is
    /// memory.
    fn slices_args(&self, count: u32) -> SlicesArgs {
        let (sums, arrived) = self
            .slices
            .as_ref()
            .map_or((0, 0), |(sums, arrived)| (sums.device_address(), arrived.device_address()));
        SlicesArgs { count, sums, arrived }
    }
}

/// Returns the shape of a launch of `gemm_mma`, of which a block computes a tile of C.
fn portable_config(m: u32, n: u32) -> Result<LaunchConfig> {
    let tiles = u64::from(m.div_ceil(portable::TILE)) * u64::from(n.div_ceil(portable::TILE));
    // CUDA's limit for a grid.
    refuse_if!(tiles > i32::MAX as u64, "a product of {m} x {n} elements is too large");
    Ok(LaunchConfig::new(tiles as u32, portable::THREADS).with_dynamic_shared(portable::SHARED))
}

/// Returns the shape of launches of `gemm_wgmma` and `gemm_blocks`, if the GPU has room.
pub(super) fn wide_config(compiled: &Kernels, [m, n, _]: [u32; 3]) -> Result<Option<LaunchConfig>> {
    let resident =
        compiled.resident_blocks::<kernels::gemm_wgmma<bf16>>(wide::THREADS, wide::SHARED)?;
    let (clusters, pairs) = (resident / wide::CLUSTER, wide_pairs(m, n));
    // The kernel counts tiles in 32 bits, beyond the last one by up to the size of the grid.
    let possible = clusters > 0 && pairs <= u64::from(u32::MAX - resident);
    Ok(possible.then(|| wide_grid(clusters, pairs)))
}

/// Returns the number of pairs of `gemm_wgmma`'s tiles, of which a cluster computes one at a time.
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
    let tiles = SWAPPED_SLICED.iter().chain(UNSWAPPED_SLICED).map(|kernel| kernel.tile);
    let largest = tiles.map(|(rows, columns)| (rows * columns) as usize).max().unwrap_or(1);
    // An allocation is not empty, also on a GPU without room, which has no plan with slices.
    let blocks = room(compiled, context)?.0[0].max(1) as usize;
    Ok((context.alloc(blocks * largest)?, context.alloc(blocks)?))
}

/// Returns the most dynamic shared memory of a block in bytes, after the number of clusters of
/// `blocks` such blocks that are resident.
pub(crate) fn resident<S: Shape, K: Kernel>(
    compiled: &Kernels,
    context: &Context,
    blocks: u32,
) -> Result<[u32; 2]> {
    let most = context.limits().shared_per_block_optin;
    let shared = most.saturating_sub(compiled.info::<K>()?.static_shared);
    Ok([compiled.resident_clusters::<K>(blocks, S::THREADS, shared)?, shared])
}

/// Returns the maps of A, B and C for tiles of `gemm_wgmma`, and 0; or, if C's rows are not
/// aligned, any map in place of C's, and its address.
pub(crate) fn wide_maps<T: GemmElement, O: GemmOutput<T>>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], groups, transposed, .. }: Matrices,
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

/// A kernel for one size of tiles and one key, with a launch `L`.
pub(crate) struct TileKernel<K, L> {
    /// [`Shape::M`] and [`Shape::N`].
    pub(crate) tile: (u32, u32),
    /// [`Shape::DEPTH`].
    pub(super) depth: u32,
    /// The element type, or the number of ranks, for which the kernel is.
    pub(crate) key: K,
    /// [`divide`] for these tiles.
    pub(crate) divide: Divide,
    /// [`resident`] for clusters of this number of blocks.
    pub(crate) resident: fn(&Kernels, &Context, u32) -> Result<[u32; 2]>,
    pub(crate) launch: L,
}

type Divide = fn([u32; 3], Cluster, u32, [u32; 2]) -> Option<(Division, LaunchConfig)>;

impl<K: Copy, L: Copy> TileKernel<K, L> {
    pub(crate) const fn new<S: Shape, T: Kernel>(key: K, launch: L) -> Self {
        let (divide, resident) = (divide::<S>, resident::<S, T>);
        Self { tile: (S::M, S::N), depth: S::DEPTH, key, divide, resident, launch }
    }
}

/// Returns how a product is divided among the clusters that are resident with this shared memory,
/// and the shape of its launch, if they can do it.
fn divide<S: Shape>(
    shape: [u32; 3],
    cluster: Cluster,
    slices: u32,
    [clusters, shared]: [u32; 2],
) -> Option<(Division, LaunchConfig)> {
    let blocks = cluster.blocks();
    let (division, clusters, shared) = Division::of::<S>(shape, cluster, slices, clusters, shared)?;
    let config = LaunchConfig::new(clusters * blocks, S::THREADS)
        .with_dynamic_shared(shared)
        .with_cluster(blocks)
        .with_dependent();
    Some((division, config))
}

/// A kernel of a `Gemm`, for a type of A, B and C.
type GemmKernel = TileKernel<DataType, LaunchTiled>;

/// Returns the kernel for plans like this one with a size of `gemm_swapped`'s tiles.
pub(super) fn kernel_of(
    plan: GemmPlan,
    tile: (u32, u32),
    data_type: DataType,
) -> Option<&'static GemmKernel> {
    let kernels: &[GemmKernel] = match plan {
        GemmPlan::Portable | GemmPlan::Wide => &[],
        GemmPlan::Swapped(Tiling { slices: 1, .. }) => SWAPPED,
        GemmPlan::Swapped(_) => SWAPPED_SLICED,
        GemmPlan::Unswapped(Tiling { slices: 1, .. }) => UNSWAPPED,
        GemmPlan::Unswapped(_) => UNSWAPPED_SLICED,
    };
    kernels.iter().find(|kernel| kernel.tile == tile && kernel.key == data_type)
}

/// Defines a table of kernels for tiles of these shapes. In parentheses are the kernel, the
/// function that makes its maps, the field of `Division` for a constant B, which is A in tiles of
/// `gemm_unswapped`, and for kernels with slices the method that makes their argument.
macro_rules! tile_kernels {
    ($by_tile:ident $kernel:tt: $($shape:ident)*) => {
        static $by_tile: &[GemmKernel] = &[$(
            tile_kernels!(@kernel $shape bf16 $kernel), tile_kernels!(@kernel $shape f16 $kernel)
        ),*];
    };
    (
        @kernel $shape:ident $type:ident
        ($kernel:ident, $maps:ident, $constant:ident $(, $slices:ident)?)
    ) => {{
        type Tile = swapped::$shape;
        type Kernel = kernels::$kernel<$type, Tile>;

        GemmKernel::new::<Tile, Kernel>($type::DATA_TYPE, |gemm, matrices, tiled| {
            let Matrices { shape: [m, n, k], epilogue, .. } = matrices;
            let (a, b, c) = $maps::<$type, Tile>(&gemm.stream, matrices, tiled.division)?;
            let division = Division { $constant: gemm.constant_b, ..tiled.division };
            let division = division_args(division);
            let product = Kernel::args(
                a, b, c, m, n, k, division, $(gemm.$slices(tiled.slices),)? epilogue,
            );
            // SAFETY: the caller passes matrices of the prepared shape that outlive the product.
            unsafe { product.config(tiled.config).launch(&gemm.compiled.on(&gemm.stream)) }
        })
    }};
}

tile_kernels! {
    SWAPPED (gemm_swapped, swapped_maps, constant_b):
    M8N64 M16N64 M32N64 M64N64 M96N64 M112N64 M128N64 M256N64 M8N128 M16N128 M32N128 M48N128
    M64N128 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128 M256N128
}

tile_kernels! {
    SWAPPED_SLICED (gemm_swapped_sliced, swapped_maps, constant_b, slices_args):
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128
}

tile_kernels! {
    UNSWAPPED (gemm_unswapped, unswapped_maps, constant_a):
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128 M256N128
}

tile_kernels! {
    UNSWAPPED_SLICED (gemm_unswapped_sliced, unswapped_maps, constant_a, slices_args):
    M96N64 M112N64 M80N128 M96N128 M112N128 M128N128 M144N128 M160N128 M176N128 M192N128 M208N128
    M224N128
}

type DivisionArgs = swapped::DivisionArgs<u32, u32, u32, u32, u32, bool, bool>;

pub(crate) fn division_args(division: Division) -> DivisionArgs {
    let Division { across, down, stages, whole, sums, constant_a, constant_b } = division;
    swapped::DivisionArgs { across, down, stages, whole, sums, constant_a, constant_b }
}

pub(crate) fn swapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, TensorMap)> {
    Ok((
        map::<T>(stream, a, [m, k, S::M / across])?,
        map::<T>(stream, b, [n, k, S::N / down])?,
        map::<T>(stream, c, [m, n, swapped::STORE_M])?,
    ))
}

fn unswapped_maps<T: Element, S: Shape>(
    stream: &Stream,
    Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    Division { across, down, .. }: Division,
) -> Result<(TensorMap, TensorMap, u64)> {
    let map = |address, tiles| map::<T>(stream, address, tiles);
    Ok((map(a, [m, k, S::N / down])?, map(b, [n, k, S::M / across])?, c))
}
