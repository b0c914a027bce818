//! A product with a collective, as one operation: how all of these choose a plan, prepare it and
//! launch it.
//!
//! A shape is validated where it enters an operation, and is an [`Extents`] from there on.
//! [`Operation::decide`] makes the decision that both `explain` and a launch use: the plan that was
//! set, that which was measured, that which this machine measured before, or that of the
//! operation's [`Operation::choose`]. Decisions are kept. A plan is a [`Strategy`].

use std::cell::OnceCell;
use std::fmt::{Debug, Display};
use std::str::FromStr;

use devcomm_host::{
    CollectiveCall, Communicator, Context, DeviceSlice, Result, Stream, StreamOrder,
};
use half::bf16;

use crate::agree::{all_can, is_same};
use crate::check::{are_aligned, refuse};
use crate::decisions::Decisions;
use crate::extents::Extents;
use crate::gemm::{Added, Matrices};
use crate::timing::{fastest, slowest};
use crate::tuned::Tuned;
use crate::{Explanation, Gemm, GemmPlan};

/// What an operation has, whatever its plans are.
pub(crate) struct Base<P> {
    pub(crate) comm: Communicator,
    pub(crate) stream: Stream,
    order: StreamOrder,
    /// The largest matrix that the ranks exchange: its rows and columns.
    pub(crate) most: [usize; 2],
    /// Whether no kernel writes B while a product may read it.
    pub(crate) constant_b: bool,
    decisions: Decisions<P>,
    tuned: Tuned<P>,
    /// Whether the first product of a shape is measured, unless a plan was chosen for it.
    pub(crate) measures_first: bool,
}

impl<P: Copy + Display + FromStr> Base<P> {
    /// Prepares an operation of this name. *Collective*.
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        operation: &str,
        most: [usize; 2],
    ) -> Result<Self> {
        let tuned = Tuned::new(comm.context(), operation, comm.n_ranks())?;
        let measures_first = std::env::var_os(MEASURE_FIRST).is_some_and(|value| value == "1");
        let call = comm.collective(operation).option(MEASURE_FIRST, measures_first);
        Ok(Self {
            tuned: tuned.agreed(call)?,
            measures_first,
            comm: comm.clone(),
            stream: stream.clone(),
            order: StreamOrder::concurrent(comm.context(), 1)?,
            most,
            constant_b: false,
            decisions: Decisions::default(),
        })
    }
}

impl<P> Base<P> {
    pub(crate) fn context(&self) -> &Context {
        self.comm.context()
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.context().limits().multiprocessors
    }
}

/// The environment variable by which the first product of a shape is measured.
const MEASURE_FIRST: &str = "DEVCOMM_MEASURE_FIRST";

/// The matrices of a product, checked: they have the elements, and are of the operation's context.
pub(crate) struct Operands<'a, C> {
    pub(crate) a: &'a DeviceSlice<bf16>,
    pub(crate) b: &'a DeviceSlice<bf16>,
    pub(crate) c: &'a C,
    /// The buffers of A, B and C.
    pub(crate) addresses: [u64; 3],
    /// What only the plan that is not fused adds to a product.
    pub(crate) added: Option<&'a Added<bf16>>,
    pub(crate) extents: Extents,
}

impl<C> Operands<'_, C> {
    /// The matrices as kernels take them.
    pub(crate) fn matrices(&self) -> Matrices {
        Matrices::plain(self.addresses, self.extents)
    }
}

/// A way to do the product and the collective: the kernels of a plan and their memory, once they
/// are prepared.
pub(crate) trait Strategy<P, C> {
    /// Whether it is prepared, and does products of this shape.
    fn supports(&self, _: &Base<P>, _: P, _: Extents) -> bool {
        true
    }

    /// Loads the kernels and allocates their memory, the first time. *Collective*.
    fn prepare(&self, _: &Base<P>, _: P) -> Result<()> {
        Ok(())
    }

    /// Enqueues a product.
    ///
    /// # Safety
    ///
    /// The plan [supports](Self::supports) the shape, or is the one that is not fused. For all
    /// others the matrices begin at multiples of 16 bytes. They stay allocated until the product
    /// has ended. Launches are ordered, and the same in all ranks.
    unsafe fn launch(&self, on: &Base<P>, plan: P, of: &Operands<'_, C>) -> Result<()>;
}

/// An operation with plans.
pub(crate) trait Operation {
    type Plan: Copy + PartialEq + Debug + Display + FromStr;
    /// The type of the memory of C.
    type C;

    /// The plan of a product and a collective, one after the other.
    const UNFUSED: Self::Plan;

