//! A product with a collective, as one operation: how all of these choose a plan, a [`Strategy`] or
//! [`Unfused`], prepare it and launch it.

mod measure;

use std::fmt::{self, Debug, Display};
use std::str::FromStr;
use std::sync::Arc;

use devcomm_kernels::gemm::gemm_wgmma::CLUSTER;

use crate::collectives::HOPPER;
use crate::decisions::Decisions;
use crate::gemm::{Added, Matrices, wide_grid};
use crate::prelude::*;
use crate::tuned::Tuned;
use crate::{Collectives, CollectivesOptions, Gemm};

/// A matrix product fused with a collective, on one communicator and one stream: owns the loaded
/// kernels and their workspace, and launches them. It is [`GemmAllReduce`](crate::GemmAllReduce),
/// [`GemmReduceScatter`](crate::GemmReduceScatter) or [`AllGatherGemm`](crate::AllGatherGemm).
///
/// [`explain`](Self::explain) says which plan a shape gets; [`set_plan`](Self::set_plan) selects
/// another one, and [`measure`](Self::measure) the fastest.
pub struct FusedGemm<F: Fusion> {
    pub(crate) base: Base<F>,
    pub(crate) fusion: F,
}

/// What an operation has, whatever its collective is.
pub struct Base<F: Fusion> {
    pub(crate) comm: Communicator,
    pub(crate) stream: Stream,
    order: Arc<StreamOrder>,
    /// The largest matrix that the ranks exchange: its rows and columns.
    pub(crate) most: [usize; 2],
    pub(crate) gpu: String,
    /// The fewest multiprocessors of any rank's GPU, so that all ranks choose the same plans.
    pub(crate) multiprocessors: u32,
    /// Whether no kernel writes B while a product may read it.
    pub(crate) constant_b: bool,
    /// The plan that is not fused, once it is prepared.
    pub(crate) unfused: OnceCell<Unfused>,
    decisions: Decisions<F::Plan>,
    /// Whether the first product of a shape is measured, unless a plan was chosen for it.
    measures_first: bool,
}

/// The product and the collective, one after the other.
pub struct Unfused {
    pub(crate) gemm: Gemm,
    pub(crate) collectives: Collectives,
}

pub(crate) const ANY_RANKS: (&[usize], &str) = (&[], "any ranks");

/// The environment variable by which the first product of a shape is measured.
const MEASURE_FIRST: &str = "DEVCOMM_MEASURE_FIRST";

#[cfg(test)]
thread_local! {
    /// Whether a test's rank, which is a thread, measures as if its environment asked for that.
    static MEASURES_FIRST: Cell<bool> = const { Cell::new(false) };
}

impl<F: Fusion> Base<F> {
    /// Prepares the kernels of a plan and their memory, the first time. A fused plan is for ranks
    /// that reach each other, one of the numbers `ranks`, which `which` describes, or any if there
    /// are none. `load` returns the kernels with numbers, such as what is resident; `allocate` gets
    /// the least of all ranks' numbers, so all ranks have the same grid. *Collective*.
    pub(crate) fn prepare<T, U>(
        &self,
        (cell, plan): (&OnceCell<U>, F::Plan),
        (ranks, which): (&[usize], &str),
        load: impl FnOnce() -> Result<(T, Vec<[u32; 2]>)>,
        allocate: impl FnOnce(T, Vec<[u32; 2]>) -> Result<U>,
    ) -> Result<()> {
        if cell.get().is_some() {
            return Ok(());
        }
        let (comm, own_ranks) = (&self.comm, self.comm.n_ranks());
        let own = || {
            refuse_if!(
                !ranks.is_empty() && !ranks.contains(&own_ranks),
                "the plan `{plan}` is for {which}, not {own_ranks}"
            );
            if plan != F::UNFUSED {
                comm.require_single_lsa_team()?;
            }
            load()
        };
        let name = format!("{}: the plan {plan}", F::NAME);
        let prepared = comm.together(&name, || {
            let call = comm.collective(&name).option(F::MOST[0], self.most[0]);
            let (loaded, all) = call.option(F::MOST[1], self.most[1]).exchange(own())?;
            // All ranks have the same kernels.
            let least = |[a, b]: [u32; 2], [c, d]: &[u32; 2]| [a.min(*c), b.min(*d)];
            let of_kernel = |i: usize| all.iter().map(|own| &own[i]).fold([u32::MAX; 2], least);
            allocate(loaded, (0..all[0].len()).map(of_kernel).collect())
        })?;
        let _ = cell.set(prepared);
        Ok(())
    }
}

