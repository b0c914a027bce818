//! The matrix product fused with an all-reduce: its workspace and its launches, with their checks.

mod chunked;
mod measure;
mod messages;
mod options;
mod plan;
mod strips;
mod swapped;
mod wide;
mod wire;

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

use devcomm_host::{
    Buffer, Communicator, Context, DeviceSlice, ReduceOp, Result, Stream, StreamOrder, Window,
};
use devcomm_kernels::GemmForm;
use half::bf16;

use self::chunked::Chunked;
pub(crate) use self::messages::Messages;
pub use self::options::GemmOptions;
use self::options::Plan;
pub use self::plan::GemmAllReducePlan;
use self::plan::hides_few_rows;
pub(crate) use self::plan::{OFTEN, times_filled};
use self::strips::Strips;
use self::swapped::{MOST_ROWS, Swapped};
use self::wide::Wide;
pub use self::wire::{ParseWireError, Wire};
use crate::check::{check_buffer, check_shape, refuse, require_context};
use crate::chosen::Chosen;
use crate::gemm::{Matrices, Room, costs_little, exchanging, hides, measured, split_rounds};
use crate::{Collectives, Explanation, Gemm, GemmPlan};

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
    stream: Stream,
    order: StreamOrder,
    communicator: Communicator,
    /// The largest product, `m x n`.
    most: [usize; 2],
    /// Whether the ranks can exchange rounded products, and whether they do so by default.
    exchanges: bool,
    exchanges_by_default: bool,
    constant_b: bool,
    chosen: Chosen<GemmAllReducePlan>,
    /// The plans of the shapes for which none was chosen.
    of_shapes: RefCell<HashMap<[usize; 3], Explanation<GemmAllReducePlan>>>,
    strips: Strips,
    wide: OnceCell<Wide>,
    swapped: OnceCell<Swapped>,
    unfused: OnceCell<(Gemm, Collectives)>,
    chunked: OnceCell<Chunked>,
}

impl GemmAllReduce {
    /// For products of up to `m x n` elements, launched on `stream`; [`options`] selects other
    /// kernels. *Collective*, with the same `m` and `n` on every rank.
    ///
    /// The workspace takes up to `2 * m * n` bytes on each GPU, rounded up to whole tiles, and on
    /// Hopper GPUs up to `4 * m * n`, that of [`Collectives`], and of two GPUs `4 * m * n` for at
    /// most 256 rows.
    ///
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

    fn build(plan: Plan, comm: &Communicator, stream: &Stream, most: [usize; 2]) -> Result<Self> {
        let Plan { exchanges, exchanges_by_default, .. } = plan;
        let gemm = Self {
            stream: stream.clone(),
            order: StreamOrder::concurrent(comm.context(), 1)?,
            communicator: comm.clone(),
            most,
            exchanges,
            exchanges_by_default,
            constant_b: false,
            chosen: Chosen::default(),
            of_shapes: RefCell::default(),
            strips: Strips::new(plan),
            wide: OnceCell::new(),
            swapped: OnceCell::new(),
            unfused: OnceCell::new(),
            chunked: OnceCell::new(),
        };
        let is_bf16 = gemm.wire() == Wire::Bf16;
        if !exchanges_by_default || !is_bf16 {
            gemm.strips.prepare(comm)?;
        }
        if !exchanges_by_default {
            return Ok(gemm);
        }
        if is_bf16 {
            gemm.prepare_unfused()?;
            if gemm.exchanges_few_rows() {
                gemm.prepare_swapped()?;
            }
        }
        let largest = [most[0], most[1], 1];
        if wide::supports(largest, most, comm.n_ranks(), gemm.wire()) && gemm.fills(most) {
            gemm.prepare_wide()?;
        }
        Ok(gemm)
    }

    /// The type in which partial sums travel.
    #[must_use]
    pub fn wire(&self) -> Wire {
        self.strips.wire()
    }

    /// The form of [`Strips`](GemmAllReducePlan::Strips).
    #[must_use]
    pub fn form(&self) -> GemmForm {
        self.strips.form()
    }

