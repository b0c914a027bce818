//! The matrix product fused with an all-reduce: its plans, and the choice among them.

mod plan;
mod strips;
mod swapped;
mod wide;
mod wire;

use std::num::NonZeroU32;

use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::workspace;

pub use self::plan::GemmAllReducePlan;
use self::plan::hides_few_rows;
pub(crate) use self::plan::{MIN_WAVES, waves};
use self::strips::Strips;
use self::swapped::{MOST_ROWS, Swapped};
use self::wide::Wide;
pub use self::wire::Wire;
use self::wire::by_wire;
use crate::GemmPlan;
use crate::fused::*;
use crate::gemm::{self, Candidates, LIKELY, ResidentClusters};
use crate::prelude::*;

type Plan = GemmAllReducePlan;

/// `C = sum over the ranks of A x B^T`.
///
/// Each rank has `m x k` elements of A and `n x k` of B, row-major: its slice of the dimension that
/// is summed over; `k` is a multiple of 8. Every rank gets the `m x n` elements of C, row-major, at
/// the beginning of a window.
///
/// On Hopper GPUs the plan follows from the shape. Products that fill 2, 4 or 8 GPUs with their
/// tiles exchange these in the product's kernel; on two GPUs most products of up to 256 rows do so
/// too. Others are followed by an all-reduce. On other GPUs the plan is
/// [`GemmAllReducePlan::Strips`].
///
/// Every rank rounds its product, with sums in f32, to bf16 and sends it; the sum of the products,
/// in f32 too, is rounded to bf16. [`GemmOptions::wire`] selects another type to send: f32, always
/// by strips, or 8-bit floats, by tiles for products that fill two Hopper GPUs and otherwise by
/// strips.
///
/// ```no_run
/// use devcomm::{GemmAllReduce, World};
/// use half::bf16;
///
/// let (m, n, k) = (1000, 4096, 1024);
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
///     let c = comm.window::<bf16>(m * n)?;
///     let gemm = GemmAllReduce::new(comm, &stream, m, n)?;
///     gemm.launch(&a, &b, &c, [m, n, k])?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub type GemmAllReduce = FusedGemm<AllReduce>;

/// The collective of [`GemmAllReduce`].
pub struct AllReduce {
    /// Whether the ranks can exchange rounded products, and whether they do so by default: if the
    /// GPUs are the same. Not in f32.
    exchanges: bool,
    exchanges_by_default: bool,
    strips: Strips,
    wide: Wide,
    swapped: Swapped,
}

impl FusedGemm<AllReduce> {
    /// Prepares products of up to `m x n` elements, launched on `stream`; [`GemmOptions`]
    /// select other kernels. *Collective*, with the same `m` and `n` on every rank.
    ///
    /// It allocates the workspaces of the plans that products have by default, whose sizes
    /// [`GemmAllReducePlan`] says: up to `2 * m * n` bytes, but on Hopper GPUs up to `4 * m * n`
    /// and more for few rows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a matrix without elements or one that is too large, for
    /// arguments that differ between the ranks, a stream of another context, and a communicator
    /// that was created without a `World`; if the default plan is `Strips`,
    /// [`DevCommError::SeveralLsaTeams`]; those of [`Gemm::new`](crate::Gemm::new) and
    /// [`Collectives::new`](crate::Collectives::new). An error on one rank is an error on all.
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        GemmOptions::new().build(comm, stream, m, n)
    }

    /// Returns the type in which partial sums are sent.
    #[must_use]
    pub fn wire(&self) -> Wire {
        self.fusion.strips.wire
    }

    /// Returns the plans for products of `[m, n, k]`: those for few rows last, the one that is
    /// expected to be the fastest first. Errors are those of [`explain`](Self::explain).
    pub fn plans(&self, shape: [usize; 3]) -> Result<Vec<GemmAllReducePlan>> {
        let extents = Extents::with_aligned_rows(shape)?;
        let few_rows = self.fusion.few_rows(&self.base, extents);
        Ok(self.fusion.plans_of(&self.base, extents, &few_rows))
    }
}

/// The options of a [`GemmAllReduce`], the same on every rank.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before `build`"]
pub struct GemmOptions {
    max_blocks: Option<NonZeroU32>,
    wire: Wire,
}

impl GemmOptions {
    /// Returns the default options.
    pub const fn new() -> Self {
        Self { max_blocks: None, wire: Wire::Bf16 }
    }