    fn base(&self) -> &Base<Self::Plan>;

    /// The strategy that does a plan.
    fn strategy(&self, plan: Self::Plan) -> &dyn Strategy<Self::Plan, Self::C>;

    /// The plan of a shape for which none was chosen that can do it.
    fn choose(&self, extents: Extents) -> Explanation<Self::Plan>;

    /// The plans that [`find_fastest`](Self::find_fastest) times.
    fn to_measure(&self, extents: Extents, expected: Self::Plan) -> Result<Vec<Self::Plan>>;

    /// The product of the plan that is not fused, if it is prepared.
    fn gemm(&self) -> Option<&Gemm>;

    /// Refuses a plan that the operation never has.
    fn require(&self, _: Self::Plan) -> Result<()> {
        Ok(())
    }

    /// What the plan of a shape depends on, the same in all ranks.
    fn key(extents: Extents) -> Extents {
        extents
    }

    /// The plan of a shape, and why.
    fn decide(&self, extents: Extents) -> Explanation<Self::Plan> {
        let (base, key) = (self.base(), Self::key(extents));
        base.decisions.of(
            key,
            || base.tuned.plan(key),
            |chosen| {
                let mut chosen = chosen.iter().flatten();
                let can =
                    |how: &&Explanation<_>| self.strategy(how.plan).supports(base, how.plan, key);
                chosen.find(can).copied().unwrap_or_else(|| self.choose(key))
            },
        )
    }

    /// Prepares a plan, which is from now on that of all shapes that it supports. *Collective*.
    fn set(&self, plan: Option<Self::Plan>) -> Result<()> {
        if let Some(plan) = plan {
            self.require(plan)?;
            self.strategy(plan).prepare(self.base(), plan)?;
        }
        self.base().decisions.set(plan);
        Ok(())
    }

    /// Enqueues a product.
    fn run(&self, operands: &Operands<'_, Self::C>) -> Result<()> {
        let base = self.base();
        if base.measures_first && operands.added.is_none() {
            self.measure_first(operands)?;
        }
        let plan = match operands.added {
            None => self.decide(operands.extents).plan,
            Some(_) => Self::UNFUSED,
        };
        if plan != Self::UNFUSED && !are_aligned(operands.addresses) {
            return refuse(format!("the plan `{plan}` needs A, B and C at multiples of 16 bytes"));
        }
        let _turn = base.order.begin(&base.stream)?;
        // SAFETY: the plan was decided for the shape; memory that is dropped is freed after the
        // work of the streams, and after the graphs. `order` lets launches follow each other.
        unsafe { self.strategy(plan).launch(base, plan, operands) }
    }

    /// Measures a shape for which no plan was chosen, unless a stream is captured. *Collective*.
    fn measure_first(&self, of: &Operands<'_, Self::C>) -> Result<()> {
        let (base, key) = (self.base(), Self::key(of.extents));
        let is_known = base.decisions.has_choice(key) || base.tuned.plan(key).is_some();
        if is_known || base.context().refuse_capturing("a plan is measured").is_err() {
            return Ok(());
        }
        let call = base.comm.collective("the first product of a shape");
        let of = Operands { a: of.a, b: of.b, c: of.c, ..*of };
        self.find_fastest(call.option("shape", format!("{:?}", key.array())), Ok(of)).map(drop)
    }

    /// Times plans of a shape, and keeps the fastest. *Collective*: a `call` with all that ranks
    /// have to agree on but the plans, which this adds.
    fn find_fastest(
        &self,
        call: CollectiveCall<'_>,
        operands: Result<Operands<'_, Self::C>>,
    ) -> Result<Self::Plan> {
        let base = self.base();
        let own = operands.and_then(|operands| {
            base.context().refuse_capturing("the plans of a product are measured")?;
            let key = Self::key(operands.extents);
            let expected = self.choose(key).plan;
            let plans = self.to_measure(key, expected)?;
            Ok(((operands, plans, expected), ()))
        });
        let key = own.as_ref().ok().map(|((operands, ..), ())| Self::key(operands.extents));
        let found = base.decisions.find(key, || {
            let plans =
                own.as_ref().map_or(String::new(), |((_, plans, _), ())| format!("{plans:?}"));
            let ((operands, plans, expected), _) = call.option("plans", plans).agree(own)?;
            if plans.contains(&Self::UNFUSED) {
                self.strategy(Self::UNFUSED).prepare(base, Self::UNFUSED)?;
            }
            // Workspaces, before any rank can have an error of its own.
            plans.iter().try_for_each(|plan| self.set(Some(*plan)))?;
            self.time(&operands, &plans, expected)
        });
        if let (Ok(plan), Some(key)) = (&found, key) {
            base.tuned.keep(key, *plan);
        }
        found
    }

