//! A product with a collective, as one operation: how all of these choose a plan, prepare it and
//! launch it. Both `explain` and a launch use the decision of [`FusedGemm::decide`], which is kept:
//! a plan that was set or measured, or that of [`Fusion::choose`]. A plan is a [`Strategy`], or the
//! product and the collective one after the other, [`Unfused`].

mod measure;
mod wide;

use std::fmt::{self, Debug, Display};
use std::str::FromStr;
use std::sync::Arc;

pub(crate) use self::wide::ExchangeKernels;
use crate::collectives::HOPPER;
use crate::decisions::Decisions;
use crate::gemm::{Added, Matrices};
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

/// The environment variable by which the first product of a shape is measured.
const MEASURE_FIRST: &str = "DEVCOMM_MEASURE_FIRST";

impl<F: Fusion> Base<F> {
    /// Creates what all operations have. Plans that were measured are kept by the name `kept`.
    /// *Collective*.
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        most: [usize; 2],
        kept: &str,
    ) -> Result<Self> {
        let tuned = Tuned::new(comm.context(), kept, comm.n_ranks())?;
        let measures_first = std::env::var_os(MEASURE_FIRST).is_some_and(|value| value == "1");
        let call = comm.collective(F::NAME).option(MEASURE_FIRST, measures_first);
        let (tuned, multiprocessors) =
            tuned.agreed(call, comm.context().limits().multiprocessors)?;
        Ok(Self {
            decisions: Decisions::new(tuned),
            measures_first,
            comm: comm.clone(),
            stream: stream.clone(),
            order: Arc::new(StreamOrder::concurrent(comm.context(), 1)?),
            most,
            multiprocessors,
            constant_b: false,
            unfused: OnceCell::new(),
        })
    }

    /// Does what [`new`](Self::new) does, for an operation in which each rank has a part of the
    /// rows, and prepares the plan that is not fused. Also returns memory for the largest matrix,
    /// and whether all ranks have the kernels of Hopper and reach each other. *Collective*.
    pub(crate) fn of_rows(
        comm: &Communicator,
        stream: &Stream,
        most: [usize; 2],
    ) -> Result<(Self, Window<bf16>, bool)> {
        let own = || {
            let can = is_hopper(comm) && is_single_lsa_team(comm)?;
            Ok((check_most::<F>(comm, stream, most)?, u8::from(can)))
        };
        let name = format!("{}::new", F::NAME);
        let call = comm.collective(&name).option(F::MOST[0], most[0]).option(F::MOST[1], most[1]);
        let (elements, all) = call.agree(own())?;
        let base = Self::new(comm, stream, most, F::NAME)?;
        base.prepare_unfused()?;
        Ok((base, comm.window(elements)?, all.iter().all(|can| *can == 1)))
    }

    pub(crate) fn context(&self) -> &Context {
        self.comm.context()
    }

    /// Prepares the plan that is not fused, the first time. *Collective*.
    pub(crate) fn prepare_unfused(&self) -> Result<()> {
        prepare_once(&self.unfused, || {
            let own = Gemm::new(&self.stream).map(|gemm| (gemm, ()));
            let name = format!("{}: the plan {}", F::NAME, F::UNFUSED);
            let (mut gemm, _) = self.comm.collective(&name).agree(own)?;
            gemm.constant_b = self.constant_b;
            // As the fused plans, it may fill the GPU.
            let (options, order) = (CollectivesOptions::new().concurrent(1), &self.order);
            let collectives = options.build_in(&self.comm, || Ok(Arc::clone(order)))?;
            Ok(Unfused { gemm, collectives })
        })
    }

    /// Returns the product of the plan that is not fused, if it is prepared.
    fn gemm(&self) -> Option<&Gemm> {
        self.unfused.get().map(|unfused| &unfused.gemm)
    }
}

/// Returns the elements of the largest matrix, if this rank can prepare products of it.
pub(crate) fn check_most<F: Fusion>(
    comm: &Communicator,
    stream: &Stream,
    [first, second]: [usize; 2],
) -> Result<usize> {
    require_context("the stream", stream.context(), comm.context())?;
    let elements = first.checked_mul(second).unwrap_or(0);
    let what = if first == 0 || second == 0 { "no" } else { "too many" };
    let [of_first, of_second] = F::MOST;
    refuse_if!(
        elements == 0,
        "a matrix of {of_first} = {first} by {of_second} = {second} has {what} elements"
    );
    Ok(elements)
}

/// Returns whether this rank's GPU has the kernels that exchange rounded products.
pub(crate) fn is_hopper(comm: &Communicator) -> bool {
    comm.context().limits().compute_capability == HOPPER
}

/// A product that was checked: the matrices have the elements, and are of the operation's context.
#[derive(Clone)]
pub struct Operands {
    /// A, B and C.
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

    /// Returns the rows of A and of C that a rank has, if there is memory for a product.
    fn rows(&self, base: &Base<Self>, extents: Extents) -> Result<[usize; 2]>;

    /// Refuses a C that no kernel can write.
    fn require_c(_: &Base<Self>, _: &DeviceSlice<bf16>, _: [usize; 2]) -> Result<()> {
        Ok(())
    }

    /// Returns the strategy that does a plan; `None` for the one that is not fused.
    fn strategy(&self, plan: Self::Plan) -> Option<&dyn Strategy<Self>>;