/// A product that was checked: the matrices have the elements, and are of the operation's context.
#[derive(Clone)]
pub struct Operands {
    pub(crate) slices: [DeviceSlice<bf16>; 3],
    pub(crate) matrices: Matrices,
    pub(crate) extents: Extents,
    /// Whether something is added to the product, which only the plan that is not fused does.
    has_epilogue: bool,
}

/// A way to do the product and the collective in one kernel, and its memory, once it is prepared.
pub trait Strategy<F: Fusion> {
    /// Returns whether it is prepared, and does products of this shape.
    fn supports(&self, base: &Base<F>, plan: F::Plan, extents: Extents) -> bool;

    /// Loads the kernels and allocates their memory, the first time. *Collective*.
    fn prepare(&self, base: &Base<F>, plan: F::Plan) -> Result<()>;

    /// Enqueues a product.
    ///
    /// # Safety
    ///
    /// The plan [supports](Self::supports) the shape. The matrices begin at multiples of 16 bytes,
    /// and stay allocated until the product has ended. Launches are ordered, and the same in all
    /// ranks.
    unsafe fn launch(&self, base: &Base<F>, plan: F::Plan, operands: &Operands) -> Result<()>;
}

/// The collective of a [`FusedGemm`].
pub trait Fusion: Sized {
    type Plan: Copy + PartialEq + Debug + Display + FromStr;

