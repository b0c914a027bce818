//! The fused product of large matrices on Hopper GPUs: its workspace and launch.

use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_wide::{ClusterTileOwners, QuantisedParts};
use nccl_device::Everyone;

use super::wire::Wire;
use super::{AllReduce, Plan};
use crate::fused::*;
use crate::gemm::{Matrices, wide_maps, wide_pairs};
use crate::prelude::*;

type OneShot = kernels::gemm_allreduce_wide;
type OneShotF8 = kernels::gemm_allreduce_wide_f8;
type TwoShot4 = kernels::gemm_allreduce_two_shot<4>;
type TwoShot8 = kernels::gemm_allreduce_two_shot<8>;

/// The plan, with partial sums that travel in the type `wire`.
pub(super) struct Wide {
    pub(super) wire: Wire,
    pub(super) prepared: OnceCell<Prepared>,
}

/// The kernels, and memory of this rank's own partial sums, if these are 8-bit floats.
type Prepared = (ExchangeKernels, Option<SymmetricBuffer<u32>>);

/// Returns the slots of a product, if there is a kernel for this number of ranks and this type.
fn slots([m, n]: [usize; 2], ranks: usize, wire: Wire) -> Option<u32> {
    match (ranks, wire) {
        (2, Wire::Bf16) => Everyone::slots(m, n),
        (2, Wire::E4m3) => QuantisedParts::slots(m, n),
        (4 | 8, Wire::Bf16) => ClusterTileOwners::slots(m, n, ranks as u32),
        _ => None,
    }
}

impl Wide {
    /// Returns whether the ranks can exchange products of this size with memory for the largest.
    pub(super) fn fits(&self, base: &Base<AllReduce>, size: [usize; 2]) -> bool {
        let slots = |size| slots(size, base.comm.n_ranks(), self.wire);
        let capacity = slots(base.most);
        size[1].is_multiple_of(8) && slots(size).is_some_and(|used| Some(used) <= capacity)
    }
}

impl Strategy<AllReduce> for Wide {
    fn supports(&self, base: &Base<AllReduce>, _: Plan, extents: Extents) -> bool {
        let [m, n, _] = extents.lengths();
        self.prepared.get().is_some() && self.fits(base, [m, n])
    }

    fn prepare(&self, base: &Base<AllReduce>, plan: Plan) -> Result<()> {
        let (ranks, is_f8) = (base.comm.n_ranks(), self.wire == Wire::E4m3);
        let load = || {
            let compiled = Kernels::load(base.comm.context(), &KERNELS.only(&[OneShot::FILE]))?;
            let blocks = match ranks {
                2 if is_f8 => compiled.resident_blocks::<OneShotF8>(THREADS, SHARED)?,
                2 => compiled.resident_blocks::<OneShot>(THREADS, SHARED)?,
                4 => compiled.resident_clusters::<TwoShot4>(CLUSTER, THREADS, SHARED)? * CLUSTER,
                _ => compiled.resident_clusters::<TwoShot8>(CLUSTER, THREADS, SHARED)? * CLUSTER,
            };
            Ok((compiled, vec![[blocks, 0]]))
        };
        let for_ranks = match is_f8 {
            true => (&[2][..], "2 ranks if partial sums travel in e4m3"),
            false => (&[2, 4, 8][..], "2, 4 or 8 ranks"),
        };
        base.prepare((&self.prepared, plan), for_ranks, load, |compiled, resident| {
            let slots = slots(base.most, ranks, self.wire);
            let wide = ExchangeKernels::new(base, (compiled, resident), slots, ranks > 2)?;
            // As many slots of 16 bytes as the messages have.
            let words = 4 * wide.memory.capacity() as usize;
            let own = is_f8.then(|| base.comm.mem_alloc(words)).transpose()?;
            Ok((wide, own))
        })
    }

    unsafe fn launch(&self, base: &Base<AllReduce>, _: Plan, operands: &Operands) -> Result<()> {
        let (wide, own) = prepared(&self.prepared)?;
        let (matrices, (window, _)) =
            (operands.matrices, window::<bf16, _>("C", &operands.slices[2], &base.comm)?);
        let Matrices { c, shape: [m, n, k], .. } = matrices;
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(&base.stream, matrices)?;
        let config = wide.wide_config(wide_pairs(m, n));
        let ExchangeKernels { compiled, dev_comm, memory, .. } = wide;
        let target = compiled.on(&base.stream);
        // With two ranks a block waits only for what the peer's block of its index sends before it
        // waits. With more, blocks of all ranks meet at barriers: all must run at the same time.
        let plain = config.without_cooperation();
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches,
        // which use the memory that `prepare` allocates for these kernels.
        unsafe {
            if let Some(own) = own {
                let args = (dev_comm, a, b, c, own, memory, m, n, k);
                return OneShotF8::launch(args, plain, &target);
            }
            let args = (dev_comm, a, b, map, &window, memory, m, n, k);
            match base.comm.n_ranks() {
                2 => {
                    let args = (dev_comm, a, b, map, c, memory, m, n, k);
                    OneShot::launch(args, plain, &target)
                }
                4 => TwoShot4::launch(args, config, &target),
                _ => TwoShot8::launch(args, config, &target),
            }
        }
    }
}
