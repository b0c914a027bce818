//! The fused product of few rows on Hopper GPUs: its workspace and launches.

use std::cell::OnceCell;
use std::collections::HashMap;

use devcomm_host::{DevCommResource, Kernels, LaunchConfig, Result, Stream, TensorMap};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_swapped::{self as shapes, Cluster, Division, Shape};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_swapped::slots;
use devcomm_types::Kernel;
use half::bf16;

use super::{AllReduce, Plan};
use crate::check::refuse;
use crate::extents::Extents;
use crate::fused::{Base, ExchangeKernels, Operands, Strategy, prepare_once, prepared};
use crate::gemm::{
    self, DivisionArgs, Matrices, ResidentClusters, TileKernel, TileKernels, clusters,
    division_args, swapped_maps,
};
use crate::lamport::LamportMemory;
use crate::launch::LaunchWith;
use crate::{KERNELS, Tiling};

/// The most rows of C.
pub(super) const MOST_ROWS: usize = 256;

/// Rows and columns of a tile, and the blocks that share it.
type Tile = (u32, u32, Cluster);

/// The kernels, and the memory of their messages.
pub(super) struct Swapped {
    kernels: ExchangeKernels,
    /// The clusters that are resident on all GPUs for each tile, and the dynamic shared memory that
    /// a block may have.
    resident: HashMap<Tile, [u32; 2]>,
    /// The index of the kernel for this number of ranks in each [`SwappedKernels`].
    index: usize,
}

impl Swapped {
    /// Loads the kernels, and allocates slots for products of up to the largest. *Collective*.
    fn new(base: &Base<AllReduce>) -> Result<Self> {
        let index = usize::from(base.comm.n_ranks() != 2);
        let load = || {
            let set = KERNELS.only(&[kernels::gemm_allreduce_swapped::<shapes::M8N64, 2>::FILE]);
            let compiled = Kernels::load(base.context(), &set)?;
            let resident = |((_, _, cluster), tile_kernels): (Tile, &SwappedKernels)| {
                (tile_kernels.kernels[index].resident)(&compiled, base.context(), cluster.blocks())
            };
            let resident = tiles().map(resident).collect::<Result<_>>()?;
            Ok((compiled, resident))
        };
        let slots = |[m, n]: [usize; 2]| slots(m.min(MOST_ROWS), n);
        let (any_ranks, has_barriers) = ((&[][..], ""), false);
        let kernels = ExchangeKernels::new(base, "swapped", any_ranks, slots, load, has_barriers)?;
        let resident = tiles().map(|(tile, _)| tile).zip(kernels.resident.iter().copied());
        Ok(Self { resident: resident.collect(), kernels, index })
    }

    /// Returns the clusters that are resident on all GPUs, which are the same for all tiles.
    pub(super) fn room(&self) -> ResidentClusters {
        ResidentClusters([1, 2, 4, 8].map(|splits| {
            let cluster = Cluster { splits, across: 1, down: 1 };
            self.resident.get(&(128, 128, cluster)).map_or(0, |[clusters, _]| *clusters)
        }))
    }

    /// Returns how a product is divided into these tiles; `None` if they cannot do it.
    fn division(&self, tile: Tile, extents: Extents) -> Option<(Division, LaunchConfig)> {
        let [m, n, _] = extents.lengths();
        let fits = slots(m, n).is_some_and(|slots| slots <= self.kernels.memory.capacity());
        let tile_kernels = kernels_of(tile).filter(|_| fits && has_few_rows(extents))?;
        let resident = *self.resident.get(&tile)?;
        let ((.., cluster), slices) = (tile, 1);
        let (division, config) = tile_kernels.divide(extents.array(), cluster, slices, resident)?;
        // A block waits only for what the peers' blocks of its index send before they wait.
        Some((division, config.without_cooperation()))
    }
}

/// Prepares the kernels of all tiles. *Collective*.
pub(super) fn prepare(cell: &OnceCell<Swapped>, base: &Base<AllReduce>) -> Result<()> {
    prepare_once(cell, || Swapped::new(base))
}

/// Returns the tile of a plan that has one.
fn tile(plan: Plan) -> Option<Tile> {
    match plan {
        Plan::Swapped(Tiling { rows, columns, cluster, slices: 1 }) => {
            Some((rows, columns, cluster))
        }
        _ => None,
    }
}

impl Strategy<AllReduce> for OnceCell<Swapped> {
    fn supports(&self, _: &Base<AllReduce>, plan: Plan, extents: Extents) -> bool {
        let division = |(swapped, tile): (&Swapped, _)| swapped.division(tile, extents);
        self.get().zip(tile(plan)).and_then(division).is_some()
    }