    /// The fastest of these plans, the same in all ranks, of which the one that is not fused is
    /// timed with the likely plans of its product. Plans that not all ranks can do are left out. An
    /// error leaves the product's plan as it was. *Collective*.
    fn time(
        &self,
        operands: &Operands<'_, Self::C>,
        plans: &[Self::Plan],
        expected: Self::Plan,
    ) -> Result<Self::Plan> {
        let (Base { comm, stream, .. }, extents) = (self.base(), operands.extents);
        let gemm = self.gemm();
        let own = || match gemm {
            Some(gemm) => Ok((gemm.plan_of(extents)?, gemm.likely(extents)?)),
            None => Ok((GemmPlan::Portable, Vec::new())),
        };
        let products = comm.collective("measure: the products");
        let ((before, likely), is_same) = is_same(products, own().map(|own| (own.clone(), own.1)))?;
        let products = if is_same && !likely.is_empty() { likely } else { vec![before] };
        let select = |(plan, product)| {
            self.set(Some(plan))?;
            gemm.map_or(Ok(true), |gemm| gemm.select(extents, product))
        };
        // Its workspace may be too small.
        let can = |plan| {
            let is_aligned = plan == Self::UNFUSED || are_aligned(operands.addresses);
            is_aligned && self.decide(extents).plan == plan
        };
        let each = |plan| if plan == Self::UNFUSED { &products[..] } else { &products[..1] };
        let pairs =
            plans.iter().flat_map(|plan| each(*plan).iter().map(|product| (*plan, *product)));
        let pairs: Vec<_> = pairs.collect();
        let chosen = || {
            let possible = pairs.iter().map(|pair| Ok(select(*pair)? && can(pair.0))).collect();
            let possible = all_can(comm, "measure: the plans", possible)?;
            let pairs = pairs.iter().zip(possible).filter(|(_, can)| *can);
            let pairs: Vec<_> = pairs.map(|(pair, _)| *pair).collect();
            let (select, launch) = (|pair| select(pair).map(drop), || self.run(operands));
            let slowest = |times| slowest(comm, times);
            fastest(stream, &pairs, (expected, products[0]), select, launch, slowest)
        };
        let chosen = chosen();
        if let Some(gemm) = gemm {
            gemm.select(extents, chosen.as_ref().map_or(before, |(_, product)| *product))?;
        }
        Ok(chosen?.0)
    }
}

/// Prepares what is not prepared yet.
pub(crate) fn prepare_once<T>(cell: &OnceCell<T>, new: impl FnOnce() -> Result<T>) -> Result<()> {
    if cell.get().is_none() {
        let _ = cell.set(new()?);
    }
    Ok(())
}

/// What was prepared.
pub(crate) fn prepared<T>(cell: &OnceCell<T>) -> Result<&T> {
    match cell.get() {
        Some(prepared) => Ok(prepared),
        None => refuse("the plan of the product is not prepared".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use devcomm_host::{Buffer, World};

    use super::*;
    use crate::GemmReduceScatter;

    #[test]
    fn the_first_product_of_a_shape_is_measured_if_the_process_asks_for_that() {
        let run = |rank: &devcomm_host::Rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let (a, b) = (comm.mem_alloc::<bf16>(6 * 16)?, comm.mem_alloc::<bf16>(8 * 16)?);
            let c = comm.mem_alloc::<bf16>(3 * 8)?;
            [&a, &b].into_iter().try_for_each(|factor| stream.fill(factor, bf16::ONE))?;
            let mut product = GemmReduceScatter::new(comm, &stream, 6, 8)?;
            product.launch(&a, &b, &c, [6, 8, 16])?;
            let reason = |shape| product.explain(shape).map(|how| how.reason);
            assert_ne!(reason([6, 8, 16])?, "as it was measured");
            product.base_mut().measures_first = true;
            for _ in 0..2 {
                product.launch(&a, &b, &c, [6, 8, 16])?;
            }
            let reason = |shape| product.explain(shape).map(|how| how.reason);
            assert_eq!(reason([6, 8, 16])?, "as it was measured");
            assert_ne!(reason([6, 8, 8])?, "as it was measured");
            let mut got = [bf16::ZERO; 24];
            stream.copy_to_host(&c.device_slice(), &mut got)?;
            assert_eq!(got, [bf16::from_f32(32.0); 24]);
            Ok::<_, devcomm_host::Error>(())
        };
        World::simulated(2).unwrap().run(run).unwrap();
    }
}
