//! The fused product of few rows on Hopper GPUs: its workspace and launches.

use std::collections::HashMap;

use devcomm_kernels::gemm::gemm_swapped::{self as shapes, Cluster, Division};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_swapped::slots;

use super::{AllReduce, Plan};
use crate::Tiling;
use crate::fused::*;
use crate::gemm::*;
use crate::prelude::*;

/// The most rows of C.
pub(super) const MOST_ROWS: usize = 256;

/// The kernels, and the memory of their messages.
pub(super) struct Swapped {
    kernels: ExchangeKernels,
    /// The clusters that are resident on all GPUs for each tile, and the dynamic shared memory that
    /// a block may have.
    resident: HashMap<Tiling, [u32; 2]>,
    /// The index of the kernel for this number of ranks in each [`SwappedKernels`].
    index: usize,
}

impl Swapped {
    /// Returns the clusters that are resident on all GPUs, which are the same for all tiles.
    pub(super) fn room(&self) -> ResidentClusters {
        ResidentClusters([1, 2, 4, 8].map(|splits| {
            let cluster = Cluster { splits, across: 1, down: 1 };
            let tiling = Tiling { rows: 128, columns: 128, cluster, slices: 1 };
            self.resident.get(&tiling).map_or(0, |[clusters, _]| *clusters)
        }))
    }

    /// Returns how a product is divided into these tiles; `None` if they cannot do it.
    fn division(&self, tiling: Tiling, extents: Extents) -> Option<(Division, LaunchConfig)> {
        let [m, n, _] = extents.lengths();
        let fits = slots(m, n).is_some_and(|slots| slots <= self.kernels.memory.capacity());
        let kernels = kernels_of(tiling).filter(|_| fits && has_few_rows(extents))?;
        let (Tiling { cluster, slices, .. }, resident) = (tiling, *self.resident.get(&tiling)?);
        let (division, config) = (kernels.divide)(extents.array(), cluster, slices, resident)?;
        // A block waits only for what the peers' blocks of its index send before they wait.
        Some((division, config.without_cooperation()))
    }
}

impl Strategy<AllReduce> for OnceCell<Swapped> {
    fn supports(&self, _: &Base<AllReduce>, plan: Plan, extents: Extents) -> bool {
        let division = |(swapped, tiling): (&Swapped, _)| swapped.division(tiling, extents);
        self.get().zip(plan.tiling()).and_then(division).is_some()
    }

    fn prepare(&self, base: &Base<AllReduce>, plan: Plan) -> Result<()> {
        refuse_if!(
            plan.tiling().and_then(kernels_of).is_none(),
            "no kernel exchanges tiles as those of the plan `{plan}`"
        );
        let (index, [m, n]) = (usize::from(base.comm.n_ranks() != 2), base.most);
        let load = || {
            let set = KERNELS.only(&[kernels::gemm_allreduce_swapped::<shapes::M8N64, 2>::FILE]);
            let compiled = Kernels::load(base.context(), &set)?;
            let resident = tilings().map(|(Tiling { cluster, .. }, kernels)| {
                (kernels.kernels[index].resident)(&compiled, base.context(), cluster.blocks())
            });
            let resident = resident.collect::<Result<_>>()?;
            Ok((compiled, resident))
        };
        base.prepare((self, plan), ANY_RANKS, load, |compiled, resident| {
            let slots = slots(m.min(MOST_ROWS), n);
            let kernels = ExchangeKernels::new(base, (compiled, resident), slots, false)?;
            let tilings = tilings().map(|(tiling, _)| tiling);
            let resident = tilings.zip(kernels.resident.iter().copied()).collect();
            Ok(Swapped { kernels, resident, index })
        })
    }

    unsafe fn launch(&self, base: &Base<AllReduce>, plan: Plan, operands: &Operands) -> Result<()> {
        let swapped = prepared(self)?;
        let launch = plan.tiling().and_then(|tiling| {
            Some((kernels_of(tiling)?, swapped.division(tiling, operands.extents)?))
        });
        let Some((kernels, (division, config))) = launch else {
            return refuse(format!("the plan `{plan}` does no product of this shape"));
        };
        let division = Division { constant_b: base.constant_b, ..division };
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches.
        unsafe {
            let launch = kernels.kernels[swapped.index].launch;
            launch(swapped, &base.stream, operands.matrices, division, config)
        }
    }
}

/// Returns whether products of this shape have few rows, with rows of C aligned to 16 bytes.
pub(super) fn has_few_rows(extents: Extents) -> bool {
    let [m, n, _] = extents.lengths();
    m <= MOST_ROWS && n.is_multiple_of(8)
}

/// Returns all tilings, each with its kernels.
fn tilings() -> impl Iterator<Item = (Tiling, &'static SwappedKernels)> {
    KERNELS_BY_TILE.iter().flat_map(|kernels| {
        let (rows, columns) = kernels.tile;
        let tiling = move |cluster| Tiling { rows, columns, cluster, slices: 1 };
        clusters(kernels.tile).map(move |cluster| (tiling(cluster), kernels))
    })
}

/// Returns the kernels with these tiles.
pub(super) fn kernels_of(
    Tiling { rows, columns, slices, .. }: Tiling,
) -> Option<&'static SwappedKernels> {
    KERNELS_BY_TILE.iter().find(|kernels| slices == 1 && kernels.tile == (rows, columns))
}

/// The kernels for a size of tiles: for two ranks, and for any number (0).
pub(super) type SwappedKernels = TileKernels<usize, Launch>;

pub(super) type Launch =
    unsafe fn(&Swapped, &Stream, Matrices, Division, LaunchConfig) -> Result<()>;

macro_rules! tile_kernels {
    ($($shape:ident)*) => {
        static KERNELS_BY_TILE: [SwappedKernels; [$(stringify!($shape)),*].len()] = [$({
            type Tile = shapes::$shape;
            TileKernels::new::<Tile>(&[tile_kernels!(@kernel 2), tile_kernels!(@kernel 0)])
        }),*];
    };
    (@kernel $ranks:literal) => {{
        type Kernel = kernels::gemm_allreduce_swapped<Tile, $ranks>;

        unsafe fn launch(
            Swapped { kernels: ExchangeKernels { compiled, dev_comm, memory, .. }, .. }: &Swapped,
            stream: &Stream,
            matrices: Matrices,
            division: Division,
            config: LaunchConfig,
        ) -> Result<()> {
            let (a, b, c) = swapped_maps::<bf16, Tile>(stream, matrices, division)?;
            let ([m, n, k], division) = (matrices.shape, division_args(division));
            let product = Kernel::args(dev_comm, a, b, c, memory, m, n, k, division);
            // SAFETY: the caller passes matrices that outlive the product, and orders the launches,
            // which use the memory that `Swapped::new` allocates for these kernels.
            unsafe { product.config(config).launch(&compiled.on(stream)) }
        }

        TileKernel { key: $ranks, resident: resident::<Tile, Kernel>, launch }
    }};
}

tile_kernels! {
    M8N64 M16N64 M32N64 M64N64 M96N64 M128N64 M8N128 M16N128 M32N128 M48N128 M64N128 M80N128
    M128N128
}
