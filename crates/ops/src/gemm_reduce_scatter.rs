//! A matrix product and the reduce-scatter of its rows.

use devcomm_kernels::gemm::gemm_wgmma::{SHARED, THREADS, TILE_N};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_wide::CLUSTER_M as ROWS;
use nccl_device::RowOwners;

use crate::fused::*;
use crate::gemm::{Matrices, wide_maps};
use crate::gemm_allreduce::{MIN_WAVES, waves};
use crate::plan::names;
use crate::prelude::*;

type Plan = GemmReduceScatterPlan;

type Wide2 = kernels::gemm_reduce_scatter_wide<2>;
type Wide4 = kernels::gemm_reduce_scatter_wide<4>;
type Wide8 = kernels::gemm_reduce_scatter_wide<8>;

/// Numbers of ranks that have a kernel, and their text.
const RANKS: (&[usize], &str) = (&[2, 4, 8], "2, 4 or 8 ranks");

/// How [`GemmReduceScatter`] does a product. As text: `unfused`, `wide`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmReduceScatterPlan {
    /// A product by [`Gemm`](crate::Gemm), and then
    /// [`Collectives::reduce_scatter`](crate::Collectives::reduce_scatter).
    Unfused,
    /// One kernel, on 2, 4 or 8 Hopper GPUs, for large matrices: a rank computes tiles of all
    /// ranks' rows in turn, sends them while it multiplies, and adds what it receives. Its
    /// workspace takes `2 * m * n` bytes for the largest product, twice that on 4 or 8 GPUs.
    Wide,
}

names! { GemmReduceScatterPlan "plan" "unfused or wide": Unfused "unfused" Wide "wide" }

/// This rank's rows of the sum over the ranks of `A x B^T`.
///
/// Each rank has `m x k` elements of A and `n x k` of B in bf16, row-major: its slice of the
/// dimension that is summed over. Rank `r` gets the `r`-th of as many equal parts of the `m` rows
/// as there are ranks, `m / ranks x n` elements. Every rank's product, with sums in f32, is rounded
/// to bf16, and so is the sum of the products, in f32.
///
/// On 2, 4 or 8 Hopper GPUs products whose tiles fill the GPU more than once exchange them in the
/// product's kernel; others are followed by a reduce-scatter, as all are elsewhere.
pub type GemmReduceScatter = FusedGemm<ReduceScatter>;

/// The collective of [`GemmReduceScatter`].
pub struct ReduceScatter {
    /// Whether there is a kernel for these ranks.
    exchanges: bool,
    product: Window<bf16>,
    wide: OnceCell<ExchangeKernels>,
}

impl FusedGemm<ReduceScatter> {
    /// Prepares products of up to `m x n` elements, launched on `stream`. *Collective*, with the
    /// same `m` and `n` on every rank. The workspace takes `2 * m * n` bytes on each GPU, and those
    /// of [`Wide`](GemmReduceScatterPlan::Wide) and of [`Collectives`](crate::Collectives). Errors
    /// are those of [`GemmAllReduce::new`](crate::GemmAllReduce::new).
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        Self::create(comm, stream, [m, n], (ReduceScatter::NAME, &[]), |[can, _]| {
            let exchanges = can && RANKS.0.contains(&comm.n_ranks());
            Ok(ReduceScatter { exchanges, product: comm.window(m * n)?, wide: OnceCell::new() })
        })
    }
}

/// Returns the number of which `m` is a multiple in the kernel.
fn row_multiple(base: &Base<ReduceScatter>) -> usize {
    base.comm.n_ranks() * ROWS as usize
}

/// Returns whether a product of this size has more than [`MIN_WAVES`] waves of tiles, and a rank
/// more than one row of tiles.
fn fills(base: &Base<ReduceScatter>, size: [usize; 2]) -> bool {
    size[0] > row_multiple(base) && waves(size, base.multiprocessors) > MIN_WAVES
}

/// Returns the slots that a product of this size uses from each rank.
fn slots(base: &Base<ReduceScatter>, [m, n]: [usize; 2]) -> Option<u32> {
    RowOwners::slots(m.div_ceil(base.comm.n_ranks()), n)
}

impl<B: Buffer<Element = bf16>> Output<ReduceScatter> for B {}

impl Fusion for ReduceScatter {
    type Plan = Plan;

