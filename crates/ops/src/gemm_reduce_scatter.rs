//! A matrix product and the reduce-scatter of its rows: its workspace and launches, with checks.

use std::cell::OnceCell;
use std::fmt;

use devcomm_host::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, DeviceSlice, Kernels, LaunchConfig,
    ReduceOp, Result, Stream, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_N};
use devcomm_kernels::gemm_allreduce::gemm_reduce_scatter_wide::{ROWS, slots};
use devcomm_types::Kernel;
use half::bf16;

use crate::agree::is_single_lsa_team;
use crate::check::{refuse, require_context, rows_of_each};
use crate::extents::Extents;
use crate::fused::{Base, Operands, Operation, Strategy, prepare_once, prepared};
use crate::gemm::{Added, Matrices, address, wide_maps};
use crate::gemm_allreduce::{MIN_WAVES, waves};
use crate::lamport::LamportMemory;
use crate::plan::plan_text;
use crate::{Collectives, Explanation, Gemm, KERNELS};

type Plan = GemmReduceScatterPlan;
/// The memory of C.
type C = DeviceSlice<bf16>;

type OfTwo = kernels::gemm_reduce_scatter_wide<2>;
type OfFour = kernels::gemm_reduce_scatter_wide<4>;
type OfEight = kernels::gemm_reduce_scatter_wide<8>;

/// Numbers of ranks that have a kernel.
const RANKS: [usize; 3] = [2, 4, 8];

/// How [`GemmReduceScatter`] does a product. As text: `unfused`, `wide`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GemmReduceScatterPlan {
    /// A product by [`Gemm`], and then [`Collectives::reduce_scatter`].
    Unfused,
    /// One kernel, on 2, 4 or 8 Hopper GPUs, for large matrices: a rank takes turns with all
    /// ranks' rows, sends tiles while it multiplies, and adds what it receives.
    Wide,
}

plan_text!(GemmReduceScatterPlan "unfused or wide": Unfused "unfused" Wide "wide");

/// This rank's rows of the sum over the ranks of `A x B^T`, on one communicator and one stream:
/// owns the kernels and their workspace, and launches them.
///
/// Each rank has `m x k` elements of A and `n x k` of B in bf16, row-major: its slice of the
/// dimension that is summed over. Rank `r` gets the `r`-th of as many equal parts of the `m` rows
/// as there are ranks, `m / ranks x n` elements. Every rank's product, with sums in f32, is rounded
/// to bf16, and so is the sum of the products, in f32.
///
/// On 2, 4 or 8 Hopper GPUs products whose tiles fill the GPU more than once exchange them in the
/// product's kernel; others are followed by a reduce-scatter, as all are elsewhere.
/// [`explain`](Self::explain) says which plan a shape gets; [`set_plan`](Self::set_plan) selects
/// another one, and [`measure`](Self::measure) the fastest.
pub struct GemmReduceScatter {
    base: Base<Plan>,
    /// Whether there is a kernel for these ranks.
    exchanges: bool,
    wide: Wide,
    unfused: Unfused,
}

/// The product of a rank and the collective, and the product's memory.
struct Unfused {
    gemm: Gemm,
    collectives: Collectives,
    product: Window<bf16>,
}

/// The kernel, once it is prepared, and the memory of this rank's product.
struct Wide {
    prepared: OnceCell<Prepared>,
    product: DeviceSlice<bf16>,
}

struct Prepared {
    compiled: Kernels,
    dev_comm: DevCommResource,
    memory: LamportMemory,
    blocks: u32,
    ranks: usize,
}

/// The call that all ranks make together.
const NAME: &str = "GemmReduceScatter::new";

