//! The fused product of two Hopper GPUs that exchange rounded products: its workspace and launch.

use std::sync::LazyLock;

use devcomm_host::{Communicator, KernelSet, Kernels, LaunchConfig, ModuleSource, Result, Stream};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M, TILE_N};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_wide as wide;
use devcomm_types::Kernel;

use super::agree::agree_on;
use super::messages::Messages;
use crate::check::refuse;
use crate::gemm::{Matrices, wide_maps};
use crate::{KERNELS, modules};

type WideKernel = kernels::gemm_allreduce_wide;

static MODULES: LazyLock<Vec<ModuleSource>> = LazyLock::new(|| modules(&[WideKernel::FILE]));

/// The kernel, and the memory of its messages.
pub(super) struct Wide {
    compiled: Kernels,
    messages: Messages,
    blocks: u32,
}

/// Whether two ranks exchange products of this shape so, with slots for `most`.
pub(super) fn supports([m, n, _]: [usize; 3], most: [usize; 2]) -> bool {
    let capacity = wide::slots(most[0], most[1]);
    n.is_multiple_of(8) && wide::slots(m, n).is_some_and(|slots| Some(slots) <= capacity)
}

impl Wide {
    /// With slots for products of up to `m x n` elements. *Collective*.
    pub(super) fn new(comm: &Communicator, m: usize, n: usize) -> Result<Self> {
        let own = || {
            let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
            let compiled = Kernels::load(comm.context(), &set)?;
            let blocks = compiled.resident_blocks::<WideKernel>(THREADS, SHARED)?;
            let Some(capacity) = wide::slots(m, n) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            Ok(((compiled, capacity), [blocks, 0]))
        };
        let ((compiled, capacity), blocks) = agree_on(comm, own())?;
        // The same grid in both ranks.
        let blocks = blocks.into_iter().map(|[blocks, _]| blocks).min().unwrap_or(0);
        let messages = Messages::new(comm, capacity)?;
        Ok(Self { compiled, messages, blocks })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    ///
    /// The matrices begin at multiples of 16 bytes, have the elements of the shape, which is
    /// [supported](supports), and stay allocated until the product has ended. Launches are ordered,
    /// and the same in both ranks.
    pub(super) unsafe fn launch(&self, stream: &Stream, matrices: Matrices) -> Result<()> {
        let Matrices { c, shape: [m, n, k], .. } = matrices;
        let ([a, b, map], _) = wide_maps::<half::bf16, half::bf16>(stream, matrices)?;
        let pairs = u64::from(m.div_ceil(CLUSTER * TILE_M)) * u64::from(n.div_ceil(TILE_N));
        let blocks = u64::from(self.blocks / CLUSTER).min(pairs) as u32 * CLUSTER;
        let config = LaunchConfig::new(blocks, THREADS).with_dynamic_shared(SHARED);
        let Messages { dev_comm, slots, state, capacity } = &self.messages;
        let product = WideKernel::args(dev_comm, a, b, map, c, slots, state, *capacity, m, n, k);
        let config = config.with_dependent().without_cooperation();
        // SAFETY: the caller's contract; the workspace is as the kernel needs it.
        unsafe { product.config(config).launch(&self.compiled.on(stream)) }
    }
}