    /// Lets [`Swapped`](GemmAllReducePlan::Swapped), [`Unfused`](GemmAllReducePlan::Unfused) and
    /// [`Chunked`](GemmAllReducePlan::Chunked) read B before the previous kernels of the stream
    /// have ended: weights, for instance, which no kernel writes.
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(mut self) -> Self {
        self.constant_b = true;
        if let Some((gemm, collectives)) = self.unfused.take() {
            // SAFETY: the caller's contract.
            let gemm = unsafe { gemm.with_constant_b() };
            let _ = self.unfused.set((gemm, collectives));
        }
        if let Some(chunked) = self.chunked.take() {
            // SAFETY: the caller's contract.
            let _ = self.chunked.set(unsafe { chunked.with_constant_b() });
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
        let mut plans = vec![GemmAllReducePlan::Strips];
        let extents = check_shape(shape)?;
        let is_bf16 = self.wire() == Wire::Bf16;
        if is_bf16 {
            plans.push(GemmAllReducePlan::Unfused);
            let chunked = [2, 4].into_iter().filter(|parts| chunked::supports(shape[0], *parts));
            plans.extend(chunked.map(|parts| GemmAllReducePlan::Chunked { parts }));
        }
        if !self.exchanges {
            return Ok(plans);
        }
        if wide::supports(shape, self.most, self.communicator.n_ranks(), self.wire()) {
            plans.push(GemmAllReducePlan::Wide);
        }
        if is_bf16 && swapped::is_for(shape) {
            let measured = measured(&self.context().device_name()?, extents);
            let all = measured.into_iter().chain(exchanging(extents, self.room()));
            for plan in all.filter_map(GemmAllReducePlan::of_few_rows) {
                if !plans.contains(&plan) {
                    plans.push(plan);
                }
            }
        }
        Ok(plans)
    }

    /// How a product of `[m, n, k]` would be done, and why.
    #[must_use]
    pub fn explain(&self, shape: [usize; 3]) -> Explanation<GemmAllReducePlan> {
        if let Some((plan, reason)) = self.chosen.of(shape).find(|(plan, _)| self.can(*plan, shape))
        {
            return Explanation { plan, reason };
        }
        if let Some(known) = self.of_shapes.borrow().get(&shape) {
            return *known;
        }
        let chosen = self.choose(shape);
        self.of_shapes.borrow_mut().insert(shape, chosen);
        chosen
    }

    /// The plan for a shape if none was set.
    fn choose(&self, shape: [usize; 3]) -> Explanation<GemmAllReducePlan> {
        if !self.exchanges_by_default {
            let reason = self.wire().reason();
            return Explanation { plan: GemmAllReducePlan::Strips, reason };
        }
        let plans = self.plans(shape).unwrap_or_default();
        let hides = self.exchanges_few_rows() && hides_few_rows(shape);
        let few = |plan: &&_| matches!(plan, GemmAllReducePlan::Swapped { .. });
        let few = plans.iter().filter(few).find(|plan| self.can(**plan, shape));
        let extents = check_shape(shape).ok();
        let is_good = |plan: &&GemmAllReducePlan| {
            let product = plan.product().zip(extents);
            product.is_some_and(|of| self.multiplies_well(of) && self.waits_little(of))
        };
        if let Some(plan) = few.filter(|plan| hides && is_good(plan)) {
            return Explanation { plan: *plan, reason: "as there are few rows" };
        }
        let wide = GemmAllReducePlan::Wide;
        // Of few rows most of a tile would be empty.
        let fills =
            shape[0] > MOST_ROWS && self.fills([shape[0], shape[1]]) && self.can(wide, shape);
        if self.wire() != Wire::Bf16 {
            let plan = if fills { wide } else { GemmAllReducePlan::Strips };
            return Explanation { plan, reason: self.wire().reason() };
        }
        if fills && self.hides(shape) {
            return Explanation { plan: wide, reason: "as its tiles fill the GPU" };
        }
        let reason = "as there is little to hide behind the product, or no kernel does it";
        Explanation { plan: GemmAllReducePlan::Unfused, reason }
    }

    /// Whether products of few rows are exchanged in their kernel by default. On four H200 the two
    /// kernels were up to 1.4 times as fast.
    fn exchanges_few_rows(&self) -> bool {
        self.communicator.n_ranks() == 2
    }

    /// Whether the tiles of a product of few rows cost little time, compared with those of `Gemm`,
    /// which has more kinds.
    fn multiplies_well(&self, (product, extents): (GemmPlan, [u32; 3])) -> bool {
        let name = self.context().device_name().unwrap_or_default();
        measured(&name, extents) == Some(product)
            || costs_little(product, extents, self.room(), self.sent(extents))
    }

    /// The bytes that each GPU sends of an all-reduce of C.
    fn sent(&self, [m, n, _]: [u32; 3]) -> f64 {
        let [m, n, ranks] = [m, n, self.communicator.n_ranks() as u32].map(f64::from);
        2.0 * (ranks - 1.0) / ranks * m * n * size_of::<bf16>() as f64
    }

    /// Whether tiles of few rows are split in at most two rounds: after each, blocks wait for the
    /// peers. On two H200 it took 1.02 to 1.13 times as long as `unfused` in three and five rounds,
    /// as 1 x 5120 x 8192 (1.07) and 1 x 4560 x 9496 (1.13).
    fn waits_little(&self, (product, extents): (GemmPlan, [u32; 3])) -> bool {
        const MOST: f64 = 2.0;
        split_rounds(product, extents, self.room()) <= MOST
    }

    /// Whether [`Wide`](GemmAllReducePlan::Wide) hides more than tiles that do not fit cost.
    fn hides(&self, shape: [usize; 3]) -> bool {
        check_shape(shape).is_ok_and(|extents| hides(extents, self.room(), self.sent(extents)))
    }

    /// Whether a plan that was prepared does a product.
    fn can(&self, plan: GemmAllReducePlan, shape: [usize; 3]) -> bool {
        match plan {
            GemmAllReducePlan::Strips => {
                self.strips.supports(self.communicator.n_ranks(), [shape[0], shape[1]])
            }
            GemmAllReducePlan::Unfused => self.unfused.get().is_some(),
            GemmAllReducePlan::Chunked { parts } => {
                self.chunked.get().is_some() && chunked::supports(shape[0], parts)
            }
            GemmAllReducePlan::Wide => {
                let ranks = self.communicator.n_ranks();
                self.wide.get().is_some() && wide::supports(shape, self.most, ranks, self.wire())
            }
            GemmAllReducePlan::Swapped { rows, columns, cluster } => {
                let swapped = self.swapped.get();
                swapped.is_some_and(|swapped| swapped.supports((rows, columns, cluster), shape))
            }
        }
    }

    /// Whether tiles of a product of this size fill the GPU often enough. Where
    /// [`hides`](Self::hides) expects it, two H100 were faster by
    /// [`Wide`](GemmAllReducePlan::Wide) than by the two kernels from 0.91 times on.
    fn fills(&self, size: [usize; 2]) -> bool {
        let least = if self.communicator.n_ranks() == 2 { 0.9 } else { OFTEN };
        times_filled(size, self.multiprocessors()) > least
    }

    /// The same in all ranks.
    fn room(&self) -> Room {
        let usual = || Room::usual(self.multiprocessors());
        self.swapped.get().map_or_else(usual, Swapped::room)
    }

    fn multiprocessors(&self) -> u32 {
        self.context().limits().multiprocessors
    }

    /// Does all products that this plan can do by it, or by the plan of their shape again. Every
    /// rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that a plan is needed, its workspace is allocated: for
    /// [`Strips`](GemmAllReducePlan::Strips) the partial sums of the largest product, `m * n` in
    /// their type, for [`Wide`](GemmAllReducePlan::Wide) up to `4 * m * n` bytes, for
    /// [`Swapped`](GemmAllReducePlan::Swapped) as many for up to 256 rows, from each rank if there
    /// are more than two, for [`Unfused`](GemmAllReducePlan::Unfused) and
    /// [`Chunked`](GemmAllReducePlan::Chunked) that of [`Collectives`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a plan that needs other GPUs
    /// or another number of ranks, or sends partial sums in another type; those of loading kernels
    /// and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<GemmAllReducePlan>) -> Result<()> {
        match plan {
            None => {}
            Some(GemmAllReducePlan::Strips) => self.strips.prepare(&self.communicator)?,
            Some(plan) if !self.wire().has(plan) => {
                return refuse(format!(
                    "the plan `{plan}` does not send partial sums in {}: set `strips`",
                    self.wire()
                ));
            }
            Some(GemmAllReducePlan::Unfused) => self.prepare_unfused()?,
            Some(GemmAllReducePlan::Chunked { .. }) => self.prepare_chunked()?,
            Some(plan) if !self.exchanges => {
                return refuse(format!(
                    "the plan `{plan}` needs several ranks with Hopper GPUs: there are {}, form \
                     {:?}",
                    self.communicator.n_ranks(),
                    self.form()
                ));
            }
            Some(GemmAllReducePlan::Wide) => self.prepare_wide()?,
            Some(GemmAllReducePlan::Swapped { rows, columns, cluster }) => {
                self.prepare_swapped()?;
                swapped::require((rows, columns, cluster))?;
            }
        }
        // What was prepared decides too, and ranks ask when they like: one may have kept a choice
        // that the others make only now.
        self.of_shapes.borrow_mut().clear();
        self.chosen.set(plan);
        Ok(())
    }

