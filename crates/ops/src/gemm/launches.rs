//! The launches of the kernels of products.

use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Division};
use devcomm_kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide, slices};

use super::element::{GemmElement, GemmOutput};
use super::matrices::{Matrices, swapped_maps, unswapped_maps, wide_maps};
use super::plan::{GemmPlan, Tiling, clusters};
use super::tile_kernel::{ResidentClusters, TileKernel, division_args, resident};
use super::{Gemm, SliceMemory};
use crate::prelude::*;

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
/// Refuses a product of 8-bit floats, and says what their kernels need.
fn no_kernel<T: Element>(Matrices { shape: [.., k], .. }: Matrices) -> Result<()> {
    refuse(format!(
        "products of {} need a GPU of the Hopper family, A, B and C at multiples of 16 bytes, \
         and rows of them too: k is {k}, pad it with zeros to a multiple of 16",
        T::NAME,
    ))
}

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

impl GemmPlan {
    /// Returns whether it is a plan with tiles for which there is a kernel.
    pub(super) fn is_known(self) -> bool {
        self.swapped([1; 3]).is_some_and(|(Tiling { rows, columns, cluster, slices }, _)| {
            let tile = (rows, columns);
            let divides = slices == 1 || (2..=MOST_SLICES).contains(&slices) && cluster.splits == 1;
            divides
                && kernel_of(self, tile, bf16::DATA_TYPE).is_some()
                && clusters(tile).any(|known| known == cluster)
        })
    }
}

/// The most slices of a plan.
pub(super) const MOST_SLICES: u32 = 8;

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
