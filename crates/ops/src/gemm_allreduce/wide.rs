//! The fused product of two Hopper GPUs that exchange rounded products: its workspace and launch.

use std::sync::LazyLock;

use devcomm_host::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, KernelSet, Kernels, LaunchConfig,
    ModuleSource, Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, SHARED, THREADS, TILE_M, TILE_N};
use devcomm_kernels::gemm_allreduce::gemm_allreduce_wide as wide;
use devcomm_types::Kernel;
use nccl_device::EMPTY;

use super::agree::agree_on;
use crate::check::refuse;
use crate::gemm::{Matrices, wide_maps};
use crate::{KERNELS, modules};

type WideKernel = kernels::gemm_allreduce_wide;

static MODULES: LazyLock<Vec<ModuleSource>> = LazyLock::new(|| modules(&[WideKernel::FILE]));

/// The kernel, and the memory of its messages.
pub(super) struct Wide {
    compiled: Kernels,
    dev_comm: DevCommResource,
    slots: Window<u32>,
    state: SymmetricBuffer<u32>,
    capacity: u32,
    blocks: u32,
}

/// Whether two ranks exchange products of this shape so.
pub(super) fn supports([m, n, _]: [usize; 3], capacity: usize) -> bool {
    n.is_multiple_of(8) && wide::slots(m, n).is_some_and(|slots| slots as usize <= capacity)
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
            Ok(((compiled, capacity), blocks))
        };
        let ((compiled, capacity), blocks) = agree_on(comm, own())?;
        // The same grid in both ranks.
        let blocks = blocks.into_iter().min().unwrap_or(0);
        let slots = comm.window::<u32>(wide::words(capacity as usize))?;
        let empty = vec![EMPTY; slots.len().min(1 << 20)];
        for first in (0..slots.len()).step_by(empty.len()) {
            let part = slots.slice(first..slots.len().min(first + empty.len()))?;
            part.copy_from_host(&empty[..part.len()])?;
        }
        let state = comm.mem_alloc::<u32>(wide::STATE)?;
        state.fill_bytes(0)?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
        // No rank sends before all slots are empty.
        comm.barrier()?;
        Ok(Self { compiled, dev_comm, slots, state, capacity, blocks })
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
        let Self { compiled, dev_comm, slots, state, capacity, .. } = self;
        let product = WideKernel::args(dev_comm, a, b, map, c, slots, state, *capacity, m, n, k);
        let config = config.with_dependent().without_cooperation();
        // SAFETY: the caller's contract; the workspace is as the kernel needs it.
        unsafe { product.config(config).launch(&compiled.on(stream)) }
    }
}
