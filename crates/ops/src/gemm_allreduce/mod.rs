//! The matrix product fused with an all-reduce: its plans, and the choice among them.

mod options;
mod plan;
mod strips;
mod swapped;
mod unfused;
mod wide;
mod wire;

use std::cell::OnceCell;

use devcomm_host::{Buffer, Communicator, DeviceSlice, Result, Stream, Window};
use half::bf16;

pub use self::options::GemmOptions;
use self::options::Plan as Agreed;
pub use self::plan::GemmAllReducePlan;
use self::plan::hides_few_rows;
pub(crate) use self::plan::{MIN_WAVES, waves};
use self::strips::Strips;
use self::swapped::{MOST_ROWS, Swapped};
use self::unfused::Unfused;
use self::wide::Wide;
pub use self::wire::{ParseWireError, Wire};
use crate::check::{check_buffer, refuse, require_context};
use crate::extents::Extents;
use crate::fused::{Base, Operands, Operation, Strategy};
use crate::gemm::{self, Candidates, Room};
use crate::{Explanation, Gemm, GemmPlan};

type Plan = GemmAllReducePlan;
/// The memory of C.
type C = Window<bf16>;

/// `C = sum over the ranks of A x B^T`, on one communicator and one stream: owns the loaded kernels
/// and their workspace, and launches them.
///
/// Each rank has `m x k` elements of A and `n x k` of B, row-major: its slice of the dimension that
/// is summed over. Every rank gets the `m x n` elements of C, row-major.
///
/// On Hopper GPUs the plan follows from the shape: products that fill 2, 4 or 8 of them, with tiles
/// that fit, exchange these in the product's kernel, and of two most of up to 256 rows; others are
/// followed by an all-reduce. Elsewhere that is [`GemmAllReducePlan::Strips`].
/// [`explain`](Self::explain) says which plan a shape gets; [`set_plan`](Self::set_plan) selects
/// another one, and [`measure`](Self::measure) the fastest.
///
/// Every rank's product, with sums in f32, is rounded to bf16 on its way, and so is the sum of the
/// products, in f32 too. [`GemmOptions::wire`] selects another type for the way: f32 and with it
/// strips for every shape, or 8-bit floats and with them strips or, of two Hopper GPUs and for
/// products that fill these, tiles.
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
pub struct GemmAllReduce {
    base: Base<Plan>,
    /// Whether the ranks can exchange rounded products, and whether they do so by default.
    exchanges: bool,
    exchanges_by_default: bool,
    strips: Strips,
    wide: Wide,
    swapped: OnceCell<Swapped>,
    unfused: OnceCell<Unfused>,
}

impl GemmAllReduce {
    /// For products of up to `m x n` elements, launched on `stream`; [`options`] selects other
    /// kernels. *Collective*, with the same `m` and `n` on every rank.
    ///
    /// The workspace takes up to `2 * m * n` bytes on each GPU, rounded up to whole tiles, and on
    /// Hopper GPUs up to `4 * m * n`, that of [`Collectives`], and of two GPUs `4 * m * n` for at
    /// most 256 rows.
    ///
    /// [`Collectives`]: crate::Collectives
    /// [`options`]: Self::options
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a product without elements or one that is too large, for
    /// arguments that differ between the ranks, a stream of another context, and a communicator
    /// that was created without a `World`; [`DevCommError::SeveralLsaTeams`] when the ranks are not
    /// in one LSA team; errors of loading kernels and of creating windows and a device
    /// communicator. An error on one rank is an error on all.
    ///
    /// [`Error::InvalidInput`]: devcomm_host::Error::InvalidInput
    /// [`DevCommError::SeveralLsaTeams`]: devcomm_host::DevCommError::SeveralLsaTeams
    pub fn new(comm: &Communicator, stream: &Stream, m: usize, n: usize) -> Result<Self> {
        Self::options().build(comm, stream, m, n)
    }

    /// The options, with their default values.
    pub fn options() -> GemmOptions {
        GemmOptions::new()
    }