    fn prepare(&self, base: &Base<AllReduce>, plan: Plan) -> Result<()> {
        prepare(self, base)?;
        match tile(plan).and_then(kernels_of) {
            Some(_) => Ok(()),
            None => refuse(format!("no kernel exchanges tiles as those of the plan `{plan}`")),
        }
    }

    unsafe fn launch(
        &self,
        base: &Base<AllReduce>,
        plan: Plan,
        operands: &Operands<'_, AllReduce>,
    ) -> Result<()> {
        let swapped = prepared(self)?;
        let launch = tile(plan)
            .and_then(|tile| Some((kernels_of(tile)?, swapped.division(tile, operands.extents)?)));
        let Some((tile_kernels, (division, config))) = launch else {
            return refuse(format!("the plan `{plan}` does no product of this shape"));
        };
        let division = Division { constant_b: base.constant_b, ..division };
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches.
        unsafe {
            let launch = tile_kernels.kernels[swapped.index].launch;
            launch(swapped, &base.stream, operands.matrices(), division, config)
        }
    }
}

/// Returns whether products of this shape have few rows, with rows of C aligned to 16 bytes.
pub(super) fn has_few_rows(extents: Extents) -> bool {
    let [m, n, _] = extents.lengths();
    m <= MOST_ROWS && n.is_multiple_of(8)
}

/// Returns whether there is a kernel with these tiles.
pub(super) fn has_kernel(Tiling { rows, columns, cluster, slices }: Tiling) -> bool {
    slices == 1 && kernels_of((rows, columns, cluster)).is_some()
}

/// Returns all tiles, each with its kernels.
fn tiles() -> impl Iterator<Item = (Tile, &'static SwappedKernels)> {
    KERNELS_BY_TILE.iter().flat_map(|tile_kernels| {
        let (rows, columns) = tile_kernels.tile;
        clusters(tile_kernels.tile).map(move |cluster| ((rows, columns, cluster), tile_kernels))
    })
}

fn kernels_of((rows, columns, _): Tile) -> Option<&'static SwappedKernels> {
    KERNELS_BY_TILE.iter().find(|kernels| kernels.tile == (rows, columns))
}

/// The kernels for a size of tiles: for two ranks, and for any number (0).
type SwappedKernels = TileKernels<usize, Launch>;

type Launch = unsafe fn(&Swapped, &Stream, Matrices, Division, LaunchConfig) -> Result<()>;

/// The arguments of `gemm_allreduce_swapped`: the device communicator, maps of A, B and C,
/// the memory of messages, the shape and its division.
type Args<'a> = (
    &'a DevCommResource,
    TensorMap,
    TensorMap,
    TensorMap,
    &'a LamportMemory,
    u32,
    u32,
    u32,
    DivisionArgs,
);

/// Launches the kernel `K`.
///
/// # Safety
///
/// That of [`Strategy::launch`].
unsafe fn launch<S: Shape, K: for<'a> LaunchWith<Args<'a>>>(
    Swapped { kernels: ExchangeKernels { compiled, dev_comm, memory, .. }, .. }: &Swapped,
    stream: &Stream,
    matrices: Matrices,
    division: Division,
    config: LaunchConfig,
) -> Result<()> {
    let (a, b, c) = swapped_maps::<bf16, S>(stream, matrices, division)?;
    let [m, n, k] = matrices.shape;
    let division = division_args(division);
    let args = (dev_comm, a, b, c, memory, m, n, k, division);
    // SAFETY: the caller passes matrices that outlive the product, and orders the launches, which
    // use the memory that `Swapped::new` allocates for these kernels.
    unsafe { K::launch(args, config, &compiled.on(stream)) }
}

macro_rules! tile_kernels {
    ($($shape:ident)*) => {
        static KERNELS_BY_TILE: [SwappedKernels; [$(stringify!($shape)),*].len()] = [$({
            type Tiles = shapes::$shape;
            TileKernels::new::<Tiles>(&[
                kernel::<Tiles, kernels::gemm_allreduce_swapped<Tiles, 2>>(2),
                kernel::<Tiles, kernels::gemm_allreduce_swapped<Tiles, 0>>(0),
            ])
        }),*];
    };
}

const fn kernel<S: Shape, K: for<'a> LaunchWith<Args<'a>>>(
    key: usize,
) -> TileKernel<usize, Launch> {
    TileKernel { key, resident: gemm::resident::<S, K>, launch: launch::<S, K> }
}

tile_kernels! {
    M8N64 M16N64 M32N64 M64N64 M96N64 M128N64 M8N128 M16N128 M32N128 M48N128 M64N128 M80N128
    M128N128
}
