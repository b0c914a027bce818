//! The product, and then the all-reduce.

use std::cell::OnceCell;

use devcomm_host::{Buffer, ReduceOp, Result};

use super::{C, Plan};
use crate::extents::Extents;
use crate::fused::{Base, Operands, Strategy, prepare_once, prepared};
use crate::gemm::Added;
use crate::{Collectives, Gemm};

/// What does each of them.
pub(super) struct Unfused {
    gemm: Gemm,
    collectives: Collectives,
}

impl Unfused {
    pub(super) fn gemm(&self) -> &Gemm {
        &self.gemm
    }

    /// Lets its products read B early.
    ///
    /// # Safety
    ///
    /// As [`Gemm::with_constant_b`].
    pub(super) unsafe fn with_constant_b(self) -> Self {
        // SAFETY: the caller promises that no kernel that may still run writes B.
        Self { gemm: unsafe { self.gemm.with_constant_b() }, ..self }
    }
}

impl Strategy<Plan, C> for OnceCell<Unfused> {
    fn supports(&self, _: &Base<Plan>, _: Plan, _: Extents) -> bool {
        self.get().is_some()
    }

    fn prepare(&self, on: &Base<Plan>, _: Plan) -> Result<()> {
        prepare_once(self, || {
            let own = Gemm::new(&on.stream).map(|gemm| (gemm, ()));
            let call = on.comm.collective("GemmAllReduce: the plan unfused");
            let (gemm, _) = call.agree(own)?;
            let unfused = Unfused { gemm, collectives: Collectives::new(&on.comm)? };
            // SAFETY: the contract of `GemmAllReduce::with_constant_b`.
            Ok(if on.constant_b { unsafe { unfused.with_constant_b() } } else { unfused })
        })
    }

    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Unfused { gemm, collectives } = prepared(self)?;
        let (Operands { a, b, c, extents, .. }, [m, n, _]) = (of, of.extents.lengths());
        let c = c.slice(..m * n)?;
        gemm.product_with(extents.lengths(), Added::NOTHING).launch_of(*extents, (a, b, &c))?;
        collectives.all_reduce(&c, &c, ReduceOp::Sum, &on.stream)
    }
}