    fn build(
        agreed: Agreed,
        comm: &Communicator,
        stream: &Stream,
        most: [usize; 2],
    ) -> Result<Self> {
        let Agreed { exchanges, exchanges_by_default, wire, .. } = agreed;
        let gemm = Self {
            base: Base::new(comm, stream, "gemm-allreduce", most)?,
            exchanges,
            exchanges_by_default,
            strips: Strips::new(agreed),
            wide: Wide::new(wire),
            swapped: OnceCell::new(),
            unfused: OnceCell::new(),
        };
        let is_bf16 = wire == Wire::Bf16;
        if !exchanges_by_default || !is_bf16 {
            gemm.strips.prepare(&gemm.base, GemmAllReducePlan::Strips)?;
        }
        if exchanges_by_default && is_bf16 {
            gemm.unfused.prepare(&gemm.base, GemmAllReducePlan::Unfused)?;
            if gemm.exchanges_few_rows() {
                swapped::prepare(&gemm.swapped, &gemm.base)?;
            }
        }
        let has_wide = gemm.wide.fits(&gemm.base, most) && gemm.fills(most);
        if exchanges_by_default && has_wide {
            gemm.wide.prepare(&gemm.base, GemmAllReducePlan::Wide)?;
        }
        Ok(gemm)
    }

    /// The type in which partial sums travel.
    #[must_use]
    pub fn wire(&self) -> Wire {
        self.strips.wire()
    }

    /// Lets [`Swapped`](GemmAllReducePlan::Swapped) and [`Unfused`](GemmAllReducePlan::Unfused)
    /// read B before the previous kernels of the stream have ended: weights, for instance, which no
    /// kernel writes.
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(mut self) -> Self {
        self.base.constant_b = true;
        if let Some(unfused) = self.unfused.take() {
            // SAFETY: the caller's contract.
            let _ = self.unfused.set(unsafe { unfused.with_constant_b() });
        }
        self
    }

    /// The plans for products of `[m, n, k]`, those for few rows last, and of these first the one
    /// that is expected to be the fastest.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape that no product has;
    /// those of the driver.
    pub fn plans(&self, shape: [usize; 3]) -> Result<Vec<GemmAllReducePlan>> {
        let extents = Extents::with_aligned_rows(shape)?;
        Ok(self.plans_of(extents, &self.few_rows(extents)?))
    }

    /// How a product of `[m, n, k]` would be done, and why.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape that no product has.
    pub fn explain(&self, shape: [usize; 3]) -> Result<Explanation<GemmAllReducePlan>> {
        Ok(self.decide(Extents::with_aligned_rows(shape)?))
    }