impl GemmReduceScatter {
    /// Prepares products of up to `m x n` elements, launched on `stream`. *Collective*, with the
    /// same `m` and `n` on every rank. The workspace takes `2 * m * n` bytes on each GPU, and for
    /// [`Wide`](GemmReduceScatterPlan::Wide) as many again, of more than two ranks twice as many.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a product without elements or
    /// one that is too large, and for a stream of another context; those of [`Gemm::new`] and
    /// [`Collectives::new`].
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        comm.together(NAME, || Self::new_on_all(comm, stream, [m, n]))
    }

    fn new_on_all(comm: &Communicator, stream: &Stream, [m, n]: [usize; 2]) -> Result<Self> {
        let own = || {
            require_context("the stream", stream.context(), comm.context())?;
            Extents::new([m, n, 1])?;
            let Some(elements) = m.checked_mul(n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let gemm = Gemm::new(stream)?;
            let exchanges = gemm.is_hopper() && is_single_lsa_team(comm)?;
            Ok(((gemm, elements), u8::from(exchanges)))
        };
        let call = comm.collective(NAME).option("m", m).option("n", n);
        let ((gemm, elements), all) = call.agree(own())?;
        let exchanges = all.iter().all(|can| *can == 1) && RANKS.contains(&comm.n_ranks());
        let (collectives, product) = (Collectives::new(comm)?, comm.window(elements)?);
        let wide = Wide { prepared: OnceCell::new(), product: product.device_slice() };
        let unfused = Unfused { gemm, collectives, product };
        let operation = Self {
            base: Base::new(comm, stream, "gemm-reduce-scatter", [m, n])?,
            exchanges,
            wide,
            unfused,
        };
        if exchanges && operation.fills([m, n]) {
            operation.wide.prepare(&operation.base, GemmReduceScatterPlan::Wide)?;
        }
        Ok(operation)
    }

    /// Returns how a product of `[m, n, k]` would be done, and why.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape that no product has.
    pub fn explain(&self, shape: [usize; 3]) -> Result<Explanation<GemmReduceScatterPlan>> {
        Ok(self.decide(Extents::new(shape)?))
    }

    /// Whether tiles of a product of this size are at least [`MIN_WAVES`], and a rank has more than
    /// one row of them.
    fn fills(&self, size: [usize; 2]) -> bool {
        size[0] > rows(&self.base) && waves(size, self.base.multiprocessors()) > MIN_WAVES
    }

    /// Does all products that this plan can do by it, or by the plan of their shape again. Every
    /// rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that [`Wide`](GemmReduceScatterPlan::Wide) is needed, it allocates
    /// `2 * m * n` bytes for the largest product, of more than two ranks `4 * m * n`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for other numbers of ranks;
    /// [`DevCommError::SeveralLsaTeams`](devcomm_host::DevCommError::SeveralLsaTeams) where load
    /// and store do not reach all ranks;
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for other GPUs; those of
    /// loading kernels and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<GemmReduceScatterPlan>) -> Result<()> {
        self.set(plan)
    }

    /// Times the plans of a shape, and does products of it by the fastest from now on, unless one
    /// is set: as [`GemmAllReduce::measure`](crate::GemmAllReduce::measure). The product of
    /// [`Unfused`](GemmReduceScatterPlan::Unfused) is timed with its likely plans. All ranks get
    /// the same plan. *Collective*.
    ///
    /// It allocates the workspaces of both plans, which this object keeps.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have different
    /// shapes.
    pub fn measure<A, B, C>(
        &self,
        a: &A,
        b: &B,
        c: &C,
        shape: [usize; 3],
    ) -> Result<GemmReduceScatterPlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        let call = self.base.comm.collective("GemmReduceScatter::measure");
        let call = call.option("shape", format!("{shape:?}"));
        self.find_fastest(call, self.operands(&a, &b, &c, shape))
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// writes this rank's `m / ranks * n` sums to `c`. Every rank calls it with the same shape, in
    /// the same order. Only work on this stream may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, `m`
    /// that is no multiple of the number of ranks, buffers that are too short or of another
    /// context, or a product that is too large for this workspace; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Buffer<Element = bf16>,
    {
        let (a, b, c) = (a.device_slice(), b.device_slice(), c.device_slice());
        self.run(&self.operands(&a, &b, &c, shape)?)
    }

    #[cfg(test)]
    pub(crate) fn base_mut(&mut self) -> &mut Base<Plan> {
        &mut self.base
    }

    fn operands<'a>(
        &self,
        a: &'a DeviceSlice<bf16>,
        b: &'a DeviceSlice<bf16>,
        c: &'a DeviceSlice<bf16>,
        shape @ [m, n, k]: [usize; 3],
    ) -> Result<Operands<'a, DeviceSlice<bf16>>> {
        let extents = Extents::new(shape)?;
        let rows = rows_of_each(m, self.base.comm.n_ranks())?;
        if m * n > self.unfused.product.len() {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmReduceScatter for it"
            ));
        }
        let context = self.base.context();
        let addresses = [
            address(context, "A", a, m, k)?,
            address(context, "B", b, n, k)?,
            address(context, "C", c, rows, n)?,
        ];
        Ok(Operands { a, b, c, addresses, added: None, extents })
    }
}

/// What `m` is a multiple of in the kernel.
fn rows(base: &Base<Plan>) -> usize {
    base.comm.n_ranks() * ROWS as usize
}

impl Operation for GemmReduceScatter {
    type Plan = Plan;
    type C = C;
    const UNFUSED: Plan = Plan::Unfused;

    fn base(&self) -> &Base<Plan> {
        &self.base
    }

    fn strategy(&self, plan: Plan) -> &dyn Strategy<Plan, C> {
        match plan {
            Plan::Unfused => &self.unfused,
            Plan::Wide => &self.wide,
        }
    }

    fn gemm(&self) -> Option<&Gemm> {
        Some(&self.unfused.gemm)
    }