    /// *Collective*, as are the following.
    fn prepare_unfused(&self) -> Result<()> {
        if self.unfused.get().is_none() {
            let own = Gemm::new(&self.stream).map(|gemm| (gemm, ()));
            let call = self.communicator.collective("GemmAllReduce: the plan unfused");
            let (mut gemm, _) = call.agree(own)?;
            if self.constant_b {
                // SAFETY: the contract of `with_constant_b`.
                gemm = unsafe { gemm.with_constant_b() };
            }
            let _ = self.unfused.set((gemm, Collectives::new(&self.communicator)?));
        }
        Ok(())
    }

    fn prepare_chunked(&self) -> Result<()> {
        if self.chunked.get().is_none() {
            let chunked = Chunked::new(&self.communicator, &self.stream, self.constant_b)?;
            let _ = self.chunked.set(chunked);
        }
        Ok(())
    }

    fn prepare_wide(&self) -> Result<()> {
        if self.wide.get().is_none() {
            let [m, n] = self.most;
            let _ = self.wide.set(Wide::new(&self.communicator, m, n, self.wire())?);
        }
        Ok(())
    }

    fn prepare_swapped(&self) -> Result<()> {
        if self.swapped.get().is_none() {
            let [m, n] = self.most;
            let _ = self.swapped.set(Swapped::new(&self.communicator, m, n)?);
        }
        Ok(())
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
        self.enqueue(&a.device_slice(), &b.device_slice(), c, shape)
    }

