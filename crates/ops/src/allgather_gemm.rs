//! The all-gather of A's rows and a matrix product.

use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M};
use devcomm_kernels::{GatheredArgs, gather_flags};
use nccl_device::TileExchange;

use crate::Product;
use crate::fused::*;
use crate::gemm::{Added, Matrices, map, wide_grid, wide_maps, wide_pairs};
use crate::plan::names;
use crate::prelude::*;

type Plan = AllGatherGemmPlan;

type FusedKernel = kernels::allgather_gemm;

/// How [`AllGatherGemm`] does a product. As text: `unfused`, `fused`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllGatherGemmPlan {
    /// An all-gather by [`Collectives::all_gather`](crate::Collectives::all_gather), and then
    /// [`Gemm`](crate::Gemm).
    Unfused,
    /// One kernel, on Hopper GPUs, any number of ranks: a rank multiplies its own rows while
    /// those of the others arrive. Its workspace takes `4 * m * k` bytes for the largest A.
    Fused,
}

names! { AllGatherGemmPlan "plan" "unfused or fused": Unfused "unfused" Fused "fused" }

/// `C = A x B^T`, where every rank has some rows of A, and its own B and C.
///
/// In bf16 and row-major: rank `r` has the `r`-th of as many equal parts of the `m` rows of A as
/// there are ranks, `m / ranks x k` elements, `n x k` elements of B, and gets `m x n` elements of
/// C: its columns of a layer whose weights the ranks share. `n` may differ between the ranks. Sums
/// are in f32, and rounded once, with what a [`product`](Self::product) adds to them.
///
/// On Hopper GPUs products of many rows are multiplied while rows arrive; others follow an
/// all-gather, as all do elsewhere.
pub type AllGatherGemm = FusedGemm<AllGather>;

/// The collective of [`AllGatherGemm`].
pub struct AllGather {
    /// Whether there is a kernel for these ranks.
    overlaps: bool,
    gathered: Window<bf16>,
    fused: OnceCell<Fused>,
}

/// The rows from which on the fused kernel does a product by default.
const MANY_ROWS: usize = 4096;

/// The kernel, and the memory in which the rows of A arrive.
struct Fused {
    compiled: Kernels,
    dev_comm: DevCommResource,
    /// Two banks for all of A, of which launches use one in turn.
    banks: Window<bf16>,
    flags: Window<u32>,
    state: SymmetricBuffer<u32>,
    /// How many clusters are resident on this rank's GPU.
    clusters: u32,
}

impl FusedGemm<AllGather> {
    /// Prepares products with up to `m` rows and `m * k` elements of A, launched on `stream`.
    /// *Collective*, with the same `m` and `k` on every rank. The workspace takes `2 * m * k` bytes
    /// on each GPU, and those of [`Fused`](AllGatherGemmPlan::Fused) and of
    /// [`Collectives`](crate::Collectives). Errors are those of
    /// [`GemmAllReduce::new`](crate::GemmAllReduce::new).
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, k: usize) -> Result<Self> {
        Self::create(comm, stream, [m, k], (AllGather::NAME, &[]), |[can, _]| {
            let overlaps = can && comm.n_ranks() > 1;
            Ok(AllGather { overlaps, gathered: comm.window(m * k)?, fused: OnceCell::new() })
        })
    }

    /// Returns a product of `[m, n, k]`: that of [`launch`](Self::launch), until more is added.
    pub fn product(&self, shape: [usize; 3]) -> GatheredProduct<'_> {
        Product::new(self, shape, Added::NOTHING)
    }
}

/// A product that [`AllGatherGemm::product`] began, with all of A.
///
/// With something added it follows an all-gather: the fused kernel has no registers left. So all
/// ranks add something, or none does.
pub type GatheredProduct<'g> = Product<'g, bf16, bf16, AllGatherGemm>;

impl GatheredProduct<'_> {
    /// Enqueues the product, as [`AllGatherGemm::launch`] does. C may begin where the residual
    /// does.
    pub fn launch(
        &self,
        a: &impl Buffer<Element = bf16>,
        b: &impl Buffer<Element = bf16>,
        c: &impl Buffer<Element = bf16>,
    ) -> Result<()> {
        let matrices = [a.device_slice(), b.device_slice(), c.device_slice()];
        self.operation.run(&self.operation.operands(matrices, &self.added, self.shape)?)
    }
}

impl<B: Buffer<Element = bf16>> Output<AllGather> for B {}

impl Fusion for AllGather {
    type Plan = Plan;

