//! Products of groups of rows, each with a B of its own: the experts of a layer.

use devcomm_kernels::gemm::gemm_grouped_swapped::{M64N128, M128N128, Shape, shared};
use devcomm_kernels::gemm::groups::GroupsArgs;
use devcomm_kernels::gemm::shapes::Cluster;
use devcomm_kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide};

use super::element::HalfElement;
use super::epilogue::{Activation, Added};
use super::matrices::{Matrices, map, wide_maps};
use super::{GemmPlan, Tiling};
use crate::prelude::*;

/// `C = A x B^T` for each group of rows of A and C, with a B for each group, on one GPU and one
/// stream: owns the loaded kernels, and launches them.
///
/// A has `m x k` elements, C `m x n`, B `n x k` for each group, one after the other, all row-major
/// and of bf16 or f16. Sums are in f32 and rounded once. Where the groups are is read on the GPU,
/// when the product runs: the host need not know how many rows there are, and a graph may be
/// replayed with other ones. A group's rows begin anywhere; rows that are in no group are not
/// written, and groups without rows take no time.
///
/// On Hopper, products whose rows begin at multiples of 16 bytes (`k` is a multiple of 8) are by
/// `wgmma` and TMA. The tiles follow from the average rows of a group, `m` over the groups: 64 x
/// 128 elements up to 48 rows, where reading B takes the time; 128 x 128 from 49 to 128 and from
/// 257 to 384; 256 x 256 otherwise, fastest if `n` is a multiple of 8 too. So `m` should be near
/// the number of rows. All other products, and those on any other GPU since Ampere, are by
/// `mma.sync`.
///
/// Launches on Hopper are *dependent*, as those of [`Gemm`](super::Gemm).
///
/// ```no_run
/// use devcomm::{Activation, Buffer, ExpertParallel, GroupedGemm, Result, Stream};
/// use half::bf16;
///
/// /// The results of experts of `hidden x inner` and `inner x hidden` elements for the rows that
/// /// `experts.group` has left in `rows`.
/// fn mlp(
///     experts: &ExpertParallel,
///     [hidden, inner]: [usize; 2],
///     [up, down]: [&impl Buffer<Element = bf16>; 2],
///     [rows, between, results]: [&impl Buffer<Element = bf16>; 3],
///     stream: &Stream,
/// ) -> Result<()> {
///     let (gemm, groups, m) = (GroupedGemm::new(stream)?, experts.groups(), experts.most_rows());
///     gemm.launch(rows, up, between, &groups, [m, inner, hidden], Some(Activation::Silu))?;
///     gemm.launch(between, down, results, &groups, [m, hidden, inner], None)
/// }
/// ```
pub struct GroupedGemm {
    compiled: Kernels,
    stream: Stream,
    is_hopper: bool,
    /// The plan of all products that it can compute.
    plan: Option<GemmPlan>,
}

/// Which rows are in which group, in memory of a GPU. The number of groups is that of the sizes. No
/// row is in two groups.
#[derive(Clone, Debug)]
pub struct RowGroups {
    /// The first row of each group. There may be more elements.
    pub offsets: DeviceSlice<u32>,
    /// How many rows each group has.
    pub sizes: DeviceSlice<u32>,
}

const FILES: &[&str] = &[
    kernels::gemm_grouped::<bf16>::FILE,
    kernels::gemm_grouped_swapped::<bf16, M64N128>::FILE,
    kernels::gemm_grouped_mma::<bf16>::FILE,
];

/// Returns the plan with the tiles of this shape.
const fn swapped<S: Shape>() -> GemmPlan {
    let cluster = Cluster { splits: 1, across: 1, down: 1 };
    GemmPlan::Swapped(Tiling { rows: S::M, columns: S::N, cluster, slices: 1 })
}

const FEW: GemmPlan = swapped::<M64N128>();
const SEVERAL: GemmPlan = swapped::<M128N128>();

