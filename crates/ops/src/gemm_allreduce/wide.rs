//! The fused product of Hopper GPUs that exchange rounded products: its workspace and launch.

use std::cell::OnceCell;

use devcomm_host::{
    Communicator, DevCommRequirements, DevCommResource, Kernels, LaunchConfig, Result,
    SymmetricBuffer,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M, TILE_N};
use devcomm_kernels::gemm_allreduce::{
    gemm_allreduce_two_shot as two_shot, gemm_allreduce_wide, gemm_allreduce_wide_f8,
};
use devcomm_types::Kernel;
use half::bf16;

use super::wire::Wire;
use super::{C, Plan};
use crate::KERNELS;
use crate::check::refuse;
use crate::extents::Extents;
use crate::fused::{Base, Operands, Strategy, prepare_once, prepared};
use crate::gemm::{Matrices, wide_maps};
use crate::lamport::LamportMemory;

type OneShot = kernels::gemm_allreduce_wide;
type OfF8 = kernels::gemm_allreduce_wide_f8;
type OfFour = kernels::gemm_allreduce_two_shot<4>;
type OfEight = kernels::gemm_allreduce_two_shot<8>;

/// The plan, whose partial sums travel in a type.
pub(super) struct Wide {
    wire: Wire,
    prepared: OnceCell<Prepared>,
}

/// The kernel for this number of ranks, and the memory of its messages.
struct Prepared {
    compiled: Kernels,
    dev_comm: DevCommResource,
    memory: LamportMemory,
    /// A rank's own partial sums, if they are 8-bit floats.
    own: Option<SymmetricBuffer<u32>>,
    blocks: u32,
    ranks: usize,
}

/// The slots of a product, if there is a kernel for so many ranks and the type.
fn slots([m, n]: [usize; 2], ranks: usize, wire: Wire) -> Option<u32> {
    match (ranks, wire) {
        (2, Wire::Bf16) => gemm_allreduce_wide::slots(m, n),
        (2, Wire::E4m3) => gemm_allreduce_wide_f8::slots(m, n),
        (4 | 8, Wire::Bf16) => two_shot::slots(m, n, ranks as u32),
        _ => None,
    }
}

impl Wide {
    pub(super) fn new(wire: Wire) -> Self {
        Self { wire, prepared: OnceCell::new() }
    }

    /// Whether the ranks exchange products of this size so, with memory for the largest.
    pub(super) fn fits(&self, on: &Base<Plan>, size: [usize; 2]) -> bool {
        let slots = |size| slots(size, on.comm.n_ranks(), self.wire);
        let capacity = slots(on.most);
        size[1].is_multiple_of(8) && slots(size).is_some_and(|used| Some(used) <= capacity)
    }
}

impl Prepared {
    /// With slots for products of up to `m x n` elements. *Collective*.
    fn new(comm: &Communicator, [m, n]: [usize; 2], wire: Wire) -> Result<Self> {
        let ranks = comm.n_ranks();
        let own = || {
            let for_ranks = if wire == Wire::E4m3 { &[2][..] } else { &[2, 4, 8] };
            if !for_ranks.contains(&ranks) {
                return refuse(format!(
                    "the plan `wide` in {wire} is for {for_ranks:?} ranks, not {ranks}"
                ));
            }
            let Some(capacity) = slots([m, n], ranks, wire) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let set = KERNELS.only(match (ranks, wire) {
                (2, Wire::E4m3) => &[OfF8::FILE],
                (2, _) => &[OneShot::FILE],
                _ => &[OfFour::FILE],
            });
            let compiled = Kernels::load(comm.context(), &set)?;
            let blocks = match ranks {
                2 if wire == Wire::E4m3 => compiled.resident_blocks::<OfF8>(THREADS, SHARED)?,
                2 => compiled.resident_blocks::<OneShot>(THREADS, SHARED)?,
                4 => compiled.resident_clusters::<OfFour>(CLUSTER, THREADS, SHARED)? * CLUSTER,
                _ => compiled.resident_clusters::<OfEight>(CLUSTER, THREADS, SHARED)? * CLUSTER,
            };
            Ok(((compiled, capacity), blocks))
        };
        const NAME: &str = "GemmAllReduce: the plan wide";
        comm.together(NAME, || {
            let call = comm.collective(NAME).option("m", m).option("n", n).option("wire", wire);
            let ((compiled, capacity), blocks) = call.agree(own())?;
            // The same grid in all ranks.
            let blocks = blocks.into_iter().min().unwrap_or(0);
            let barriers = if ranks == 2 { 0 } else { blocks };
            let memory = LamportMemory::new(comm, capacity)?;
            let requirements = DevCommRequirements::new().lsa_barriers(barriers);
            let dev_comm = comm.create_dev_comm(requirements)?;
            let own = match wire {
                Wire::E4m3 => Some(comm.mem_alloc(4 * capacity as usize)?),
                _ => None,
            };
            Ok(Self { compiled, dev_comm, memory, own, blocks, ranks })
        })
    }
}

impl Strategy<Plan, C> for Wide {
    fn supports(&self, on: &Base<Plan>, _: Plan, extents: Extents) -> bool {
        let [m, n, _] = extents.lengths();
        self.prepared.get().is_some() && self.fits(on, [m, n])
    }

    fn prepare(&self, on: &Base<Plan>, _: Plan) -> Result<()> {
        prepare_once(&self.prepared, || Prepared::new(&on.comm, on.most, self.wire))
    }

    unsafe fn launch(&self, on: &Base<Plan>, _: Plan, of: &Operands<'_, C>) -> Result<()> {
        let Prepared { compiled, dev_comm, memory, own, blocks, ranks } = prepared(&self.prepared)?;
        let (matrices, window, stream) = (of.matrices(), of.c, &on.stream);
        let Matrices { c, shape: [m, n, k], .. } = matrices;
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(stream, matrices)?;
        let pairs = u64::from(m.div_ceil(CLUSTER * TILE_M)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(blocks / CLUSTER).min(pairs) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let config = config.with_dependent();
        let LamportMemory { slots, state, capacity } = memory;
        let target = compiled.on(stream);
        macro_rules! launch {
            ($kernel:ident, $($own:expr),*; $config:expr) => {{
                let product = $kernel::args(
                    dev_comm, a, b, $($own,)* slots, state, *capacity, m, n, k,
                );
                // SAFETY: the caller's contract; the workspace is as the kernels need it.
                unsafe { product.config($config).launch(&target) }
            }};
        }
        match (own, ranks) {
            (Some(own), _) => launch!(OfF8, c, own; config.without_cooperation()),
            (None, 2) => launch!(OneShot, map, c; config.without_cooperation()),
            (None, 4) => launch!(OfFour, map, window; config),
            (None, _) => launch!(OfEight, map, window; config),
        }
    }
}