    const NAME: &'static str;
    /// The names of the extents of the largest matrix that the ranks exchange.
    const MOST: [&'static str; 2];
    /// The plan of a product and a collective, one after the other.
    const UNFUSED: Self::Plan;
    /// Whether ranks may have different numbers of columns, on which no plan depends then.
    const COLUMNS_DIFFER: bool = false;

    fn extents(shape: [usize; 3]) -> Result<Extents> {
        Extents::new(shape)
    }

    /// Returns the plans that are prepared with the operation.
    fn defaults(&self, base: &Base<Self>) -> Vec<Self::Plan>;

    /// Returns the rows of A and of C that a rank has, if there is memory for a product.
    fn rows(&self, base: &Base<Self>, extents: Extents) -> Result<[usize; 2]>;

    /// Refuses a C that no kernel can write.
    fn require_c(_: &Base<Self>, _: &DeviceSlice<bf16>, _: [usize; 2]) -> Result<()> {
        Ok(())
    }

    /// Returns the strategy that does a plan; `None` for the one that is not fused.
    fn strategy(&self, plan: Self::Plan) -> Option<&dyn Strategy<Self>>;

    /// Enqueues the product and the collective, one after the other.
    fn launch_unfused(&self, base: &Base<Self>, operands: &Operands) -> Result<()>;

    /// Returns the plan of a shape for which no plan was set or measured that can do it.
    fn choose(&self, base: &Base<Self>, extents: Extents) -> Explanation<Self::Plan>;

    /// Returns the plans that [`FusedGemm::measure`] times, of which `usual` is the default.
    fn timed(&self, base: &Base<Self>, extents: Extents, usual: Self::Plan) -> Vec<Self::Plan>;

    /// Refuses a plan that no shape can have on these GPUs.
    fn require(&self, _: &Base<Self>, _: Self::Plan) -> Result<()> {
        Ok(())
    }

    fn describe(&self, base: &Base<Self>) -> String {
        format!("{} ranks", base.comm.n_ranks())
    }
}

/// Memory of C: a window for [`GemmAllReduce`](crate::GemmAllReduce), which stores to all ranks,
/// and any [`Buffer`] for the other operations.
#[diagnostic::on_unimplemented(message = "`{Self}` is no memory for C of this operation")]
pub trait Output<F: Fusion>: Buffer<Element = bf16> {}

impl<F: Fusion> FusedGemm<F> {
    /// Creates the operation for matrices of up to `most`. `fuse` gets whether all ranks have the
    /// kernels of Hopper and reach each other, and whether their GPUs are alike. Plans that were
    /// measured are kept by the name `kept`. *Collective*.
    pub(crate) fn create(
        comm: &Communicator,
        stream: &Stream,
        most @ [first, second]: [usize; 2],
        (kept, options): (&str, &[(&str, String)]),
        fuse: impl FnOnce([bool; 2]) -> Result<F>,
    ) -> Result<Self> {
        let (context, [of_first, of_second]) = (comm.context(), F::MOST);
        let own = || {
            require_context("the stream", stream.context(), context)?;
            let what = if first == 0 || second == 0 { "no" } else { "too many" };
            refuse_if!(
                first.checked_mul(second).unwrap_or(0) == 0,
                "a matrix of {of_first} = {first} by {of_second} = {second} has {what} elements"
            );
            let (limits, tuned) = (context.limits(), Tuned::new(context, kept, comm.n_ranks())?);
            let can = limits.compute_capability == HOPPER && is_single_lsa_team(comm)?;
            let name = context.device_name()?;
            // The plans of a table are for GPUs of one name.
            let gpu = [hash(&name), limits.multiprocessors.into()];
            let numbers = [gpu, [can.into(), tuned.hash()]];
            Ok(((tuned, name), numbers))
        };
        let measures_first = std::env::var_os(MEASURE_FIRST).is_some_and(|value| value == "1");
        #[cfg(test)]
        let measures_first = measures_first || MEASURES_FIRST.get();
        let name = format!("{}::new", F::NAME);
        let call = comm.collective(&name).option(of_first, first).option(of_second, second);
        let call = call.option(MEASURE_FIRST, measures_first);
        let call = options.iter().fold(call, |call, (name, value)| call.option(*name, value));
        let made = comm.together(&name, || {
            let ((tuned, gpu), all) = call.agree(own())?;
            let multiprocessors = all.iter().map(|[[_, number], _]| *number as u32).min();
            let base = Base {
                decisions: Decisions::new(tuned.agreed(all.iter().map(|[_, [_, hash]]| *hash))),
                measures_first,
                comm: comm.clone(),
                stream: stream.clone(),
                order: Arc::new(StreamOrder::concurrent(context, 1)?),
                most,
                gpu,
                multiprocessors: multiprocessors.unwrap_or(0),
                constant_b: false,
                unfused: OnceCell::new(),
            };
            let can_exchange = all.iter().all(|[_, [can, _]]| *can == 1);
            let are_alike = all.iter().all(|[gpu, _]| *gpu == all[0][0]);
            let made = Self { base, fusion: fuse([can_exchange, are_alike])? };
            let defaults = made.fusion.defaults(&made.base);
            defaults.into_iter().try_for_each(|plan| made.prepare(plan))?;
            made.prepare_kept()?;
            Ok(made)
        })?;
        comm.name(&made.base.order, F::NAME);
        Ok(made)
    }

    /// Prepares the plans that this machine has measured for shapes of this size, if these ranks
    /// would measure them. *Collective*.
    pub(crate) fn prepare_kept(&self) -> Result<()> {
        let (base, [first, second]) = (&self.base, self.base.most);
        for (shape, plan) in base.decisions.tuned.all() {
            let Ok(extents) = F::extents(shape.map(|extent| extent as usize)) else { continue };
            let [m, n, k] = extents.lengths();
            let columns = if F::COLUMNS_DIFFER { k } else { n };
            let is_small = m * columns <= first * second;
            if is_small && self.fusion.timed(base, extents, plan).contains(&plan) {
                self.prepare(plan)?;
            }
        }
        Ok(())
    }

    /// Returns how a product of `[m, n, k]` would be done, and why; an [`Error::InvalidInput`] for
    /// a shape that no product has.
    pub fn explain(&self, shape: [usize; 3]) -> Result<Explanation<F::Plan>> {
        Ok(self.decide(F::extents(shape)?))
    }