impl GroupedGemm {
    /// Prepares products launched on `stream`. Errors are those of [`Gemm::new`](super::Gemm::new).
    pub fn new(stream: &Stream) -> Result<Self> {
        let compiled = Kernels::load(stream.context(), &KERNELS.only(FILES))?;
        let is_hopper = compiled.info::<kernels::gemm_grouped<bf16>>().is_ok();
        if !is_hopper {
            compiled.info::<kernels::gemm_grouped_mma<bf16>>()?;
        }
        Ok(Self { compiled, stream: stream.clone(), is_hopper, plan: None })
    }

    /// Computes all products by this plan if it can: for instance by that of few rows, if `m` is
    /// much larger than the number of rows in groups.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a plan that [`plan`](Self::plan) returns for no shape.
    pub fn with_plan(mut self, plan: GemmPlan) -> Result<Self> {
        let on_hopper = self.is_hopper && [FEW, SEVERAL, GemmPlan::Wide].contains(&plan);
        refuse_if!(
            !on_hopper && plan != GemmPlan::Portable,
            "the plan `{plan}` is none of grouped products on this GPU"
        );
        self.plan = Some(plan);
        Ok(self)
    }

    /// Returns how products of `groups` groups and this shape are computed, if the buffers are
    /// aligned to 16 bytes: with the tiles of [`GemmPlan::Wide`], of [`GemmPlan::Portable`] or of a
    /// [`GemmPlan::Swapped`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements or too large a one.
    pub fn plan(&self, groups: usize, shape: [usize; 3]) -> Result<GemmPlan> {
        Ok(self.plan_of(groups, Extents::new(shape)?))
    }

    fn plan_of(&self, groups: usize, extents: Extents) -> GemmPlan {
        let [m, _, k] = extents.lengths();
        if !self.is_hopper || !k.is_multiple_of(8) {
            return GemmPlan::Portable;
        }
        // Measured on an H200 (docs/findings.md). A tile of `Wide` has 256 rows. Up to 128 rows a
        // group, half of it or more is empty; from 257 to 384, half or more of a group's second
        // tile is. For 256 rows, random sizes are a tie, and equal ones gain.
        self.plan.unwrap_or(match m.div_ceil(groups.max(1)) {
            ..=48 => FEW,
            49..=128 | 257..=384 => SEVERAL,
            _ => GemmPlan::Wide,
        })
    }