    const NAME: &'static str = "GemmReduceScatter";
    const MOST: [&'static str; 2] = ["m", "n"];
    const UNFUSED: Plan = Plan::Unfused;

    fn defaults(&self, base: &Base<Self>) -> Vec<Plan> {
        let wide = (self.exchanges && fills(base, base.most)).then_some(Plan::Wide);
        [Plan::Unfused].into_iter().chain(wide).collect()
    }

    fn rows(&self, base: &Base<Self>, extents: Extents) -> Result<[usize; 2]> {
        let [m, n, _] = extents.lengths();
        let rows = rows_of_each(m, base.comm.n_ranks())?;
        refuse_if!(
            m * n > self.product.len(),
            "a product of {m} x {n} elements needs a larger workspace: make another \
             GemmReduceScatter for it"
        );
        Ok([m, rows])
    }

    fn strategy(&self, plan: Plan) -> Option<&dyn Strategy<Self>> {
        (plan == Plan::Wide).then_some(self)
    }

    fn launch_unfused(&self, base: &Base<Self>, operands: &Operands) -> Result<()> {
        let Unfused { gemm, collectives } = prepared(&base.unfused)?;
        let [m, n, _] = operands.extents.lengths();
        let product = self.product.slice(..m * n)?;
        let matrices = Matrices { c: product.device_address(), ..operands.matrices };
        // SAFETY: the matrices have the elements: `operands` was checked, and `product` is as large
        // as C of all ranks. Memory that is dropped is freed after the work of the streams.
        unsafe { gemm.enqueue::<bf16, bf16>(operands.extents, matrices) }?;
        let c = operands.slices[2].slice(..m / base.comm.n_ranks() * n)?;
        collectives.reduce_scatter(&product, &c, ReduceOp::Sum, &base.stream)
    }

    fn choose(&self, base: &Base<Self>, extents: Extents) -> Explanation<Plan> {
        let [m, n, _] = extents.lengths();
        let (plan, reason) = match self.wide.get() {
            None => (Plan::Unfused, "as no kernel was prepared"),
            _ if !self.supports(base, Plan::Wide, extents) => (
                Plan::Unfused,
                "as m is no multiple of 256 for each rank, n or k none of 8, or \
                    the shape has more tiles than the largest",
            ),
            _ if fills(base, [m, n]) => (Plan::Wide, "as it has many tiles"),
            _ => (Plan::Unfused, "as it has few tiles"),
        };
        Explanation { plan, reason }
    }

    fn timed(&self, _: &Base<Self>, _: Extents, _: Plan) -> Vec<Plan> {
        if self.exchanges { vec![Plan::Unfused, Plan::Wide] } else { vec![Plan::Unfused] }
    }
}

impl Strategy<Self> for ReduceScatter {
    fn supports(&self, base: &Base<Self>, _: Plan, extents: Extents) -> bool {
        let [m, n, k] = extents.lengths();
        let is_aligned = m.is_multiple_of(row_multiple(base)) && (n | k).is_multiple_of(8);
        // A shape with fewer elements than the largest may have more parts of tiles.
        let (used, most) = (slots(base, [m, n]), slots(base, base.most));
        let fits = used.is_some_and(|used| Some(used) <= most);
        self.wide.get().is_some() && is_aligned && fits
    }

    fn prepare(&self, base: &Base<Self>, plan: Plan) -> Result<()> {
        let ranks = base.comm.n_ranks();
        let load = || {
            let compiled = Kernels::load(base.comm.context(), &KERNELS.only(&[Wide2::FILE]))?;
            let blocks = with_type!(ranks, Wide => {
                compiled.resident_blocks::<Wide>(THREADS, SHARED)?
            }; { 2 => Wide2, 4 => Wide4, _ => Wide8 });
            Ok((compiled, vec![[blocks, 0]]))
        };
        base.prepare((&self.wide, plan), RANKS, load, |compiled, resident| {
            ExchangeKernels::new(base, (compiled, resident), slots(base, base.most), false)
        })
    }

    unsafe fn launch(&self, base: &Base<Self>, _: Plan, operands: &Operands) -> Result<()> {
        let Matrices { c, shape: [m, n, k], .. } = operands.matrices;
        let (wide, product, ranks) =
            (prepared(&self.wide)?, self.product.device_address(), base.comm.n_ranks());
        let matrices = Matrices { c: product, ..operands.matrices };
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(&base.stream, matrices)?;
        // A cluster computes the same number of tiles of each rank's rows.
        let tiles = u64::from(m / (ranks as u32 * ROWS)) * u64::from(n.div_ceil(TILE_N));
        // A block waits only for what the peers' blocks of its index send before they wait.
        let config = wide.wide_config(tiles).without_cooperation();
        let ExchangeKernels { compiled, dev_comm, memory, .. } = wide;
        let target = compiled.on(&base.stream);
        let args = (dev_comm, a, b, map, product, c, memory, m, n, k);
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches,
        // which use the memory that `prepare` allocates for these kernels.
        with_type!(ranks, Wide => unsafe { Wide::launch(args, config, &target) }; {
            2 => Wide2, 4 => Wide4, _ => Wide8
        })
    }
}

#[cfg(test)]
mod tests;