    /// Does all products that this plan can do by it, or by the plan of their shape again. Every
    /// rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that a plan is needed, its workspace is allocated: for
    /// [`Strips`](GemmAllReducePlan::Strips) the partial sums of the largest product, `m * n` in
    /// their type, for [`Wide`](GemmAllReducePlan::Wide) up to `4 * m * n` bytes, for
    /// [`Swapped`](GemmAllReducePlan::Swapped) as many for up to 256 rows, from each rank if there
    /// are more than two, for [`Unfused`](GemmAllReducePlan::Unfused) that of
    /// [`Collectives`](crate::Collectives).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a plan that needs other GPUs
    /// or another number of ranks, or sends partial sums in another type; those of loading kernels
    /// and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<GemmAllReducePlan>) -> Result<()> {
        self.set(plan)
    }

    /// Times the [`plans`](Self::plans) of a shape, those for few rows if their product alone is
    /// expected to take at most half as long again as the fastest, and does products of it by the
    /// fastest from now on, unless one is set. Each is launched 17 times, and the promising ones 48
    /// times more, as [`launch`](Self::launch) with these buffers, of which the L2 cache keeps what
    /// it can. The time of a plan is that of the slowest rank. The plan that
    /// [`explain`](Self::explain) names without a measurement is kept if none is faster by more
    /// than 2 %. All ranks get the same plan. *Collective*.
    ///
    /// [`Unfused`](GemmAllReducePlan::Unfused) is timed with the likely plans of its product, as
    /// [`Gemm::measure`](crate::Gemm::measure) has them, if all ranks have the same ones.
    ///
    /// It allocates the workspaces of all these plans, which this object keeps. The plan is kept in
    /// the cache folder, for operations of the same number of ranks on the same kind of GPU that
    /// are made later.
    ///
    /// # Errors
    ///
    /// Those of [`launch`](Self::launch) and [`set_plan`](Self::set_plan), and
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for ranks that have different
    /// plans, or ask for different shapes.
    pub fn measure<A, B>(
        &self,
        a: &A,
        b: &B,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<GemmAllReducePlan>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        let (a, b) = (a.device_slice(), b.device_slice());
        let call = self.base.comm.collective("GemmAllReduce::measure");
        let call = call.option("shape", format!("{shape:?}"));
        self.find_fastest(call, self.operands(&a, &b, c, shape))
    }

    /// Enqueues one product of `[m, n, k]`: reads `m * k` elements of `a` and `n * k` of `b`, and
    /// stores the sum to the first `m * n` elements of `c` in every rank. Later work on the stream
    /// sees the whole result.
    ///
    /// Every rank calls it with the same shape and the same window, in the same order. Only work on
    /// this stream may access `c` until the product has ended. A product fills the GPU: operations
    /// of other objects on other streams wait for it, or it for them, in the order of the host's
    /// calls, which is the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, a
    /// `k` that is not a multiple of 8, buffers and windows that are too short, not aligned to 16
    /// bytes or of another context or communicator, or a product that is too large for this
    /// workspace; errors of the launch.
    pub fn launch<A, B>(&self, a: &A, b: &B, c: &Window<bf16>, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
    {
        let (a, b) = (a.device_slice(), b.device_slice());
        self.run(&self.operands(&a, &b, c, shape)?)
    }

    fn operands<'a>(
        &self,
        a: &'a DeviceSlice<bf16>,
        b: &'a DeviceSlice<bf16>,
        c: &'a Window<bf16>,
        shape: [usize; 3],
    ) -> Result<Operands<'a, Window<bf16>>> {
        let context = self.base.context();
        if !c.communicator().is(&self.base.comm) {
            return refuse("C is a window of another communicator".to_owned());
        }
        require_context("A", a.context(), context)?;
        require_context("B", b.context(), context)?;
        let (extents, [m, n, k]) = (Extents::with_aligned_rows(shape)?, shape);
        let addresses = [a.device_address(), b.device_address(), c.device_address()];
        check_buffer("A", addresses[0], a.len(), m, k)?;
        check_buffer("B", addresses[1], b.len(), n, k)?;
        check_buffer("C", addresses[2], c.min_len(), m, n)?;
        Ok(Operands { a, b, c, addresses, added: None, extents })
    }

    /// The plans for a shape: those with tiles of few rows are given.
    fn plans_of(&self, extents: Extents, few_rows: &FewRows) -> Vec<GemmAllReducePlan> {
        let [m, n, _] = extents.lengths();
        let mut plans = vec![GemmAllReducePlan::Strips];
        if self.wire() == Wire::Bf16 {
            plans.push(GemmAllReducePlan::Unfused);
        }
        if self.exchanges && self.wide.fits(&self.base, [m, n]) {
            plans.push(GemmAllReducePlan::Wide);
        }
        plans.extend(&few_rows.plans);
        plans
    }

    /// The plans with tiles of few rows for a shape, the one that is expected to be the fastest
    /// first.
    fn few_rows(&self, extents: Extents) -> Result<FewRows> {
        let room = self.swapped.get().map_or_else(
            // The same in all ranks.
            || Room::usual(self.base.multiprocessors()),
            Swapped::room,
        );
        let candidates = Candidates::new(extents, room);
        let is_done = self.exchanges && self.wire() == Wire::Bf16 && swapped::is_for(extents);
        let (mut measured, mut plans) = (None, Vec::new());
        if is_done {
            measured = gemm::measured(&self.base.context().device_name()?, extents);
            let all = measured.into_iter().chain(candidates.exchanging());
            for plan in all.filter_map(GemmAllReducePlan::of_few_rows) {
                if !plans.contains(&plan) {
                    plans.push(plan);
                }
            }
        }
        Ok(FewRows { plans, measured, candidates })
    }

    /// Whether products of few rows are exchanged in their kernel by default. On four H200 the two
    /// kernels were up to 1.4 times as fast.
    fn exchanges_few_rows(&self) -> bool {
        self.base.comm.n_ranks() == 2
    }

    /// Whether tiles of a product of this size fill the GPU often enough. Where
    /// [`Candidates::hides`] expects it, two H100 were faster by
    /// [`Wide`](GemmAllReducePlan::Wide) than by the two kernels from 0.91 times on.
    fn fills(&self, size: [usize; 2]) -> bool {
        let least = if self.base.comm.n_ranks() == 2 { 0.9 } else { MIN_WAVES };
        waves(size, self.base.multiprocessors()) > least
    }
}

