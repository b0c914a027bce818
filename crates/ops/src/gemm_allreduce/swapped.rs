//! The fused product of few rows on Hopper GPUs: its workspace and launches.

use devcomm_kernels::gemm::gemm_swapped::{self as shapes, Division};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_swapped::slots;

use super::{AllReduce, Plan};
use crate::Tiling;
use crate::fused::*;
use crate::gemm::*;
use crate::prelude::*;

/// The most rows of C.
pub(super) const MOST_ROWS: usize = 256;

/// A kernel, how it divides a product, and the shape of its launch.
type Divided = (&'static SwappedKernel, Division, LaunchConfig);

/// The kernels, and the memory of their messages, once they are prepared.
#[derive(Default)]
pub(super) struct Swapped(OnceCell<ExchangeKernels>);

impl Swapped {
    /// Returns the clusters that are resident on all GPUs, which are the same for all tiles.
    pub(super) fn room(&self) -> Option<ResidentClusters> {
        let kernels = self.0.get()?;
        Some(ResidentClusters([0, 1, 2, 3].map(|log: usize| kernels.resident[log][0])))
    }

    /// Returns the kernel of a plan, how it divides a product, and the shape of the launch, if it
    /// can do the product.
    fn divide(&self, ranks: usize, plan: Plan, extents: Extents) -> Option<Divided> {
        let (kernels, [m, n, _], tiling) = (self.0.get()?, extents.lengths(), plan.tiling()?);
        let fits = slots(m, n).is_some_and(|slots| slots <= kernels.memory.capacity());
        let kernel = kernel_of(tiling, ranks).filter(|_| fits && has_few_rows(extents))?;
        let Tiling { cluster, slices, .. } = tiling;
        let resident = *kernels.resident.get(cluster.blocks().checked_ilog2()? as usize)?;
        let (division, config) = (kernel.divide)(extents.array(), cluster, slices, resident)?;
        // A block waits only for what the peers' blocks of its index send before they wait.
        Some((kernel, division, config.without_cooperation()))
    }
}

impl Strategy<AllReduce> for Swapped {
    fn supports(&self, base: &Base<AllReduce>, plan: Plan, extents: Extents) -> bool {
        self.divide(base.comm.n_ranks(), plan, extents).is_some()
    }

    fn prepare(&self, base: &Base<AllReduce>, plan: Plan) -> Result<()> {
        refuse_if!(
            !plan.tiling().is_some_and(is_known),
            "no kernel exchanges tiles as those of the plan `{plan}`"
        );
        let (ranks, [m, n]) = (base.comm.n_ranks(), base.most);
        let load = || {
            let set = KERNELS.only(&[kernels::gemm_allreduce_swapped::<shapes::M8N64, 2>::FILE]);
            let compiled = Kernels::load(base.comm.context(), &set)?;
            // For clusters of 1, 2, 4 and 8 blocks, what all tiles have.
            let of_tiles = |blocks| {
                KERNELS_BY_TILE.iter().filter(|kernel| kernel.is_for(ranks)).try_fold(
                    [u32::MAX; 2],
                    |[clusters, shared], kernel| {
                        let [a, b] = (kernel.resident)(&compiled, base.comm.context(), blocks)?;
                        Ok([clusters.min(a), shared.min(b)])
                    },
                )
            };
            let resident = [1, 2, 4, 8].into_iter().map(of_tiles).collect::<Result<_>>()?;
            Ok((compiled, resident))
        };
        base.prepare((&self.0, plan), ANY_RANKS, load, |compiled, resident| {
            let slots = slots(m.min(MOST_ROWS), n);
            ExchangeKernels::new(base, (compiled, resident), slots, false)
        })
    }

    unsafe fn launch(&self, base: &Base<AllReduce>, plan: Plan, operands: &Operands) -> Result<()> {
        let kernels = prepared(&self.0)?;
        let divided = self.divide(base.comm.n_ranks(), plan, operands.extents);
        let Some((kernel, division, config)) = divided else {
            return refuse(format!("the plan `{plan}` does no product of this shape"));
        };
        let division = Division { constant_b: base.constant_b, ..division };
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches.
        unsafe { (kernel.launch)(kernels, &base.stream, operands.matrices, division, config) }
    }
}

/// Returns whether products of this shape have few rows, with rows of C aligned to 16 bytes.
pub(super) fn has_few_rows(extents: Extents) -> bool {
    let [m, n, _] = extents.lengths();
    m <= MOST_ROWS && n.is_multiple_of(8)
}

/// Returns whether there is a kernel for tiles that are shared like this.
fn is_known(tiling: Tiling) -> bool {
    kernel_of(tiling, 2).is_some()
        && clusters((tiling.rows, tiling.columns)).any(|known| known == tiling.cluster)
}

/// Returns the kernel with these tiles for this number of ranks.
pub(super) fn kernel_of(tiling: Tiling, ranks: usize) -> Option<&'static SwappedKernel> {
    let Tiling { rows, columns, slices, .. } = tiling;
    let mut kernels = KERNELS_BY_TILE.iter().filter(|kernel| kernel.is_for(ranks));
    kernels.find(|kernel| slices == 1 && kernel.tile == (rows, columns))
}

/// A kernel for two ranks, or for any number (0).
pub(super) type SwappedKernel = TileKernel<usize, Launch>;

impl SwappedKernel {
    fn is_for(&self, ranks: usize) -> bool {
        self.key == if ranks == 2 { 2 } else { 0 }
    }
}

pub(super) type Launch =
    unsafe fn(&ExchangeKernels, &Stream, Matrices, Division, LaunchConfig) -> Result<()>;

macro_rules! tile_kernels {
    ($($shape:ident)*) => {
        static KERNELS_BY_TILE: &[SwappedKernel] =
            &[$(tile_kernels!(@kernel $shape 2), tile_kernels!(@kernel $shape 0)),*];
    };
    (@kernel $shape:ident $ranks:literal) => {{
        type Tile = shapes::$shape;
        type Kernel = kernels::gemm_allreduce_swapped<Tile, $ranks>;

        SwappedKernel::new::<Tile, Kernel>($ranks, |kernels, stream, matrices, division, config| {
            let ExchangeKernels { compiled, dev_comm, memory, .. } = kernels;
            let (a, b, c) = swapped_maps::<bf16, Tile>(stream, matrices, division)?;
            let ([m, n, k], division) = (matrices.shape, division_args(division));
            let product = Kernel::args(dev_comm, a, b, c, memory, m, n, k, division);
            // SAFETY: the caller passes matrices that outlive the product, and orders the launches,
            // which use the memory that `prepare` allocates for these kernels.
            unsafe { product.config(config).launch(&compiled.on(stream)) }
        })
    }};
}

tile_kernels! {
    M8N64 M16N64 M32N64 M64N64 M96N64 M128N64 M8N128 M16N128 M32N128 M48N128 M64N128 M80N128
    M128N128
}