    const NAME: &'static str = "AllGatherGemm";
    const MOST: [&'static str; 2] = ["m", "k"];
    const UNFUSED: Plan = Plan::Unfused;
    const COLUMNS_DIFFER: bool = true;

    fn defaults(&self, base: &Base<Self>) -> Vec<Plan> {
        let fused = (self.overlaps && base.most[0] >= MANY_ROWS).then_some(Plan::Fused);
        [Plan::Unfused].into_iter().chain(fused).collect()
    }

    fn rows(&self, base: &Base<Self>, extents: Extents) -> Result<[usize; 2]> {
        let [m, _, k] = extents.lengths();
        let rows = rows_of_each(m, base.comm.n_ranks())?;
        refuse_if!(
            m > base.most[0] || m * k > self.gathered.len(),
            "{m} x {k} elements of A need a larger workspace: make another AllGatherGemm for \
             them"
        );
        Ok([rows, m])
    }

    fn strategy(&self, plan: Plan) -> Option<&dyn Strategy<Self>> {
        (plan == Plan::Fused).then_some(self)
    }

    fn launch_unfused(&self, base: &Base<Self>, operands: &Operands) -> Result<()> {
        let Unfused { gemm, collectives } = prepared(&base.unfused)?;
        let (Operands { extents, .. }, [m, _, k]) = (operands, operands.extents.lengths());
        let gathered = self.gathered.slice(..m * k)?;
        let own = operands.slices[0].slice(..m / base.comm.n_ranks() * k)?;
        collectives.all_gather(&own, &gathered, &base.stream)?;
        let matrices = Matrices { a: gathered.device_address(), ..operands.matrices };
        // SAFETY: the matrices have the elements: `operands` was checked, and `gathered` is as
        // large as A. Memory that is dropped is freed after the work of the streams.
        unsafe { gemm.enqueue::<bf16, bf16>(*extents, matrices) }
    }

    fn choose(&self, base: &Base<Self>, extents: Extents) -> Explanation<Plan> {
        let (plan, reason) = match self.fused.get() {
            None => (Plan::Unfused, "as no kernel was prepared"),
            _ if !self.supports(base, Plan::Fused, extents) => {
                (Plan::Unfused, "as k is no multiple of 8")
            }
            _ if extents.lengths()[0] >= MANY_ROWS => (Plan::Fused, "as it has many rows"),
            _ => (Plan::Unfused, "as it has few rows"),
        };
        Explanation { plan, reason }
    }

    fn timed(&self, _: &Base<Self>, _: Extents, _: Plan) -> Vec<Plan> {
        if self.overlaps { vec![Plan::Unfused, Plan::Fused] } else { vec![Plan::Unfused] }
    }
}

impl Strategy<Self> for AllGather {
    fn supports(&self, _: &Base<Self>, _: Plan, extents: Extents) -> bool {
        let [.., k] = extents.lengths();
        self.fused.get().is_some() && k.is_multiple_of(8)
    }

    fn prepare(&self, base: &Base<Self>, plan: Plan) -> Result<()> {
        /// A bank begins at a multiple of this number of elements: of 256 bytes. TMA needs 16.
        const ALIGNMENT: usize = 128;
        let (Base { comm, .. }, [m, k]) = (base, base.most);
        let load = || {
            let compiled = Kernels::load(comm.context(), &KERNELS.only(&[FusedKernel::FILE]))?;
            let clusters = compiled.resident_clusters::<FusedKernel>(CLUSTER, THREADS, SHARED)?;
            refuse_if!(clusters == 0, "the GPU has no room for a block of the kernel");
            Ok(((compiled, clusters), Vec::new()))
        };
        // No kernel sets a flag before those of all ranks are zeroed, as new memory is.
        base.prepare((&self.fused, plan), ANY_RANKS, load, |(compiled, clusters), _| {
            Ok(Fused {
                compiled,
                dev_comm: comm.create_dev_comm(DevCommRequirements::new())?,
                banks: comm.window(2 * (m * k).next_multiple_of(ALIGNMENT))?,
                // Fewer rows than ranks have no flags, but no window is empty.
                flags: comm.window(gather_flags(m, comm.n_ranks()).max(1))?,
                state: comm.mem_alloc(TileExchange::<bf16>::STATE)?,
                clusters,
            })
        })
    }

    unsafe fn launch(&self, base: &Base<Self>, _: Plan, operands: &Operands) -> Result<()> {
        let Fused { compiled, dev_comm, banks, flags, state, clusters } = prepared(&self.fused)?;
        let (stream, matrices) = (&base.stream, operands.matrices);
        let Matrices { a, shape: [m, n, k], .. } = matrices;
        let rows = m / base.comm.n_ranks() as u32;
        // A's maps are those of the two banks, and of this rank's own rows.
        let first = banks.device_address();
        let in_first = Matrices { a: first, ..matrices };
        let ([gathered, b, map_of_c], unaligned) = wide_maps::<bf16, bf16>(stream, in_first)?;
        let factor = |address, rows| map::<bf16>(stream, address, [rows, k, TILE_M]);
        let second = first + banks.len() as u64 / 2 * size_of::<bf16>() as u64;
        let (own, second) = (factor(a, rows)?, factor(second, m)?);
        let config = wide_grid(*clusters, wide_pairs(m, n));
        let memory = GatheredArgs { rows: a, banks, flags, state };
        let launch = FusedKernel::args(
            dev_comm, memory, own, gathered, second, b, map_of_c, unaligned, m, n, k,
        );
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches,
        // which use the memory that `prepare` allocates for this kernel.
        unsafe { launch.config(config).launch(&compiled.on(stream)) }
    }
}

#[cfg(test)]
mod tests;