    /// Enqueues the product and the collective, one after the other.
    fn launch_unfused(&self, base: &Base<Self>, by: &Unfused, operands: &Operands) -> Result<()>;

    /// Returns the plan of a shape for which none was chosen that can do it.
    fn choose(&self, base: &Base<Self>, extents: Extents) -> Explanation<Self::Plan>;

    /// Returns the plans that [`FusedGemm::measure`] times.
    fn to_measure(
        &self,
        base: &Base<Self>,
        extents: Extents,
        expected: Self::Plan,
    ) -> Result<Vec<Self::Plan>>;

    /// Refuses a plan that no shape can have on these GPUs.
    fn require(&self, _: &Base<Self>, _: Self::Plan) -> Result<()> {
        Ok(())
    }

    /// Returns what `Debug` says.
    fn describe(&self, base: &Base<Self>) -> String {
        format!("{} ranks", base.comm.n_ranks())
    }
}

/// Memory of C: a window for [`GemmAllReduce`](crate::GemmAllReduce), which stores to all ranks,
/// and any [`Buffer`] for the other operations.
#[diagnostic::on_unimplemented(message = "`{Self}` is no memory for C of this operation")]
pub trait Output<F: Fusion>: Buffer<Element = bf16> {}

impl<F: Fusion> FusedGemm<F> {
    /// Creates the operation. *Collective*.
    pub(crate) fn create(
        comm: &Communicator,
        steps: impl FnOnce() -> Result<Self>,
    ) -> Result<Self> {
        let made = comm.together(&format!("{}::new", F::NAME), || {
            let made = steps()?;
            made.prepare_kept()?;
            Ok(made)
        })?;
        comm.name(&made.base.order, F::NAME);
        Ok(made)
    }

    /// Prepares the plans that this machine has measured for shapes that are no larger than the
    /// largest, and that these ranks would measure: all ranks have the same ones. *Collective*.
    pub(crate) fn prepare_kept(&self) -> Result<()> {
        let (base, [first, second]) = (&self.base, self.base.most);
        for (shape, plan) in base.decisions.tuned.all() {
            let Ok(extents) = F::extents(shape.map(|extent| extent as usize)) else { continue };
            let [m, n, k] = extents.lengths();
            let columns = if F::COLUMNS_DIFFER { k } else { n };
            let is_small = m * columns <= first * second;
            if is_small && self.fusion.to_measure(base, extents, plan)?.contains(&plan) {
                self.prepare(plan)?;
            }
        }
        Ok(())
    }

    /// Returns how a product of `[m, n, k]` would be done, and why.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape that no product has.
    pub fn explain(&self, shape: [usize; 3]) -> Result<Explanation<F::Plan>> {
        Ok(self.decide(F::extents(shape)?))
    }

    /// Does all products by this plan if it can do them; `None` returns to the plans of the shapes.
    /// Every rank sets the same plan between the same products. *Collective*.
    ///
    /// The first time that a plan is needed, its workspace is allocated; the plans tell its size.
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
        match self.fusion.strategy(plan) {
            Some(strategy) => strategy.prepare(&self.base, plan),
            None => self.base.prepare_unfused(),
        }
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
    /// in one, in the same order. Later work on the stream sees the whole result. Only work on this
    /// stream may access `c` until the product has ended.
    ///
    /// A product fills the GPU: operations of other objects on other streams wait for it, or it for
    /// them, in the order of the host's calls, which is the same on all ranks. Where the ranks call
    /// them in another order, [`synchronize_within`](Stream::synchronize_within) lists them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements or that ranks cannot share, buffers and
    /// windows that are too short, not aligned as the plan needs them, or of another context or
    /// communicator, or a product that is too large for this workspace; in a checked world,
    /// [`WorldError::CallsDiffer`](devcomm_host::WorldError::CallsDiffer) for ranks that call
    /// another operation or have another shape; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C, shape: [usize; 3]) -> Result<()>
    where
        A: Buffer<Element = bf16>,
        B: Buffer<Element = bf16>,
        C: Output<F>,
    {
        let matrices = [a.device_slice(), b.device_slice(), c.device_slice()];
        self.run(&self.operands(matrices, &Added::NOTHING, shape)?)
    }

    /// Checks a product, and what is added to it.
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
        let matrices = Matrices::checked(self.base.context(), extents, (a, b, c), rows, added)?;
        Ok(Operands { slices, matrices, extents, has_epilogue: !added.is_nothing() })
    }

    /// Returns the extents on which the plan of a shape depends, the same in all ranks.
    fn key(extents: Extents) -> Extents {
        if F::COLUMNS_DIFFER { extents.without_columns() } else { extents }
    }

    /// Returns the plan of a shape, and why.
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
            None => self.fusion.launch_unfused(base, prepared(&base.unfused)?, operands),
        }
    }
}

impl<F: Fusion> Debug for FusedGemm<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", F::NAME, self.fusion.describe(&self.base))
    }
}

pub(crate) fn prepare_once<T>(cell: &OnceCell<T>, new: impl FnOnce() -> Result<T>) -> Result<()> {
    if cell.get().is_none() {
        let _ = cell.set(new()?);
    }
    Ok(())
}

/// Returns what was prepared, or an error.
pub(crate) fn prepared<T>(cell: &OnceCell<T>) -> Result<&T> {
    match cell.get() {
        Some(prepared) => Ok(prepared),
        None => refuse("the plan of the product is not prepared"),
    }
}