    /// Does all products by this plan if it can do them; `None` returns to the plans of the shapes.
    /// Every rank sets the same plan between the same products. The first time that a plan is set,
    /// its workspace is allocated; the plans tell its size. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a plan that needs other GPUs or another number of ranks, or
    /// sends partial sums in another type; [`DevCommError::SeveralLsaTeams`] where load and store
    /// do not reach all ranks; [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for
    /// other GPUs; those of loading kernels and of creating windows and a device communicator.
    pub fn set_plan(&self, plan: Option<F::Plan>) -> Result<()> {
        if let Some(plan) = plan {
            self.fusion.require(&self.base, plan)?;
            self.prepare(plan)?;
        }
        self.base.decisions.set(plan);
        Ok(())
    }

    /// Prepares a plan, the first time. *Collective*.
    fn prepare(&self, plan: F::Plan) -> Result<()> {
        let base = &self.base;
        if let Some(strategy) = self.fusion.strategy(plan) {
            return strategy.prepare(base, plan);
        }
        let load = || Ok((Gemm::new(&base.stream)?, Vec::new()));
        base.prepare((&base.unfused, plan), ANY_RANKS, load, |mut gemm, _| {
            gemm.constant_b = base.constant_b;
            // As the fused plans, it may fill the GPU.
            let options = CollectivesOptions::new().concurrent(1);
            let collectives = options.build_in(&base.comm, Some(Arc::clone(&base.order)))?;
            Ok(Unfused { gemm, collectives })
        })
    }

    /// Lets plans whose kernels can do it read B before the previous kernels of the stream have
    /// ended: weights, for instance, which no kernel writes.
    ///
    /// # Safety
    ///
    /// No kernel that may still run when a product is launched writes its B.
    #[must_use]
    pub unsafe fn with_constant_b(mut self) -> Self {
        self.base.constant_b = true;
        if let Some(unfused) = self.base.unfused.get_mut() {
            unfused.gemm.constant_b = true;
        }
        self
    }

    /// Enqueues one product of `[m, n, k]`. Every rank calls it with the same shape (of
    /// [`AllGatherGemm`](crate::AllGatherGemm) the same `m` and `k`) and the same window, if C is
    /// in one, in the same order. Later work on the stream sees the whole result. `c` overlaps
    /// neither `a` nor `b`. Only work on this stream may access `c` until the product has ended.
    ///
    /// A product fills the GPU: operations of other objects on other streams wait for it, or it for
    /// them, in the order of the host's calls, which is the same on all ranks.
    /// [`synchronize_within`](Stream::synchronize_within) lists those of another order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements or that ranks cannot share, buffers and
    /// windows that are too short, not aligned as the plan needs them, of another context or
    /// communicator or overlap `c`, or a product that is too large for this workspace; in a checked
    /// world, [`WorldError::CallsDiffer`](devcomm_host::WorldError::CallsDiffer) for ranks that
    /// call another operation or have another shape; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Output<F>,
    {
        let matrices = [a.device_slice(), b.device_slice(), c.device_slice()];
        self.run(&self.operands(matrices, &Added::NOTHING, shape)?)
    }

    pub(crate) fn operands(
        &self,
        slices: [DeviceSlice<bf16>; 3],
        added: &Added<bf16>,
        shape: [usize; 3],
    ) -> Result<Operands> {
        let (extents, [_, n, _], [a, b, c]) = (F::extents(shape)?, shape, &slices);
        let [rows_of_a, rows_of_c] = self.fusion.rows(&self.base, extents)?;
        F::require_c(&self.base, c, [rows_of_c, n])?;
        let rows = [rows_of_a, n, rows_of_c];
        let matrices =
            Matrices::checked(self.base.comm.context(), extents, (a, b, c), rows, added)?;
        let Added { bias, activation, residual } = added;
        let has_epilogue = bias.is_some() || activation.is_some() || residual.is_some();
        Ok(Operands { slices, matrices, extents, has_epilogue })
    }

    /// Returns the extents on which the plan of a shape depends, the same in all ranks.
    fn key(extents: Extents) -> Extents {
        if F::COLUMNS_DIFFER { extents.without_columns() } else { extents }
    }

