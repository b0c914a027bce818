//! Products of groups of rows, each with a B of its own: the experts of a layer.

use devcomm_kernels::gemm::groups::GroupsArgs;
use devcomm_kernels::gemm::{gemm_mma as portable, gemm_wgmma as wide};

use super::GemmPlan;
use super::element::HalfElement;
use super::launches::{Matrices, wide_maps};
use super::product::{Activation, Added};
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
/// Products are by `wgmma` and TMA, or by `mma.sync`, under the conditions of
/// [`Gemm`](super::Gemm). With `wgmma`, launches are dependent, and tiles have 256 x 256 elements:
/// groups of a few rows take the time in which their B is read from memory.
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

const FILES: &[&str] =
    &[kernels::gemm_grouped::<bf16>::FILE, kernels::gemm_grouped_mma::<bf16>::FILE];

impl GroupedGemm {
    /// Prepares products launched on `stream`. Errors are those of [`Gemm::new`](super::Gemm::new).
    pub fn new(stream: &Stream) -> Result<Self> {
        let compiled = Kernels::load(stream.context(), &KERNELS.only(FILES))?;
        let is_hopper = compiled.info::<kernels::gemm_grouped<bf16>>().is_ok();
        if !is_hopper {
            compiled.info::<kernels::gemm_grouped_mma<bf16>>()?;
        }
        Ok(Self { compiled, stream: stream.clone(), is_hopper })
    }

    /// Returns how products of this shape are computed, if the buffers are aligned to 16 bytes:
    /// with the tiles of [`GemmPlan::Wide`] or of [`GemmPlan::Portable`]. Errors are those of
    /// [`Gemm::plan`](super::Gemm::plan).
    pub fn plan(&self, shape: [usize; 3]) -> Result<GemmPlan> {
        Ok(self.plan_of(Extents::new(shape)?))
    }

    fn plan_of(&self, extents: Extents) -> GemmPlan {
        let [.., k] = extents.array();
        if self.is_hopper && k.is_multiple_of(8) { GemmPlan::Wide } else { GemmPlan::Portable }
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
            if matrices.are_aligned() && self.plan_of(extents) == GemmPlan::Wide {
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
