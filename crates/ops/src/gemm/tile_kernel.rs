//! Kernels for tiles of one size, and the division of a product among their clusters.

use devcomm_kernels::gemm::gemm_swapped::{self as swapped, Cluster, Division, Shape};

use crate::prelude::*;

/// How many clusters of 1, 2, 4 and 8 blocks of `gemm_swapped` run on a GPU at the same time. How
/// many multiprocessors larger ones leave unused depends on the GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResidentClusters(pub(crate) [u32; 4]);

impl ResidentClusters {
    /// Returns the clusters of an H100, scaled to this number of multiprocessors.
    pub(crate) fn usual(multiprocessors: u32) -> Self {
        let of = |clusters: u64| (u64::from(multiprocessors) * clusters / 132) as u32;
        Self([multiprocessors, of(66), of(30), of(15)])
    }

    /// Returns how many clusters of this number of blocks are resident: at least one, as times are
    /// divided by it.
    pub(super) fn clusters(self, blocks: u32) -> f64 {
        let clusters = self.0[blocks.max(1).ilog2().min(3) as usize];
        f64::from(clusters.max(1))
    }
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

type DivisionArgs = swapped::DivisionArgs<u32, u32, u32, u32, u32, bool, bool>;

pub(crate) fn division_args(division: Division) -> DivisionArgs {
    let Division { across, down, stages, whole, sums, constant_a, constant_b } = division;
    swapped::DivisionArgs { across, down, stages, whole, sums, constant_a, constant_b }
}