/// What is known of a shape for tiles of few rows.
struct FewRows {
    plans: Vec<GemmAllReducePlan>,
    /// The plan of `Gemm` that a table has.
    measured: Option<GemmPlan>,
    candidates: Candidates,
}

impl FewRows {
    /// Whether the tiles cost little time, compared with those of `Gemm`, which has more kinds, and
    /// are split in at most two rounds: after each, blocks wait for the peers. On two H200 it took
    /// 1.02 to 1.13 times as long as `unfused` in three and five rounds, as 1 x 5120 x 8192 (1.07)
    /// and 1 x 4560 x 9496 (1.13). Each GPU sends so many bytes of an all-reduce of C.
    fn is_good(&self, plan: GemmAllReducePlan, bytes: f64) -> bool {
        const MOST_ROUNDS: f64 = 2.0;
        plan.product().is_some_and(|product| {
            let is_fast =
                self.measured == Some(product) || self.candidates.costs_little(product, bytes);
            is_fast && self.candidates.split_rounds(product) <= MOST_ROUNDS
        })
    }
}

impl Operation for GemmAllReduce {
    type Plan = Plan;
    type C = C;
    const UNFUSED: Plan = Plan::Unfused;

    fn base(&self) -> &Base<Plan> {
        &self.base
    }

    fn strategy(&self, plan: Plan) -> &dyn Strategy<Plan, C> {
        match plan {
            Plan::Strips => &self.strips,
            Plan::Wide => &self.wide,
            Plan::Swapped { .. } => &self.swapped,
            Plan::Unfused => &self.unfused,
        }
    }

    fn gemm(&self) -> Option<&Gemm> {
        self.unfused.get().map(Unfused::gemm)
    }

    fn choose(&self, extents: Extents) -> Explanation<Plan> {
        let how = |plan, reason| Explanation { plan, reason };
        let (wire, [m, n, _]) = (self.wire(), extents.lengths());
        if !self.exchanges_by_default {
            return how(Plan::Strips, wire.reason());
        }
        let wide = Plan::Wide;
        // With few rows, most of a tile would be empty.
        let fills =
            m > MOST_ROWS && self.fills([m, n]) && self.wide.supports(&self.base, wide, extents);
        if wire != Wire::Bf16 {
            return how(if fills { wide } else { Plan::Strips }, wire.reason());
        }
        let ranks = self.base.comm.n_ranks() as f64;
        let bytes = 2.0 * (ranks - 1.0) / ranks * m as f64 * n as f64 * size_of::<bf16>() as f64;
        if let Ok(few_rows) = self.few_rows(extents) {
            let does = |plan: &&Plan| self.swapped.supports(&self.base, **plan, extents);
            let first = few_rows.plans.iter().find(does);
            let hides = self.exchanges_few_rows() && hides_few_rows(extents);
            if let Some(plan) = first.filter(|plan| hides && few_rows.is_good(**plan, bytes)) {
                return how(*plan, "as there are few rows");
            }
            if fills && few_rows.candidates.hides(bytes) {
                return how(wide, "as its tiles fill the GPU");
            }
        }
        let reason = "as there is little to hide behind the product, or no kernel does it";
        how(Plan::Unfused, reason)
    }

    fn require(&self, plan: Plan) -> Result<()> {
        let wire = self.wire();
        if !wire.has(plan) {
            return refuse(format!(
                "the plan `{plan}` does not send partial sums in {wire}: set `strips`"
            ));
        }
        match plan {
            Plan::Wide | Plan::Swapped { .. } if !self.exchanges => refuse(format!(
                "the plan `{plan}` needs several ranks, all with Hopper GPUs, and there are {}: \
                 set `strips` or `unfused`",
                self.base.comm.n_ranks()
            )),
            _ => Ok(()),
        }
    }

    fn to_measure(&self, extents: Extents, expected: Plan) -> Result<Vec<Plan>> {
        let few_rows = self.few_rows(extents)?;
        let likely: Vec<_> = few_rows.candidates.likely().collect();
        let is_likely = |plan: Plan| plan.product().is_none_or(|product| likely.contains(&product));
        let mut plans = self.plans_of(extents, &few_rows);
        plans.retain(|plan| *plan == expected || is_likely(*plan));
        Ok(plans)
    }
}

impl std::fmt::Debug for GemmAllReduce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmAllReduce({} blocks)", self.strips.blocks())
    }
}
