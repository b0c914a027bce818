//! The fused product of Hopper GPUs that exchange rounded products: its workspace and launch.

use devcomm_host::{Communicator, Kernels, LaunchConfig, Result, Stream, SymmetricBuffer, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M, TILE_N};
use devcomm_kernels::gemm_allreduce::{
    gemm_allreduce_two_shot as two_shot, gemm_allreduce_wide, gemm_allreduce_wide_f8,
};
use devcomm_types::Kernel;
use half::bf16;

use super::messages::Messages;
use super::wire::Wire;
use crate::KERNELS;
use crate::check::refuse;
use crate::gemm::{Matrices, wide_maps};

type OneShot = kernels::gemm_allreduce_wide;
type OfF8 = kernels::gemm_allreduce_wide_f8;
type OfFour = kernels::gemm_allreduce_two_shot<4>;
type OfEight = kernels::gemm_allreduce_two_shot<8>;

/// The kernel for this number of ranks, and the memory of its messages.
pub(super) struct Wide {
    compiled: Kernels,
    messages: Messages,
    /// A rank's own partial sums, if they are 8-bit floats.
    own: Option<SymmetricBuffer<u32>>,
    blocks: u32,
    ranks: usize,
}

/// Whether so many ranks exchange products of this shape so, with slots for `most`.
pub(super) fn supports([m, n, _]: [usize; 3], most: [usize; 2], ranks: usize, wire: Wire) -> bool {
    let capacity = slots(most, ranks, wire);
    n.is_multiple_of(8) && slots([m, n], ranks, wire).is_some_and(|used| Some(used) <= capacity)
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
    /// With slots for products of up to `m x n` elements. *Collective*.
    pub(super) fn new(comm: &Communicator, m: usize, n: usize, wire: Wire) -> Result<Self> {
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
            let messages = Messages::new(comm, capacity, barriers)?;
            let own = match wire {
                Wire::E4m3 => Some(comm.mem_alloc(4 * capacity as usize)?),
                _ => None,
            };
            Ok(Self { compiled, messages, own, blocks, ranks })
        })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    ///
    /// The matrices begin at multiples of 16 bytes, have the elements of the shape, which is
    /// [supported](supports), and stay allocated until the product has ended; C is the window.
    /// Launches are ordered, and the same in all ranks.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        matrices: Matrices,
        window: &Window<bf16>,
    ) -> Result<()> {
        let Matrices { c, shape: [m, n, k], .. } = matrices;
        let ([a, b, map], _) = wide_maps::<bf16, bf16>(stream, matrices)?;
        let pairs = u64::from(m.div_ceil(CLUSTER * TILE_M)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(self.blocks / CLUSTER).min(pairs) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let config = config.with_dependent();
        let Messages { dev_comm, slots, state, capacity } = &self.messages;
        let target = self.compiled.on(stream);
        // SAFETY: the caller's contract; the workspace is as the kernels need it.
        unsafe {
            if let Some(own) = &self.own {
                let product = OfF8::args(dev_comm, a, b, c, own, slots, state, *capacity, m, n, k);
                return product.config(config.without_cooperation()).launch(&target);
            }
            if self.ranks == 2 {
                let product =
                    OneShot::args(dev_comm, a, b, map, c, slots, state, *capacity, m, n, k);
                return product.config(config.without_cooperation()).launch(&target);
            }
            if self.ranks == 4 {
                let product =
                    OfFour::args(dev_comm, a, b, map, window, slots, state, *capacity, m, n, k);
                return product.config(config).launch(&target);
            }
            let product =
                OfEight::args(dev_comm, a, b, map, window, slots, state, *capacity, m, n, k);
            product.config(config).launch(&target)
        }
    }
}