    /// Enqueues the products of all groups, of shape `[m, n, k]`: reads up to `m * k` elements of
    /// `a` and `n * k` of `b` for each group, and writes the rows of groups among the first `m * n`
    /// elements of `c`, which overlaps neither. `m` is the number of rows that there is room for:
    /// rows of groups after these are left out. The sums' `activation` is computed in f32.
    ///
    /// Only work on this stream may access `c`, or write the groups, until the products have ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements or groups, and for buffers that are too
    /// short, of another context or overlap `c`; errors of the launch.
    pub fn launch<T: HalfElement>(
        &self,
        a: &impl Buffer<Element = T>,
        b: &impl Buffer<Element = T>,
        c: &impl Buffer<Element = T>,
        groups: &RowGroups,
        shape: [usize; 3],
        activation: Option<Activation>,
    ) -> Result<()> {
        let [m, n, _] = shape;
        let count = groups.sizes.len();
        refuse_if!(count == 0, "a grouped product without groups has nothing to do");
        let (extents, context) = (Extents::new(shape)?, self.stream.context());
        let (of_b, most) = (count.saturating_mul(n), Extents::MOST);
        refuse_if!(
            of_b > most,
            "the B of {count} groups have {of_b} rows together, but {most} is the maximum"
        );
        let slices = (&a.device_slice(), &b.device_slice(), &c.device_slice());
        let (rows, added) = ([m, of_b, m], Added { activation, ..Added::NOTHING });
        let mut matrices = Matrices::checked(context, extents, slices, rows, &added)?;
        matrices.groups = count as u32;
        let words =
            |name, words| address_apart(context, name, words, [count, 1], ("C", slices.2, m * n));
        let groups = GroupsArgs {
            count: matrices.groups,
            offsets: words("the groups' offsets", &groups.offsets)?,
            sizes: words("the groups' sizes", &groups.sizes)?,
        };
        let Matrices { a, b, c, shape, epilogue, .. } = matrices;
        let ([m, n, k], count, target) = (shape, groups.count, self.compiled.on(&self.stream));
        // SAFETY: `address` has checked that the buffers have the elements; memory that is dropped
        // is freed after the work of the streams, and after the graphs.
        with_element!(T::DATA_TYPE, Half in f16, bf16 => unsafe {
            let plan = match matrices.are_aligned() {
                true => self.plan_of(groups.count as usize, extents),
                false => GemmPlan::Portable,
            };
            if let GemmPlan::Swapped(Tiling { rows, columns, .. }) = plan {
                let map = |from, rows, height| map::<T>(&self.stream, from, [rows, k, height]);
                let maps = (map(a, m, rows)?, map(b, count * n, columns)?);
                return with_type!(rows, Tile => {
                    type Kernel = kernels::gemm_grouped_swapped<Half, Tile>;
                    let block = [Tile::THREADS, shared::<Tile>()];
                    let tile = [1, Tile::M, Tile::N];
                    let config = self.config::<Kernel>(block, tile, count, shape)?.with_dependent();
                    let args = (maps.0, maps.1, c, groups, m, n, k, epilogue);
                    Kernel::launch(args, config, &target)
                }; { M64N128::M => M64N128, _ => M128N128 });
            }
            if plan == GemmPlan::Wide {
                type Kernel = kernels::gemm_grouped<Half>;
                const TILE: [u32; 3] = [wide::CLUSTER, wide::CLUSTER * wide::TILE_M, wide::TILE_N];
                let block = [wide::THREADS, wide::SHARED];
                let config = self.config::<Kernel>(block, TILE, count, shape)?.with_dependent();
                let ([a, b, map], _) = wide_maps::<T, T::Output>(&self.stream, matrices)?;
                let args = (a, b, map, c, groups, m, n, k, epilogue);
                return Kernel::launch(args, config, &target);
            }
            type Kernel = kernels::gemm_grouped_mma<Half>;
            const TILE: [u32; 3] = [1, portable::TILE, portable::TILE];
            let block = [portable::THREADS, portable::SHARED];
            let config = self.config::<Kernel>(block, TILE, count, shape)?;
            Kernel::launch((a, b, c, groups, m, n, k, epilogue), config, &target)
        })
    }

    /// Returns the shape of a launch of `K`, in clusters of `cluster` blocks, each of which
    /// computes a tile of `rows x columns` elements of C at a time.
    fn config<K: Kernel>(
        &self,
        [threads, shared]: [u32; 2],
        [cluster, rows, columns]: [u32; 3],
        groups: u32,
        [m, n, _]: [u32; 3],
    ) -> Result<LaunchConfig> {
        let resident = self.compiled.resident_blocks::<K>(threads, shared)?;
        // Each group has at most one tile that is not full.
        let most = u64::from(groups.min(m) + m / rows) * u64::from(n.div_ceil(columns));
        refuse_if!(
            most > u64::from(u32::MAX - resident),
            "a grouped product of {m} x {n} elements is too large"
        );
        let blocks = u64::from(resident / cluster).min(most) as u32 * cluster;
        refuse_if!(blocks == 0, "this GPU has no room for a block of the grouped product");
        Ok(LaunchConfig::new(blocks, threads).with_dynamic_shared(shared))
    }
}

impl std::fmt::Debug for GroupedGemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GroupedGemm({})", if self.is_hopper { "hopper" } else { "portable" })
    }
}