    fn context(&self) -> &Context {
        self.communicator.context()
    }

    /// The matrices of a product, checked.
    fn matrices(
        &self,
        a: &DeviceSlice<bf16>,
        b: &DeviceSlice<bf16>,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<Matrices> {
        if !c.communicator().is(&self.communicator) {
            return refuse("C is a window of another communicator".to_owned());
        }
        require_context("A", a.context(), self.context())?;
        require_context("B", b.context(), self.context())?;
        let [m, n, k] = check_shape(shape)?;
        let [rows, columns, terms] = shape;
        check_buffer("A", a.device_address(), a.len(), rows, terms)?;
        check_buffer("B", b.device_address(), b.len(), columns, terms)?;
        check_buffer("C", c.device_address(), c.min_len(), rows, columns)?;
        let addresses = [a.device_address(), b.device_address(), c.device_address()];
        Ok(Matrices::plain(addresses, [m, n, k]))
    }

    fn enqueue(
        &self,
        a: &DeviceSlice<bf16>,
        b: &DeviceSlice<bf16>,
        c: &Window<bf16>,
        shape: [usize; 3],
    ) -> Result<()> {
        let matrices = self.matrices(a, b, c, shape)?;
        let _turn = self.order.begin(&self.stream)?;
        // SAFETY: the plan does the shape; the buffers are long enough and begin at multiples of 16
        // bytes; memory that is dropped is freed after the work of the streams, and after the
        // graphs. `order` lets launches follow each other.
        unsafe {
            let plan = self.explain(shape).plan;
            if let (GemmAllReducePlan::Wide, Some(wide)) = (plan, self.wide.get()) {
                return wide.launch(&self.stream, matrices, c);
            }
            if let (GemmAllReducePlan::Swapped { rows, columns, cluster }, Some(swapped)) =
                (plan, self.swapped.get())
            {
                let tile = (rows, columns, cluster);
                return swapped.launch(&self.stream, tile, matrices, self.constant_b);
            }
            if let (GemmAllReducePlan::Unfused, Some((gemm, collectives))) =
                (plan, self.unfused.get())
            {
                let c = c.slice(..shape[0] * shape[1])?;
                gemm.launch(a, b, &c, shape)?;
                return collectives.all_reduce(&c, &c, ReduceOp::Sum, &self.stream);
            }
            if let (GemmAllReducePlan::Chunked { parts }, Some(chunked)) =
                (plan, self.chunked.get())
            {
                return chunked.launch(&self.stream, [a, b], c, shape, parts);
            }
            self.strips.launch(self.communicator.n_ranks(), &self.stream, matrices, c)
        }
    }
}

impl std::fmt::Debug for GemmAllReduce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmAllReduce({:?}, {} blocks)", self.form(), self.strips.blocks())
    }
}