    pub(crate) fn decide(&self, extents: Extents) -> Explanation<F::Plan> {
        let key = Self::key(extents);
        let can = |plan| match self.fusion.strategy(plan) {
            Some(strategy) => strategy.supports(&self.base, plan, key),
            None => self.base.unfused.get().is_some(),
        };
        self.base.decisions.decide(key, can, || self.fusion.choose(&self.base, key))
    }

    pub(crate) fn run(&self, operands: &Operands) -> Result<()> {
        let base = &self.base;
        if base.measures_first && !operands.has_epilogue {
            self.measure_first(operands)?;
        }
        let decide = || self.decide(operands.extents).plan;
        let plan = if operands.has_epilogue { F::UNFUSED } else { decide() };
        let strategy = self.fusion.strategy(plan);
        refuse_if!(
            strategy.is_some() && !operands.matrices.are_aligned(),
            "the plan `{plan}` needs A, B and C at multiples of 16 bytes"
        );
        base.comm.compare_kernel(&base.order, || match operands.extents.lengths() {
            [m, _, k] if F::COLUMNS_DIFFER => format!("product of m = {m}, k = {k} by {plan}"),
            [m, n, k] => format!("product of {m} x {n} x {k} by {plan}"),
        })?;
        let _turn = base.order.begin(&base.stream)?;
        match strategy {
            // SAFETY: the plan was decided for the shape; memory that is dropped is freed after the
            // work of the streams, and after the graphs. `order` lets launches follow each other.
            Some(strategy) => unsafe { strategy.launch(base, plan, operands) },
            None => self.fusion.launch_unfused(base, operands),
        }
    }
}

impl<F: Fusion> Debug for FusedGemm<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", F::NAME, self.fusion.describe(&self.base))
    }
}

pub(crate) fn prepared<T>(cell: &OnceCell<T>) -> Result<&T> {
    cell.get().map_or_else(|| refuse("the plan of the product is not prepared"), Ok)
}

/// Kernels that send tiles of sums to peers, as Lamport messages, and the memory of the messages.
pub(crate) struct ExchangeKernels {
    pub(crate) compiled: Kernels,
    pub(crate) dev_comm: DevCommResource,
    pub(crate) memory: LamportMemory,
    /// What fits on every rank's GPU: all ranks have the same numbers, and so the same grid.
    ///
    /// For a `wide` plan there is one pair: the number of blocks that are resident at the same
    /// time, and a number that is not used. For `swapped` plans, whose tiles have few rows, there
    /// are four pairs, for clusters of 1, 2, 4 and 8 blocks in this order: the number of such
    /// clusters that are resident at the same time, and the bytes of dynamic shared memory that a
    /// block has.
    pub(crate) resident: Vec<[u32; 2]>,
}

impl ExchangeKernels {
    /// Allocates the memory of messages with a capacity in slots; `capacity` is `None`, which is an
    /// error, if the largest product needs too many. With `has_barriers`, there is an LSA barrier
    /// for each of the blocks that are resident (the first number of `resident`). *Collective*.
    pub(crate) fn new<F: Fusion>(
        Base { comm, most: [m, n], .. }: &Base<F>,
        (compiled, resident): (Kernels, Vec<[u32; 2]>),
        capacity: Option<u32>,
        has_barriers: bool,
    ) -> Result<Self> {
        let Some(capacity) = capacity else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        let memory = LamportMemory::allocate(comm, capacity)?;
        let barriers = if has_barriers { resident[0][0] } else { 0 };
        let requirements = DevCommRequirements::new().lsa_barriers(barriers);
        Ok(Self { compiled, dev_comm: comm.create_dev_comm(requirements)?, memory, resident })
    }

    /// Returns the shape of a launch of a `wide` plan, for so many pairs of `gemm_wgmma`'s tiles:
    /// each cluster computes one pair at a time.
    pub(crate) fn wide_config(&self, pairs: u64) -> LaunchConfig {
        wide_grid(self.resident[0][0] / CLUSTER, pairs)
    }
}