    fn choose(&self, extents: Extents) -> Explanation<Plan> {
        let [m, n, _] = extents.lengths();
        let wide = Plan::Wide;
        let (plan, reason) = match self.wide.prepared.get() {
            None => (Self::UNFUSED, "as no kernel was prepared"),
            _ if !self.wide.supports(&self.base, wide, extents) => {
                (Self::UNFUSED, "as m is no multiple of 256 for each rank, or n or k none of 8")
            }
            _ if self.fills([m, n]) => (wide, "as it has many tiles"),
            _ => (Self::UNFUSED, "as it has few tiles"),
        };
        Explanation { plan, reason }
    }

    fn to_measure(&self, _: Extents, _: Plan) -> Result<Vec<Plan>> {
        let wide = self.exchanges.then_some(Plan::Wide);
        Ok([Self::UNFUSED].into_iter().chain(wide).collect())
    }
}

impl Strategy<Plan, C> for Unfused {
    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Operands { a, b, c, extents, .. } = of;
        let Self { gemm, collectives, product } = self;
        let [m, n, _] = extents.lengths();
        let product = product.slice(..m * n)?;
        let multiply = gemm.product_with(extents.lengths(), Added::NOTHING);
        multiply.launch_of(*extents, (a, b, &product))?;
        let c = c.slice(..m / on.comm.n_ranks() * n)?;
        collectives.reduce_scatter(&product, &c, ReduceOp::Sum, &on.stream)
    }
}

impl Prepared {
    /// Allocates slots for a rank's share of a product of up to `m x n` elements. *Collective*.
    fn new(comm: &Communicator, [m, n]: [usize; 2]) -> Result<Self> {
        let ranks = comm.n_ranks();
        let own = || {
            if !RANKS.contains(&ranks) {
                return refuse(format!("the plan `wide` is for 2, 4 or 8 ranks, not {ranks}"));
            }
            comm.require_single_lsa_team()?;
            let set = KERNELS.only(&[OfTwo::FILE]);
            let compiled = Kernels::load(comm.context(), &set)?;
            let blocks = match ranks {
                2 => compiled.resident_blocks::<OfTwo>(THREADS, SHARED)?,
                4 => compiled.resident_blocks::<OfFour>(THREADS, SHARED)?,
                _ => compiled.resident_blocks::<OfEight>(THREADS, SHARED)?,
            };
            let Some(capacity) = slots(m.div_ceil(ranks), n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            Ok(((compiled, capacity), blocks))
        };
        const NAME: &str = "GemmReduceScatter: the plan wide";
        comm.together(NAME, || {
            let call = comm.collective(NAME).option("m", m).option("n", n);
            let ((compiled, capacity), blocks) = call.agree(own())?;
            // The same grid in all ranks.
            let blocks = blocks.into_iter().min().unwrap_or(0);
            let memory = LamportMemory::new(comm, capacity)?;
            let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
            Ok(Self { compiled, dev_comm, memory, blocks, ranks })
        })
    }
}

impl Strategy<Plan, C> for Wide {
    fn supports(&self, on: &Base<Plan>, _: Plan, extents: Extents) -> bool {
        let [m, n, k] = extents.lengths();
        self.prepared.get().is_some() && m.is_multiple_of(rows(on)) && (n | k).is_multiple_of(8)
    }

    fn prepare(&self, on: &Base<Plan>, _: Plan) -> Result<()> {
        prepare_once(&self.prepared, || Prepared::new(&on.comm, on.most))
    }

    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Operands { addresses: [a, b, c], extents, .. } = of;
        let Prepared { compiled, dev_comm, memory, blocks, ranks } = prepared(&self.prepared)?;
        let (stream, product, [m, n, k]) =
            (&on.stream, self.product.device_address(), extents.array());
        let matrices = Matrices::plain([*a, *b, product], *extents);
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(stream, matrices)?;
        // A cluster computes as many tiles of each rank's rows.
        let tiles = u64::from(m / (*ranks as u32 * ROWS)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(blocks / CLUSTER).min(tiles) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let config = config.with_dependent().without_cooperation();
        let LamportMemory { slots, state, capacity } = memory;
        let (target, capacity, c) = (compiled.on(stream), *capacity, *c);
        macro_rules! launch {
            ($kernel:ident) => {{
                let product =
                    $kernel::args(dev_comm, a, b, map, product, c, slots, state, capacity, m, n, k);
                // SAFETY: the caller's contract; the workspace is as the kernels need it.
                unsafe { product.config(config).launch(&target) }
            }};
        }
        match ranks {
            2 => launch!(OfTwo),
            4 => launch!(OfFour),
            _ => launch!(OfEight),
        }
    }
}

impl fmt::Debug for GemmReduceScatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GemmReduceScatter({} ranks)", self.base.comm.n_ranks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read_as_they_are_written() {
        for text in ["unfused", "wide"] {
            assert_eq!(text.parse::<GemmReduceScatterPlan>().unwrap().to_string(), text);
        }
        let error = "ring".parse::<GemmReduceScatterPlan>().unwrap_err().to_string();
        assert_eq!(error, "`ring` is no plan: unfused or wide");
    }
}