    /// Launches at most `blocks` blocks by the plan [`Strips`](crate::GemmAllReducePlan::Strips),
    /// which leaves multiprocessors to other kernels. Default: as many as are resident everywhere.
    pub const fn max_blocks(mut self, blocks: NonZeroU32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Selects the type in which partial sums travel. Default: [`Wire::Bf16`].
    pub const fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Creates the operation, as [`GemmAllReduce::new`] does.
    pub fn build(
        self,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<GemmAllReduce> {
        // Destructured, so that a new option cannot be forgotten here.
        let Self { max_blocks, wire } = self;
        let options = [("max_blocks", or_default(max_blocks)), ("wire", wire.to_string())];
        // Each type has its own plans.
        let kept = format!("{}-{wire}", AllReduce::NAME);
        GemmAllReduce::create(comm, stream, [m, n], (&kept, &options), |[can, are_alike]| {
            let Some(workspace) = by_wire!(wire, W => workspace::<W>(m, n, comm.n_ranks())) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let exchanges = can && wire != Wire::F32 && comm.n_ranks() >= 2;
            Ok(AllReduce {
                exchanges,
                exchanges_by_default: exchanges && are_alike,
                strips: Strips { wire, max_blocks, workspace, prepared: OnceCell::new() },
                wide: Wide { wire, prepared: OnceCell::new() },
                swapped: Swapped::default(),
            })
        })
    }
}

impl AllReduce {
    /// Returns the plans for a shape, which end with those of `few_rows`.
    fn plans_of(&self, base: &Base<Self>, extents: Extents, few_rows: &FewRows) -> Vec<Plan> {
        let [m, n, _] = extents.lengths();
        let mut plans = vec![Plan::Strips];
        if self.strips.wire == Wire::Bf16 {
            plans.push(Plan::Unfused);
        }
        if self.exchanges && self.wide.fits(base, [m, n]) {
            plans.push(Plan::Wide);
        }
        plans.extend(&few_rows.plans);
        plans
    }

    /// Returns the plans with tiles of few rows for a shape, the one expected to be fastest first.
    fn few_rows(&self, base: &Base<Self>, extents: Extents) -> FewRows {
        // All ranks have the same numbers of resident clusters, those that `swapped` agreed on or
        // estimates, and read the table only if their GPUs are alike: so they choose the same plan.
        let usual = || ResidentClusters::usual(base.multiprocessors);
        let candidates = Candidates::new(extents, self.swapped.room().unwrap_or_else(usual));
        let can_exchange = self.exchanges && self.strips.wire == Wire::Bf16;
        let (mut measured, mut plans) = (None, Vec::new());
        if can_exchange && swapped::has_few_rows(extents) {
            let are_alike = self.exchanges_by_default;
            measured = are_alike.then(|| gemm::measured(&base.gpu, extents)).flatten();
            let all = measured.into_iter().chain(candidates.exchanging());
            for plan in all.filter_map(Plan::of_few_rows) {
                if !plans.contains(&plan) {
                    plans.push(plan);
                }
            }
        }
        FewRows { plans, measured, candidates }
    }
}

/// Returns whether products of few rows are exchanged in their kernel by default. On four H200
/// product and all-reduce by two kernels were up to 1.4 times as fast.
fn exchanges_few_rows(base: &Base<AllReduce>) -> bool {
    base.comm.n_ranks() == 2
}

/// Returns whether tiles of a product of this size fill the GPU often enough. On two H100, `wide`
/// was faster from 0.91 waves of tiles on, where [`Candidates::hides`] expects a gain.
fn fills(base: &Base<AllReduce>, size: [usize; 2]) -> bool {
    let least = if base.comm.n_ranks() == 2 { 0.9 } else { MIN_WAVES };
    waves(size, base.multiprocessors) > least
}

/// What is known of a shape for tiles of few rows.
struct FewRows {
    plans: Vec<GemmAllReducePlan>,
    /// The plan of `Gemm` for this shape in the table of this GPU, if there is one.
    measured: Option<GemmPlan>,
    candidates: Candidates,
}

impl FewRows {
    /// Returns whether the tiles of a fused plan cost little time, compared with those of `Gemm`
    /// and with an all-reduce of C that sends `bytes` from each GPU; and whether the blocks compute
    /// parts of sums in at most two rounds. Three and five rounds took 1.02 to 1.13 times as long
    /// as `unfused` on two H200.
    fn is_good(&self, plan: GemmAllReducePlan, bytes: f64) -> bool {
        const MOST_ROUNDS: f64 = 2.0;
        plan.tiling().map(GemmPlan::Swapped).is_some_and(|product| {
            let is_fast =
                self.measured == Some(product) || self.candidates.costs_little(product, bytes);
            is_fast && self.candidates.split_rounds(product) <= MOST_ROUNDS
        })
    }
}

impl Output<AllReduce> for Window<bf16> {}

impl Fusion for AllReduce {
    type Plan = Plan;

    const NAME: &'static str = "GemmAllReduce";
    const MOST: [&'static str; 2] = ["m", "n"];
    const UNFUSED: Plan = Plan::Unfused;

    fn extents(shape: [usize; 3]) -> Result<Extents> {
        Extents::with_aligned_rows(shape)
    }

    fn defaults(&self, base: &Base<Self>) -> Vec<Plan> {
        let is_unfused = self.exchanges_by_default && self.strips.wire == Wire::Bf16;
        let mut plans = vec![if is_unfused { Plan::Unfused } else { Plan::Strips }];
        if is_unfused && exchanges_few_rows(base) {
            // All tiles are prepared together.
            plans.extend("swapped:8x64:1".parse::<Plan>());
        }
        let most = base.most;
        if self.exchanges_by_default && self.wide.fits(base, most) && fills(base, most) {
            plans.push(Plan::Wide);
        }
        plans
    }

    fn rows(&self, _: &Base<Self>, extents: Extents) -> Result<[usize; 2]> {
        Ok([extents.lengths()[0]; 2])
    }

    fn require_c(base: &Base<Self>, c: &DeviceSlice<bf16>, [m, n]: [usize; 2]) -> Result<()> {
        let (c, _) = window::<bf16, _>("C", c, &base.comm)?;
        check_len("C", c.min_len(), m, n)
    }

    fn strategy(&self, plan: Plan) -> Option<&dyn Strategy<Self>> {
        Some(match plan {
            Plan::Strips => &self.strips,
            Plan::Wide => &self.wide,
            Plan::Swapped(_) => &self.swapped,
            Plan::Unfused => return None,
        })
    }

    fn launch_unfused(&self, base: &Base<Self>, operands: &Operands) -> Result<()> {
        let Unfused { gemm, collectives } = prepared(&base.unfused)?;
        let [m, n, _] = operands.extents.lengths();
        let c = operands.slices[2].slice(..m * n)?;
        // SAFETY: `operands` was checked. Memory that is dropped is freed after the work of the
        // streams.
        unsafe { gemm.enqueue::<bf16, bf16>(operands.extents, operands.matrices) }?;
        collectives.all_reduce(&c, &c, ReduceOp::Sum, &base.stream)
    }

    fn choose(&self, base: &Base<Self>, extents: Extents) -> Explanation<Plan> {
        let how = |plan, reason| Explanation { plan, reason };
        let (wire, [m, n, _]) = (self.strips.wire, extents.lengths());
        if !self.exchanges_by_default {
            return how(Plan::Strips, wire.reason());
        }
        let wide = Plan::Wide;
        // With few rows, most of a tile would be empty.
        let fills = m > MOST_ROWS && fills(base, [m, n]) && self.wide.supports(base, wide, extents);
        if wire != Wire::Bf16 {
            return how(if fills { wide } else { Plan::Strips }, wire.reason());
        }
        // What each GPU sends in an all-reduce of C.
        let ranks = base.comm.n_ranks() as f64;
        let bytes = 2.0 * (ranks - 1.0) / ranks * m as f64 * n as f64 * size_of::<bf16>() as f64;
        let few_rows = self.few_rows(base, extents);
        let is_possible = |plan: &&Plan| self.swapped.supports(base, **plan, extents);
        let first = few_rows.plans.iter().find(is_possible);
        let hides = exchanges_few_rows(base) && hides_few_rows(extents);
        if let Some(plan) = first.filter(|plan| hides && few_rows.is_good(**plan, bytes)) {
            return how(*plan, "as there are few rows");
        }
        if fills && few_rows.candidates.hides(bytes) {
            return how(wide, "as its tiles fill the GPU");
        }
        let reason =
            "as the product hides too little of the exchange, or no fused kernel does this shape";
        how(Plan::Unfused, reason)
    }

    fn require(&self, _: &Base<Self>, plan: Plan) -> Result<()> {
        let wire = self.strips.wire;
        let sends = match plan {
            Plan::Strips => true,
            Plan::Wide => wire != Wire::F32,
            Plan::Swapped(_) | Plan::Unfused => wire == Wire::Bf16,
        };
        refuse_if!(!sends, "the plan `{plan}` does not send partial sums in {wire}: set `strips`");
        match plan {
            Plan::Wide | Plan::Swapped(_) if !self.exchanges => refuse(format!(
                "the plan `{plan}` needs several ranks, all with Hopper GPUs, that reach each \
                 other by load and store: set `strips`{}",
                if wire == Wire::Bf16 { " or `unfused`" } else { "" }
            )),
            _ => Ok(()),
        }
    }

    fn timed(&self, base: &Base<Self>, extents: Extents, usual: Plan) -> Vec<Plan> {
        let few_rows = self.few_rows(base, extents);
        let likely: Vec<_> = few_rows.candidates.within(LIKELY).collect();
        let is_likely = |plan: Plan| {
            plan.tiling().is_none_or(|tiling| likely.contains(&GemmPlan::Swapped(tiling)))
        };
        let mut plans = self.plans_of(base, extents, &few_rows);
        plans.retain(|plan| *plan == usual || is_likely(*plan));
        plans
    }

    fn describe(&self, _: &Base<Self>) -> String {
        let strips = self.strips.prepared.get();
        let blocks = strips.map_or(String::new(), |strips| format!(", {} blocks", strips.blocks));
        format!("{}{blocks}", self.strips.wire)
    }
}
